package limits

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"stampede/bench/rig"
	"stampede/sql"
)

var paymentsKept = flag.Int("payments", 1_000_000, "payments that Postgres has in BenchmarkPaymentQueries")

// fillPayments makes $1 payments: of ten the refund of one is due, that of one is back, and eight are settled, but for
// a thousand each that wait, are unclear or disputed. Half are of the sale $2, 100 of the order $3.
const fillPayments = `
	INSERT INTO payment_events (reference, version, type, order_id, sale_id, amount, currency, reason, occurred_at)
	SELECT 'pi_' || n, v, (ARRAY['PaymentReceived', CASE
			WHEN n % 10 < 2 THEN 'PaymentRefundDue' WHEN n % ($1 / 1000) = 3 THEN 'PaymentUnclear'
			WHEN n % ($1 / 1000) = 4 THEN 'PaymentDisputed' ELSE 'PaymentSettled' END, 'PaymentRefunded'])[v],
		CASE WHEN n % ($1 / 100) = 5 THEN $3::uuid ELSE gen_random_uuid() END, CASE WHEN n % 2 = 0 THEN $2::uuid END, 1250,
		(ARRAY['EUR', 'USD', 'JPY'])[n % 3 + 1], CASE WHEN v > 1 AND n % 10 < 2 THEN 'order-expired' END,
		now() - make_interval(secs => $1 - n)
	FROM generate_series(1, $1::int) AS n, generate_series(1, 3) AS v
	WHERE v = 1 OR v = 2 AND n % ($1 / 1000) <> 2 OR v = 3 AND n % 10 = 1
	ORDER BY n, v`

// openPayments does what the trigger of payment_events does.
const openPayments = `
	INSERT INTO open_payments (reference, state, version, position, since, order_id, sale_id, amount, currency)
	SELECT reference, open_payment(type), version, position, occurred_at, order_id, sale_id, amount, currency
	FROM payment_events AS e
	WHERE open_payment(type) IS NOT NULL AND NOT EXISTS (
		SELECT FROM payment_events AS later WHERE later.reference = e.reference AND later.version = e.version + 1)`

// BenchmarkPaymentQueries measures the queries of pages, metrics and workers beside many payments.
func BenchmarkPaymentQueries(b *testing.B) {
	payments := rig.Scale(b, *paymentsKept, 10_000)
	s := rig.Open(b)
	defer s.Close()
	sale, id := s.InsertSale(1), uuid.New()
	for _, statement := range []string{
		// What keeps events and open payments in step while others write takes minutes for so many.
		"ALTER TABLE payment_events DISABLE TRIGGER USER",
		"ALTER TABLE payment_events ALTER position SET DEFAULT nextval('order_events_position_seq')",
		fillPayments, openPayments, "VACUUM (ANALYZE) payment_events", "VACUUM (ANALYZE) open_payments",
	} {
		args := []any{}
		if statement == fillPayments {
			args = []any{payments, sale, id}
		}
		_, err := s.Pool.Exec(b.Context(), statement, args...)
		require.NoError(b, err)
	}
	list := func(of *uuid.UUID, open, ended []string) []any { return []any{-1, 51, of, open, ended} }
	open := []string{"waiting", "refund_due", "unclear", "disputed"}
	ended := []string{"PaymentSettled", "PaymentRefunded", "PaymentDismissed", "PaymentClaimed"}
	queries := []struct {
		name, query string
		args        []any
	}{
		{"survey/look", sql.SurveyLook, nil},
		{"payment/due", sql.PaymentDue, nil},
		{"payment/list, due", sql.PaymentList, list(nil, open[1:2], nil)},
		{"payment/list, unclear", sql.PaymentList, list(nil, open[2:3], nil)},
		{"payment/list, settled", sql.PaymentList, list(nil, nil, ended[:1])},
		{"payment/list, refunded", sql.PaymentList, list(nil, nil, ended[1:2])},
		{"payment/list, all", sql.PaymentList, list(nil, open, ended)},
		{"payment/list, due of a sale", sql.PaymentList, list(&sale, open[1:2], nil)},
		{"payment/list, settled of a sale", sql.PaymentList, list(&sale, nil, ended[:1])},
		{"payment/list, all of a sale", sql.PaymentList, list(&sale, open, ended)},
		{"payment/list_of_order", sql.PaymentListOfOrder, []any{-1, 51, id, nil, nil}},
		{"payment/waiting", sql.PaymentWaiting, []any{0, 1000}},
	}
	var candidates []rig.Candidate
	for _, q := range queries {
		candidates = append(candidates, rig.Candidate{Name: q.name, Turn: func(b *testing.B, _ int) rig.Values {
			values := rig.Values{}
			for _, mode := range []string{"auto", "force_generic_plan"} {
				conn, err := pgx.Connect(b.Context(), s.DatabaseURL)
				require.NoError(b, err)
				_, err = conn.Exec(b.Context(), "SET plan_cache_mode = "+mode)
				require.NoError(b, err)
				var took []float64
				for range 20 { // with auto, Postgres chooses a kept plan or not after five
					began := time.Now()
					rows, _ := conn.Query(b.Context(), q.query, q.args...) // rows carry the error
					_, err := pgx.CollectRows(rows, func(pgx.CollectableRow) (struct{}, error) { return struct{}{}, nil })
					require.NoError(b, err)
					took = append(took, rig.InMillis(time.Since(began)))
				}
				values[mode] = rig.Summarize(took).Median
				require.NoError(b, conn.Close(b.Context()))
			}
			return values
		}})
	}
	results := rig.Compare(b, candidates...)
	table := rig.Table{
		Title: "Queries of payments",
		Note: fmt.Sprintf("Milliseconds beside %d payments, of which a tenth is due for refund and a thousand each wait, are "+
			"unclear or disputed, with plans as Postgres chooses them and with those that it keeps; medians of %d rounds.",
			payments, b.N),
		Head: []string{"", "chosen plan, ms", "kept plan, ms"},
	}
	for _, c := range candidates {
		table.Rows = append(table.Rows,
			append([]string{c.Name}, results.Ranges(rig.Ratio, c.Name, "auto", "force_generic_plan")...))
	}
	rig.Put(table)
}

package limits

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/bench/httpload"
	"stampede/bench/rig"
	"stampede/sql"
)

const (
	paymentRate  = 500
	buyersAlone  = "purchases alone"
	buyersPaying = "purchases beside 500 payments a second"
	paymentsOnly = "500 payments a second alone"
	buyersPaced  = "500 purchases a second alone"
)

// BenchmarkPayments measures reports of payments beside the highest load of purchases, and what they cost purchases.
func BenchmarkPayments(b *testing.B) {
	results := rig.Compare(b, rig.Candidate{Name: buyersAlone, Turn: reports(0, true)},
		rig.Candidate{Name: buyersPaying, Turn: reports(paymentRate, true)},
		rig.Candidate{Name: paymentsOnly, Turn: reports(paymentRate, false)},
		rig.Candidate{Name: buyersPaced, Turn: pacedPurchases})
	ratio := results.Ratio(buyersPaying, perSecond, buyersAlone, perSecond)
	table := rig.Table{
		Title: "Payments beside a crowd",
		Note: fmt.Sprintf("Accepted purchases of a closed loop with a worker, and the time of `POST /v1/payments` in an "+
			"open loop; medians of %d rounds. Beside payments %s times as many are accepted. The CPU time is that of the "+
			"ingress and of Postgres for a payment, or for a purchase at the same rate.", b.N, ratio.Format(rig.Ratio)),
		Head: []string{"", "purchases/s", "payment p50, ms", "payment p99, ms", "CPU, ms"},
	}
	for _, name := range []string{buyersAlone, buyersPaying, paymentsOnly, buyersPaced} {
		table.Rows = append(table.Rows, append([]string{name, results.Of(name, perSecond).Format(rig.Count)},
			results.Ranges(rig.Ratio, name, "p50", "p99", "cpu")...))
	}
	rig.Put(table)
	b.ReportMetric(ratio.Median, "with÷without")
}

// reports is `stampede serve` with a worker, so many reports of payments in a second, and perhaps a crowd beside them.
func reports(rate float64, crowd bool) turn {
	return func(b *testing.B, _ int) rig.Values {
		s := rig.Stampede{}.Start(b, hugeStock)
		defer s.Close()
		load := s.Payments(int(paymentRate * turnDuration(b).Seconds()))
		load.Connections, load.For, load.Rate = crowdConnections, turnDuration(b), rate
		s.Warm(crowdConnections)
		var paid httpload.Answers
		var paying errgroup.Group
		before := s.CPU()
		if rate > 0 {
			paying.Go(func() (err error) {
				paid, err = load.Measure(b.Context())
				return err
			})
		}
		values := rig.Values{}
		if crowd {
			values, _ = accept(b, s)
		}
		require.NoError(b, paying.Wait())
		if rate > 0 {
			used, settled := s.CPU().Since(before), s.Settled()
			if !crowd { // beside buyers it cannot be told apart
				values["cpu"] = frontAndPostgres(used, settled)
			}
			// Reports that were due and could not be sent in time are among the latencies.
			require.Equal(b, map[int]int64{http.StatusOK: settled}, paid.ByStatus, "answers: %s", paid)
			values["p50"], values["p99"] = rig.InMillis(paid.Percentile(50)), rig.InMillis(paid.Percentile(99))
		}
		return values
	}
}

// pacedPurchases is what the cost of payments is compared with.
func pacedPurchases(b *testing.B, _ int) rig.Values {
	s := rig.Stampede{}.Start(b, hugeStock)
	defer s.Close()
	s.Warm(crowdConnections)
	crowd := s.Crowd(1)
	crowd.Connections, crowd.For, crowd.Rate = crowdConnections, turnDuration(b), paymentRate
	before := s.CPU()
	accepted := s.Measure(crowd).Wanted
	return rig.Values{"cpu": frontAndPostgres(s.CPU().Since(before), accepted)}
}

// frontAndPostgres is the CPU time of the ingress and of Postgres for each of so many, in milliseconds.
func frontAndPostgres(used rig.Usage, of int64) float64 {
	each := used.PerOrder(of)
	return (each[rig.Front] + each[rig.Postgres]) / 1000
}

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

// insertBatch is the number of orders per transaction: the maximum of a worker.
const insertBatch = 500

// The rows that the ledger writes for confirmed orders, without any check: whether the sale exists,
// whether an event was recorded before, whether the user has another order.
const (
	insertEvents = `INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at,
		reserved_at, sequence, epoch)
		SELECT order_id, 2, 'OrderConfirmed', $2, user_id, 1, now(), $5, sequence, 1
		FROM unnest($1::uuid[], $3::text[], $4::bigint[]) AS e (order_id, user_id, sequence)`
	insertOrders = `INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at,
		updated_at, key_fingerprint)
		SELECT order_id, $2, user_id, 1, 'confirmed', 2, sequence, 1, $5, now(), NULL
		FROM unnest($1::uuid[], $3::text[], $4::bigint[]) AS e (order_id, user_id, sequence)`
	addSold = `UPDATE sales SET sold = sold + $2, last_sequence = greatest(last_sequence, $3) WHERE id = $1`
)

// orderColumns are the orders of one transaction as arrays, built before the clock starts.
type orderColumns struct {
	ids       []uuid.UUID
	users     []string
	sequences []int64
	at        time.Time
}

func newColumns(requests []request) []orderColumns {
	var all []orderColumns
	for first := 0; first < len(requests); first += insertBatch {
		c := orderColumns{at: time.Now()}
		for i, r := range requests[first:min(first+insertBatch, len(requests))] {
			c.ids, c.users = append(c.ids, r.order), append(c.users, r.user)
			c.sequences = append(c.sequences, int64(first+i+1))
		}
		all = append(all, c)
	}
	return all
}

// inserter writes orders in one transaction.
type inserter func(ctx context.Context, conn *pgx.Conn, sale uuid.UUID, c orderColumns) error

// insertAll writes the orders over several connections, each its share, one transaction after another.
func (s shop) insertAll(b *testing.B, orders []orderColumns, connections int, write inserter) {
	b.Helper()
	var all errgroup.Group
	for i := range connections {
		all.Go(func() error {
			return s.Pool.AcquireFunc(b.Context(), func(conn *pgxpool.Conn) error {
				for n := i; n < len(orders); n += connections {
					if err := write(b.Context(), conn.Conn(), s.sale, orders[n]); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
	require.NoError(b, all.Wait())
}

// insertUnnest sends one transaction in one round trip.
func insertUnnest(ctx context.Context, conn *pgx.Conn, sale uuid.UUID, c orderColumns) error {
	batch := &pgx.Batch{}
	batch.Queue("BEGIN")
	batch.Queue(insertEvents, c.ids, sale, c.users, c.sequences, c.at)
	batch.Queue(insertOrders, c.ids, sale, c.users, c.sequences, c.at)
	batch.Queue(addSold, sale, len(c.ids), c.sequences[len(c.sequences)-1])
	batch.Queue("COMMIT")
	return conn.SendBatch(ctx, batch).Close()
}

// insertCopy writes the same rows by COPY, with more round trips and less parsing.
func insertCopy(ctx context.Context, conn *pgx.Conn, sale uuid.UUID, c orderColumns) error {
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		events := pgx.CopyFromSlice(len(c.ids), func(i int) ([]any, error) {
			return []any{
				c.ids[i], 2, "OrderConfirmed", sale, c.users[i], 1, c.at, c.at, c.sequences[i], 1,
			}, nil
		})
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"order_events"}, []string{
			"order_id", "version", "type", "sale_id", "user_id", "quantity", "occurred_at", "reserved_at", "sequence", "epoch",
		}, events)
		if err != nil {
			return err
		}
		orders := pgx.CopyFromSlice(len(c.ids), func(i int) ([]any, error) {
			return []any{c.ids[i], sale, c.users[i], 1, "confirmed", 2, c.sequences[i], 1, c.at, c.at, nil}, nil
		})
		_, err = tx.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{
			"id", "sale_id", "user_id", "quantity", "status", "version", "sequence", "epoch", "reserved_at", "updated_at",
			"key_fingerprint",
		}, orders)
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, addSold, sale, len(c.ids), c.sequences[len(c.sequences)-1])
		return err
	})
}

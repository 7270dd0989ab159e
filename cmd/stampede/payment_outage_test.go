//go:build system

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	ratelimiter "golang.org/x/time/rate"

	"stampede/internal/connect"
	"stampede/internal/retry"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql/migrate"
)

var outageOfPostgres = flag.Duration("payments.outage", 8*time.Second, "how long Postgres is away while buyers pay")

// Buyers pay at a provider that takes 25 payments a second, and Postgres is away meanwhile, for longer than some of
// them have left. Nobody's money that the provider has taken in time is refunded, and each report that was answered 200
// is what Postgres has.
func TestOutageRefundsNoMoneyInTime(t *testing.T) {
	t.Parallel()
	const winners, perSecond = 150, 25
	postgres := testkit.OwnPostgres(t)
	require.NoError(t, migrate.Up(t.Context(), postgres.URL))
	pool, err := connect.Postgres(t.Context(), postgres.URL, 4)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	s := &shop{t: t, keys: testkit.Keys(t), pool: pool, databaseURL: postgres.URL}
	_, url := s.serve()
	s.worker("worker").Start()
	sale := s.createSale(url, reservation.Terms{
		Name: "test", Stock: winners, PaymentWindow: 12 * time.Second, UnitPrice: 1290, Currency: "EUR",
	})
	orders := make([]order.View, winners)
	var buyers errgroup.Group
	for n := range orders {
		buyers.Go(func() error {
			return postJSON(t.Context(), url+"/v1/sales/"+sale.String()+"/orders", nil, &orders[n],
				"X-User-ID", fmt.Sprint("buyer-", n), "Prefer", "wait=30")
		})
	}
	require.NoError(t, buyers.Wait())

	limit := ratelimiter.NewLimiter(perSecond, 1)
	var mu sync.Mutex
	answers := map[string]order.PaymentView{} // of the reports that were answered 200, by reference
	var payers errgroup.Group
	for n, o := range orders {
		payers.Go(func() error {
			until, err := time.Parse(time.RFC3339, o.ExpiresAt)
			if err == nil {
				err = limit.Wait(t.Context())
			}
			if err != nil || time.Now().After(until) {
				return err // the provider does not take it any more
			}
			report := fmt.Appendf(nil, `{"order_id":%q,"reference":"ch_%d","amount":1290,"currency":"EUR"}`, o.OrderID, n)
			for {
				var p order.PaymentView
				if postJSON(t.Context(), url+"/v1/payments", report, &p, "Authorization", "Bearer "+adminToken) == nil {
					mu.Lock()
					answers[p.Reference] = p
					mu.Unlock()
					return nil
				}
				if !retry.Pause(100*time.Millisecond+rand.N(400*time.Millisecond), t.Context().Done()) {
					return t.Context().Err()
				}
			}
		})
	}
	testkit.Eventually(t, within, "some have paid", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(answers) >= winners/10
	})
	postgres.StopImmediate()
	retry.Pause(*outageOfPostgres, t.Context().Done())
	require.NoError(t, postgres.Restart(t.Context()))
	require.NoError(t, payers.Wait())
	testkit.Eventually(t, within, "each payment is decided", func() bool {
		return s.count("SELECT count(*) FROM open_payments WHERE state = 'waiting'") == 0
	})
	t.Logf("%d of %d orders were paid in time, with Postgres away for %v", len(answers), winners, *outageOfPostgres)
	require.Greater(t, len(answers), winners/2)
	rows, _ := pool.Query(t.Context(), "SELECT reference, state, order_id FROM payments") // its error comes with the rows
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ Reference, State, OrderID string }])
	require.NoError(t, err)
	require.Len(t, found, len(answers))
	for _, p := range found {
		require.Equal(t, "settled", p.State, p.Reference)
		require.Equal(t, answers[p.Reference].OrderID.String(), p.OrderID)
	}
	require.Equal(t, len(answers), s.count("SELECT count(*) FROM orders WHERE status = 'paid'"))
	s.ends(exitOK, "audit", "--wait=60s", "--sale="+sale.String())
}

// postJSON posts a JSON document, and reads the answer of 200 or 201 into another one.
func postJSON(ctx context.Context, to string, body []byte, into any, header ...string) error {
	ctx, cancel := context.WithTimeout(ctx, 40*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, to, bytes.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK && answer.StatusCode != http.StatusCreated {
		return fmt.Errorf("%s: HTTP %d", to, answer.StatusCode)
	}
	return json.NewDecoder(answer.Body).Decode(into)
}

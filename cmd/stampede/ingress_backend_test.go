//go:build system

package main

import (
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// Anonymous readers hold every connection that they can get; heartbeats, the guard, payments, reads of orders and
// purchases continue.
func TestAnonymousReadersDoNotBlockPayments(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, url := s.serve()
	s.worker("worker").Start()
	sale := s.payableSale("1000", "30m")
	page := url + "/v1/sales/" + sale.String()
	bought := ask(t, http.MethodPost, page+"/orders", "ann", "")
	require.Equal(t, http.StatusAccepted, bought.HTTP)
	order := url + "/v1/orders/" + bought.OrderID
	testkit.Eventually(t, within, "the order is confirmed",
		func() bool { return ask(t, http.MethodGet, order, "ann", "").Status == "confirmed" })

	outages := func() (n int) {
		require.NoError(t, s.pool.QueryRow(t.Context(), "SELECT count(*) FROM outages").Scan(&n))
		return n
	}
	before := outages()
	// From now on every read of a sale blocks.
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE sales IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	var readers sync.WaitGroup
	done := make(chan struct{})
	for n := range 40 {
		readers.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
					ask(t, http.MethodGet, []string{page, url + "/v1/sales", fmt.Sprintf("%s/v1/sales?limit=%d", url, n+1)}[n%3], "",
						"")
				}
			}
		})
	}
	blocked := func() (n int) {
		require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock' AND application_name = 'stampede serve'`).Scan(&n))
		return n
	}
	most := 0
	testkit.Eventually(t, within, "readers hold all connections that they can get", func() bool {
		before := most
		most = max(most, blocked())
		return most > 0 && most == before
	})
	seen := func() (at time.Time) {
		require.NoError(t, s.pool.QueryRow(t.Context(), "SELECT seen_at FROM pulse").Scan(&at))
		return at
	}
	for try := range 3 {
		_, err := tx.Exec(t.Context(), "SELECT 1") // the worker ends a session that blocks others and is silent
		require.NoError(t, err)
		last := seen()
		testkit.Eventually(t, within, "heartbeats arrive", func() bool { return seen().After(last) })
		assert.Equal(t, http.StatusOK, ask(t, http.MethodPost, order+"/pay", "ann", `{"reference":"pi_1"}`).HTTP)
		assert.Equal(t, "paid", ask(t, http.MethodGet, order, "ann", "").Status)
		assert.Equal(t, http.StatusOK, ask(t, http.MethodGet, url+"/v1/orders", "ann", "").HTTP)
		assert.Equal(t, http.StatusAccepted, ask(t, http.MethodPost, page+"/orders", fmt.Sprint("buyer-", try), "").HTTP)
	}
	assert.Equal(t, before, outages())
	require.NoError(t, tx.Rollback(t.Context()))
	close(done)
	readers.Wait()
}

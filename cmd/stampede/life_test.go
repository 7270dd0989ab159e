//go:build system

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// payableSale creates a sale with a payment window.
func (s *shop) payableSale(stock, window string) uuid.UUID {
	s.t.Helper()
	output := s.ends(exitOK, "sale", "create", "--name=test", "--stock="+stock, "--payment-window="+window,
		"--output=json")
	var sale struct{ ID uuid.UUID }
	require.NoError(s.t, json.Unmarshal([]byte(output), &sale), output)
	return sale.ID
}

// The unit of an unpaid order goes to another buyer, who pays; the audit holds.
func TestUnpaidOrderReleasesUnitToNextBuyer(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, url := s.serve()
	sale := s.payableSale("1", "1s")
	orders := url + "/v1/sales/" + sale.String() + "/orders"

	late := ask(t, http.MethodPost, orders, "ann", "")
	require.Equal(t, http.StatusAccepted, late.HTTP)
	require.Equal(t, http.StatusConflict, ask(t, http.MethodPost, orders, "bob", "").HTTP)
	s.worker("worker").Start() // from its confirmation on, the order can expire
	order := url + "/v1/orders/" + late.OrderID
	testkit.Eventually(t, within, "the order expires",
		func() bool { return ask(t, http.MethodGet, order, "ann", "").Status == "expired" })
	assert.Equal(t, http.StatusGone, ask(t, http.MethodPost, order+"/pay", "ann", `{"reference":"too late"}`).HTTP)

	// On a busy machine the buyer may miss the window of one second, and buys again.
	testkit.Eventually(t, within, "another buyer pays", func() bool {
		bought := ask(t, http.MethodPost, orders, "bob", "")
		if bought.HTTP != http.StatusAccepted {
			return false
		}
		var paid apiAnswer
		testkit.Eventually(t, within, "a decision", func() bool {
			paid = ask(t, http.MethodPost, url+"/v1/orders/"+bought.OrderID+"/pay", "bob", `{"reference":"in time"}`)
			return paid.HTTP == http.StatusOK || paid.HTTP == http.StatusGone
		})
		return paid.HTTP == http.StatusOK
	})
	assert.Zero(t, ask(t, http.MethodGet, url+"/v1/sales/"+sale.String(), "bob", "").Available)
	s.ends(exitOK, "audit", "--wait=30s", "--sale="+sale.String())
}

// Time without a running ingress does not count towards the payment window.
func TestOutageExtendsPaymentWindow(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	ingress, url := s.serve()
	s.worker("worker").Start()
	bought := ask(t, http.MethodPost, url+"/v1/sales/"+s.payableSale("1", "30m").String()+"/orders", "ann", "")
	require.Equal(t, http.StatusAccepted, bought.HTTP)
	var before apiAnswer
	testkit.Eventually(t, within, "the order is confirmed", func() bool {
		before = ask(t, http.MethodGet, url+"/v1/orders/"+bought.OrderID, "ann", "")
		return before.Status == "confirmed"
	})
	seenAt := func() (seen time.Time) {
		require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT seen_at FROM pulse`).Scan(&seen))
		return seen
	}
	first := seenAt()
	testkit.Eventually(t, within, "the ingress is seen again", func() bool { return seenAt().After(first) })

	// The ingress is killed, and an hour passes.
	ingress.Kill()
	for _, column := range []string{"pulse SET seen_at = seen_at", "orders SET due = due"} {
		_, err := s.pool.Exec(t.Context(), "UPDATE "+column+" - interval '1 hour'")
		require.NoError(t, err)
	}
	_, url = s.serve()
	var outages int
	testkit.Eventually(t, within, "the outage is recorded", func() bool {
		outages = s.count(`SELECT count(*) FROM outages WHERE ended_at - began_at > interval '59 minutes'`)
		return outages > 0
	})
	assert.Equal(t, 1, outages)
	after := ask(t, http.MethodGet, url+"/v1/orders/"+bought.OrderID, "ann", "")
	assert.Equal(t, "confirmed", after.Status)
	assert.WithinDuration(t, before.ExpiresAt, after.ExpiresAt, time.Minute, "the remaining time is unchanged")
	assert.False(t, after.ExpiresAt.Before(before.ExpiresAt))
	assert.Equal(t, "paid", ask(t, http.MethodPost, url+"/v1/orders/"+bought.OrderID+"/pay", "ann",
		`{"reference":"r-1"}`).Status)
}

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

	outages := func() int { return s.count("SELECT count(*) FROM outages") }
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
	blocked := func() int {
		return s.count(`SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock' AND application_name = 'stampede serve'`)
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
		assert.Equal(t, http.StatusAccepted, ask(t, http.MethodPost, page+"/orders", fmt.Sprint("buyer-", try), "").HTTP)
	}
	assert.Equal(t, before, outages())
	require.NoError(t, tx.Rollback(t.Context()))
	// A payment reads the price of its sale, so it waited as well. The readers go on.
	testkit.Eventually(t, within, "the order is paid", func() bool {
		return ask(t, http.MethodPost, order+"/pay", "ann", `{"reference":"pi_1"}`).HTTP == http.StatusOK
	})
	assert.Equal(t, "paid", ask(t, http.MethodGet, order, "ann", "").Status)
	assert.Equal(t, http.StatusOK, ask(t, http.MethodGet, url+"/v1/orders", "ann", "").HTTP)
	close(done)
	readers.Wait()
}

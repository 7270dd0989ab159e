//go:build system && desk

package main

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/redisinfo"
	"stampede/internal/test/testkit"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
)

func (s *site) setRedis(name, value string) {
	s.t.Helper()
	require.NoError(s.t, s.rdb.ConfigSet(s.t.Context(), name, value).Err())
}

// fillRedis makes the memory in use that share of maxmemory.
func (s *site) fillRedis(share float64) {
	s.t.Helper()
	servers := redisinfo.Masters(s.t.Context(), s.rdb)
	require.Len(s.t, servers, 1)
	s.setRedis("maxmemory", fmt.Sprint(int64(float64(servers[0].UsedBytes)/share)))
}

func (s *site) setPostgres(setting string) {
	s.t.Helper()
	s.exec("ALTER SYSTEM " + setting)
	s.exec("SELECT pg_reload_conf()")
}

// signalPostgres sends a signal to the server and to all its processes, which are in groups of their own.
func (s *site) signalPostgres(signal syscall.Signal) {
	s.t.Helper()
	server := s.postgres.Pid()
	require.NoError(s.t, syscall.Kill(server, signal)) // first, so that it starts no other
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	require.NoError(s.t, err)
	for _, path := range stats {
		var pid, parent int
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		_, after, _ := strings.Cut(string(stat), ") ")
		if _, err := fmt.Sscanf(after[min(2, len(after)):], "%d", &parent); err == nil && parent == server {
			_, err := fmt.Sscan(string(stat), &pid)
			require.NoError(s.t, err)
			_ = syscall.Kill(pid, signal) // it may have ended
		}
	}
}

// slowDown makes each statement that records orders take so long.
func (s *site) slowDown(by time.Duration) {
	s.t.Helper()
	s.exec("DROP TRIGGER IF EXISTS slow ON order_events")
	if by == 0 {
		return
	}
	s.exec(fmt.Sprintf("CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "+
		"'BEGIN PERFORM pg_sleep(%f); RETURN NULL; END'", by.Seconds()))
	s.exec("CREATE TRIGGER slow AFTER INSERT ON order_events FOR EACH STATEMENT EXECUTE FUNCTION slow()")
}

// crowd lets so many new buyers buy at the same time.
func (s *site) crowd(n int) {
	s.t.Helper()
	var buying sync.WaitGroup
	for range n {
		s.buyers++
		user := fmt.Sprint("buyer-", s.buyers)
		buying.Go(func() {
			call(s.t, http.MethodPost, s.at("ingress-1")+"/v1/sales/"+s.sale.String()+"/orders", "{}", "X-User-ID", user)
		})
	}
	buying.Wait()
}

// enter buys a unit of a sale, and returns the order once it is confirmed.
func (s *site) enter(sale uuid.UUID) uuid.UUID {
	s.t.Helper()
	s.buyers++
	var bought order.View
	require.NoError(s.t, postJSON(s.t.Context(), s.at("ingress-1")+"/v1/sales/"+sale.String()+"/orders", nil, &bought,
		"X-User-ID", fmt.Sprint("buyer-", s.buyers), "Prefer", "wait=30"))
	return bought.OrderID
}

// confirmed is a new order that is confirmed.
func (s *site) confirmed() uuid.UUID { return s.enter(s.sale) }

// loseSale deletes the sale in Redis.
func (s *site) loseSale() {
	s.t.Helper()
	require.NoError(s.t, s.rdb.Del(s.t.Context(), s.keys.Sale(s.keys.Partition(s.sale), s.sale)).Err())
}

// hook has the relay send its events to a receiver that answers with a status.
func (s *site) hook(name string, status int) {
	s.t.Helper()
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
	}))
	s.t.Cleanup(receiver.Close)
	secret := file(s.t, "whsec_"+base64.StdEncoding.EncodeToString([]byte(strings.Repeat("k", 32)))+"\n")
	s.ends(exitOK, "relay", "add", name, receiver.URL, "--secret-file="+secret, "--allow-private")
}

// loseEntry deletes an entry that a worker has read and not recorded, while this worker is frozen.
func (s *site) loseEntry() {
	s.t.Helper()
	hold, err := s.pool.Begin(s.t.Context())
	require.NoError(s.t, err)
	defer func() { _ = hold.Rollback(context.WithoutCancel(s.t.Context())) }()
	_, err = hold.Exec(s.t.Context(), "SELECT FROM sales WHERE id = $1 FOR UPDATE", s.sale)
	require.NoError(s.t, err)
	s.crowd(1)
	orders := s.keys.Orders(s.keys.Partition(s.sale))
	var pending []redis.XPendingExt
	testkit.Eventually(s.t, within, "a worker has read the entry", func() bool {
		pending, err = s.rdb.XPendingExt(s.t.Context(), &redis.XPendingExtArgs{
			Stream: orders, Group: reservation.Group, Start: "-", End: "+", Count: 10,
		}).Result()
		return err == nil && len(pending) > 0
	})
	reader := s.running[pending[0].Consumer]
	reader.Freeze()
	defer reader.Thaw()
	require.NoError(s.t, s.rdb.XDel(s.t.Context(), orders, pending[0].ID).Err())
	testkit.Eventually(s.t, within, "another worker claims it", func() bool {
		left, err := s.rdb.XPendingExt(s.t.Context(), &redis.XPendingExtArgs{
			Stream: orders, Group: reservation.Group, Start: pending[0].ID, End: pending[0].ID, Count: 1,
		}).Result()
		return err == nil && len(left) == 0
	})
}

func (s *site) restartIngresses(settings ...string) {
	s.t.Helper()
	s.start("ingress-1", settings...)
	s.start("ingress-2", settings...)
}

const cashierToken = "token-of-the-shop"

// appointCashier lets the shop report payments, and waits until it may.
func (s *site) appointCashier() {
	s.t.Helper()
	s.appoint(fmt.Sprintf("shop cashier %x\n", sha256.Sum256([]byte(cashierToken))))
	testkit.Eventually(s.t, within, "the cashier may report", func() bool {
		status, _ := call(s.t, http.MethodGet, s.at("ingress-1")+"/v1/admin/payments?state=refund_due", "", "Authorization",
			"Bearer "+cashierToken)
		return status == http.StatusOK
	})
}

// forget restarts the dashboard, which shows for two minutes what it has counted.
func (s *site) forget() {
	s.t.Helper()
	s.restart("dashboard")
	s.logIn()
}

// pay reports the money of an order.
func (s *site) pay(o uuid.UUID, amount int64) {
	s.t.Helper()
	call(s.t, http.MethodPost, s.at("ingress-1")+"/v1/payments",
		fmt.Sprintf(`{"order_id":%q,"reference":"pi_%s","amount":%d,"currency":"EUR"}`, o, o, amount),
		"Authorization", "Bearer "+cashierToken)
}

// reports reports so many payments of new orders.
func (s *site) reports(n int, amount int64) {
	s.t.Helper()
	for range n {
		s.pay(s.confirmed(), amount)
	}
}

// report tells the ledger of money, as a payment provider does.
func (s *site) report(m order.Money) {
	s.t.Helper()
	_, err := ledger.New(s.pool).Report(s.t.Context(), m)
	require.NoError(s.t, err)
}

// waitsFor sets back since when a payment is in its state.
func (s *site) waitsFor(reference, since string) {
	s.t.Helper()
	s.exec("UPDATE open_payments SET since = now() - $2::interval WHERE reference = $1", reference, since)
}

// dispute tells the ledger of a dispute about the money of an order, as a payment provider does.
func (s *site) dispute(reference string, state order.DisputeState) {
	s.t.Helper()
	_, err := ledger.New(s.pool).Disputed(s.t.Context(), order.Dispute{Reference: reference, ID: "dp_1", State: state})
	require.NoError(s.t, err)
}

// reject sells a unit in Redis that Postgres has not.
func (s *site) reject() {
	s.t.Helper()
	sale := s.createSale(s.at("ingress-1"), reservation.Terms{Name: "too few", Stock: 10})
	s.exec("UPDATE sales SET stock = 1 WHERE id = $1", sale)
	for range 3 {
		s.buyers++
		call(s.t, http.MethodPost, s.at("ingress-1")+"/v1/sales/"+sale.String()+"/orders", "{}", "X-User-ID",
			fmt.Sprint("buyer-", s.buyers))
	}
}

// poison adds an entry that no worker can read.
func (s *site) poison() {
	s.t.Helper()
	require.NoError(s.t, s.rdb.XAdd(s.t.Context(), &redis.XAddArgs{
		Stream: s.keys.Orders(0), Values: map[string]any{"rubbish": "x"},
	}).Err())
}

// frozenDraw makes a draw with some entries whose list is frozen.
func (s *site) frozenDraw(flags ...string) {
	s.t.Helper()
	s.drawn = s.createSale(s.at("ingress-1"), reservation.Terms{Name: "raffle", Stock: 2, PaymentWindow: time.Hour})
	entries := s.createSale(s.at("ingress-1"), reservation.Terms{
		Name: "entries", Stock: 100, PerOrderLimit: 1, ClosesAt: time.Now().Add(time.Hour),
	})
	s.ends(exitOK, append([]string{"draw", "create", s.drawn.String(), "--entries=" + entries.String(), "--freeze=60s"},
		flags...)...)
	for range 3 {
		s.enter(entries)
	}
	s.exec("UPDATE sales SET closes_at = now() - interval '1 second' WHERE id = $1", entries)
	testkit.Eventually(s.t, within, "the list is frozen", func() bool {
		return s.count("SELECT count(*) FROM draws WHERE sale_id = $1 AND frozen_at IS NOT NULL", s.drawn) == 1
	})
}

// offer makes a waiting list in which nobody pays.
func (s *site) offer() {
	s.t.Helper()
	const stock, waiting = 6, 30
	var list struct{ ID uuid.UUID }
	created := s.ends(exitOK, "sale", "create", "--name=rare", fmt.Sprint("--stock=", stock), "--payment-window=2s",
		"--waitlist", "--output=json", "--log-level=error")
	require.NoError(s.t, json.Unmarshal([]byte(created), &list), created)
	s.drawn = list.ID
	for range stock {
		s.enter(list.ID)
	}
	for n := range waiting {
		status, text := call(s.t, http.MethodPost, s.at("ingress-1")+"/v1/sales/"+list.ID.String()+"/waitlist", "{}",
			"X-User-ID", fmt.Sprint("waiting-", n))
		require.Equal(s.t, http.StatusAccepted, status, text)
	}
}

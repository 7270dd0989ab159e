//go:build system

package ingress

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/accept"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

func TestStreamsSurvivePostgresRestart(t *testing.T) {
	t.Parallel()
	postgres := testkit.OwnPostgres(t)
	s := openShopOn(t, onPostgres(t, postgres))
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, _ := s.confirm(sale, "ada")
	reserved, _, _ := s.purchased(sale, "bob")
	w, waiting := s.watch(path+"/events", as("ada")), s.watch(reserved+"/events", as("bob"))
	sales := s.watch("/v1/sales/" + sale.String() + "/events")
	w.receivesStatus(order.StatusConfirmed, 2)
	waiting.receivesStatus(order.StatusReserved, 1)
	_, ok := sales.next()
	require.True(t, ok)
	postgres.StopImmediate()
	s.awaitUnavailable("/v1/sales/" + sale.String())
	s.watch(reserved+"/events", as("bob")).receivesStatus(order.StatusReserved, 1)
	require.NoError(t, postgres.Restart(t.Context()))
	testkit.Eventually(t, 20*time.Second, "the order is paid", func() bool {
		return s.post(path+"/pay", `{"reference":"pi_1"}`, as("ada")).status == http.StatusOK
	})
	w.receivesStatus(order.StatusPaid, 3)
	w.receivesEnd()
	s.recordReserved(sale, "bob", "")
	waiting.receivesStatus(order.StatusConfirmed, 2)
	e, ok := sales.next()
	require.True(t, ok)
	require.Equal(t, "sale", e.name)
}

func TestStopEndsThousandStreams(t *testing.T) {
	t.Parallel()
	s, stop, ended := runShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	path, _ := s.order(sale, "ada")
	const streams = 1000
	conns := make([]net.Conn, streams)
	for i := range conns {
		target := path
		if i%2 == 0 {
			target = "/v1/sales/" + sale.String()
		}
		for line := ""; line != "HTTP/1.1 200 OK\r\n"; {
			conns[i] = s.dial()
			require.NoError(t, conns[i].SetDeadline(time.Now().Add(5*time.Minute)))
			_, err := fmt.Fprintf(conns[i], "GET %s/events HTTP/1.1\r\nHost: shop\r\nX-User-ID: ada\r\n\r\n", target)
			require.NoError(t, err)
			line, err = bufio.NewReader(conns[i]).ReadString('\n')
			require.NoError(t, err)
			// On a busy machine Postgres may not answer in time.
			require.Contains(t, []string{"HTTP/1.1 200 OK\r\n", "HTTP/1.1 503 Service Unavailable\r\n"}, line)
		}
	}
	l := s.server.limits
	require.EqualValues(t, streams, l.saleStreams.all.taken.Load()+l.orderStreams.all.taken.Load())
	began := time.Now()
	stop()
	require.NoError(t, <-ended)
	took := time.Since(began)
	t.Logf("stopped after %v", took)
	require.Less(t, took, s.server.config.DrainTimeout/2)
	for _, conn := range conns {
		_, err := io.Copy(io.Discard, conn)
		require.NoError(t, err)
	}
}

func TestStreamOutlivesConnectionTimeouts(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, _ := s.confirm(sale, "ada")
	conn := s.dial()
	require.NoError(t, conn.SetDeadline(time.Now().Add(3*heartbeatInterval)))
	_, err := fmt.Fprintf(conn, "GET %s/events HTTP/1.1\r\nHost: shop\r\nX-User-ID: ada\r\n\r\n", path)
	require.NoError(t, err)
	began := time.Now()
	lines := bufio.NewReader(conn)
	for line := ""; line != ": \n"; {
		line, err = lines.ReadString('\n')
		require.NoError(t, err)
	}
	require.Greater(t, time.Since(began), max(accept.ReadTimeout, accept.WriteTimeout))
	s.post(path+"/pay", `{"reference":"pi_1"}`, as("ada")).is(http.StatusOK)
	for line := ""; line != "event: paid\n"; {
		line, err = lines.ReadString('\n')
		require.NoError(t, err)
	}
}

func TestChangeWithoutPostgres(t *testing.T) {
	t.Parallel()
	postgres := testkit.OwnPostgres(t)
	s := openShopOn(t, onPostgres(t, postgres))
	sale := s.sale(reservation.Terms{Stock: 3, PaymentWindow: 10 * time.Minute})
	paid, _ := s.confirm(sale, "ada")
	cancelled, _ := s.confirm(sale, "bob")
	postgres.StopImmediate()
	for range 5 {
		for _, r := range []reply{
			s.pay(paid, "r-1", as("ada")), s.cancel(cancelled, as("bob")), s.get("/v1/orders", as("ada")),
			s.pay(orderPath(uuid.New()), "r-1", as("ada")),
		} {
			require.Equal(t, http.StatusServiceUnavailable, r.status)
			require.Equal(t, "1", r.header.Get("Retry-After"))
			for _, text := range []string{"postgres", "dial", "refused", "127.0.0.1", "SQLSTATE"} {
				require.NotContains(t, r.body, text)
			}
		}
	}
	// Once queries have opened the breaker, changes do not wait for Postgres.
	testkit.Eventually(t, 20*time.Second, "a payment is refused without an attempt", func() bool {
		s.get("/v1/orders", as("ada"))
		return strings.Contains(s.pay(paid, "r-1", as("ada")).body, "Nothing was done")
	})

	require.NoError(t, postgres.Restart(t.Context()))
	s.pool.Reset() // closes the old connections
	testkit.Eventually(t, 20*time.Second, "the order can be paid", func() bool {
		return s.pay(paid, "r-1", as("ada")).status == http.StatusOK
	})
	s.cancel(cancelled, as("bob")).is(http.StatusOK)
	require.Len(t, s.get("/v1/orders", as("ada")).is(http.StatusOK)["orders"], 1)
}

// Redis is not needed to change a confirmed order.
func TestChangeWithoutRedis(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := openShopOn(t, onRedis(t, own))
	sale := s.sale(reservation.Terms{Stock: 2, PaymentWindow: 10 * time.Minute})
	paid, _ := s.confirm(sale, "ada")
	cancelled, _ := s.confirm(sale, "bob")
	own.Kill()
	s.pay(paid, "r-1", as("ada")).is(http.StatusOK)
	s.cancel(cancelled, as("bob")).is(http.StatusOK)
	// The order may be in Redis, so the answer is not "not found".
	r := s.pay(orderPath(order.NewOrderID(sale)), "r-1", as("ada"))
	r.isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	require.Equal(t, "1", r.header.Get("Retry-After"))

	require.NoError(t, own.Restart(t.Context()))
	s.startWorker()
	testkit.Eventually(t, 20*time.Second, "the unit is for sale again", func() bool {
		return s.buy(sale, "", as("bob")).status == http.StatusAccepted
	})
	s.buy(sale, "", as("eve")).isProblem(http.StatusConflict, "sold-out")
}

// No worker announces it: the stream looks it up.
func TestOrderStreamSendsVoidedAfterRedisLoss(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	path, _, receipt := s.purchased(sale, "ada")
	w, without := s.watch(withReceipt(path+"/events", receipt), as("ada")), s.watch(path+"/events", as("ada"))
	w.receivesStatus(order.StatusReserved, 1)
	without.receivesStatus(order.StatusReserved, 1)
	s.loseReservations(sale)
	s.raiseEpoch(sale)
	w.receivesStatus(order.StatusVoided, 2)
	w.receivesEnd()
	without.receivesEnd()
}

// While Postgres does not answer, operators are told so, and nothing is cancelled.
func TestOperatorsCallsWithoutPostgres(t *testing.T) {
	t.Parallel()
	postgres := testkit.OwnPostgres(t)
	s := openShopOn(t, onPostgres(t, postgres))
	path, _ := s.confirm(s.sale(reservation.Terms{Stock: 10}), "ada")
	postgres.StopImmediate()
	for _, r := range []reply{
		s.get(adminPath(path), operator), s.get("/v1/admin/orders?user=ada", operator),
		s.post(adminPath(path)+"/cancel", `{"reason":"r"}`, operator),
	} {
		r.isProblem(http.StatusServiceUnavailable, "sale-unavailable")
		require.Equal(t, "1", r.header.Get("Retry-After"))
	}
	require.NoError(t, postgres.Restart(context.WithoutCancel(t.Context())))
	testkit.Eventually(t, 20*time.Second, "the order is shown", func() bool {
		return s.get(adminPath(path), operator).status == http.StatusOK
	})
	require.Equal(t, "confirmed", s.get(adminPath(path), operator).is(http.StatusOK)["status"])
}

func TestSaleGoesOnWithoutPostgres(t *testing.T) {
	t.Parallel()
	postgres := testkit.OwnPostgres(t)
	s := openShopOn(t, onPostgres(t, postgres))
	sale := s.sale(reservation.Terms{Stock: 2})
	earlier, _ := s.order(sale, "ada")
	require.Equal(t, "up", s.get("/readyz").is(http.StatusOK)["postgres"])

	postgres.StopImmediate()
	path, _ := s.order(sale, "bob")
	s.buy(sale, "", as("eve")).isProblem(http.StatusConflict, "sold-out")
	for range 20 {
		require.Equal(t, "reserved", s.get(path, as("bob")).is(http.StatusOK)["status"])
		require.Equal(t, "reserved", s.get(earlier, as("ada")).is(http.StatusOK)["status"])
	}
	// The order may be in Postgres, so the answer is not "not found".
	r := s.get("/v1/orders/"+uuid.NewString(), as("ada"))
	r.isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	require.Equal(t, "1", r.header.Get("Retry-After"))
	for _, text := range []string{"postgres", "dial", "127.0.0.1", "SQLSTATE"} {
		require.NotContains(t, r.body, text)
	}
	s.awaitUnavailable("/v1/sales/" + sale.String())
	s.post("/v1/sales", `{"name":"x","stock":1}`, operator).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	ready := s.get("/readyz").is(http.StatusOK)
	require.Equal(t, []any{"ready", "up", "down"}, []any{ready["status"], ready["redis"], ready["postgres"]})
	s.awaitMetrics(`stampede_ready{process="ingress",reason=""} 1`, `stampede_dependency_up{dependency="postgres"} 0`,
		`stampede_dependency_up{dependency="redis"} 1`, `stampede_dependency_up{dependency="receipt-secret"} 1`)

	require.NoError(t, postgres.Restart(t.Context()))
	testkit.Eventually(t, 30*time.Second, "Postgres is queried again", func() bool {
		return s.get("/v1/orders/"+uuid.NewString(), as("ada")).status == http.StatusNotFound
	})
}

func TestIngressWithoutRedis(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := openShopOn(t, onRedis(t, own))
	sale := s.sale(reservation.Terms{Stock: 10})
	path, id := s.order(sale, "ada")
	s.record(id, sale, "ada", order.StatusConfirmed, "")
	own.Kill()

	r := s.buy(sale, "", as("bob"))
	r.isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	require.Equal(t, "1", r.header.Get("Retry-After"))
	for _, text := range []string{"redis", "dial", "refused", "127.0.0.1"} {
		require.NotContains(t, r.body, text)
	}
	require.Equal(t, "confirmed", s.get(path, as("ada")).is(http.StatusOK)["status"])
	s.get(orderPath(order.NewOrderID(sale)), as("ada")).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	p := s.get("/readyz").isProblem(http.StatusServiceUnavailable, "not-ready")
	require.Equal(t, []any{"down", "up"}, []any{p["redis"], p["postgres"]})
	s.awaitMetrics(`stampede_ready{process="ingress",reason="Redis does not answer"} 0`,
		`stampede_dependency_up{dependency="redis"} 0`)
	s.get("/livez").is(http.StatusOK)

	require.NoError(t, own.Restart(t.Context()))
	s.buy(sale, "", as("bob")).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	testkit.VerifyServer(t, s.pool, s.store, 0)
	testkit.Eventually(t, 30*time.Second, "the sale goes on", func() bool {
		return s.buy(sale, "", as("bob")).status == http.StatusAccepted
	})
	s.get("/readyz").is(http.StatusOK)
	s.awaitMetrics(`stampede_ready{process="ingress",reason=""} 1`)
}

func TestWaitOutlivesConnectionTimeouts(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	answered := s.inBackground(func() reply { return s.buy(sale, `{"quantity":1}`, as("ada"), prefer("wait=14")) })
	began := time.Now()
	r := <-answered
	r.is(http.StatusAccepted)
	require.Greater(t, time.Since(began), accept.WriteTimeout)
	require.Equal(t, "wait=14", r.header.Get("Preference-Applied"))
}

// Other purchases are served meanwhile.
func TestTwoThousandWaitersShareLookups(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	const buyers = 2000
	sale := s.sale(reservation.Terms{Stock: buyers + 10})
	var (
		client   = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: buyers}}
		answers  sync.WaitGroup
		statuses [600]atomic.Int64
	)
	defer client.CloseIdleConnections()
	for n := range buyers {
		answers.Go(func() {
			status := http.StatusServiceUnavailable
			for status == http.StatusServiceUnavailable { // on a busy machine some are refused
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+ordersPath(sale), nil)
				if !assert.NoError(t, err) {
					return
				}
				r.Header.Set("X-User-ID", fmt.Sprint("buyer-", n))
				r.Header.Set("Idempotency-Key", "only")
				r.Header.Set("Prefer", "wait=30")
				answer, err := client.Do(r)
				if !assert.NoError(t, err) {
					return
				}
				_ = answer.Body.Close()
				status = answer.StatusCode
			}
			statuses[status].Add(1)
		})
	}
	s.awaitWaiting(buyers)
	s.buy(sale, "", as("another")).is(http.StatusAccepted)
	before := s.counter("stampede_outcome_lookups_total")
	s.startWorker()
	answers.Wait()
	require.EqualValues(t, buyers, statuses[http.StatusCreated].Load())
	lookups := s.counter("stampede_outcome_lookups_total") - before
	t.Logf("%.0f lookups for %d buyers, %.0f messages", lookups, buyers, s.counter("stampede_outcome_messages_total"))
	require.Positive(t, s.counter("stampede_outcome_messages_total"))
	require.Less(t, lookups, buyers/20.0)
}

// Later purchases get announcements again.
func TestWaitSurvivesRedisRestart(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := openShopOn(t, onRedis(t, own))
	sale := s.sale(reservation.Terms{Stock: 10})
	answered := s.inBackground(func() reply { return s.buy(sale, "", as("ada"), prefer("wait=25")) })
	s.awaitWaiting(1)
	own.Kill()
	require.NoError(t, own.Restart(t.Context()))
	s.recordReserved(sale, "ada", "")
	(<-answered).is(http.StatusCreated)
	s.startWorker() // a worker verifies the server, and the sale goes on
	testkit.Eventually(t, 40*time.Second, "messages are read again", func() bool {
		before := s.counter("stampede_outcome_messages_total")
		return s.buy(s.sale(reservation.Terms{Stock: 1}), "", as("ada"), prefer("wait=5")).status == http.StatusCreated &&
			s.counter("stampede_outcome_messages_total") > before
	})
}

// A wait that times out meanwhile is 202, not an error.
func TestWaitSurvivesPostgresRestart(t *testing.T) {
	t.Parallel()
	postgres := testkit.OwnPostgres(t)
	s := openShopOn(t, onPostgres(t, postgres))
	sale := s.sale(reservation.Terms{Stock: 10})
	postgres.StopImmediate()
	s.buy(sale, "", as("ada"), prefer("wait=2")).is(http.StatusAccepted)
	answered := s.inBackground(func() reply { return s.buy(sale, "", as("bob"), prefer("wait=25")) })
	s.awaitWaiting(1)
	require.NoError(t, postgres.Restart(t.Context()))
	testkit.Eventually(t, 20*time.Second, "Postgres takes the order", func() bool {
		return s.pool.Ping(t.Context()) == nil
	})
	s.recordReserved(sale, "bob", "")
	(<-answered).is(http.StatusCreated)
}

// The order is shown as Redis holds it.
func TestReceiptOfReservedOrderWithoutPostgres(t *testing.T) {
	t.Parallel()
	postgres := testkit.OwnPostgres(t)
	s := openShopOn(t, onPostgres(t, postgres))
	sale := s.sale(reservation.Terms{Stock: 10})
	path, _, receipt := s.purchased(sale, "ada")
	gone, _, lost := s.purchased(sale, "bob")
	require.NoError(t, s.rdb.HDel(t.Context(), s.keys.Buyers(0, sale), "bob").Err())
	postgres.StopImmediate()
	require.Equal(t, "reserved", s.get(withReceipt(path, receipt), as("ada")).is(http.StatusOK)["status"])
	s.get(withReceipt(gone, lost), as("bob")).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
}

// No purchase is accepted without a receipt, so a server without the secret is not ready.
func TestStartWithoutPostgresRefusesPurchases(t *testing.T) {
	t.Parallel()
	postgres := testkit.OwnPostgres(t)
	on := onPostgres(t, postgres)
	before := openShopOn(t, on)
	sale := before.sale(reservation.Terms{Stock: 10})
	held, _, receipt := before.purchased(sale, "eve", withKey("k"))
	postgres.StopImmediate()
	s := openShopOn(t, on)
	stock := s.stock(sale)
	for _, wait := range []reqHeader{{"Prefer", "wait=0"}, {"Prefer", "wait=1"}} {
		r := s.buy(sale, "", as("ada"), withKey("k"), wait)
		require.Contains(t, r.isProblem(http.StatusServiceUnavailable, "sale-unavailable")["detail"], "Nothing was done")
		require.Equal(t, "1", r.header.Get("Retry-After"))
		s.buy(sale, "", as("eve"), withKey("k"), wait).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	}
	require.Equal(t, stock, s.stock(sale))
	p := s.get("/readyz").isProblem(http.StatusServiceUnavailable, "not-ready")
	require.Equal(t, []any{"up", "down"}, []any{p["redis"], p["postgres"]})
	require.Contains(t, p["detail"], "STAMPEDE_RECEIPT_SECRET")
	s.get("/livez").is(http.StatusOK)
	s.get(withReceipt(held, receipt), as("eve")).isProblem(http.StatusServiceUnavailable, "sale-unavailable")

	// A server that has read the secret goes on, and one that was given a secret needs no Postgres.
	given := openShopOn(t, on, func(c *Config) { c.ReceiptSecret = strings.Repeat("z", 32) })
	for user, open := range map[string]*shop{"bob": before, "cid": given} {
		require.Equal(t, "down", open.get("/readyz").is(http.StatusOK)["postgres"])
		path, _, receipt := open.purchased(sale, user)
		open.get(withReceipt(path, receipt), as(user)).is(http.StatusOK)
	}

	require.NoError(t, postgres.Restart(t.Context()))
	testkit.Eventually(t, 20*time.Second, "it is ready by itself", func() bool {
		return s.get("/readyz").status == http.StatusOK
	})
	path, _, receipt := s.purchased(sale, "ada", withKey("k"))
	s.get(withReceipt(path, receipt), as("ada")).is(http.StatusOK)
	require.Equal(t, receipt, s.buy(sale, "", as("ada"), withKey("k")).is(http.StatusAccepted)["receipt"])
}

// One client does not read its stream; another receives every event.
func TestSlowReaderDelaysNoOtherStream(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	sale := s.sale(reservation.Terms{Stock: 5000})
	slow := s.dial()
	require.NoError(t, slow.Conn.(*net.TCPConn).SetReadBuffer(1))
	_, err := fmt.Fprintf(slow, "GET /v1/sales/%s/events HTTP/1.1\r\nHost: shop\r\n\r\n", sale)
	require.NoError(t, err)
	testkit.Eventually(t, 30*time.Second, "the stream is open", func() bool {
		return s.server.limits.saleStreams.all.taken.Load() == 1
	})
	w := s.watch("/v1/sales/" + sale.String() + "/events")
	_, ok := w.next()
	require.True(t, ok)
	// The test makes the updates, because a sale does not change often enough to fill the socket.
	sales := s.server.sales.feed
	give := func(news saleUpdate) {
		sales.mu.Lock()
		defer sales.mu.Unlock()
		sales.items[sale].send(news)
	}
	filler := strings.Repeat(" ", 256<<10)
	sold := func(n int) saleUpdate {
		const text = `{"state":"open","stock":100000000,"available":0,"held":0,"sold":%d%s}`
		return saleUpdate{data: fmt.Appendf(nil, text, n, filler)}
	}
	const last = 30 // more than the 4 MiB that Linux buffers, and read quickly by the other client
	for n := range last {
		give(sold(n))
	}
	testkit.Eventually(t, 40*time.Second, "the other client receives the last", func() bool {
		give(sold(last)) // again, because an update of the feed itself may have replaced it
		for {
			select {
			case e, ok := <-w.events:
				require.True(t, ok)
				if e.data["sold"] == float64(last) {
					return true
				}
			default:
				return false
			}
		}
	})
	require.EqualValues(t, 2, s.server.limits.saleStreams.all.taken.Load())
	another := last
	// A client that reads nothing for eventTimeout is cut off.
	testkit.Eventually(t, 6*eventTimeout, "the slow one is cut off", func() bool {
		another++
		give(sold(another))
		return s.server.limits.saleStreams.all.taken.Load() == 1
	})
}

package ingress

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/connect"
	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

const adminToken = "operators-only"

// purchases keeps connections of their own for purchases: net/http keeps those on which it has served anything else.
var purchases = http.DefaultTransport.(*http.Transport).Clone()

// shop is a server on real stores, with access to the stores.
type shop struct {
	t       testing.TB
	server  *Server
	url     string
	store   *reservation.Store
	catalog *catalog.Catalog
	ledger  *ledger.Ledger
	pool    *pgxpool.Pool
	rdb     redis.UniversalClient
	on      servers
	keys    reservation.Keys
}

// servers are the Redis and Postgres of a shop. openShop uses the shared ones.
type servers struct {
	redisURL, databaseURL string
	keys                  reservation.Keys
}

func sharedServers(t testing.TB) servers {
	t.Helper()
	return servers{testkit.RedisURL(t), testkit.DatabaseURL(t), testkit.Keys(t)}
}

// onRedis are servers with a Redis of the test's own.
func onRedis(t testing.TB, own *localserver.Redis) servers {
	t.Helper()
	return servers{own.URL, testkit.DatabaseURL(t), reservation.Keys{Prefix: "stampede", Partitions: 1}}
}

// onPostgres are servers with a Postgres of the test's own.
func onPostgres(t testing.TB, own *localserver.Postgres) servers {
	t.Helper()
	return servers{testkit.RedisURL(t), own.URL, testkit.Keys(t)}
}

func openShop(t testing.TB, change ...func(*Config)) *shop {
	t.Helper()
	return openShopOn(t, sharedServers(t), change...)
}

// runShop is openShop for a test that stops the server. It returns what stops it, and the channel of Run's error.
func runShop(t testing.TB, change ...func(*Config)) (s *shop, stop context.CancelFunc, ended <-chan error) {
	t.Helper()
	s = prepareShop(t, sharedServers(t), change...)
	stop, ended = s.run()
	return s, stop, ended
}

func openShopOn(t testing.TB, on servers, change ...func(*Config)) *shop {
	t.Helper()
	s := prepareShop(t, on, change...)
	s.run()
	return s
}

// run has the server listen. It returns what stops it, and the channel of Run's error.
func (s *shop) run() (context.CancelFunc, <-chan error) {
	s.t.Helper()
	ctx, stop := context.WithCancel(s.t.Context())
	ended := make(chan error, 1)
	over := make(chan struct{})
	go func() {
		defer close(over)
		ended <- s.server.Run(ctx)
	}()
	s.t.Cleanup(func() { stop(); <-over })
	testkit.Eventually(s.t, 30*time.Second, "the server listens", func() bool { return s.server.listenAddr() != "" })
	s.url = "http://" + s.server.listenAddr()
	return stop, ended
}

// prepareShop makes the server without listening.
func prepareShop(t testing.TB, on servers, change ...func(*Config)) *shop {
	t.Helper()
	rdb, err := connect.Ingress(on.redisURL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = rdb.Close() })
	pool, err := connect.Postgres(t.Context(), on.databaseURL, 8)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	apart, err := connect.Postgres(t.Context(), on.databaseURL, 2)
	require.NoError(t, err)
	t.Cleanup(apart.Close)
	store := reservation.NewStore(rdb, on.keys, reservation.StoreOptions{Logger: testkit.Logger(t)})
	t.Cleanup(store.Close)
	sales := catalog.New(pool, store)
	l := ledger.New(pool)
	config := Config{
		Addr: "127.0.0.1:0", PlainReader: true,
		Reservations: store, Sales: sales, Orders: l, Postgres: ledger.New(apart), Draws: draws.New(pool),
		Auth: AuthHeader, AdminToken: adminToken, Logger: testkit.Logger(t), OutcomesStreams: on.keys.AllOutcomes(),
		Outcomes: func() (redis.UniversalClient, error) { return connect.Blocking(on.redisURL) },
	}
	for _, c := range change {
		c(&config)
	}
	server, err := New(config)
	require.NoError(t, err)
	t.Cleanup(server.Close)
	holdToContract(t, server)
	return &shop{
		t: t, server: server, store: store, catalog: sales, ledger: l, pool: pool, rdb: rdb, on: on, keys: on.keys,
	}
}

// sale creates a sale in the catalog, without HTTP.
func (s *shop) sale(terms reservation.Terms) uuid.UUID {
	s.t.Helper()
	if terms.Name == "" {
		terms.Name = "a sale"
	}
	if terms.PerOrderLimit == 0 {
		terms.PerOrderLimit = 2
	}
	sale, err := s.catalog.Create(s.t.Context(), terms)
	require.NoError(s.t, err)
	return sale.ID
}

// reply is a complete answer.
type reply struct {
	t      testing.TB
	status int
	header http.Header
	body   string
	closes bool // the connection
}

func readReply(t testing.TB, res *http.Response) reply {
	t.Helper()
	body, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	return reply{t, res.StatusCode, res.Header, string(body), res.Close}
}

// reqHeader is a header of a request. An empty value is sent as such.
type reqHeader struct{ name, value string }

func as(user string) reqHeader { return reqHeader{"X-User-ID", user} }

func withKey(key string) reqHeader { return reqHeader{"Idempotency-Key", key} }

func bearing(token string) reqHeader { return reqHeader{"Authorization", "Bearer " + token} }

var (
	operator = bearing(adminToken)
	jsonBody = reqHeader{"Content-Type", "application/json"}
)

func (s *shop) ask(method, path string, body io.Reader, headers ...reqHeader) reply {
	s.t.Helper()
	// Longer than the longest wait, on a busy machine.
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, s.url+path, body)
	require.NoError(s.t, err)
	for _, h := range headers {
		r.Header[http.CanonicalHeaderKey(h.name)] = append(r.Header[http.CanonicalHeaderKey(h.name)], h.value)
	}
	transport := http.DefaultTransport
	if method == http.MethodPost && strings.HasSuffix(path, "/orders") {
		transport = purchases
	}
	res, err := transport.RoundTrip(r)
	require.NoError(s.t, err)
	return readReply(s.t, res)
}

func (s *shop) get(path string, headers ...reqHeader) reply {
	s.t.Helper()
	return s.ask(http.MethodGet, path, nil, headers...)
}

// post sends a body as JSON, or none if it is empty.
func (s *shop) post(path, body string, headers ...reqHeader) reply {
	s.t.Helper()
	if body == "" {
		return s.ask(http.MethodPost, path, nil, headers...)
	}
	return s.ask(http.MethodPost, path, strings.NewReader(body), append([]reqHeader{jsonBody}, headers...)...)
}

func (s *shop) buy(sale uuid.UUID, body string, headers ...reqHeader) reply {
	s.t.Helper()
	return s.post(ordersPath(sale), body, headers...)
}

func ordersPath(sale uuid.UUID) string { return "/v1/sales/" + sale.String() + "/orders" }

func (r reply) json() map[string]any {
	r.t.Helper()
	require.True(r.t, strings.HasSuffix(r.body, "}\n") && strings.Count(r.body, "\n") == 1, "one line: %q", r.body)
	var v map[string]any
	require.NoError(r.t, json.Unmarshal([]byte(r.body), &v), r.body)
	return v
}

// is checks that the answer is a success with this status.
func (r reply) is(status int) map[string]any {
	r.t.Helper()
	require.Equal(r.t, status, r.status, r.body)
	require.Equal(r.t, "application/json", r.header.Get("Content-Type"))
	return r.json()
}

// isProblem checks that the answer is a problem in the form of RFC 9457 and returns its members.
func (r reply) isProblem(status int, slug string) map[string]any {
	r.t.Helper()
	require.Equal(r.t, status, r.status, r.body)
	require.Equal(r.t, "application/problem+json", r.header.Get("Content-Type"), r.body)
	p := r.json()
	require.Equal(r.t, "/problems/"+slug, p["type"], r.body)
	require.EqualValues(r.t, status, p["status"])
	require.NotEmpty(r.t, p["title"])
	require.NotEmpty(r.t, p["detail"])
	return p
}

// redisStock is a sale in Redis. A refused request must not change it.
type redisStock struct {
	Sale   map[string]string
	Buyers map[string]string
	Orders int // in the stream
}

func (s *shop) stock(sale uuid.UUID) redisStock {
	s.t.Helper()
	ctx := s.t.Context()
	var (
		now       redisStock
		err       error
		partition = s.keys.Partition(sale)
	)
	now.Sale, err = s.rdb.HGetAll(ctx, s.keys.Sale(partition, sale)).Result()
	require.NoError(s.t, err)
	now.Buyers, err = s.rdb.HGetAll(ctx, s.keys.Buyers(partition, sale)).Result()
	require.NoError(s.t, err)
	entries, err := s.rdb.XRange(ctx, s.keys.Orders(partition), "-", "+").Result()
	require.NoError(s.t, err)
	for _, entry := range entries {
		now.Orders += order.CountReserved(entry.Values["payload"].(string))
	}
	return now
}

// record writes an order to Postgres in the status that a test needs, without the rest of what the ledger does.
func (s *shop) record(id, sale uuid.UUID, user string, status order.Status, reason string) {
	s.t.Helper()
	_, err := s.pool.Exec(s.t.Context(), `INSERT INTO orders
		(id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, reason)
		VALUES ($1, $2, $3, 1, $4, 2, 1, 1, now(), now(), nullif($5, ''))`, id, sale, user, status, reason)
	require.NoError(s.t, err)
}

// confirm purchases one unit and records the order as a worker would, but leaves its entry in the stream.
func (s *shop) confirm(sale uuid.UUID, user string) (path string, id uuid.UUID) {
	s.t.Helper()
	path, id = s.order(sale, user)
	now := time.Now()
	outcomes, err := s.ledger.Record(s.t.Context(), []order.OrderReserved{
		{OrderID: id, SaleID: sale, UserID: user, Quantity: 1, Epoch: 1, Sequence: 1, ReservedAt: now},
	})
	require.NoError(s.t, err)
	require.Equal(s.t, order.StatusConfirmed, outcomes[0].Status)
	return path, id
}

// startWorker runs a worker, and the heartbeat without which no order expires, until the test ends.
func (s *shop) startWorker(change ...func(*fulfillment.WorkerConfig)) {
	s.t.Helper()
	blocking, err := connect.Blocking(s.on.redisURL)
	require.NoError(s.t, err)
	control, err := connect.Control(s.on.redisURL)
	require.NoError(s.t, err)
	config := fulfillment.WorkerConfig{
		Blocking: blocking, Catalog: s.catalog,
		Consumer: "worker", SweepInterval: 50 * time.Millisecond, Logger: testkit.Logger(s.t),
	}
	for _, c := range change {
		c(&config)
	}
	worker, err := fulfillment.NewWorker(config)
	require.NoError(s.t, err)
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	heartbeat := ledger.Heartbeat{Pool: s.pool, Logger: testkit.Logger(s.t)}
	_, err = heartbeat.Send(ctx) // ends an outage since another test, so that it moves no deadline of this one
	require.NoError(s.t, err)
	running.Go(func() { assert.NoError(s.t, worker.Run(ctx)) })
	running.Go(func() { assert.NoError(s.t, heartbeat.Run(ctx)) })
	s.t.Cleanup(func() {
		stop()
		running.Wait()
		_, _ = blocking.Close(), control.Close()
	})
}

// awaitStatus waits until the order is shown with that status.
func (s *shop) awaitStatus(path, user string, status order.Status) map[string]any {
	s.t.Helper()
	testkit.Eventually(s.t, 20*time.Second, path+" is "+string(status), func() bool {
		return s.get(path, as(user)).is(http.StatusOK)["status"] == string(status)
	})
	return s.get(path, as(user)).is(http.StatusOK)
}

// awaitUnits waits until the sale is shown with these units. A snapshot is shown for up to a second.
func (s *shop) awaitUnits(sale uuid.UUID, available, held, sold float64) {
	s.t.Helper()
	what := fmt.Sprintf("%v available, %v held and %v sold", available, held, sold)
	testkit.Eventually(s.t, 20*time.Second, what, func() bool {
		now := s.get("/v1/sales/" + sale.String()).is(http.StatusOK)
		return now["available"] == available && now["held"] == held && now["sold"] == sold
	})
}

// awaitUnavailable waits until the path is unavailable. A snapshot is shown for up to a second.
func (s *shop) awaitUnavailable(path string) {
	s.t.Helper()
	testkit.Eventually(s.t, 20*time.Second, path+" is unavailable", func() bool {
		return s.get(path).status == http.StatusServiceUnavailable
	})
	r := s.get(path)
	r.isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	require.Equal(s.t, []string{"1", "no-store"}, []string{r.header.Get("Retry-After"), r.header.Get("Cache-Control")})
}

// lock blocks every query of this table until unlock is called or the test ends.
func (s *shop) lock(table string) (unlock func()) {
	s.t.Helper()
	tx, err := s.pool.Begin(s.t.Context())
	require.NoError(s.t, err)
	unlock = sync.OnceFunc(func() { _ = tx.Rollback(context.Background()) })
	s.t.Cleanup(unlock)
	// On a slow machine a test needs its lock for longer than sessions may be idle or transactions may take.
	_, err = tx.Exec(s.t.Context(), "SELECT set_config(name, '0', true) FROM pg_settings "+
		"WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')")
	require.NoError(s.t, err)
	_, err = tx.Exec(s.t.Context(), "LOCK TABLE "+table+" IN ACCESS EXCLUSIVE MODE")
	require.NoError(s.t, err)
	return unlock
}

// caller is a connection on which a test writes HTTP by hand.
type caller struct {
	t testing.TB
	net.Conn
	answers *bufio.Reader
}

func (s *shop) dial() caller {
	s.t.Helper()
	conn, err := net.DialTimeout("tcp", strings.TrimPrefix(s.url, "http://"), 30*time.Second)
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = conn.Close() })
	require.NoError(s.t, conn.SetDeadline(time.Now().Add(15*time.Second)))
	return caller{s.t, conn, bufio.NewReader(conn)}
}

func (c caller) sends(text string) {
	c.t.Helper()
	_, err := io.WriteString(c, text)
	require.NoError(c.t, err)
}

// receives returns the next answer.
func (c caller) receives() reply {
	c.t.Helper()
	res, err := http.ReadResponse(c.answers, nil)
	require.NoError(c.t, err)
	return readReply(c.t, res)
}

// receivesEnd waits until the server closes the connection.
func (c caller) receivesEnd() {
	c.t.Helper()
	rest, err := io.ReadAll(c.answers)
	if !errors.Is(err, syscall.ECONNRESET) {
		require.NoError(c.t, err)
	}
	require.Empty(c.t, string(rest))
}

// receivesContinue waits until the server reads the body: net/http sends 100 when the handler begins to.
func (c caller) receivesContinue() {
	c.t.Helper()
	require.Equal(c.t, http.StatusContinue, c.receives().status)
}

// head is the text of a purchase's head.
func (s *shop) head(sale uuid.UUID, user string, headers ...string) string {
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: shop\r\nX-User-ID: %s\r\nContent-Type: application/json\r\n%s\r\n",
		ordersPath(sale), user, strings.Join(headers, ""))
}

// reservedCounter counts lookups in Redis.
type reservedCounter struct {
	Reservations
	lookups atomic.Int64
}

func (r *reservedCounter) FindReserved(ctx context.Context, id uuid.UUID, user string) (order.Order, error) {
	r.lookups.Add(1)
	return r.Reservations.FindReserved(ctx, id, user)
}

// heldPurchases keeps purchases from Redis while its gate is locked.
type heldPurchases struct {
	Reservations
	gate sync.RWMutex
}

func (h *heldPurchases) Reserve(ctx context.Context, r reservation.Request) (reservation.Answer, error) {
	h.gate.RLock()
	defer h.gate.RUnlock()
	r.Arrived = time.Now() // the store refuses what has waited for long
	return h.Reservations.Reserve(ctx, r)
}

// slowTogether takes longer to look up several orders than any request waits.
type slowTogether struct {
	Orders
	pool   *pgxpool.Pool
	failed atomic.Int64
}

func (o *slowTogether) FindOrders(ctx context.Context, ids []uuid.UUID) ([]order.Order, error) {
	_, err := o.pool.Exec(ctx, "SELECT pg_sleep(60)")
	if err == nil {
		return o.Orders.FindOrders(ctx, ids)
	}
	o.failed.Add(1)
	return nil, err
}

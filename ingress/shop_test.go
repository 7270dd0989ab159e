package ingress

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/testkit"
	"stampede/reservation"
)

const adminToken = "operators-only"

// ordersTable answers from the table that fulfillment's ledger fills: ingress knows the ledger only
// by the interface that it declares, so its tests write and read the rows themselves.
type ordersTable struct{ pool *pgxpool.Pool }

func (o ordersTable) Order(ctx context.Context, id uuid.UUID) (reservation.Order, error) {
	order := reservation.Order{ID: id}
	err := o.pool.QueryRow(ctx, `SELECT sale_id, user_id, quantity, status, version, reserved_at, coalesce(reason, '') FROM orders WHERE id = $1`, id).
		Scan(&order.SaleID, &order.UserID, &order.Quantity, &order.Status, &order.Version, &order.ReservedAt, &order.Reason)
	if errors.Is(err, pgx.ErrNoRows) {
		err = reservation.ErrOrderNotFound
	}
	return order, err
}

// shop is a server on real stores, with what a test needs to look behind it.
type shop struct {
	t       testing.TB
	server  *Server
	url     string
	store   *reservation.Store
	catalog *reservation.Catalog
	pool    *pgxpool.Pool
	rdb     *redis.Client
	keys    reservation.Keys
}

// servers are those that a shop works on; openShop takes the shared ones.
type servers struct {
	redisURL, databaseURL string
	keys                  reservation.Keys
}

func openShop(t testing.TB, change ...func(*Config)) *shop {
	t.Helper()
	return openShopOn(t, servers{testkit.RedisURL(t), testkit.DatabaseURL(t), testkit.Keys(t)}, change...)
}

func openShopOn(t testing.TB, on servers, change ...func(*Config)) *shop {
	t.Helper()
	s := prepareShop(t, on, change...)
	served := httptest.NewServer(s.server.Handler())
	t.Cleanup(served.Close)
	s.url = served.URL
	return s
}

// prepareShop makes the server without serving it.
func prepareShop(t testing.TB, on servers, change ...func(*Config)) *shop {
	t.Helper()
	rdb, err := connect.Ingress(on.redisURL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = rdb.Close() })
	pool, err := connect.Postgres(t.Context(), on.databaseURL, 8)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	store := reservation.NewStore(rdb, on.keys, reservation.StoreOptions{Logger: testkit.Logger(t)})
	t.Cleanup(store.Close)
	catalog := reservation.NewCatalog(pool, store)
	config := Config{
		Reservations: store, Sales: catalog, Orders: ordersTable{pool}, Postgres: pool,
		Auth: AuthHeader, AdminToken: adminToken, Logger: testkit.Logger(t),
	}
	for _, c := range change {
		c(&config)
	}
	server, err := New(config)
	require.NoError(t, err)
	t.Cleanup(server.Close)
	return &shop{t: t, server: server, store: store, catalog: catalog, pool: pool, rdb: rdb, keys: on.keys}
}

// sale creates a sale past the HTTP server.
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

// reply is an answer, read to its end.
type reply struct {
	t      testing.TB
	status int
	header http.Header
	body   string
}

// header sets a header of a request; an empty value is sent as such.
type header struct{ name, value string }

func as(user string) header       { return header{"X-User-ID", user} }
func withKey(key string) header   { return header{"Idempotency-Key", key} }
func bearing(token string) header { return header{"Authorization", "Bearer " + token} }

var (
	operator = bearing(adminToken)
	jsonBody = header{"Content-Type", "application/json"}
)

func (s *shop) ask(method, path string, body io.Reader, headers ...header) reply {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 15*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, s.url+path, body)
	require.NoError(s.t, err)
	for _, h := range headers {
		r.Header[http.CanonicalHeaderKey(h.name)] = append(r.Header[http.CanonicalHeaderKey(h.name)], h.value)
	}
	res, err := http.DefaultTransport.RoundTrip(r)
	require.NoError(s.t, err)
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	require.NoError(s.t, err)
	return reply{s.t, res.StatusCode, res.Header, string(text)}
}

func (s *shop) get(path string, headers ...header) reply {
	s.t.Helper()
	return s.ask(http.MethodGet, path, nil, headers...)
}

// post sends a body as JSON, or none if it is empty.
func (s *shop) post(path, body string, headers ...header) reply {
	s.t.Helper()
	if body == "" {
		return s.ask(http.MethodPost, path, nil, headers...)
	}
	return s.ask(http.MethodPost, path, strings.NewReader(body), append([]header{jsonBody}, headers...)...)
}

func (s *shop) buy(sale uuid.UUID, body string, headers ...header) reply {
	s.t.Helper()
	return s.post(ordersOf(sale), body, headers...)
}

func ordersOf(sale uuid.UUID) string { return "/v1/sales/" + sale.String() + "/orders" }

func (r reply) json() map[string]any {
	r.t.Helper()
	var v map[string]any
	require.NoError(r.t, json.Unmarshal([]byte(r.body), &v), r.body)
	return v
}

// is checks that the answer is this success.
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

// stock is what a sale looks like in Redis: nothing of it may change by a request that is refused.
type stock struct {
	Sale    map[string]string
	Buyers  map[string]string
	Entries int64
}

func (s *shop) stock(sale uuid.UUID) stock {
	s.t.Helper()
	ctx := s.t.Context()
	var (
		now       stock
		err       error
		partition = s.keys.Partition(sale)
	)
	now.Sale, err = s.rdb.HGetAll(ctx, s.keys.Sale(partition, sale)).Result()
	require.NoError(s.t, err)
	now.Buyers, err = s.rdb.HGetAll(ctx, s.keys.Buyers(partition, sale)).Result()
	require.NoError(s.t, err)
	now.Entries, err = s.rdb.XLen(ctx, s.keys.Orders(partition)).Result()
	require.NoError(s.t, err)
	return now
}

// record writes an order to Postgres as the ledger would.
func (s *shop) record(order, sale uuid.UUID, user string, status reservation.Status, reason string) {
	s.t.Helper()
	_, err := s.pool.Exec(s.t.Context(), `INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, reason)
		VALUES ($1, $2, $3, 1, $4, 2, 1, 1, now(), now(), nullif($5, ''))`, order, sale, user, status, reason)
	require.NoError(s.t, err)
}

// lock makes every request that needs this table hang in Postgres, until it is called back or the
// test ends.
func (s *shop) lock(table string) (unlock func()) {
	s.t.Helper()
	tx, err := s.pool.Begin(s.t.Context())
	require.NoError(s.t, err)
	unlock = sync.OnceFunc(func() { _ = tx.Rollback(context.Background()) })
	s.t.Cleanup(unlock)
	_, err = tx.Exec(s.t.Context(), "LOCK TABLE "+table+" IN ACCESS EXCLUSIVE MODE")
	require.NoError(s.t, err)
	return unlock
}

// dial opens a connection on which a test speaks HTTP by hand.
func (s *shop) dial() net.Conn {
	s.t.Helper()
	conn, err := net.DialTimeout("tcp", strings.TrimPrefix(s.url, "http://"), 5*time.Second)
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = conn.Close() })
	require.NoError(s.t, conn.SetDeadline(time.Now().Add(15*time.Second)))
	return conn
}

// head is the head of a purchase by hand, up to its last header.
func (s *shop) head(sale uuid.UUID, user string, headers ...string) string {
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: shop\r\nX-User-ID: %s\r\nContent-Type: application/json\r\n%s\r\n",
		ordersOf(sale), user, strings.Join(headers, ""))
}

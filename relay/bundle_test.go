package relay_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/relay"
	"stampede/relay/target"
	"stampede/reservation"
)

var secret = []byte("0123456789abcdef0123456789abcdef")

// bundle is what a test of the relay needs, on real servers.
type bundle struct {
	pool    *pgxpool.Pool
	rdb     redis.UniversalClient
	keys    reservation.Keys
	targets *target.Store
}

func setup(t testing.TB) *bundle {
	t.Helper()
	pool := testkit.Pool(t)
	return &bundle{pool, testkit.Redis(t), testkit.Keys(t), target.NewStore(pool)}
}

// add adds a target that gets all events.
func (b *bundle) add(t testing.TB, name, url string) {
	t.Helper()
	to, err := target.ParseAddress(url)
	require.NoError(t, err)
	require.NoError(t, b.targets.Add(t.Context(), name, to, [][]byte{secret}, true, 0))
}

// config is one of a relay that is quick to notice changes.
func (b *bundle) config(t testing.TB) relay.Config {
	t.Helper()
	return relay.Config{
		Pool: b.pool, Redis: b.rdb, Keys: b.keys, Name: t.Name(), Source: "/test", Scan: 50 * time.Millisecond,
		Lease: 2 * time.Second, Logger: testkit.Logger(t), Registerer: prometheus.NewRegistry(), Agent: "stampede/test",
	}
}

// run runs a relay until stop, or the end of the test.
func (b *bundle) run(t testing.TB, change func(*relay.Config)) (stop func()) {
	t.Helper()
	config := b.config(t)
	if change != nil {
		change(&config)
	}
	r, err := relay.New(config)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			cancel()
			require.NoError(t, <-done)
		}
	}
	t.Cleanup(stop)
	return stop
}

// process is a relay that a test kills.
func (b *bundle) process(t testing.TB) *testkit.Cmd {
	t.Helper()
	p := testkit.Command(t)
	p.UseServers(b.keys)
	return p
}

// standing returns a target as it is.
func (b *bundle) standing(t testing.TB, name string) target.Standing {
	t.Helper()
	all, err := b.targets.List(context.Background())
	require.NoError(t, err)
	for _, one := range all {
		if one.Name == name {
			return one
		}
	}
	t.Fatalf("no target %s", name)
	return target.Standing{}
}

// rest waits until a target has all events.
func (b *bundle) rest(t testing.TB, name string) {
	t.Helper()
	testkit.Eventually(t, within, "no lag", func() bool { s := b.standing(t, name); return s.Lag() == 0 })
}

// write commits the events of orders: each of them is confirmed and then paid. It returns their ids.
func (b *bundle) write(t testing.TB, orders int) (ids []string) {
	t.Helper()
	for range orders {
		order := uuid.Must(uuid.NewV7())
		for version := 2; version <= 3; version++ {
			_, err := b.pool.Exec(context.Background(), insertEvent, order, version)
			require.NoError(t, err)
			ids = append(ids, order.String()+"."+strconv.Itoa(version))
		}
	}
	return ids
}

const insertEvent = `INSERT INTO order_events
	(order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at)
	VALUES ($1, $2, CASE $2::int WHEN 2 THEN 'OrderConfirmed' ELSE 'OrderPaid' END, $1, 'ann', 1, now(),
		CASE $2::int WHEN 2 THEN now() END)`

const insertPayment = `INSERT INTO payment_events (reference, version, type)
	VALUES ($1, $2::int, (ARRAY['PaymentReceived', 'PaymentSettled', 'PaymentRefundDue'])[$2::int])`

// writeTogether is write in one transaction, which some others overtake, with a payment of each order.
func writeTogether(ctx context.Context, pool *pgxpool.Pool, orders int, pause time.Duration, commit bool) (
	ids []string, err error,
) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for range orders {
			order := uuid.Must(uuid.NewV7())
			for version := 2; version <= 3; version++ {
				if _, err := tx.Exec(ctx, insertEvent, order, version); err != nil {
					return err
				}
				ids = append(ids, order.String()+"."+strconv.Itoa(version))
			}
			for version := 1; version <= 3; version++ {
				if _, err := tx.Exec(ctx, insertPayment, "pi_"+order.String(), version); err != nil {
					return err
				}
				if version > 1 {
					ids = append(ids, "pi_"+order.String()+".p"+strconv.Itoa(version))
				}
			}
		}
		<-time.After(pause)
		if !commit {
			return pgx.ErrTxCommitRollback
		}
		return nil
	})
	if !commit {
		return nil, nil
	}
	return ids, err
}

// within bounds the waits of tests on a busy machine.
const within = time.Minute

// receiver is a shop with a webhook. It drops repeats by their id.
type receiver struct {
	url string

	mu sync.Mutex
	// answer decides the status of a request; nil for 204.
	answer func(w http.ResponseWriter, id string) (status int)
	// ids are those of the events that were taken, in the order of their first arrival.
	ids      []string
	bodies   map[string]string
	taken    map[string]int
	requests int
}

func newReceiver(t *testing.T) *receiver {
	t.Helper()
	r := &receiver{taken: map[string]int{}, bodies: map[string]string{}}
	server := httptest.NewServer(r)
	t.Cleanup(server.Close)
	r.url = server.URL
	return r
}

// ServeHTTP takes an event.
func (r *receiver) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	body, err := io.ReadAll(q.Body)
	if err != nil {
		return
	}
	id := q.Header.Get("webhook-id")
	r.mu.Lock()
	r.requests++
	answer := r.answer
	r.mu.Unlock()
	status := http.StatusNoContent
	if answer != nil {
		status = answer(w, id)
	}
	if status < 300 {
		r.take(id, string(body))
	}
	w.WriteHeader(status)
}

func (r *receiver) take(id, body string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.taken[id]++
	if r.taken[id] == 1 {
		r.ids = append(r.ids, id)
		r.bodies[id] = body
	}
}

// respond sets the answers from now on.
func (r *receiver) respond(answer func(w http.ResponseWriter, id string) int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answer = answer
}

func (r *receiver) got() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.ids)
}

func (r *receiver) asked() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.requests
}

// repeats counts the events that were taken more than once.
func (r *receiver) repeats() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, times := range r.taken {
		n += times - 1
	}
	return n
}

// await waits until exactly these events were taken, each order's and payment's in the order of its versions.
func (r *receiver) await(t *testing.T, want []string) {
	t.Helper()
	testkit.Eventually(t, within, "all events", func() bool { return len(r.got()) >= len(want) })
	got := r.got()
	require.ElementsMatch(t, want, got)
	requireOrder(t, got)
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, body := range r.bodies {
		var e struct{ ID string }
		require.NoError(t, json.Unmarshal([]byte(body), &e))
		require.Equal(t, id, e.ID)
	}
}

// requireOrder requires that the versions of each order rise.
func requireOrder(t *testing.T, ids []string) {
	t.Helper()
	last := map[string]string{}
	for _, id := range ids {
		subject, version, _ := strings.Cut(id, ".")
		assert.Less(t, last[subject], version, id)
		last[subject] = version
	}
}

// BenchmarkRelay sends a backlog of events, two for each order, to one target of each kind.
func BenchmarkRelay(b *testing.B) {
	const events = 100_000
	for _, kind := range []string{"webhook", "redis-stream", "stdout"} {
		b.Run(kind, func(b *testing.B) {
			s := setup(b)
			_, err := s.pool.Exec(b.Context(), `INSERT INTO order_events
				(order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at)
				SELECT md5('order' || n)::uuid, v, CASE v WHEN 2 THEN 'OrderConfirmed' ELSE 'OrderPaid' END,
					'01a208e6-6891-78b5-8281-31785abb8356', 'user-' || n, 1, now(), CASE v WHEN 2 THEN now() END
				FROM generate_series(1, $1::int / 2) AS n, generate_series(2, 3) AS v`, events)
			require.NoError(b, err)
			_, err = s.pool.Exec(b.Context(), "VACUUM ANALYZE order_events")
			require.NoError(b, err)
			var got atomic.Int64
			url := "stdout"
			switch kind {
			case "webhook":
				server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					_, _ = io.Copy(io.Discard, r.Body)
					got.Add(1)
					w.WriteHeader(http.StatusNoContent)
				}))
				b.Cleanup(server.Close)
				url = server.URL
			case "redis-stream":
				redisURL := testkit.RedisURL(b)
				url = strings.Replace(redisURL, "redis:", "redis-stream:", 1) + "?stream=" + s.keys.Prefix + ":events"
			}
			s.add(b, "target", url)
			run := func() (took time.Duration) {
				begun := time.Now()
				stop := s.run(b, func(c *relay.Config) { c.Stdout = io.Discard })
				testkit.Eventually(b, 10*time.Minute, "no lag", func() bool { t := s.standing(b, "target"); return t.Lag() == 0 })
				took = time.Since(begun)
				stop()
				return took
			}
			var all time.Duration
			for b.Loop() {
				all += run()
				_, err := s.targets.SetPosition(b.Context(), "target", 0)
				require.NoError(b, err)
			}
			b.ReportMetric(float64(b.N)*events/all.Seconds(), "events/s")
			b.ReportMetric(0, "ns/op")
		})
	}
}

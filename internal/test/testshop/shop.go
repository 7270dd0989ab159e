package testshop

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

// Shop is everything that a sale needs, on real servers.
type Shop struct {
	Pool     *pgxpool.Pool
	Rdb      redis.UniversalClient
	Blocking redis.UniversalClient
	Keys     reservation.Keys
	Store    *reservation.Store
	Catalog  *catalog.Catalog
}

func NewShop(t testing.TB, pool *pgxpool.Pool) *Shop {
	t.Helper()
	return NewShopOn(t, pool, testkit.RedisURL(t), testkit.Keys(t))
}

// OnOwnPostgres returns a shop on a Postgres for this test only, which it may stop and restart.
func OnOwnPostgres(t testing.TB) (*Shop, *localserver.Postgres) {
	t.Helper()
	server := testkit.OwnPostgres(t)
	pool, err := connect.Postgres(t.Context(), server.URL, 8)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return NewShop(t, pool), server
}

func NewShopOn(t testing.TB, pool *pgxpool.Pool, redisURL string, keys reservation.Keys) *Shop {
	t.Helper()
	blocking, err := connect.Blocking(redisURL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = blocking.Close() })
	control, err := connect.Control(redisURL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = control.Close() })
	s := &Shop{Pool: pool, Rdb: control, Blocking: blocking, Keys: keys}
	s.Store = reservation.NewStore(s.Rdb, s.Keys,
		reservation.StoreOptions{Logger: testkit.Logger(t), WaitMax: time.Minute})
	t.Cleanup(s.Store.Close)
	s.Catalog = catalog.New(pool, s.Store)
	return s
}

func (s *Shop) Open(t testing.TB, stock int64) uuid.UUID {
	t.Helper()
	sale, err := s.Catalog.Create(t.Context(), reservation.Terms{Name: "test", Stock: stock, PerOrderLimit: 10})
	require.NoError(t, err)
	return sale.ID
}

// Crowd lets n users buy one unit each, and returns how many were accepted.
func (s *Shop) Crowd(t testing.TB, sale uuid.UUID, n int) (accepted int) {
	t.Helper()
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			answer, err := s.Store.Reserve(context.Background(),
				reservation.Request{Sale: sale, User: fmt.Sprintf("user-%d", i), Quantity: 1})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if answer.Verdict == reservation.Reserved {
				accepted++
			}
		})
	}
	wg.Wait()
	return accepted
}

func (s *Shop) Buy(t testing.TB, sale uuid.UUID, user string) uuid.UUID {
	t.Helper()
	answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: user, Quantity: 1})
	require.NoError(t, err)
	require.Equal(t, reservation.Reserved, answer.Verdict)
	return answer.Reservation.OrderID
}

// Restart restarts Postgres and drops the test's old connections.
func (s *Shop) Restart(t testing.TB, server *localserver.Postgres) {
	t.Helper()
	require.NoError(t, server.Restart(t.Context()))
	s.Pool.Reset()
}

func (s *Shop) Count(t testing.TB, query string, args ...any) int64 {
	t.Helper()
	return QueryInt(t, s.Pool, query, args...)
}

const ConfirmedOrders = "SELECT count(*) FROM orders WHERE status = 'confirmed'"

func (s *Shop) AwaitConfirmed(t testing.TB, n int) {
	t.Helper()
	testkit.Eventually(t, 30*time.Second, fmt.Sprintf("%d orders are confirmed", n), func() bool {
		return s.Count(t, ConfirmedOrders) == int64(n)
	})
}

// ValueOf returns the value of the gauge or counter with that label value, or without labels for
// "", and 0 if there is none.
func ValueOf(t testing.TB, from prometheus.Gatherer, name, label string) float64 {
	t.Helper()
	families, err := from.Gather()
	require.NoError(t, err)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			if family.GetName() == name && label == "" && len(m.GetLabel()) == 0 {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
			for _, l := range m.GetLabel() {
				if family.GetName() == name && l.GetValue() == label {
					return m.GetGauge().GetValue() + m.GetCounter().GetValue()
				}
			}
		}
	}
	return 0
}

// CountingLog is a slog.Handler that counts messages.
type CountingLog struct{ messages sync.Map }

func (l *CountingLog) Enabled(context.Context, slog.Level) bool { return true }

func (l *CountingLog) WithAttrs([]slog.Attr) slog.Handler { return l }

func (l *CountingLog) WithGroup(string) slog.Handler { return l }

func (l *CountingLog) Handle(_ context.Context, r slog.Record) error {
	n, _ := l.messages.LoadOrStore(r.Message, new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
	return nil
}

func (l *CountingLog) Times(message string) int {
	if n, ok := l.messages.Load(message); ok {
		return int(n.(*atomic.Int64).Load())
	}
	return 0
}

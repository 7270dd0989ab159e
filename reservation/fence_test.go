package reservation_test

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

// replicaPair is a Redis with a replica, and an address that leads to one of them, like a host name.
type replicaPair struct {
	t        *testing.T
	first    *localserver.Redis
	second   *localserver.Redis
	address  atomic.Value // string
	atFirst  *redis.Client
	atSecond *redis.Client
}

func newReplicaPair(t *testing.T) *replicaPair {
	t.Helper()
	h := &replicaPair{t: t, first: testkit.OwnRedis(t), second: testkit.OwnRedis(t)}
	h.atFirst, h.atSecond = testkit.Client(t, h.first.URL), testkit.Client(t, h.second.URL)
	h.follow(h.atSecond, h.atFirst)
	h.address.Store(h.atFirst.Options().Addr)
	return h
}

// client connects to the server that has the address when it dials.
func (h *replicaPair) client() *redis.Client {
	h.t.Helper()
	rdb := redis.NewClient(&redis.Options{
		ContextTimeoutEnabled: true, DialerRetries: 1, Protocol: 2,
		Dialer: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, h.address.Load().(string))
		},
	})
	h.t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// move points the address to another server, and ends the connections to the previous one.
func (h *replicaPair) move(from, to *redis.Client) {
	h.t.Helper()
	h.address.Store(to.Options().Addr)
	require.NoError(h.t, from.Do(h.t.Context(), "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes").Err())
}

// follow makes one server a replica of another, and waits until it has caught up.
func (h *replicaPair) follow(replica, primary *redis.Client) {
	h.t.Helper()
	ctx := h.t.Context()
	host, port, err := net.SplitHostPort(primary.Options().Addr)
	require.NoError(h.t, err)
	require.NoError(h.t, primary.ConfigSet(ctx, "repl-diskless-sync-delay", "0").Err())
	require.NoError(h.t, replica.Do(ctx, "REPLICAOF", host, port).Err())
	h.catchUp(replica, primary)
}

// catchUp waits until a replica has all current data of its primary.
func (h *replicaPair) catchUp(replica, primary *redis.Client) {
	h.t.Helper()
	require.NoError(h.t, primary.Set(h.t.Context(), "mark", uuid.NewString(), 0).Err())
	testkit.Eventually(h.t, 20*time.Second, "the replica has caught up", func() bool {
		mark, err := replica.Get(h.t.Context(), "mark").Result()
		return err == nil && mark == primary.Get(h.t.Context(), "mark").Val()
	})
}

// cut ends the replication of the second server, which cannot log in at the first any more.
func (h *replicaPair) cut() {
	h.t.Helper()
	ctx := h.t.Context()
	require.NoError(h.t, h.atSecond.ConfigSet(ctx, "masteruser", "nobody").Err())
	require.NoError(h.t, h.atSecond.ConfigSet(ctx, "masterauth", "wrong").Err())
	require.NoError(h.t, h.atFirst.Do(ctx, "CLIENT", "KILL", "TYPE", "replica").Err())
}

func (h *replicaPair) promote(replica *redis.Client) {
	h.t.Helper()
	require.NoError(h.t, replica.Do(h.t.Context(), "REPLICAOF", "NO", "ONE").Err())
}

// appended returns the server's statistics of XADD since its start or their reset, or "nothing".
func appended(t *testing.T, rdb *redis.Client) string {
	t.Helper()
	stats, err := rdb.InfoMap(t.Context(), "commandstats").Result()
	require.NoError(t, err)
	for _, section := range stats {
		if line := section["cmdstat_xadd"]; line != "" {
			return line
		}
	}
	return "nothing"
}

func resetStats(t *testing.T, rdb *redis.Client) {
	t.Helper()
	require.NoError(t, rdb.ConfigResetStat(t.Context()).Err())
}

// refuses fails the test unless the store is unavailable to the user.
func refuses(t testing.TB, s *testshop.Shop, sale uuid.UUID, user string) {
	t.Helper()
	a, err := s.Reserve(t.Context(), reservation.Request{Sale: sale, User: user, Quantity: 1})
	require.ErrorIs(t, err, reservation.ErrUnavailable, "%s got %v", user, a)
	require.NotErrorIs(t, err, reservation.ErrOutcomeUnknown)
}

// crowd buys without a pause until stop, which waits until its buyers were refused 20 times each on average.
func crowd(t testing.TB, s *testshop.Shop, sale uuid.UUID) (stop func()) {
	t.Helper()
	const buyers = 8
	ctx, cancel := context.WithCancel(t.Context())
	var refused atomic.Int64
	done := make(chan struct{}, buyers)
	for buyer := range buyers {
		go func() {
			defer func() { done <- struct{}{} }()
			for n := 0; ctx.Err() == nil; n++ {
				a, err := s.Reserve(
					t.Context(), reservation.Request{Sale: sale, User: fmt.Sprintf("crowd-%d-%d", buyer, n), Quantity: 1},
				)
				if err != nil {
					refused.Add(1)
				} else if a.Verdict != reservation.Reserved {
					t.Errorf("a buyer got %s", a.Verdict)
				}
			}
		}()
	}
	return func() {
		t.Helper()
		before := refused.Load()
		testkit.Eventually(
			t, 20*time.Second, "the crowd is refused", func() bool { return refused.Load() > before+20*buyers },
		)
		cancel()
		for range buyers {
			<-done
		}
	}
}

// rebuild rebuilds a sale as a worker does, but without Postgres.
func rebuild(t testing.TB, s *testshop.Shop, sale reservation.Sale, epoch int64, holders ...reservation.Holder) {
	t.Helper()
	ctx, p := t.Context(), sale.Layout().Partition(0)
	closed, err := s.CloseSale(ctx, sale.ID, p, testshop.Token, 0)
	require.NoError(t, err)
	require.NoError(t, s.StageBuyers(ctx, p, sale.ID, testshop.Token, epoch, holders))
	var held int64
	for _, h := range holders {
		held += h.Reservation.Quantity
	}
	sale.Epoch = epoch
	sale.Revision++
	require.NoError(
		t, s.OpenRebuilt(
			ctx, reservation.Rebuilt{
				Sale: sale, Left: sale.Stock - held, Held: held, LastPlace: closed.Sequence, Holders: int64(len(holders)),
				Token: testshop.Token,
			},
		),
	)
}

// The script of one partition does not admit calls for the other.
func TestPartitionsAreVerifiedIndependently(t *testing.T) {
	t.Parallel()
	keys := testkit.Keys(t)
	keys.Partitions = 2
	s := testshop.NewShopOn(t, testshop.Options{Keys: keys})
	var sales [2]catalog.CountedSale
	for sales[0].ID == uuid.Nil || sales[1].ID == uuid.Nil {
		sale := s.Sale(t, 10)
		sales[sale.Layout().Partition(0)] = sale
	}
	for _, sale := range sales {
		s.Buy(t, sale.ID, "ann")
	}
	require.NoError(t, s.Distrust(t.Context(), 1))
	fresh := s.Next(t, s.Rdb)
	for range 3 { // with the script of partition 0 loaded
		for n, ingress := range []*testshop.Shop{s, fresh} {
			require.Equal(t, reservation.Reserved, ingress.Ask(t, sales[0].ID, uuid.NewString()).Verdict, n)
			refuses(t, ingress, sales[1].ID, "eve")
		}
	}
	testkit.VerifyServer(t, s.Pool, s.Store, 1)
	fresh.Buy(t, sales[1].ID, "bob")
	s.Buy(t, sales[1].ID, "cid")
}

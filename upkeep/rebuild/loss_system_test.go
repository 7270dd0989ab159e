//go:build system

package rebuild_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/upkeep/rebuild"
)

// trap is a go-redis hook that calls spring before the left-th call.
type trap struct {
	left   atomic.Int64 // calls until it springs; 0 or less: never
	spring func()
}

func (h *trap) step() {
	if h.left.Add(-1) == 0 {
		h.spring()
	}
}

func (h *trap) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

func (h *trap) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.step()
		return next(ctx, cmd)
	}
}

func (h *trap) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		h.step()
		return next(ctx, cmds)
	}
}

// Redis is lost again before each call of a rebuild, one call per round.
func TestRebuildSurvivesLossOfRedisAtEachCall(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(t *testing.T, s *testshop.Shop){
		"emptied": func(t *testing.T, s *testshop.Shop) {
			_, port, err := net.SplitHostPort(s.Rdb.(*redis.Client).Options().Addr)
			require.NoError(t, err)
			other := redis.NewClient(&redis.Options{Addr: "127.0.0.1:" + port})
			defer func() { _ = other.Close() }()
			require.NoError(t, other.FlushAll(context.Background()).Err())
		},
		"restarted": func(t *testing.T, s *testshop.Shop) {
			s.Server.Kill()
			require.NoError(t, s.Server.Restart(context.Background()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.OnOwnRedis(t, 1)
			hook := &trap{spring: func() { lose(t, s) }}
			sales := []uuid.UUID{s.Open(t, 100), s.Open(t, 100), s.Open(t, 100)}
			for _, sale := range sales {
				s.Crowd(t, sale, 30)
			}
			testwork.Fulfil(t, s)
			_, err := s.Catalog.End(t.Context(), sales[2])
			require.NoError(t, err)
			s.Rdb.AddHook(hook)
			r := testwork.Rebuilder(t, s)
			moments, again := 0, 0
			for moment := int64(1); ; moment++ {
				hook.left.Store(moment)
				report, err := r.Partition(t.Context(), 0, rebuild.ReasonByHand)
				sprung := hook.left.Load() <= 0
				hook.left.Store(0)
				again += report.Tries - 1
				// In any case holders get no second unit, and no sale is reported missing.
				for _, sale := range sales {
					answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: "user-7", Quantity: 1})
					if err != nil {
						require.ErrorIs(t, err, reservation.ErrUnavailable)
					} else {
						require.Equal(t, reservation.AlreadyPurchased, answer.Verdict)
					}
				}
				if !sprung {
					require.NoError(t, err)
					break
				}
				moments++
				testkit.Eventually(t, 30*time.Second, "a worker finishes the rebuild", func() bool {
					healErr := testwork.Heal(t, s, r, 1)
					found, err := r.Needs(t.Context(), 1, true)
					return healErr == nil && err == nil && len(found) == 0
				})
				_, err = s.Catalog.PublishPending(t.Context())
				require.NoError(t, err)
				s.RequireSound(t)
			}
			require.Greater(t, moments, 12, "the number of calls")
			require.Positive(t, again, "some rebuilds were restarted")
			require.Zero(t, s.Count(t, "SELECT count(*) FROM orders WHERE status <> 'confirmed'"))
		})
	}
}

// More orders than one call takes, some with several units.
func TestRebuildCopiesManyOrders(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 100_000)
	const orders = 5*rebuild.HoldersPerCall + 1
	fill(t, s, sale, orders)
	s.Flush(t)
	require.EqualValues(t, orders, testwork.Rebuild(t, s).Sales[0].Orders)
	require.EqualValues(t, orders, s.Rdb.HLen(t.Context(), s.Keys.Buyers(0, sale)).Val())
	for _, n := range []int{1, rebuild.HoldersPerCall, orders} {
		answer := s.Attempt(t, sale, "user-"+strconv.Itoa(n), 1, "")
		require.Equal(t, reservation.AlreadyPurchased, answer.Verdict)
		require.EqualValues(t, n, answer.Reservation.Sequence)
		require.EqualValues(t, 1+n%3, answer.Reservation.Quantity)
	}
	require.Equal(t, reservation.Reserved, s.Ask(t, sale, fmt.Sprint("user-", orders+1)).Verdict)
	testwork.Fulfil(t, s)
	s.RequireSound(t)
}

func TestRebuildVoidsExactlyTheLostTailOfAOF(t *testing.T) {
	t.Parallel()
	for _, recorded := range []int{0, 80, 140} { // orders in Postgres before Redis is lost
		t.Run(fmt.Sprintf("%d in Postgres", recorded), func(t *testing.T) {
			t.Parallel()
			const kept, cut = 100, 100
			s := testshop.OnOwnRedis(t, 1)
			sale := s.Open(t, 1000)
			var receipts []order.Receipt
			buy := func() {
				user := fmt.Sprintf("user-%d", len(receipts))
				r := s.Ask(t, sale, user).Reservation
				receipts = append(receipts, order.Receipt{
					OrderID: r.OrderID, SaleID: sale, User: user, Epoch: r.Epoch, Sequence: r.Sequence, Quantity: 1,
					ReservedAt: r.ReservedAt,
				})
				if len(receipts) == recorded {
					testwork.Fulfil(t, s)
				}
			}
			for range kept {
				buy()
			}
			file := appendOnlyFile(t, s)
			size := fileSize(t, file)
			for range cut {
				buy()
			}
			s.Server.Kill()
			// Inside a command: Redis truncates the incomplete one.
			require.NoError(t, os.Truncate(file, size+(fileSize(t, file)-size)/2+1))
			require.NoError(t, s.Server.Restart(t.Context()))
			survived := map[uuid.UUID]bool{}
			for _, event := range s.Events(t, 0) {
				survived[event.OrderID] = true
			}
			require.Greater(t, len(survived), kept)
			require.Less(t, len(survived), kept+cut)

			registry, _ := testwork.Guarded(t, s)
			testkit.Eventually(t, 30*time.Second, "the partition is rebuilt",
				func() bool { return testwork.Rebuilds(t, registry) == 1 })
			s.AwaitConfirmed(t, max(len(survived), recorded))
			testwork.AwaitRest(t, s)
			l := ledger.New(s.Pool)
			for i, receipt := range receipts {
				o, err := l.FindByReceipt(t.Context(), receipt)
				require.NoError(t, err)
				want := order.StatusConfirmed
				if !survived[receipt.OrderID] && i >= recorded {
					want = order.StatusVoided
				}
				require.Equal(t, want, o.Status, "order %d", i+1)
			}
			require.EqualValues(t, max(len(survived), recorded), testshop.Sold(t, s.Pool, sale))
			// Users whose order was lost may buy, holders of an order may not.
			for i := range receipts {
				want := reservation.Reserved
				if i < max(len(survived), recorded) {
					want = reservation.AlreadyPurchased
				}
				require.Equal(t, want, s.Ask(t, sale, fmt.Sprintf("user-%d", i)).Verdict)
			}
			s.AwaitConfirmed(t, kept+cut)
			testwork.AwaitRest(t, s)
			s.RequireSound(t)
			testwork.RequireUnbroken(t, s, sale)
		})
	}
}

// appendOnlyFile returns the file to which the Redis of the test appends.
func appendOnlyFile(t testing.TB, s *testshop.Shop) string {
	t.Helper()
	where, err := s.Rdb.ConfigGet(t.Context(), "*dir*").Result()
	require.NoError(t, err)
	found, err := filepath.Glob(filepath.Join(where["dir"], where["appenddirname"], "*.incr.aof"))
	require.NoError(t, err)
	require.Len(t, found, 1)
	return found[0]
}

func fileSize(t testing.TB, file string) int64 {
	t.Helper()
	info, err := os.Stat(file)
	require.NoError(t, err)
	return info.Size()
}

package rebuild_test

import (
	"context"
	"errors"
	"fmt"
	"net"
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
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
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
	for name, lose := range map[string]func(t *testing.T, s testshop.LostShop){
		"emptied": func(t *testing.T, s testshop.LostShop) {
			_, port, err := net.SplitHostPort(s.Rdb.(*redis.Client).Options().Addr)
			require.NoError(t, err)
			other := redis.NewClient(&redis.Options{Addr: "127.0.0.1:" + port})
			defer func() { _ = other.Close() }()
			require.NoError(t, other.FlushAll(context.Background()).Err())
		},
		"restarted": func(t *testing.T, s testshop.LostShop) {
			s.Server.Kill()
			require.NoError(t, s.Server.Restart(context.Background()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewLostShop(t)
			hook := &trap{spring: func() { lose(t, s) }}
			sales := []uuid.UUID{s.Open(t, 100), s.Open(t, 100), s.Open(t, 100)}
			for _, sale := range sales {
				s.Crowd(t, sale, 30)
			}
			testwork.Fulfil(s.Shop, t)
			_, err := s.Catalog.End(t.Context(), sales[2])
			require.NoError(t, err)
			s.Rdb.AddHook(hook)
			r := testwork.Rebuilder(s.Shop, t)
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
					healErr := testwork.Heal(s.Shop, t, r, 1)
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

// A worker processes entries that Redis has lost. An order that is recorded before the rebuild stays valid, a later one
// is voided.
func TestLateEventOfOlderEpochIsVoided(t *testing.T) {
	t.Parallel()
	s := testshop.NewLostShop(t)
	sale := s.Open(t, 10)
	for _, user := range []string{"early", "late", "by-hand"} {
		s.Buy(t, sale, user)
	}
	entries := s.Rdb.XRange(t.Context(), s.Keys.Orders(0), "-", "+").Val()
	msgs := testwork.Messages(s.Shop, t)
	b := testwork.Batch(s.Shop, t, nil)
	s.Flush(t)
	require.NoError(t, testshop.Answer(t, testwork.Handle(b, msgs[0])[0]))
	report := testwork.Rebuild(s.Shop, t)
	require.EqualValues(t, 1, report.Sales[0].Orders)
	require.NoError(t, testshop.Answer(t, testwork.Handle(b, msgs[1])[0]), "the message is acknowledged")

	// The third entry is appended again from a copy, twice.
	for range 2 {
		require.NoError(t,
			s.Rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: s.Keys.Orders(0), Values: entries[2].Values}).Err())
	}
	s.Buy(t, sale, "late") // buys again and keeps this order
	testwork.Work(t, testwork.Config(s.Shop, t))
	s.AwaitConfirmed(t, 2)
	testwork.AwaitRest(s.Shop, t)
	require.EqualValues(t, 2,
		s.Count(t,
			"SELECT count(*) FROM orders WHERE status = 'voided' AND epoch = 1 AND reason = 'sale-rebuilt' AND user_id IN "+
				"('late', 'by-hand')"))
	require.EqualValues(t, 4, s.Count(t, "SELECT count(*) FROM orders"))
	require.EqualValues(t, 8, s.Left(t, sale))
	require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters"))
	s.RequireSound(t)
}

func TestReplayedDeadLetterOfOlderEpochIsVoided(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	entry := testwork.TakeOut(s, t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	require.NoError(t, letters.Park(t.Context(), entry, errors.New("a test")))
	testwork.Rebuild(s, t)
	s.Buy(t, sale, "ann") // possible, because the first order is lost
	_, _, err := letters.Replay(t.Context(), testwork.OnlyLetter(s, t, letters).ID, "ann")
	require.NoError(t, err)
	testwork.Work(t, testwork.Config(s, t))
	s.AwaitConfirmed(t, 1)
	testwork.AwaitRest(s, t)
	require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM orders WHERE status = 'voided'"))
	s.RequireSound(t)
	require.EqualValues(t, 9, s.Left(t, sale))
}

// Each partition has its own server to verify, also one without a sale.
func TestPartitionsAreRebuiltIndependently(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	keys := testkit.Keys(t)
	keys.Partitions = 3
	s := testshop.NewShopOn(t, pool, testkit.RedisURL(t), keys)
	sales := map[int]uuid.UUID{}
	for len(sales) < 2 {
		sale := s.Open(t, 10)
		if p := keys.Partition(sale); p < 2 {
			sales[p] = sale
		}
	}
	for _, sale := range sales {
		s.Buy(t, sale, "ann")
	}
	r := testwork.Rebuilder(s, t)
	partitions, err := r.Partitions(t.Context())
	require.NoError(t, err)
	require.Equal(t, 3, partitions)
	require.NoError(t, s.Store.Distrust(t.Context(), 1))
	require.NoError(t, testwork.Heal(s, t, r, 3))
	require.EqualValues(t, 1, s.EpochOf(t, sales[0]))
	require.EqualValues(t, 2, s.EpochOf(t, sales[1]))
	require.Equal(t, "1", s.Rdb.HGet(t.Context(), keys.Sale(0, sales[0]), "epoch").Val())

	// A failure of one partition does not stop the others.
	require.NoError(t,
		testshop.ExecSQL(t, s, "UPDATE redis_servers SET run_id = 'another' WHERE partition = 0"))
	require.NoError(t, s.Store.Distrust(t.Context(), 1))
	require.ErrorIs(t, testwork.Heal(s, t, r, 3), rebuild.ErrOtherServer)
	require.EqualValues(t, 1, s.EpochOf(t, sales[0]))
	require.EqualValues(t, 3, s.EpochOf(t, sales[1]))
	_, err = r.Partition(t.Context(), 0, rebuild.ReasonByHand)
	require.NoError(t, err)
	require.NoError(t, testwork.Heal(s, t, r, 3))

	empty := testshop.NewShop(t, pool)
	empty.Keys.Partitions = 64
	report, err := testwork.Rebuilder(empty, t).Partition(t.Context(), 63, rebuild.ReasonByHand)
	require.NoError(t, err)
	require.Empty(t, report.Sales)
	require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM redis_servers WHERE partition = 63"))
	s.Buy(t, sales[0], "bob")
	s.Buy(t, sales[1], "bob")
}

// More orders than one call takes, some with several units.
func TestRebuildCopiesManyOrders(t *testing.T) {
	t.Parallel()
	s := testshop.NewLostShop(t)
	sale := s.Open(t, 100_000)
	const orders = 5*rebuild.HoldersPerCall + 1
	fill(s.Shop, t, sale, orders)
	s.Flush(t)
	report := testwork.Rebuild(s.Shop, t)
	require.EqualValues(t, orders, report.Sales[0].Orders)
	require.EqualValues(t, orders, s.Rdb.HLen(t.Context(), s.Keys.Buyers(0, sale)).Val())
	for _, n := range []int{1, rebuild.HoldersPerCall, orders} {
		answer := s.Reserve(t, sale, "user-"+strconv.Itoa(n), 1, "")
		require.Equal(t, reservation.AlreadyPurchased, answer.Verdict)
		require.EqualValues(t, n, answer.Reservation.Sequence)
		require.EqualValues(t, 1+n%3, answer.Reservation.Quantity)
	}
	require.Equal(t, reservation.Reserved, s.Reserve(t, sale, fmt.Sprint("user-", orders+1), 1, "").Verdict)
	testwork.Fulfil(s.Shop, t)
	s.RequireSound(t)
}

// fill inserts confirmed orders of a sale into Postgres.
func fill(s *testshop.Shop, t testing.TB, sale uuid.UUID, orders int) {
	t.Helper()
	for _, query := range []string{
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at,
			key_fingerprint)
		SELECT gen_random_uuid(), $1, 'user-' || n, 1 + n % 3, 'confirmed', 2, n, 1, now(), now(), 'AAAAAAAAAAAAAAAAAAAAAA'
		FROM generate_series(1, $2::int) AS n`,
		`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at, data)
		SELECT id, 2, 'OrderConfirmed', sale_id, user_id, quantity, updated_at, reserved_at, '{}'
		FROM orders WHERE sale_id = $1 AND $2::int > 0`,
		`UPDATE sales SET sold = (SELECT sum(quantity) FROM orders WHERE sale_id = $1), last_sequence = $2 WHERE id = $1`,
	} {
		_, err := s.Pool.Exec(t.Context(), query, sale, orders)
		require.NoError(t, err)
	}
}

func TestOvertakenRebuildOpensNothing(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	testwork.Fulfil(s, t)
	r := testwork.Rebuilder(s, t)
	session, err := r.Begin(t.Context(), 0)
	require.NoError(t, err)
	defer session.End()
	guarded, err := r.FindSale(t.Context(), sale)
	require.NoError(t, err)
	b := r.NewBuild(session, rebuild.Need{Reason: rebuild.ReasonByHand})
	sales := []rebuild.RequiredSale{guarded}
	require.NoError(t, b.CloseAndDrain(t.Context(), sales))
	ours, err := session.RaiseEpoch(t.Context(), sales[0], rebuild.ReasonByHand)
	require.NoError(t, err)
	all, err := b.StageBuyers(t.Context(), ours)
	require.NoError(t, err)

	_, err = session.RaiseEpoch(t.Context(), sales[0], rebuild.ReasonByHand)
	require.ErrorIs(t, err, rebuild.ErrOvertaken, "the epoch was raised after the sale was read")
	again, err := r.FindSale(t.Context(), sale)
	require.NoError(t, err)
	other := r.NewBuild(session, rebuild.Need{Reason: rebuild.ReasonByHand})
	sales = []rebuild.RequiredSale{again}
	require.NoError(t, other.CloseAndDrain(t.Context(), sales))
	require.Equal(t, b.Token(), sales[0].Closed().LastToken)
	require.ErrorIs(t, b.Open(t.Context(), ours, 10-all.Units(), all), reservation.ErrSaleNotClosed)
	theirs, err := session.RaiseEpoch(t.Context(), sales[0], rebuild.ReasonByHand)
	require.NoError(t, err)
	_, err = b.StageBuyers(t.Context(), ours)
	require.ErrorIs(t, err, rebuild.ErrOvertaken)
	require.NoError(t, session.Conn().Ping(t.Context()), "the session stays usable")
	all2, err := other.StageBuyers(t.Context(), theirs)
	require.NoError(t, err)
	require.NoError(t, other.Open(t.Context(), theirs, 9, all2))
	require.ErrorIs(t, b.Open(t.Context(), ours, 10-all.Units(), all), reservation.ErrSaleNotClosed)
	require.Equal(t, "3", s.SaleInRedis(t, sale)["epoch"])
	s.Buy(t, sale, "bob")
}

func TestRebuildDeletesLeftoversOfFailedRebuild(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	testwork.Fulfil(s, t)
	token := reservation.NewRebuildToken()
	_, err := s.Store.CloseSale(t.Context(), sale, 0, token, 1)
	require.NoError(t, err)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Staged(0, sale, token), "user", "reservation").Err())
	testwork.Rebuild(s, t)
	require.Empty(t, s.Rdb.Keys(t.Context(), s.Keys.Staged(0, sale, "*")).Val())
	require.Equal(t, []string{"ann"}, s.Rdb.HKeys(t.Context(), s.Keys.Buyers(0, sale)).Val())
	s.RequireSound(t)
}

// RaiseEpoch waits for the transaction of a worker that records an order of the old epoch, and counts the order.
func TestRaiseEpochCountsUncommittedOrder(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	event := testwork.Events(s, t)[0]
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Orders(0)).Err()) // nothing to drain
	recording, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = recording.Rollback(context.WithoutCancel(t.Context())) }()
	columns, _ := ledger.ColumnsOf([]order.OrderReserved{event})
	_, err = recording.Exec(t.Context(), sql.LedgerRecordOrders, append(columns.Arguments(), nil)...)
	require.NoError(t, err)
	_, err = recording.Exec(t.Context(), sql.LedgerAddSold, sale, 1, 1, 1)
	require.NoError(t, err)
	done := make(chan error, 1)
	var report rebuild.Report
	go func() {
		var err error
		report, err = testwork.Rebuilder(s, t).Partition(context.Background(), 0, rebuild.ReasonByHand)
		done <- err
	}()
	testkit.Eventually(t, 20*time.Second, "the rebuild waits for the order", func() bool {
		return s.Count(t,
			"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'") == 1
	})
	require.NoError(t, recording.Commit(t.Context()))
	require.NoError(t, <-done)
	require.EqualValues(t, 1, report.Sales[0].Orders)
	require.EqualValues(t, 1, s.Count(t, "SELECT (data ->> 'orders')::int FROM sale_events WHERE type = 'SaleRebuilt'"))
	s.RequireSound(t)
}

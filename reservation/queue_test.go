package reservation_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/tracing"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// heldCalls holds each call of the reserve script until a value is sent, and reports how many requests it has.
type heldCalls struct {
	requests chan int
	released chan struct{}
}

func (h heldCalls) process(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
	const others, perRequest = 10, 4 // arguments: evalsha, sha, number of keys, four keys, three of the call
	if cmd.Name() == "evalsha" {
		h.requests <- (len(cmd.Args()) - others) / perRequest
		<-h.released
	}
	return next(ctx, cmd)
}

func TestHalfBatchStartsSecondCall(t *testing.T) {
	t.Parallel()
	rdb := testkit.Redis(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: rdb, Store: reservation.StoreOptions{BatchMax: 4, QueueMax: 2}})
	sale := s.Sale(t, 100)
	s.Buy(t, sale.ID, "warm-up")
	held := heldCalls{requests: make(chan int, 100), released: make(chan struct{})}
	release := sync.OnceFunc(func() { close(held.released) })
	defer release()
	rdb.AddHook(testkit.Hook(held.process))

	answered, buyers := make(chan error, 8), 0
	buy := func() {
		buyers++
		user := fmt.Sprint("buyer-", buyers)
		go func() {
			_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: user, Quantity: 1})
			answered <- err
		}()
	}
	buy()
	require.Equal(t, 1, testshop.Answer(t, held.requests), "a single request leaves immediately")
	buy()
	buy()
	require.Equal(t, 2, testshop.Answer(t, held.requests), "the next one waits until half a batch does")
	for range 3 {
		buy()
	}
	require.ErrorIs(t, testshop.Answer(t, answered), reservation.ErrOverloaded, "two wait, and the third is too many")
	require.Empty(t, held.requests, "a third call waits for one of the two")

	held.released <- struct{}{}
	require.Equal(t, 2, testshop.Answer(t, held.requests), "they follow the call that ended")
	buy()
	held.released <- struct{}{}
	requireReserved := func(n int) {
		for range n {
			require.NoError(t, testshop.Answer(t, answered))
		}
	}
	requireReserved(3)
	buy()
	require.Equal(t, 2, testshop.Answer(t, held.requests), "no call followed that one for a single request")

	release()
	requireReserved(4)
	require.EqualValues(t, 92, s.Left(t, sale.ID))
}

// leaving is a client that is still there, or has left.
type leaving bool

func (l leaving) HasLeft() bool { return bool(l) }

// A request may have waited before Reserve is called, and its client may leave meanwhile.
func TestReserveDecidesNoLateRequest(t *testing.T) {
	t.Parallel()
	s := testshop.NewShopOn(t, testshop.Options{Store: reservation.StoreOptions{WaitMax: reservation.DefaultWaitMax}})
	sale := s.Sale(t, 10)
	for name, c := range map[string]struct {
		age  time.Duration
		gone leaving
		err  error
	}{
		"new":           {0, false, nil},
		"new, and gone": {0, true, nil}, // the caller knows it
		"has waited":    {reservation.DefaultWaitMax / 4, false, nil},
		"has gone":      {reservation.DefaultWaitMax / 4, true, reservation.ErrOverloaded},
		"is too old":    {reservation.DefaultWaitMax + time.Millisecond, false, reservation.ErrOverloaded},
	} {
		_, err := s.Reserve(t.Context(), reservation.Request{
			Sale: sale.ID, User: strings.ReplaceAll(name, " ", "-"), Quantity: 1,
			Arrived: time.Now().Add(-c.age), Client: c.gone,
		})
		require.ErrorIs(t, err, c.err, name)
	}
	require.EqualValues(t, 7, s.Left(t, sale.ID))
}

// One damaged buyer must not fail the other requests of its batch.
func TestDamagedBuyerDoesNotFailBatch(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 1000)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Buyers(0, sale.ID), "damaged", "?").Err())
	const buyers = 200
	errs := make([]error, buyers)
	var all sync.WaitGroup
	for i := range buyers {
		all.Go(func() {
			user := fmt.Sprint("buyer-", i)
			if i%20 == 0 {
				user = "damaged"
			}
			_, errs[i] = s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: user, Quantity: 1})
		})
	}
	all.Wait()
	failed := 0
	for i, err := range errs {
		if i%20 != 0 {
			if err != nil {
				failed++
			}
			continue
		}
		require.ErrorIs(t, err, reservation.ErrReservationDamaged)
		require.NotErrorIs(t, err, reservation.ErrUnavailable)
	}
	require.Zero(t, failed, "failed requests of %d other buyers", buyers-buyers/20)
}

// Redis does not roll back the writes of a script that fails at a command without permission.
func TestScriptWithoutPermissionWritesNothing(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	operator := testshop.NewShopOn(t, testshop.Options{Redis: testkit.Client(t, own.URL)})
	sale := operator.Sale(t, 10)
	acl := func(rules ...any) {
		t.Helper()
		require.NoError(
			t, operator.Rdb.Do(
				t.Context(), append([]any{"ACL", "SETUSER", "ingress", "on", "nopass", "~*", "&*", "+@all"}, rules...)...,
			).Err(),
		)
	}
	acl()
	o := *operator.Rdb.(*redis.Client).Options()
	o.Username, o.Password = "ingress", "any"
	rdb := testkit.Client(t, own.URL)
	rdb.Options().Username, rdb.Options().Password = o.Username, o.Password
	ingress := operator.Next(t, rdb)
	ingress.Buy(t, sale.ID, "before")

	acl("-hset") // while it sells
	_, err := ingress.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: "ann", Quantity: 1})
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	require.NotErrorIs(t, err, reservation.ErrOutcomeUnknown)
	require.Len(t, operator.Events(t, 0), 1, "a refused request has no event")
	require.EqualValues(t, 9, operator.Left(t, sale.ID))

	acl("+hset")
	ingress.Buy(t, sale.ID, "ann")
}

// afterLoss runs what happens to Redis between the try whose answer is lost and the next one.
type afterLoss struct {
	once sync.Once
	do   func()
}

func (a *afterLoss) process(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
	err := next(ctx, cmd)
	if err != nil && cmd.Name() == "evalsha" {
		a.once.Do(a.do)
	}
	return err
}

// An answer about a rebuilt stock does not show what an earlier try did.
func TestLostReplyStaysUnknownAfterRebuild(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(ctx context.Context, rdb redis.UniversalClient, keys reservation.Keys,
		sale uuid.UUID) error{
		"in another epoch, without the order": func(ctx context.Context, rdb redis.UniversalClient, keys reservation.Keys,
			sale uuid.UUID,
		) error {
			if err := rdb.Del(ctx, keys.Buyers(0, sale)).Err(); err != nil {
				return err
			}
			return rdb.HSet(ctx, keys.Sale(0, sale), "epoch", 2, "state", "paused").Err()
		},
		"closed for a rebuild": func(ctx context.Context, rdb redis.UniversalClient, keys reservation.Keys,
			sale uuid.UUID,
		) error {
			return rdb.HSet(ctx, keys.Sale(0, sale), "epoch", 0).Err()
		},
		"lost": func(ctx context.Context, rdb redis.UniversalClient, keys reservation.Keys, sale uuid.UUID) error {
			return rdb.Del(ctx, keys.Sale(0, sale)).Err()
		},
		"set back": func(ctx context.Context, rdb redis.UniversalClient, keys reservation.Keys, sale uuid.UUID) error {
			return rdb.HSet(ctx, keys.Sale(0, sale), "sequence", 0).Err()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy, rdb, direct := testkit.RedisThroughProxy(t)
			s := testshop.NewShopOn(t, testshop.Options{Redis: rdb})
			sale := s.Sale(t, 10)
			s.Buy(t, sale.ID, "warm-up")
			lost := &afterLoss{do: func() { require.NoError(t, change(t.Context(), direct, s.Keys, sale.ID)) }}
			rdb.AddHook(testkit.Hook(lost.process))

			proxy.Lose(1)
			answer, err := s.Reserve(t.Context(), reservation.Request{
				Sale: sale.ID, User: "ann", Quantity: 1,
				IdempotencyKey: "k",
			})
			proxy.RequireLost(t)
			require.Len(t, s.Events(t, 0), 2, "the order of the first try is in the stream")
			require.ErrorIs(t, err, reservation.ErrOutcomeUnknown, "%+v", answer)
		})
	}
}

func TestUnknownSaleIsLookedUpOncePerMoment(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	rdb := testkit.Client(t, own.URL)
	s := testshop.NewShopOn(t, testshop.Options{Redis: rdb})
	known := s.Sale(t, 1).ID
	s.Buy(t, known, "ann")

	unknown := uuid.Must(uuid.NewV7())
	require.Equal(t, reservation.UnknownSale, s.Ask(t, unknown, "ann").Verdict)
	before, began := testshop.ScriptCalls(t, rdb), time.Now()
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			for range 200 {
				a, err := s.Reserve(t.Context(), reservation.Request{Sale: unknown, User: "ann", Quantity: 1})
				if err != nil || a.Verdict != reservation.UnknownSale {
					t.Error(a, err)
				}
			}
		})
	}
	all.Wait()
	looks := testshop.ScriptCalls(t, rdb) - before
	// One for each quarter of a second that has begun, and one a second for each partition.
	require.LessOrEqual(t, looks, int(4*time.Since(began)/time.Second)+int(time.Since(began)/time.Second)+8,
		"lookups for 10,000 requests")

	// A sale that is published meanwhile is found.
	require.NoError(
		t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, unknown),
			s.Rdb.HGetAll(t.Context(), s.Keys.Sale(0, known)).Val()).Err(),
	)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, unknown), "left", 1).Err())
	testkit.Eventually(t, 30*time.Second, "the sale is known", func() bool {
		return s.Ask(t, unknown, "ann").Verdict == reservation.Reserved
	})
	// This process has not looked up the sale that it creates.
	s.Buy(t, s.Sale(t, 1).ID, "ann")
}

// BenchmarkReplicaAcks compares one reservation at a time with and without the confirmation of a replica.
func BenchmarkReplicaAcks(b *testing.B) {
	cluster := testkit.OwnCluster(b)
	rdb, err := connect.Ingress(cluster.URL)
	require.NoError(b, err)
	b.Cleanup(func() { _ = rdb.Close() })
	pool := testkit.Pool(b)
	for _, acks := range []int{0, 1} {
		b.Run(fmt.Sprint(acks), func(b *testing.B) {
			store := reservation.NewStore(rdb, reservation.Keys{Prefix: "stampede", Partitions: 1},
				reservation.StoreOptions{ReplicaAcks: acks, Logger: testkit.Logger(b)})
			b.Cleanup(store.Close)
			sale, err := catalog.New(pool, store).Create(b.Context(), reservation.Terms{
				Name: "test", Stock: int64(b.N), PerOrderLimit: 1,
			})
			require.NoError(b, err)
			b.ResetTimer()
			for i := range b.N {
				_, err := store.Reserve(b.Context(), reservation.Request{
					Sale: sale.ID, User: fmt.Sprintf("user-%d", i), Quantity: 1,
				})
				require.NoError(b, err)
			}
		})
	}
}

// One call decides several purchases, of which some are traced: each of these has its own span of the call, and its own
// traceparent in the entry, which a stock subscriber reads as it reads any other.
func TestCallOfSeveralTracedPurchases(t *testing.T) {
	tracer, collector := testkit.Tracer(t)
	rdb := testkit.Redis(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: rdb})
	sale := s.Sale(t, 100)
	s.Buy(t, sale.ID, "warm-up")
	held := heldCalls{requests: make(chan int, 100), released: make(chan struct{})}
	rdb.AddHook(testkit.Hook(held.process))

	type bought struct {
		user   string
		answer reservation.Answer
		err    error
	}
	answers := make(chan bought, 100)
	traceOf := map[string]string{}
	buy := func(user string, traced bool) {
		span := tracing.Span{}
		if traced {
			traceOf[user] = fmt.Sprintf("%032x", len(traceOf)+1)
			span = tracer.Request(http.Header{"Traceparent": {"00-" + traceOf[user] + "-00f067aa0ba902b7-01"}}, user)
			require.True(t, span.On())
		}
		go func() {
			defer span.End()
			answer, err := s.Reserve(span.In(t.Context()), reservation.Request{Sale: sale.ID, User: user, Quantity: 1})
			answers <- bought{user, answer, err}
		}()
	}
	buy("first", false)
	require.Equal(t, 1, testshop.Answer(t, held.requests))
	const traced = 20
	for i := range traced {
		buy(fmt.Sprint("traced-", i), true)
	}
	buy("plain", false)
	testkit.Eventually(t, 30*time.Second, "all of them wait", func() bool { return s.Waiting(sale.ID) == traced+1 })
	held.released <- struct{}{}
	require.Equal(t, traced+1, testshop.Answer(t, held.requests))
	close(held.released)
	orders := map[string]order.Reservation{}
	for range traced + 2 {
		b := testshop.Answer(t, answers)
		require.NoError(t, b.err)
		orders[b.user] = b.answer.Reservation
	}

	testkit.Eventually(t, 30*time.Second, "the spans", func() bool {
		return len(collector.Named("", "reserve.lua")) == order.MaxTraces &&
			len(collector.Named("", "wait in line")) == traced
	})
	calls := map[string]testkit.Span{} // by trace
	links := map[string]int{}
	for _, call := range collector.Named("", "reserve.lua") {
		require.Equal(t, fmt.Sprint(traced+1), call.Attributes["stampede.purchases"])
		calls[call.Trace] = call
		for _, link := range call.Links {
			links[link]++
		}
	}
	require.Len(t, calls, order.MaxTraces, "one in each trace")
	ofFirst := 0
	for _, call := range calls {
		if len(call.Links) == order.MaxTraces-1 {
			ofFirst++
			require.Equal(t, order.MaxTraces-1, links[call.TraceParent()], "the others have links to it")
		}
	}
	require.Equal(t, 1, ofFirst)

	entries := s.Entries(t, 0)
	require.Len(t, entries, 3)
	require.Less(t, len(entries[1].Values["metadata"].(string)), 150, "an entry without traces")
	require.Less(t, len(entries[2].Values["metadata"].(string)), 1500)
	stock, err := redisstream.DefaultMarshallerUnmarshaller{}.Unmarshal(entries[2].Values)
	require.NoError(t, err)
	require.Contains(t, calls, strings.Split(stock.Metadata.Get("traceparent"), "-")[1])
	events, err := order.DecodeReserved(stock)
	require.NoError(t, err)
	require.Len(t, events, traced+1)
	parents := 0
	for _, e := range events {
		require.Equal(t, orders[e.UserID].OrderID, e.OrderID)
		call, carried := calls[traceOf[e.UserID]]
		if !carried {
			require.Empty(t, e.TraceParent, e.UserID)
			continue
		}
		parents++
		require.Equal(t, call.TraceParent(), e.TraceParent)
	}
	require.Equal(t, order.MaxTraces, parents)
}

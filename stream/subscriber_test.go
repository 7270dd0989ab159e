package stream_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

// streamBench is the stream of one test, with helpers.
type streamBench struct {
	t      *testing.T
	ctx    context.Context
	url    string
	rdb    redis.UniversalClient
	stream string

	deadLetters *deadLetterStore
}

func newStreamBench(t *testing.T) *streamBench {
	t.Helper()
	return newStreamBenchAt(t, testkit.RedisURL(t), testkit.Keys(t).Orders(0))
}

func newStreamBenchAt(t *testing.T, url, name string) *streamBench {
	t.Helper()
	rdb := testkit.Control(t, url)
	return &streamBench{
		t: t, ctx: t.Context(), url: url, rdb: rdb, stream: name, deadLetters: &deadLetterStore{},
	}
}

// subscriber returns a subscriber that claims and redelivers quickly. It is closed at the end of the test.
func (b *streamBench) subscriber(consumer string, change ...func(*stream.Config)) *stream.Subscriber {
	b.t.Helper()
	blocking, err := connect.Blocking(b.url)
	require.NoError(b.t, err)
	config := stream.Config{
		Client: blocking, Control: b.rdb, Group: reservation.Group, Consumer: consumer,
		BlockTimeout: 20 * time.Millisecond, MinIdle: 400 * time.Millisecond, ClaimInterval: 50 * time.Millisecond,
		RedeliveryDelay: 5 * time.Millisecond, RedeliveryDelayMax: 20 * time.Millisecond,
		DrainTimeout: 5 * time.Second, DeadLetter: b.deadLetters.store, Logger: testkit.Logger(b.t),
	}
	for _, c := range change {
		c(&config)
	}
	sub, err := stream.NewSubscriber(config)
	require.NoError(b.t, err)
	b.t.Cleanup(func() {
		require.NoError(b.t, sub.Close())
		require.NoError(b.t, blocking.Close())
	})
	return sub
}

func (b *streamBench) subscribe(sub *stream.Subscriber) <-chan *message.Message {
	b.t.Helper()
	messages, err := sub.Subscribe(b.ctx, b.stream)
	require.NoError(b.t, err)
	return messages
}

// publish appends messages with watermill-redisstream's own publisher and returns their UUIDs.
func (b *streamBench) publish(n int) []string {
	b.t.Helper()
	client, err := connect.Control(b.url)
	require.NoError(b.t, err)
	publisher, err := redisstream.NewPublisher(redisstream.PublisherConfig{Client: client}, nil)
	require.NoError(b.t, err)
	uuids := make([]string, n)
	for i := range uuids {
		uuids[i] = watermill.NewUUID()
		require.NoError(b.t, publisher.Publish(b.stream, message.NewMessage(uuids[i], []byte(strconv.Itoa(i)))))
	}
	require.NoError(b.t, publisher.Close()) // closes its client
	return uuids
}

// add appends a raw entry.
func (b *streamBench) add(fields ...any) string {
	b.t.Helper()
	id, err := b.rdb.XAdd(b.ctx, &redis.XAddArgs{Stream: b.stream, Values: fields}).Result()
	require.NoError(b.t, err)
	return id
}

// takeAway reads entries as a consumer that never acknowledges them.
func (b *streamBench) takeAway(consumer string, n int) []string {
	b.t.Helper()
	require.NoError(b.t, stream.CreateGroup(b.ctx, b.rdb, b.stream, reservation.Group))
	page, err := b.rdb.XReadGroup(b.ctx, &redis.XReadGroupArgs{
		Group: reservation.Group, Consumer: consumer, Streams: []string{b.stream, ">"}, Count: int64(n), Block: -1,
	}).Result()
	require.NoError(b.t, err)
	ids := make([]string, n)
	for i, entry := range page[0].Messages {
		ids[i] = entry.ID
	}
	return ids
}

func (b *streamBench) pending() []redis.XPendingExt {
	b.t.Helper()
	pending, err := b.rdb.XPendingExt(b.ctx, &redis.XPendingExtArgs{
		Stream: b.stream, Group: reservation.Group, Start: "-", End: "+", Count: 10_000,
	}).Result()
	require.NoError(b.t, err)
	return pending
}

func (b *streamBench) awaitNonePending() {
	b.t.Helper()
	testkit.Eventually(b.t, testshop.Soon, "no entry is pending", func() bool { return len(b.pending()) == 0 })
}

func receive(t *testing.T, messages <-chan *message.Message) *message.Message {
	t.Helper()
	select {
	case msg, open := <-messages:
		require.True(t, open, "the channel was closed, want a message")
		return msg
	case <-time.After(testshop.Soon):
		require.FailNow(t, "no message")
		return nil
	}
}

func receiveUUIDs(t *testing.T, messages <-chan *message.Message, n int) []string {
	t.Helper()
	uuids := make([]string, n)
	for i := range uuids {
		msg := receive(t, messages)
		uuids[i] = msg.UUID
		require.True(t, msg.Ack())
	}
	return uuids
}

func deliveriesOf(t *testing.T, msg *message.Message) int {
	t.Helper()
	n, err := strconv.Atoi(msg.Metadata.Get(order.MetaDeliveries))
	require.NoError(t, err)
	return n
}

// deadLetterStore is a store of dead letters that can be away.
type deadLetterStore struct {
	mu      sync.Mutex
	away    bool
	tries   int
	entries []stream.Entry
	reasons []error
}

func (g *deadLetterStore) store(_ context.Context, entry stream.Entry, reason error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.tries++
	if g.away {
		return errors.New("the store of dead letters is away")
	}
	g.entries, g.reasons = append(g.entries, entry), append(g.reasons, reason)
	return nil
}

func (g *deadLetterStore) setAway(isAway bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.away = isAway
}

func (g *deadLetterStore) snapshot() (tries int, entries []stream.Entry, reasons []error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.tries, slices.Clone(g.entries), slices.Clone(g.reasons)
}

func (g *deadLetterStore) await(t *testing.T, n int) ([]stream.Entry, []error) {
	t.Helper()
	testkit.Eventually(t, testshop.Soon, fmt.Sprintf("%d dead letters are stored", n), func() bool {
		_, entries, _ := g.snapshot()
		return len(entries) >= n
	})
	_, entries, reasons := g.snapshot()
	require.Len(t, entries, n)
	return entries, reasons
}

func TestSubscriberDeliversInOrderAndAcknowledges(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	uuids := b.publish(50)
	messages := b.subscribe(b.subscriber("worker-1"))
	require.Equal(t, uuids, receiveUUIDs(t, messages, 50),
		"including entries that are older than the group, in their order")
	b.awaitNonePending()
}

func TestSubscriberReadsMessagesOfStockPublisher(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	publisher, err := redisstream.NewPublisher(redisstream.PublisherConfig{Client: b.rdb}, nil)
	require.NoError(t, err)
	sent := message.NewMessage(watermill.NewUUID(), []byte("payload \x00\xff"))
	sent.Metadata = message.Metadata{"event": "OrderReserved", "": "no name"}
	bare := message.NewMessage(watermill.NewUUID(), nil) // without metadata the publisher writes an empty field
	require.NoError(t, publisher.Publish(b.stream, sent, bare))

	messages := b.subscribe(b.subscriber("worker-1"))
	for _, want := range []*message.Message{sent, bare} {
		got := receive(t, messages)
		require.NotEmpty(t, got.Metadata.Get(order.MetaEntryID))
		require.Equal(t, "1", got.Metadata.Get(order.MetaDeliveries))
		delete(got.Metadata, order.MetaEntryID)
		delete(got.Metadata, order.MetaDeliveries)
		require.True(t, got.Equals(want), "got %v, want %v", got, want)
		require.True(t, got.Ack())
	}
	b.awaitNonePending()
}

func TestStockSubscriberTakesOver(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	uuids := b.publish(4)
	sub := b.subscriber("worker-1", func(c *stream.Config) { c.DrainTimeout = 10 * time.Millisecond })
	require.Equal(t, uuids[:2], receiveUUIDs(t, b.subscribe(sub), 2))
	testkit.Eventually(t, testshop.Soon, "two entries are acknowledged", func() bool { return len(b.pending()) == 2 })
	require.NoError(t, sub.Close())

	client, err := connect.Blocking(b.url)
	require.NoError(t, err)
	stock, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
		Client: client, ConsumerGroup: reservation.Group, Consumer: "stock", DisableIndefiniteInitialBlock: true,
		MaxIdleTime: 100 * time.Millisecond, ClaimInterval: 20 * time.Millisecond,
	}, nil)
	require.NoError(t, err)
	theirs, err := stock.Subscribe(t.Context(), b.stream)
	require.NoError(t, err)
	require.ElementsMatch(t, uuids[2:], receiveUUIDs(t, theirs, 2))
	b.awaitNonePending()
	require.NoError(t, stock.Close())
}

func TestEntryCannotForgeItsDelivery(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	// msgpack of a map with the name of each, and of nil
	forged := "\x82\xb1" + order.MetaEntryID + "\xa30-1\xb3" + order.MetaDeliveries + "\xa299"
	id := b.add(stream.FieldUUID, "u-1", stream.FieldMetadata, forged, stream.FieldPayload, "{}")
	b.add(stream.FieldUUID, "u-2", stream.FieldMetadata, "\xc0", order.MetaDeliveries, "99") // and no payload
	messages := b.subscribe(b.subscriber("worker-1"))

	msg := receive(t, messages)
	require.Equal(t, message.Metadata{order.MetaEntryID: id, order.MetaDeliveries: "1"}, msg.Metadata)
	msg.Ack()
	msg = receive(t, messages)
	require.Equal(t, "1", msg.Metadata.Get(order.MetaDeliveries))
	msg.Ack()
}

func TestSubscriberBoundsInFlightEntries(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(30)
	messages := b.subscribe(b.subscriber("worker-1", func(c *stream.Config) { c.PageMax, c.InFlightMax = 4, 10 }))
	held := make([]*message.Message, 10)
	for i := range held {
		held[i] = receive(t, messages)
	}
	backlog := func() stream.Backlog {
		backlog, err := stream.ReadBacklog(t.Context(), b.rdb, b.stream, reservation.Group)
		require.NoError(t, err)
		return backlog
	}
	require.EqualValues(t, 10, backlog().Pending)
	require.EqualValues(t, 20, backlog().Lag)

	// The hanging message is the oldest. It takes one place, and does not delay the others.
	hanging := held[0]
	for _, msg := range held[1:] {
		msg.Ack()
	}
	for range 20 {
		receive(t, messages).Ack()
	}
	testkit.Eventually(t, testshop.Soon, "all others are acknowledged", func() bool { return len(b.pending()) == 1 })
	hanging.Ack()
	b.awaitNonePending()
}

func TestSubscriberBoundsOrdersInFlight(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	sale := uuid.New()
	for range 10 {
		events := make([]order.OrderReserved, 10)
		for i := range events {
			events[i] = order.OrderReserved{
				OrderID: order.NewOrderID(sale), SaleID: sale, UserID: "ann", Quantity: 1, Epoch: 1,
			}
		}
		require.NoError(t, b.rdb.XAdd(t.Context(),
			&redis.XAddArgs{Stream: b.stream, Values: stream.Values(events...)}).Err())
	}
	messages := b.subscribe(b.subscriber("worker-1", func(c *stream.Config) { c.PageMax, c.InFlightMax = 4, 25 }))
	var held []*message.Message
	for range 4 { // a first page, of entries of unknown size
		held = append(held, receive(t, messages))
	}
	settled := func(want int) {
		t.Helper()
		testkit.Eventually(t, testshop.Soon, "entries are acknowledged", func() bool { return len(b.pending()) == want })
	}
	require.Len(t, b.pending(), 4)
	held[0].Ack() // 30 orders are left
	settled(3)
	held[1].Ack() // 20 are: room for half an entry
	held = append(held, receive(t, messages))
	settled(3)
	for _, msg := range held[2:] {
		msg.Ack()
	}
	for range 5 {
		receive(t, messages).Ack()
	}
	b.awaitNonePending()
}

func TestSubscriberRejectsSecondSubscriptionOfStream(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	sub := b.subscriber("worker-1")
	ctx, cancel := context.WithCancel(t.Context())
	messages, err := sub.Subscribe(ctx, b.stream)
	require.NoError(t, err)
	_, err = sub.Subscribe(ctx, b.stream)
	require.ErrorIs(t, err, stream.ErrAlreadySubscribed)

	cancel()
	_, open := <-messages
	require.False(t, open)
	b.publish(1)
	receiveUUIDs(t, b.subscribe(sub), 1)
}

func TestSubscriberConfigReportsAllErrors(t *testing.T) {
	t.Parallel()
	_, err := stream.NewSubscriber(stream.Config{PageMax: -1, InFlightMax: -1})
	for _, want := range []string{"Client", "Control", "Group", "Consumer", "DeadLetter", "PageMax", "InFlightMax"} {
		require.ErrorContains(t, err, want)
	}
	client := redis.NewClient(&redis.Options{ReadTimeout: time.Second})
	t.Cleanup(func() { _ = client.Close() })
	store := func(context.Context, stream.Entry, error) error { return nil }
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}, ReadTimeout: time.Second})
	t.Cleanup(func() { _ = cluster.Close() })
	_, err = stream.NewSubscriber(stream.Config{Client: cluster, BlockTimeout: time.Second})
	require.ErrorContains(t, err, "BlockTimeout must be below the read time-out of Client")
	_, err = stream.NewSubscriber(stream.Config{
		Client: client, Control: client, Group: "g", Consumer: rand.Text(),
		DeadLetter: store, BlockTimeout: time.Second,
	})
	require.ErrorContains(t, err, "read time-out")
}

func (b *streamBench) presence(consumer string, silentMax time.Duration) *stream.Presence {
	return &stream.Presence{Control: b.rdb, Group: reservation.Group, Consumer: consumer, SilentMax: silentMax}
}

func othersIn(t *testing.T, found stream.Present) []string {
	t.Helper()
	require.NoError(t, found.Err)
	return slices.Sorted(maps.Keys(found.Others))
}

func TestPresentWorkersSeeEachOtherUntilTheyWithdraw(t *testing.T) {
	t.Parallel()
	b, without := newStreamBench(t), newStreamBench(t)
	require.NoError(t, stream.CreateGroup(t.Context(), b.rdb, b.stream, reservation.Group))
	b.publish(1)
	b.takeAway("drained", 1) // a consumer that is no present worker
	streams := []string{without.stream, b.stream}
	ann, bob := b.presence("ann", time.Minute), b.presence("bob", time.Minute)

	found := ann.Announce(t.Context(), streams)
	require.Empty(t, othersIn(t, found[0]), "a stream without a group is no error")
	require.Empty(t, othersIn(t, found[1]))
	require.Equal(t, []string{"ann"}, othersIn(t, bob.Announce(t.Context(), streams)[1]))
	require.Equal(t, []string{"bob"}, othersIn(t, ann.Look(t.Context(), streams)[1]))
	require.Len(t, b.pending(), 1, "no entry is given to a presence")

	ann.Withdraw(t.Context(), streams)
	require.Empty(t, othersIn(t, bob.Look(t.Context(), streams)[1]))
	require.Empty(t, othersIn(t, bob.Look(t.Context(), streams)[0]))
}

func TestSilentWorkerIsNotPresent(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	require.NoError(t, stream.CreateGroup(t.Context(), b.rdb, b.stream, reservation.Group))
	streams := []string{b.stream}
	silent := b.presence("silent", time.Minute)
	silent.Announce(t.Context(), streams)
	testkit.Eventually(t, testshop.Soon, "it has been silent for too long", func() bool {
		found := b.presence("other", 50*time.Millisecond).Announce(t.Context(), streams)
		return len(othersIn(t, found[0])) == 0
	})
	silent.Announce(t.Context(), streams)
	require.Equal(t, []string{"silent"}, othersIn(t, b.presence("other", time.Minute).Look(t.Context(), streams)[0]))
}

func TestTwinIsProcessOfSameName(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	require.NoError(t, stream.CreateGroup(t.Context(), b.rdb, b.stream, reservation.Group))
	streams := []string{b.stream}
	ann, bob, twin := b.presence("ann", time.Minute), b.presence("bob", time.Minute), b.presence("ann", time.Minute)
	for range 5 {
		require.False(t, ann.Announce(t.Context(), streams)[0].Twin)
		<-time.After(30 * time.Millisecond)
		bob.Announce(t.Context(), streams)
	}
	testkit.Eventually(t, testshop.Soon, "both see each other", func() bool {
		<-time.After(30 * time.Millisecond)
		theirs := twin.Announce(t.Context(), streams)[0].Twin
		<-time.After(30 * time.Millisecond)
		return ann.Announce(t.Context(), streams)[0].Twin && theirs
	})
	require.False(t, b.presence("ann", time.Minute).Announce(t.Context(), streams)[0].Twin, "a restarted process")
}

func TestPresenceReportsStreamThatCannotBeRead(t *testing.T) {
	t.Parallel()
	b, wrong := newStreamBench(t), newStreamBench(t)
	require.NoError(t, stream.CreateGroup(t.Context(), b.rdb, b.stream, reservation.Group))
	require.NoError(t, b.rdb.Set(t.Context(), wrong.stream, "", 0).Err())
	b.presence("ann", time.Minute).Announce(t.Context(), []string{b.stream})
	found := b.presence("bob", time.Minute).Announce(t.Context(), []string{wrong.stream, b.stream})
	require.ErrorContains(t, found[0].Err, "WRONGTYPE")
	require.Equal(t, []string{"ann"}, othersIn(t, found[1]), "other streams have their own result")
}

func TestFirstSpreadsStreamsAndMovesOnlyThoseOfOneWorker(t *testing.T) {
	t.Parallel()
	keys := reservation.Keys{Prefix: "stampede", Partitions: 64}
	var workers []string
	for i := range 8 {
		workers = append(workers, fmt.Sprintf("host-%d", i))
	}
	reads := map[string]int{}
	for p := range keys.Partitions {
		first := stream.First(keys.Orders(p), workers)
		reads[first]++
		rest := slices.DeleteFunc(slices.Clone(workers), func(w string) bool { return w == workers[3] })
		if moved := stream.First(keys.Orders(p), rest) != first; moved {
			require.Equal(t, workers[3], first, "only streams of the worker that has gone have another reader")
		}
		slices.Reverse(rest)
		require.Equal(t, stream.First(keys.Orders(p), rest), stream.First(keys.Orders(p), slices.Sorted(slices.Values(rest))))
	}
	for _, worker := range workers {
		require.Positive(t, reads[worker], "%v", reads)
		require.LessOrEqual(t, reads[worker], 16, "%v", reads)
	}
}

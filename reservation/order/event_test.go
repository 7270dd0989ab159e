package order_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"log"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack"
	"pgregory.net/rapid"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

// The wire format is a contract with every deployed consumer: a change requires a new event version.
func TestEventWireFormat(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 5)
	a := s.Ask(t, sale.ID, "auth0|5f7c8e")
	b, err := s.Reserve(t.Context(),
		reservation.Request{Sale: sale.ID, User: "bob", Quantity: 1, IdempotencyKey: "click-1"})
	require.NoError(t, err)
	entries := s.Entries(t, 0)
	require.Len(t, entries, 2)
	values := entries[0].Values

	require.ElementsMatch(t, []string{"_watermill_message_uuid", "metadata", "payload"},
		slices.Collect(maps.Keys(values)))
	id := order.CompactID(a.Reservation.OrderID)
	require.Equal(t, id, values["_watermill_message_uuid"])
	at := strconv.FormatInt(a.Reservation.ReservedAt.UnixMilli(), 16)
	require.Equal(t, "auth0|5f7c8e\n"+id+" 1 1 "+at, values["payload"])
	require.Equal(t, "\x85\xa5event\xadOrderReserved\xadevent_version\xa12\xa7sale_id\xd9\x24"+sale.ID.String()+
		"\xa5epoch\xa11\xa5count\xa11", values["metadata"])
	require.Regexp(t, `^bob\n[\w-]{22} 1 2 [0-9a-f]+:[\w-]{22}$`, entries[1].Values["payload"])
	require.Contains(t, entries[1].Values["payload"], order.CompactID(b.Reservation.OrderID))

	// The stock marshaller would write the same metadata.
	stock, err := redisstream.DefaultMarshallerUnmarshaller{}.Marshal("",
		&message.Message{UUID: id, Metadata: message.Metadata{"event": "OrderReserved"}})
	require.NoError(t, err)
	require.IsType(t, []byte{}, stock["metadata"])
	var metadata message.Metadata
	require.NoError(t, msgpack.Unmarshal([]byte(values["metadata"].(string)), &metadata))
	require.Equal(t, message.Metadata{
		"event": "OrderReserved", "event_version": "2", "sale_id": sale.ID.String(), "epoch": "1", "count": "1",
	}, metadata)
}

func TestStockWatermillReadsEvents(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 5)
	a := s.Ask(t, sale.ID, "ann")

	// The subscriber closes its client, so it gets its own.
	client := testkit.Client(t, testkit.RedisURL(t))
	subscriber, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
		Client: client, ConsumerGroup: "another-group", Consumer: "one", OldestId: "0",
	}, watermill.NopLogger{})
	require.NoError(t, err)
	soon, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	messages, err := subscriber.Subscribe(soon, s.Keys.Orders(0))
	require.NoError(t, err)
	msg, open := <-messages
	require.True(t, open)
	events, err := order.DecodeReserved(msg)
	require.NoError(t, err)
	msg.Ack()
	require.NoError(t, subscriber.Close())

	require.Equal(t, []order.OrderReserved{{
		OrderID: a.Reservation.OrderID, SaleID: sale.ID, UserID: "ann", Quantity: 1, Epoch: 1, Sequence: 1,
		ReservedAt: a.Reservation.ReservedAt,
	}}, events)
}

// newMessage returns a message with the orders of a sale, as the script writes it.
func newMessage(sale uuid.UUID, epoch int64, events ...order.OrderReserved) *message.Message {
	msg := message.NewMessage("id", order.ReservedPayload(epoch, events...))
	msg.Metadata = message.Metadata{
		"event": "OrderReserved", "event_version": "2", "sale_id": sale.String(),
		"epoch": strconv.FormatInt(epoch, 10), "count": strconv.Itoa(len(events)),
	}
	return msg
}

func TestDecodeReservedReadsWhatIsWritten(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(r *rapid.T) {
		sale, epoch := uuid.New(), rapid.Int64Range(1, 1<<31).Draw(r, "epoch")
		events := make([]order.OrderReserved, rapid.IntRange(1, order.MaxPerMessage).Draw(r, "orders"))
		for i := range events {
			events[i] = order.OrderReserved{
				OrderID: order.NewOrderID(sale), SaleID: sale,
				UserID:         rapid.StringMatching(`[!#-\[\]-z|~]{1,128}`).Draw(r, "user"),
				Quantity:       rapid.Int64Range(1, order.MaxPerOrder).Draw(r, "quantity"),
				Epoch:          rapid.Int64Range(1, epoch).Draw(r, "its epoch"),
				ReservedAt:     time.UnixMilli(rapid.Int64Range(0, 1<<47).Draw(r, "time")).UTC(),
				Sequence:       rapid.Int64Range(1, 1<<40).Draw(r, "sequence"),
				KeyFingerprint: rapid.SampledFrom([]string{"", "abcdefghijklmnopqrstuQ"}).Draw(r, "key"),
			}
		}
		read, err := order.DecodeReserved(newMessage(sale, epoch, events...))
		require.NoError(r, err)
		require.Equal(r, events, read)
	})
}

// FuzzReadReserved writes again what it reads, and reads the same from that.
func FuzzReadReserved(f *testing.F) {
	const id = "AaH9eHpfdXukBQzkOOCaFQ"
	for _, payload := range []string{
		"", "\n", "ann\n" + id + " 1 17 1a0c2d3e4f5", "ann\n" + id + " 1 17 1a0c2d3e4f5:abcdefghijklmnopqrstuQ@2",
		"ann\n" + id + " 1 17 1a0c2d3e4f5\nbob", "ann\n" + id + " 1 17 1\n\n" + id + " 1 17 1",
	} {
		f.Add(payload, "1", "1")
	}
	f.Fuzz(func(t *testing.T, payload, epoch, count string) {
		sale := uuid.MustParse("0190b4a2-0000-7000-8000-000000000002")
		msg := message.NewMessage("id", []byte(payload))
		msg.Metadata = message.Metadata{
			"event": "OrderReserved", "event_version": "2", "sale_id": sale.String(), "epoch": epoch, "count": count,
		}
		events, err := order.ReadReserved(msg)
		if err != nil {
			require.ErrorIs(t, err, order.ErrUndecodable)
		}
		if len(events) == 0 {
			return
		}
		again, err := order.DecodeReserved(newMessage(sale, 1<<31, events...))
		require.NoError(t, err)
		require.Equal(t, events, again)
	})
}

func TestDecodeReservedRejectsOtherMessages(t *testing.T) {
	t.Parallel()
	sale := uuid.MustParse("0190b4a2-0000-7000-8000-000000000002")
	good := order.OrderReserved{
		OrderID: order.NewOrderID(sale), SaleID: sale, UserID: "ann", Quantity: 1, Epoch: 1, Sequence: 7,
		ReservedAt: time.UnixMilli(1700000000123).UTC(),
	}
	other := good
	other.OrderID, other.UserID, other.Sequence = order.NewOrderID(sale), "bob", 8
	both, second := []order.OrderReserved{good, other}, []order.OrderReserved{other}
	none := []order.OrderReserved{}
	replacing := func(from, to string) func(*message.Message) {
		return func(msg *message.Message) {
			msg.Payload = []byte(strings.Replace(string(msg.Payload), from, to, 1))
		}
	}
	setting := func(name, value string) func(*message.Message) {
		return func(msg *message.Message) { msg.Metadata[name] = value }
	}
	for name, tc := range map[string]struct {
		change   func(*message.Message)
		readable []order.OrderReserved
	}{
		"no event":                {setting("event", ""), nil},
		"another event":           {setting("event", "OrderShipped"), nil},
		"an unknown version":      {setting("event_version", "4"), both},
		"the version of items":    {setting("event_version", "3"), none},
		"a count of less":         {setting("count", "1"), both},
		"a count of more":         {setting("count", "3"), both},
		"no count":                {setting("count", ""), both},
		"no sale":                 {setting("sale_id", ""), nil},
		"the nil sale":            {setting("sale_id", uuid.Nil.String()), nil},
		"no epoch":                {setting("epoch", ""), nil},
		"epoch 0":                 {setting("epoch", "0"), nil},
		"a huge epoch":            {setting("epoch", "9223372036854775807"), nil},
		"no payload":              {func(msg *message.Message) { msg.Payload = nil }, none},
		"JSON":                    {func(msg *message.Message) { msg.Payload = []byte(`{"user":"ann"}`) }, none},
		"a line too many":         {replacing("ann", "eve\nann"), none},
		"a damaged id":            {replacing(order.CompactID(good.OrderID), "x"), second},
		"quantity 0":              {replacing(" 1 7 ", " 0 7 "), second},
		"quantity 1.5":            {replacing(" 1 7 ", " 1.5 7 "), second},
		"a user with braces":      {replacing("ann", "{ann}"), second},
		"no user":                 {replacing("ann", ""), second},
		"a damaged sequence":      {replacing(" 1 7 ", " 1 x "), second},
		"a negative sequence":     {replacing(" 1 7 ", " 1 -7 "), second},
		"a huge sequence":         {replacing(" 1 7 ", " 1 9223372036854775807 "), second},
		"a time beyond 9999":      {replacing("7 18bcfe5687b", "7 e677d21fdc00"), second},
		"a huge epoch of its own": {replacing("18bcfe5687b", "18bcfe5687b@9223372036854775807"), second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			msg := newMessage(sale, 1, good, other)
			tc.change(msg)
			_, err := order.DecodeReserved(msg)
			require.ErrorIs(t, err, order.ErrUndecodable)
			read, err := order.ReadReserved(msg)
			require.ErrorIs(t, err, order.ErrUndecodable)
			require.Equal(t, tc.readable, read)
		})
	}
}

func TestFindOrderByID(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	ctx := t.Context()
	for range 20 {
		s.Sale(t, 5)
	}
	sale := s.Sale(t, 5)
	a := s.Ask(t, sale.ID, "ann")
	o, err := s.FindReserved(ctx, a.Reservation.OrderID, "ann")
	require.NoError(t, err)
	require.Equal(t, order.Order{
		ID: a.Reservation.OrderID, SaleID: sale.ID, UserID: "ann", Quantity: 1,
		Status: order.StatusReserved, Version: 1, ReservedAt: a.Reservation.ReservedAt,
		UpdatedAt: a.Reservation.ReservedAt,
	}, o)

	for name, id := range map[string]uuid.UUID{
		"never made":      order.NewOrderID(sale.ID),
		"of no sale":      order.NewOrderID(uuid.New()),
		"not a version 7": uuid.New(),
		"of the future":   uuid.MustParse("ffffffff-ffff-7000-8000-000000000000"),
	} {
		_, err = s.FindReserved(ctx, id, "ann")
		require.ErrorIs(t, err, order.ErrNotFound, name)
	}
	_, err = s.FindReserved(ctx, a.Reservation.OrderID, "bob")
	require.ErrorIs(t, err, order.ErrNotFound, "another user's order")

	// A sale that was created after the ingress read the index.
	elsewhere := testshop.NewShopOn(t, testshop.Options{Redis: s.Rdb, Keys: s.Keys})
	later := elsewhere.Sale(t, 5)
	b := elsewhere.Ask(t, later.ID, "ann")
	_, err = s.FindReserved(ctx, b.Reservation.OrderID, "ann")
	require.NoError(t, err)
}

func TestOrderIDsAreUniqueVersion7(t *testing.T) {
	t.Parallel()
	sale := uuid.Must(uuid.NewV7())
	seen := map[uuid.UUID]bool{}
	for range 100_000 {
		id := order.NewOrderID(sale)
		require.EqualValues(t, 7, id.Version())
		require.Equal(t, uuid.RFC4122, id.Variant())
		require.False(t, seen[id])
		require.Equal(t, id.String(), string(order.AppendID(nil, id)))
		seen[id] = true
	}
}

func TestKeysOfPartitionShareHashTag(t *testing.T) {
	t.Parallel()
	keys := reservation.Keys{Prefix: reservation.DefaultPrefix, Partitions: 4}
	sale := uuid.MustParse("0190b4a2-0000-7000-8000-000000000002")
	require.Equal(t, "stampede:{3}:sale:0190b4a2-0000-7000-8000-000000000002", keys.Sale(3, sale))
	require.Equal(t, "stampede:{3}:buyers:0190b4a2-0000-7000-8000-000000000002", keys.Buyers(3, sale))
	require.Equal(t, "stampede:{3}:orders", keys.Orders(3))
	require.Equal(t, "stampede:{3}:lock:ann", keys.Lock(3, "ann"))

	counts := make([]int, 4)
	for range 4000 {
		counts[keys.Partition(uuid.Must(uuid.NewV7()))]++
	}
	for _, n := range counts {
		require.InDelta(t, 1000, n, 200, "sales spread evenly over the partitions")
	}
}

const traceParent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

// tracedMessage returns the message of these orders as a stock subscriber has it.
func tracedMessage(t *testing.T, events ...order.OrderReserved) *message.Message {
	t.Helper()
	first := events[0]
	msg, err := redisstream.DefaultMarshallerUnmarshaller{}.Unmarshal(map[string]any{
		redisstream.UUIDHeaderKey: order.CompactID(first.OrderID),
		"metadata":                order.ReservedMetadata(first.SaleID, 1, len(events), false, order.TracesOf(events...)...),
		"payload":                 string(order.ReservedPayload(1, events...)),
	})
	require.NoError(t, err)
	return msg
}

// A call of the script makes a message of MaxPerMessage orders at most.
func TestMessageOfTooManyOrdersIsRefused(t *testing.T) {
	t.Parallel()
	most := newEvents(order.MaxPerMessage + 1)
	_, err := order.DecodeReserved(newMessage(most[0].SaleID, 1, most...))
	require.ErrorIs(t, err, order.ErrUndecodable)
	read, err := order.DecodeReserved(newMessage(most[0].SaleID, 1, most[1:]...))
	require.NoError(t, err)
	require.Equal(t, most[1:], read)
}

func newEvents(n int) (events []order.OrderReserved) {
	sale := uuid.Must(uuid.NewV7())
	for i := range n {
		events = append(events, order.OrderReserved{
			OrderID: order.NewOrderID(sale), SaleID: sale, UserID: "user", Quantity: 1, Epoch: 1, Sequence: int64(i + 1),
			ReservedAt: time.UnixMilli(1_795_000_000_000).UTC(),
		})
	}
	return events
}

func TestEachOrderOfMessageHasItsTrace(t *testing.T) {
	t.Parallel()
	for _, traced := range []int{0, 1, 2, order.MaxTraces} {
		events := newEvents(20)
		for i := range traced {
			events[i+3].TraceParent = traceParent[:50] + string("0123456789abcdef"[i]) + traceParent[51:]
		}
		msg := tracedMessage(t, events...)
		got, err := order.DecodeReserved(msg)
		require.NoError(t, err)
		require.Equal(t, events, got)
		require.Equal(t, events[3].TraceParent, msg.Metadata.Get("traceparent"), "for a stock subscriber")
	}
	// More than fit have none.
	events := newEvents(30)
	for i := range events {
		events[i].TraceParent = traceParent
	}
	got, err := order.DecodeReserved(tracedMessage(t, events...))
	require.NoError(t, err)
	require.Empty(t, got[order.MaxTraces].TraceParent)
	require.Equal(t, traceParent, got[order.MaxTraces-1].TraceParent)
}

// Damaged traces are left out, and cost no order.
func TestDamagedTracesAreNone(t *testing.T) {
	t.Parallel()
	event := newEvents(1)[0]
	id := order.CompactID(event.OrderID)
	for _, traces := range []string{
		" ", "\n\n", id, id + " ", id + " " + traceParent[:54], id + " " + traceParent + "0",
		id + " '; DROP TABLE orders; --",
		id + " " + strings.Replace(traceParent, "4", "é", 1), id + " " + strings.ToUpper(traceParent), "x " + traceParent,
		order.CompactID(uuid.New()) + " " + traceParent, strings.Repeat("x", 100_000),
		strings.Repeat(order.CompactID(uuid.New())+" "+traceParent+"\n", 1000), id + " 01" + traceParent[2:],
	} {
		msg := tracedMessage(t, event)
		msg.Metadata["traces"] = traces
		got, err := order.DecodeReserved(msg)
		require.NoError(t, err, traces)
		require.Equal(t, []order.OrderReserved{event}, got, traces)
	}
}

func TestMain(m *testing.M) { testkit.Main(m) }

// No key of a buyer has the fingerprint of an offer, which a fingerprint alone shows.
func TestFingerprintShowsOffer(t *testing.T) {
	t.Parallel()
	lasts := map[byte]bool{}
	for n := range 200 {
		key := fmt.Sprint("key ", n)
		plain, offer := order.Fingerprint(key), order.OfferFingerprint(key)
		require.Equal(t, order.KindOrder, order.KindOf(uuid.Nil, false, plain))
		require.Equal(t, order.KindOffer, order.KindOf(uuid.Nil, false, offer))
		raw, err := base64.RawURLEncoding.DecodeString(offer)
		require.NoError(t, err)
		require.Equal(t, plain, base64.RawURLEncoding.EncodeToString(raw))
		lasts[offer[len(offer)-1]] = true
	}
	require.Equal(t, map[byte]bool{'B': true, 'R': true, 'h': true, 'x': true}, lasts)
	require.Equal(t, order.KindOrder, order.KindOf(uuid.Nil, true, ""))
	require.Equal(t, order.KindEntry, order.KindOf(uuid.New(), false, order.OfferFingerprint("k")))
	require.Equal(t, order.KindPlace, order.KindOf(uuid.New(), true, order.OfferFingerprint("k")))
}

// A consumer of one's own reads the accepted orders of a partition with Watermill's subscriber, in a group of its own.
func ExampleDecodeReserved() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	server, err := localserver.StartRedis(ctx, localserver.RedisOptions{}) // yours is that of REDIS_URL
	if err != nil {
		log.Fatal(err)
	}
	defer server.Stop()
	options, err := redis.ParseURL(server.URL)
	if err != nil {
		log.Fatal(err)
	}
	rdb := redis.NewClient(options)
	keys := reservation.Keys{Prefix: reservation.DefaultPrefix, Partitions: 1} // STAMPEDE_PARTITIONS
	sale := uuid.Must(uuid.NewV7())
	rdb.XAdd(ctx, &redis.XAddArgs{Stream: keys.Orders(0), Values: stream.Values(order.OrderReserved{ // as an ingress does
		OrderID: order.NewOrderID(sale), SaleID: sale, UserID: "ann", Quantity: 2, Epoch: 1, Sequence: 17,
		ReservedAt: time.UnixMilli(1790925461749),
	})})

	subscriber, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
		Client: rdb, ConsumerGroup: "analytics", OldestId: "0",
	}, watermill.NopLogger{})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = subscriber.Close() }()
	messages, err := subscriber.Subscribe(ctx, keys.Orders(0)) // one stream for each partition
	if err != nil {
		log.Fatal(err)
	}
	msg := <-messages // range over them
	reserved, err := order.DecodeReserved(msg)
	if err != nil {
		log.Print(err) // errors.Is(err, order.ErrUndecodable): retries do not help
	}
	for _, o := range reserved { // a message has all orders of one call of the script
		fmt.Println(o.UserID, o.Quantity, o.Sequence) // process each o.OrderID once
	}
	msg.Ack()
	// Output: ann 2 17
}

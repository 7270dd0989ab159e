package order_test

import (
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack"

	"stampede/internal/testkit"
	"stampede/internal/testsale"
	"stampede/reservation"
	"stampede/reservation/order"
)

// The wire format is a contract with every deployed consumer: a change requires a new event version.
func TestEventWireFormat(t *testing.T) {
	t.Parallel()
	s := testsale.NewShop(t)
	sale := s.Sale(5)
	a := s.Buy(sale.ID, "auth0|5f7c8e")
	events := s.Events(sale.ID)
	require.Len(t, events, 1)
	values := events[0].Values

	order := a.Reservation.OrderID.String()
	require.ElementsMatch(t, []string{"_watermill_message_uuid", "metadata", "payload", "reserved_at_ms", "sequence"},
		fieldNames(values), "the purchase had no idempotency key")
	require.Equal(t, reservation.CompactID(a.Reservation.OrderID), values["_watermill_message_uuid"],
		"each order takes this in the stream until it is in Postgres")
	require.Equal(t, "1", values["sequence"])
	require.Equal(t, a.Reservation.ReservedAt, time.UnixMilli(mustInt(t, values["reserved_at_ms"])).UTC())
	require.Equal(t, "\x82\xa5event\xadOrderReserved\xadevent_version\xa11", values["metadata"])

	payload, requestedAt, found := strings.Cut(values["payload"].(string), `,"requested_at_ms":`)
	require.True(t, found)
	require.Equal(t, `{"order_id":"`+order+`","sale_id":"`+sale.ID.String()+
		`","user_id":"auth0|5f7c8e","quantity":1,"version":1,"epoch":1`, payload)
	require.WithinDuration(t, time.Now(), time.UnixMilli(mustInt(t, strings.TrimSuffix(requestedAt, "}"))), time.Minute)

	// The stock marshaller would write the same metadata.
	stock, err := redisstream.DefaultMarshallerUnmarshaller{}.Marshal("",
		&message.Message{UUID: order, Metadata: message.Metadata{"event": "OrderReserved"}})
	require.NoError(t, err)
	require.IsType(t, []byte{}, stock["metadata"])
	var metadata message.Metadata
	require.NoError(t, msgpack.Unmarshal([]byte(values["metadata"].(string)), &metadata))
	require.Equal(t, message.Metadata{"event": "OrderReserved", "event_version": "1"}, metadata)

	_, err = s.Reserve(t.Context(), reservation.Request{
		Sale: sale.ID, User: "bob", Quantity: 1,
		IdempotencyKey: "click-1",
	})
	require.NoError(t, err)
	values = s.Events(sale.ID)[1].Values
	require.ElementsMatch(
		t, []string{
			"_watermill_message_uuid", "metadata", "payload", "reserved_at_ms", "sequence", "key",
		}, fieldNames(values),
	)
	require.Len(t, values["key"], 22, "a fingerprint")
}

func TestStockWatermillReadsEvents(t *testing.T) {
	t.Parallel()
	s := testsale.NewShop(t)
	sale := s.Sale(5)
	a := s.Buy(sale.ID, "ann")

	// The subscriber closes its client, so it gets its own.
	client := testsale.OwnClient(t, testkit.RedisURL(t))
	subscriber, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
		Client: client, ConsumerGroup: "somebody-else", Consumer: "one", OldestId: "0",
	}, watermill.NopLogger{})
	require.NoError(t, err)
	messages, err := subscriber.Subscribe(testsale.Soon(t), s.Keys.Orders(0))
	require.NoError(t, err)
	msg, open := <-messages
	require.True(t, open)
	event, err := order.DecodeReserved(msg)
	require.NoError(t, err)
	msg.Ack()
	require.NoError(t, subscriber.Close())

	require.Equal(t, a.Reservation.OrderID, event.OrderID)
	require.Equal(t, "ann", event.UserID)
	require.Equal(t, event.RequestedAt, event.ReservedAt, "it drops the script's fields")
	require.Zero(t, event.Sequence)
}

func TestDecodeReservedRejectsOtherMessages(t *testing.T) {
	t.Parallel()
	const good = `{"order_id":"0190b4a2-0000-7000-8000-000000000001","sale_id":"0190b4a2-0000-7000-8000-000000000002","user_id":"ann","quantity":1,"version":1,"epoch":1,"requested_at_ms":1700000000000}`
	decode := func(event, version, payload string, more ...string) (order.OrderReserved, error) {
		msg := message.NewMessage("id", []byte(payload))
		msg.Metadata = message.Metadata{"event": event, "event_version": version}
		for i := 0; i < len(more); i += 2 {
			msg.Metadata[more[i]] = more[i+1]
		}
		return order.DecodeReserved(msg)
	}
	e, err := decode("OrderReserved", "1", good, "reserved_at_ms", "1700000000123", "sequence", "7")
	require.NoError(t, err)
	require.Equal(t, order.OrderReserved{
		OrderID: uuid.MustParse("0190b4a2-0000-7000-8000-000000000001"),
		SaleID:  uuid.MustParse("0190b4a2-0000-7000-8000-000000000002"),
		UserID:  "ann", Quantity: 1, Epoch: 1, Sequence: 7,
		RequestedAt: time.UnixMilli(1700000000000).UTC(), ReservedAt: time.UnixMilli(1700000000123).UTC(),
	}, e)

	for name, err := range map[string]error{
		"event missing":    second(decode("", "", "bar")),
		"other event":      second(decode("OrderShipped", "1", good)),
		"unknown version":  second(decode("OrderReserved", "2", good)),
		"not JSON":         second(decode("OrderReserved", "1", "bar")),
		"order id missing": second(decode("OrderReserved", "1", strings.Replace(good, "order_id", "x", 1))),
		"order id damaged": second(decode("OrderReserved", "1", strings.Replace(good, "0190", "01", 1))),
		"quantity 0":       second(decode("OrderReserved", "1", strings.Replace(good, `"quantity":1`, `"quantity":0`, 1))),
		"quantity 1.5": second(decode("OrderReserved", "1",
			strings.Replace(good, `"quantity":1`, `"quantity":1.5`, 1))),
		"user with braces":             second(decode("OrderReserved", "1", strings.Replace(good, "ann", "{ann}", 1))),
		"sequence damaged":             second(decode("OrderReserved", "1", good, "sequence", "x")),
		"sequence negative":            second(decode("OrderReserved", "1", good, "sequence", "-1")),
		"sequence too large":           second(decode("OrderReserved", "1", good, "sequence", "9223372036854775807")),
		"reserved after the year 9999": second(decode("OrderReserved", "1", good, "reserved_at_ms", "1152922451291646976")),
		"requested after the year 9999": second(decode("OrderReserved", "1",
			strings.Replace(good, "1700000000000", "1152922451291646976", 1))),
		"epoch too large": second(decode("OrderReserved", "1",
			strings.Replace(good, `"epoch":1`, `"epoch":9223372036854775807`, 1))),
	} {
		require.ErrorIs(t, err, order.ErrUndecodable, name)
	}
}

func TestFindOrderByID(t *testing.T) {
	t.Parallel()
	s := testsale.NewShop(t)
	ctx := t.Context()
	for range 20 {
		s.Sale(5)
	}
	sale := s.Sale(5)
	a := s.Buy(sale.ID, "ann")
	o, err := s.FindReserved(ctx, a.Reservation.OrderID, "ann")
	require.NoError(t, err)
	require.Equal(t, order.Order{
		ID: a.Reservation.OrderID, SaleID: sale.ID, UserID: "ann", Quantity: 1,
		Status: order.StatusReserved, Version: 1, ReservedAt: a.Reservation.ReservedAt,
	}, o)

	for name, id := range map[string]uuid.UUID{
		"never made":      order.NewOrderID(sale.ID),
		"of no sale":      order.NewOrderID(uuid.New()),
		"not a version 7": uuid.New(),
		"of the future":   uuid.MustParse("ffffffff-ffff-7000-8000-000000000000"),
	} {
		_, err = s.FindReserved(ctx, id, "ann")
		require.ErrorIs(t, err, order.ErrOrderNotFound, name)
	}
	_, err = s.FindReserved(ctx, a.Reservation.OrderID, "bob")
	require.ErrorIs(t, err, order.ErrOrderNotFound, "another user's order")

	// A sale that was created after the ingress read the index.
	elsewhere := testsale.NewShopOn(t, s.Redis, s.Keys, reservation.StoreOptions{})
	later := elsewhere.Sale(5)
	b := elsewhere.Buy(later.ID, "ann")
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

func fieldNames(values map[string]any) (names []string) {
	for name := range values {
		names = append(names, name)
	}
	return names
}

func mustInt(t *testing.T, v any) (n int64) {
	t.Helper()
	text, ok := v.(string)
	require.True(t, ok)
	for _, digit := range text {
		require.True(t, digit >= '0' && digit <= '9', "%q is a whole number", text)
		n = n*10 + int64(digit-'0')
	}
	return n
}

func second[A, B any](_ A, b B) B { return b }

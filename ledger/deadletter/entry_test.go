package deadletter_test

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation/order"
	"stampede/stream"
)

// forgedFields are damaged contents of dead_letters.fields. $order is an accepted order, and $metadata is that of its
// message.
var forgedFields = []string{
	`null`, `{}`, `[]`, `1`, `"text"`, `true`, `[1, 2]`, `[null]`, `[[]]`, `[["payload"]]`, `[["payload", "plain"]]`,
	`[["payload", 5]]`, `[["payload", null]]`,
	`[[null, {"text": "x"}]]`, `[[1, {"text": "x"}]]`, `[["payload", {"base64": "no base64!"}]]`,
	`[["payload", {"text": 7}]]`, `[["payload", {}]]`,
	`[["payload", {"text": "no lines"}]]`, `[["metadata", {"base64": "/w=="}], ["payload", {"text": "ann\n$order 1 1 1"}]]`,
	`[["payload", {"text": "ann\n$order 1 1 1"}]]`, `[["metadata", {"base64": "$metadata"}]]`,
	`[["metadata", {"base64": "$metadata"}], ["payload", {"text": ""}]]`,
	`[["metadata", {"base64": "$metadata"}], ["payload", {"text": "\n$order 1 1 1"}]]`,
	`[["metadata", {"base64": "$metadata"}], ["payload", {"text": "a b\n$order 1 1 1"}]]`,
	`[["metadata", {"base64": "$metadata"}], ["payload", {"text": "ann\n$order -1 1 1"}]]`,
	`[["metadata", {"base64": "$metadata"}], ["payload", {"text": "ann\n$order 1e99 1 1"}]]`,
	`[["metadata", {"base64": "$metadata"}], ["payload", {"text": "ann\n$order 1 1 1@9223372036854775807"}]]`,
	`[["metadata", {"base64": "$metadata"}], ["payload", {"text": "ann\n$order 1 99999999999999999999 1"}]]`,
	`[["metadata", {"base64": "$metadata"}], ["payload", {"text": "ann\n$order 1 1 7fffffffffffffff"}]]`,
	`[["metadata", {"base64": "$metadata"}], ["payload", {"text": "ann\n$another 1 1 1"}]]`,
	`[["metadata", {"base64": "$metadata"}], ["payload", {"text": "bob\n$order 1 1 1"}]]`,
	`[["metadata", {"base64": "$metadata"}], ["payload", {"text": "ann\n$order 1 1 1\nann\n$order 2 1 1"}]]`,
	`[["metadata", {"base64": "$elsewhere"}], ["payload", {"text": "ann\n$order 1 1 1"}]]`,
}

// A damaged dead letter stops neither the audit nor Get nor Discard, and the accepted order still ends.
func TestAuditReportsForgedDeadLettersAndDiscardRemovesThem(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	sale := s.OpenPayable(t, 10)
	o := s.Buy(t, sale, "ann")
	testwork.TakeOut(t, s) // its event is lost
	entries := []string{"1-1", "", "rubbish", "99999999999999999999-0", "9223372036854775807-0", "-1-1"}
	streams := []string{s.Keys.Orders(0), "", "another stream"}
	ids := make([]int64, len(forgedFields))
	for i, fields := range forgedFields {
		fields = strings.NewReplacer(
			"$order", order.CompactID(o), "$another", order.CompactID(uuid.New()),
			"$metadata", base64.StdEncoding.EncodeToString([]byte(order.ReservedMetadata(sale, 1, 1, false))),
			"$elsewhere", base64.StdEncoding.EncodeToString([]byte(order.ReservedMetadata(uuid.New(), 1, 1, false))),
		).Replace(fields)
		err := s.Pool.QueryRow(t.Context(), `INSERT INTO dead_letters
			(stream, entry_id, fields, reason, deliveries, replays, created_at, updated_at)
			VALUES ($1, $2, $3, E'\x1b rubbish', -1, 2147483647, 'infinity', '-infinity') RETURNING id`,
			streams[i%len(streams)], fmt.Sprint(entries[i%len(entries)],
				map[bool]string{true: "", false: fmt.Sprint(i)}[i < len(entries)]), fields).Scan(&ids[i])
		require.NoError(t, err, fields)
	}
	report := testwork.Audit(t, s, uuid.Nil)
	require.False(t, report.Unchecked(), testwork.Text(t, report))
	require.GreaterOrEqual(t, report.Promise("S3").Found, int64(len(ids)))
	require.Contains(t, testwork.Unmended(testwork.Reconcile(t, s)), "dlq")
	listed, err := letters.List(t.Context(), deadletter.StatusParked, 1000)
	require.NoError(t, err)
	require.Len(t, listed, len(ids))

	damaged := 0
	for i, id := range ids {
		letter, err := letters.Get(t.Context(), id)
		require.NoError(t, err, forgedFields[i])
		if letter.Damage != "" {
			damaged++
			_, _, err = letters.Replay(t.Context(), id, "ann")
			require.ErrorIs(t, err, deadletter.ErrUnreadable)
			require.False(t, errors.Is(err, deadletter.ErrNotParked))
		}
		require.NoError(t, letters.Discard(t.Context(), id, "forged", "ann"), forgedFields[i])
	}
	require.Positive(t, damaged)
	require.NotEqual(t, len(ids), damaged)
	testwork.Reconcile(t, s)
	testwork.ProcessWaiting(t, s)
	testwork.Reconcile(t, s)
	testwork.ProcessWaiting(t, s)
	got := testwork.Order(t, s.Pool, o)
	require.Contains(t, []order.Status{order.StatusConfirmed, order.StatusRejected}, got.Status, "the order ends")
	report = testwork.Audit(t, s, sale)
	require.Zero(t, report.Promise("S3").Found, testwork.Text(t, report))
}

func TestRefusedOrdersBecomeDeadLettersOfTheirOwn(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	events := testshop.ReservedCrowd(s.Open(t, 5), 3)
	key := s.Keys.Orders(0)
	id, err := s.Rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: stream.Values(events...)}).Result()
	require.NoError(t, err)
	entry, err := stream.ReadEntry(t.Context(), s.Rdb, key, id)
	require.NoError(t, err)
	entry.Deliveries = 4

	refused := stream.OrderErrors{
		{OrderID: events[0].OrderID, Err: errors.New("one")},
		{OrderID: events[2].OrderID, Err: errors.New("two")},
	}
	for range 2 { // a repeat changes nothing
		require.NoError(t, letters.Park(t.Context(), entry, fmt.Errorf("refused: %w", refused)))
	}
	parked, err := letters.List(t.Context(), deadletter.StatusParked, 10)
	require.NoError(t, err)
	require.Len(t, parked, 2)
	for i, of := range []int{2, 0} { // newest first
		require.Equal(t, events[of].OrderID, parked[i].OrderID)
		require.Equal(t, id, parked[i].Entry.ID)
		require.Contains(t, parked[i].Reason, refused[1-i].Err.Error())
		require.NotContains(t, parked[i].Reason, refused[i].Err.Error())
		held, err := deadletter.OrdersOf(parked[i].Entry)
		require.NoError(t, err)
		require.Equal(t, []order.OrderReserved{events[of]}, held)
	}
	require.NoError(t, letters.Park(t.Context(), entry, errors.New("unreadable")))
	whole, err := letters.List(t.Context(), deadletter.StatusParked, 10)
	require.NoError(t, err)
	require.Len(t, whole, 3)
	require.Equal(t, uuid.Nil, whole[0].OrderID, "the whole entry has a row of its own")

	again, appended, err := letters.Replay(t.Context(), parked[0].ID, "ann")
	require.NoError(t, err)
	require.True(t, appended)
	replayed, err := stream.ReadEntry(t.Context(), s.Rdb, key, again)
	require.NoError(t, err)
	held, err := deadletter.OrdersOf(replayed)
	require.NoError(t, err)
	require.Equal(t, []order.OrderReserved{events[2]}, held, "only the order of the letter is appended")
	// Refused again, it goes back to its letter, also if the worker cannot read the entry.
	for _, reason := range []error{refused[1:], errors.New("unreadable")} {
		require.NoError(t, letters.Park(t.Context(), replayed, reason))
		letter, err := letters.Get(t.Context(), parked[0].ID)
		require.NoError(t, err)
		require.Equal(t, deadletter.StatusParked, letter.Status)
		require.Equal(t, again, letter.Entry.ID)
	}
	all, err := letters.List(t.Context(), "", 10)
	require.NoError(t, err)
	require.Len(t, all, 3)
}

func TestDiscardOfWholeEntryRejectsItsReadableOrders(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	sale := s.Open(t, 5)
	for _, user := range []string{"ann", "bob", "cid"} {
		s.Buy(t, sale, user)
	}
	events := s.Events(t, 0)
	values := stream.Values(events...)
	values[stream.FieldPayload] = replacing("cid\n", "{cid}\n")(values[stream.FieldPayload].(string))
	entry := stream.Entry{Stream: s.Keys.Orders(0), ID: "1-1", Fields: stream.FieldsOf(values)}
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Orders(0)).Err())
	require.NoError(t, letters.Park(t.Context(), entry, order.ErrUndecodable))
	id := testwork.OnlyLetter(t, s, letters).ID
	require.NoError(t, letters.Discard(t.Context(), id, "damaged", "ann"))
	resolution := testwork.OnlyLetter(t, s, letters).Resolution
	for _, event := range events[:2] {
		o, err := ledger.New(s.Pool).Order(t.Context(), event.OrderID)
		require.NoError(t, err)
		require.Equal(t, order.StatusRejected, o.Status)
		require.Contains(t, resolution, "order "+event.OrderID.String()+" is rejected and its units are back in the sale")
	}
	require.Contains(t, resolution, "if it was accepted, `stampede reconcile` records it from its reservation")
	testwork.RequireMended(t, s, sale, "")
	require.Equal(t, order.StatusConfirmed, testwork.Order(t, s.Pool, events[2].OrderID).Status)
}

// An entry of a sale with items is read, and its one order replayed, with its lines.
func TestEntryKeepsLines(t *testing.T) {
	t.Parallel()
	sale := uuid.Must(uuid.NewV7())
	events := []order.OrderReserved{testwork.Basket(sale, "ann", 1, "a2c1"), testwork.Basket(sale, "bob", 2, "b1")}
	entry := stream.Entry{ID: "1-1"}
	for name, value := range stream.Values(events...) {
		entry.Fields = append(entry.Fields, stream.Field{Name: name, Value: fmt.Sprint(value)})
	}
	read, err := deadletter.OrdersOf(entry)
	require.NoError(t, err)
	require.Equal(t, events, read)
	only, ok := deadletter.OnlyOrder(entry, events[0].OrderID)
	require.True(t, ok)
	read, err = deadletter.OrdersOf(only)
	require.NoError(t, err)
	require.Equal(t, events[:1], read)
}

package deadletter_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/deadletter"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
	"stampede/internal/testwork"
	"stampede/reservation/order"
)

// forgedFields are damaged contents of dead_letters.fields. $order and $sale belong to an accepted order.
var forgedFields = []string{
	`null`, `{}`, `[]`, `1`, `"text"`, `true`, `[1, 2]`, `[null]`, `[[]]`, `[["payload"]]`, `[["payload", "plain"]]`,
	`[["payload", 5]]`, `[["payload", null]]`,
	`[[null, {"text": "x"}]]`, `[[1, {"text": "x"}]]`, `[["payload", {"base64": "no base64!"}]]`,
	`[["payload", {"text": 7}]]`, `[["payload", {}]]`,
	`[["payload", {"text": "not JSON"}]]`, `[["metadata", {"base64": "/w=="}], ["payload", {"text": "{}"}]]`,
	`[["payload", {"text": "{\"order_id\": 5}"}]]`, `[["payload", {"text": "{\"order_id\": \"$order\"}"}]]`,
	`[["payload", {"text": "{\"order_id\": \"$order\", \"sale_id\": \"$sale\", \"user_id\": \"\", \"quantity\": 1, ` +
		`\"epoch\": 1}"}]]`,
	`[["payload", {"text": "{\"order_id\": \"$order\", \"sale_id\": \"$sale\", \"user_id\": \"a b\", \"quantity\": 1, ` +
		`\"epoch\": 1}"}]]`,
	`[["payload", {"text": "{\"order_id\": \"$order\", \"sale_id\": \"$sale\", \"user_id\": \"ann\", \"quantity\": -1, ` +
		`\"epoch\": 1}"}]]`,
	`[["payload", {"text": "{\"order_id\": \"$order\", \"sale_id\": \"$sale\", \"user_id\": \"ann\", \"quantity\": ` +
		`1e99, \"epoch\": 1}"}]]`,
	`[["payload", {"text": "{\"order_id\": \"$order\", \"sale_id\": \"$sale\", \"user_id\": \"ann\", \"quantity\": 1, ` +
		`\"epoch\": 0}"}]]`,
	`[["payload", {"text": "{\"order_id\": \"$order\", \"sale_id\": \"$sale\", \"user_id\": \"ann\", \"quantity\": 1, ` +
		`\"epoch\": 9223372036854775807}"}]]`,
	`[["payload", {"text": "{\"order_id\": \"$order\", \"sale_id\": \"$other\", \"user_id\": \"ann\", \"quantity\": 1, ` +
		`\"epoch\": 1}"}]]`,
	`[["payload", {"text": "{\"order_id\": \"$other\", \"sale_id\": \"$sale\", \"user_id\": \"ann\", \"quantity\": 1, ` +
		`\"epoch\": 1}"}]]`,
	`[["payload", {"text": "{\"order_id\": \"$order\", \"sale_id\": \"$sale\", \"user_id\": \"bob\", \"quantity\": 1, ` +
		`\"epoch\": 1}"}]]`,
	`[["payload", {"text": "{\"order_id\": \"$order\", \"sale_id\": \"$sale\", \"user_id\": \"ann\", \"quantity\": 1, ` +
		`\"epoch\": 1}"}], ["sequence", {"text": "99999999999999999999"}], ["reserved_at_ms", {"text": ` +
		`"9223372036854775807"}]]`,
}

// A damaged dead letter stops neither the audit nor Get nor Discard, and the accepted order still ends.
func TestAuditReportsForgedDeadLettersAndDiscardRemovesThem(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	sale := s.OpenPayable(t, 10)
	o := s.Buy(t, sale, "ann")
	testwork.TakeOut(s, t) // its event is lost
	entries := []string{"1-1", "", "rubbish", "99999999999999999999-0", "9223372036854775807-0", "-1-1"}
	streams := []string{s.Keys.Orders(0), "", "another stream"}
	ids := make([]int64, len(forgedFields))
	for i, fields := range forgedFields {
		fields = replacing("$order", o.String())(
			replacing("$sale", sale.String())(replacing("$other", uuid.NewString())(fields)),
		)
		err := s.Pool.QueryRow(t.Context(), `INSERT INTO dead_letters
			(stream, entry_id, fields, reason, deliveries, replays, created_at, updated_at)
			VALUES ($1, $2, $3, E'\x1b rubbish', -1, 2147483647, 'infinity', '-infinity') RETURNING id`,
			streams[i%len(streams)], fmt.Sprint(entries[i%len(entries)],
				map[bool]string{true: "", false: fmt.Sprint(i)}[i < len(entries)]), fields).Scan(&ids[i])
		require.NoError(t, err, fields)
	}
	report := testwork.Audit(s, t, uuid.Nil)
	require.False(t, report.Unchecked(), testwork.TextOf(t, report))
	require.GreaterOrEqual(t, report.Promise("S3").Found, int64(len(ids)))
	require.Contains(t, testwork.LeftOf(testwork.Reconcile(s, t)), "dlq")
	listed, err := letters.List(t.Context(), deadletter.StatusParked, 1000)
	require.NoError(t, err)
	require.Len(t, listed, len(ids))

	damaged := 0
	for i, id := range ids {
		letter, err := letters.Get(t.Context(), id)
		require.NoError(t, err, forgedFields[i])
		if letter.Damage != "" {
			damaged++
			_, _, err = letters.Replay(t.Context(), id)
			require.ErrorIs(t, err, deadletter.ErrUnreadable)
			require.False(t, errors.Is(err, deadletter.ErrNotParked))
		}
		require.NoError(t, letters.Discard(t.Context(), id, "forged"), forgedFields[i])
	}
	require.Positive(t, damaged)
	require.NotEqual(t, len(ids), damaged)
	testwork.Reconcile(s, t)
	testwork.Arrive(s, t)
	testwork.Reconcile(s, t)
	testwork.Arrive(s, t)
	got := testwork.OrderOfID(t, s.Pool, o)
	require.Contains(t, []order.Status{order.StatusConfirmed, order.StatusRejected}, got.Status, "the order ends")
	report = testwork.Audit(s, t, sale)
	require.Zero(t, report.Promise("S3").Found, testwork.TextOf(t, report))
}

package deadletter_test

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger/deadletter"
	"stampede/reservation/order"
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
			"$metadata", base64.StdEncoding.EncodeToString([]byte(order.ReservedMetadata(sale, 1, 1))),
			"$elsewhere", base64.StdEncoding.EncodeToString([]byte(order.ReservedMetadata(uuid.New(), 1, 1))),
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

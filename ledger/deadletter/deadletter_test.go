package deadletter_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation/order"
	"stampede/stream"
)

func TestMain(m *testing.M) { testwork.Main(m) }

func TestDeadLetterFieldsKeepEveryByte(t *testing.T) {
	t.Parallel()
	fields := []stream.Field{
		{Name: "foo", Value: "bar"},
		{Name: "foo", Value: "again"},
		{Name: "", Value: ""},
		{Name: "bytes", Value: testshop.EveryByte},
		{Name: testshop.EveryByte, Value: "a name may be anything"},
		{Name: "nul", Value: "a\x00b"},
		{Name: "text", Value: `<&> " \ ' é 漢 🦬` + "\u2028\uFFFD"},
		{Name: `{"base64":"eA=="}`, Value: `{"text":"x"}`},
	}
	encoded, err := deadletter.EncodeFields(fields)
	require.NoError(t, err)
	decoded, err := deadletter.DecodeFields(encoded)
	require.NoError(t, err)
	require.Equal(t, fields, decoded)

	encoded, err = deadletter.EncodeFields([]stream.Field{{Name: "name", Value: "text"}, {Name: "name", Value: "\xff"}})
	require.NoError(t, err)
	require.JSONEq(t, `[["name", {"text": "text"}], ["name", {"base64": "/w=="}]]`, string(encoded),
		"the format described in sql/migrations")
}

func TestDeadLetterIsStoredOnceWithAllFields(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	entry := testwork.AppendUnreadable(t, s)
	require.NoError(t, letters.Park(t.Context(), entry, errors.New("cannot read \xff\x00 it")))
	require.NoError(t, letters.Park(t.Context(), entry, errors.New("again")))

	kept := testwork.OnlyLetter(t, s, letters)
	require.Equal(t, entry, kept.Entry)
	require.Equal(t, "cannot read \uFFFD\uFFFD it", kept.Reason)
	require.Equal(t, deadletter.StatusParked, kept.Status)
	byID, err := letters.Get(t.Context(), kept.ID)
	require.NoError(t, err)
	require.Equal(t, kept, byID)
	_, err = letters.Get(t.Context(), kept.ID+1)
	require.ErrorIs(t, err, deadletter.ErrNotFound)
}

// A flushed Redis whose clock was set back, or a promoted replica that lacks the last entries, gives ids a second time.
func TestEntriesWithOneIDAreTwoDeadLetters(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	entry := testwork.AppendUnreadable(t, s)
	other := entry
	other.Fields = append(slices.Clone(entry.Fields), stream.Field{Name: "other", Value: "content"})
	for range 2 {
		require.NoError(t, letters.Park(t.Context(), entry, errors.New("rubbish")))
		require.NoError(t, letters.Park(t.Context(), other, errors.New("rubbish")))
	}
	all, err := letters.List(t.Context(), "", 10)
	require.NoError(t, err)
	require.Len(t, all, 2)
	require.Equal(t, entry, all[1].Entry)
	require.Equal(t, other.Fields, all[0].Entry.Fields)
	require.True(t, strings.HasPrefix(all[0].Entry.ID, entry.ID+"/"), all[0].Entry.ID)
	_, appended, err := letters.Replay(t.Context(), all[0].ID, "ann")
	require.NoError(t, err)
	require.True(t, appended)
}

func TestDeadLettersAreListedNewestFirst(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	var want []string
	for range 3 {
		entry := testwork.AppendUnreadable(t, s)
		require.NoError(t, letters.Park(t.Context(), entry, errors.New("rubbish")))
		want = append([]string{entry.ID}, want...)
	}
	listed, err := letters.List(t.Context(), deadletter.StatusParked, 2)
	require.NoError(t, err)
	require.Len(t, listed, 2)
	require.Equal(t, want[:2], []string{listed[0].Entry.ID, listed[1].Entry.ID})
	listed, err = letters.List(t.Context(), deadletter.StatusDiscarded, 2)
	require.NoError(t, err)
	require.Empty(t, listed)
}

func TestFailedReplayReturnsToItsDeadLetter(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	entry := testwork.AppendUnreadable(t, s)
	require.NoError(t, letters.Park(t.Context(), entry, errors.New("rubbish")))
	first := testwork.OnlyLetter(t, s, letters)

	for replay := 1; replay <= 2; replay++ {
		id, appended, err := letters.Replay(t.Context(), first.ID, "ann")
		require.NoError(t, err)
		require.True(t, appended)
		entries := s.Rdb.XLen(t.Context(), entry.Stream).Val()
		replayed := testwork.OnlyLetter(t, s, letters)
		require.Equal(t, deadletter.StatusReplayed, replayed.Status)
		require.Equal(t, replay, replayed.Replays)
		require.Contains(t, replayed.Resolution, id)
		require.Equal(t, id, replayed.ReplayedAs)
		same, appended, err := letters.Replay(t.Context(), first.ID, "ann")
		require.NoError(t, err, "Replay is idempotent")
		require.False(t, appended)
		require.Equal(t, id, same)
		require.Equal(t, replayed, testwork.OnlyLetter(t, s, letters))
		require.Equal(t, entries, s.Rdb.XLen(t.Context(), entry.Stream).Val(), "the second Replay appends nothing")
		require.ErrorIs(t, letters.Discard(t.Context(), first.ID, "x", "ann"), deadletter.ErrNotParked)

		again, err := stream.ReadEntry(t.Context(), s.Rdb, entry.Stream, id)
		require.NoError(t, err)
		require.Equal(t, entry.Fields, again.Fields[:len(entry.Fields)], "the original fields")
		require.Len(t, again.Fields, len(entry.Fields)+1, "one mark, however often the entry is replayed")
		again.Deliveries = 2
		require.NoError(t, letters.Park(t.Context(), again, errors.New("still rubbish")))
		require.NoError(t, letters.Park(t.Context(), again, errors.New("twice")))
		back := testwork.OnlyLetter(t, s, letters)
		require.Equal(t, deadletter.StatusParked, back.Status)
		require.Equal(t, "still rubbish", back.Reason)
		require.Equal(t, id, back.Entry.ID)
		require.Equal(t, entry.Fields, back.Entry.Fields)
		require.EqualValues(t, 3+2*replay, back.Entry.Deliveries)
	}
}

// A mark that is no number or has no row is stored like any other field.
func TestDeadLetterKeepsForgedReplayMark(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	for i, mark := range []string{"999999", "x", "-1", ""} {
		entry := stream.Entry{
			Stream: s.Keys.Orders(0), ID: uuid.NewString(),
			Fields: []stream.Field{{Name: deadletter.FieldReplayOf, Value: mark}},
		}
		require.NoError(t, letters.Park(t.Context(), entry, errors.New("rubbish")))
		listed, err := letters.List(t.Context(), "", 10)
		require.NoError(t, err)
		require.Len(t, listed, i+1)
		require.Equal(t, entry, listed[0].Entry)
	}
}

func TestForgedReplayDoesNotReplaceDeadLetter(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	require.NoError(t, letters.Park(t.Context(), testwork.AppendUnreadable(t, s), errors.New("rubbish")))
	first := testwork.OnlyLetter(t, s, letters)

	forged := testwork.AppendUnreadable(t, s)
	forged.Fields = append(forged.Fields, stream.Field{Name: "other", Value: "content"},
		stream.Field{Name: deadletter.FieldReplayOf, Value: fmt.Sprint(first.ID)})
	require.NoError(t, letters.Park(t.Context(), forged, errors.New("rubbish")))
	all, err := letters.List(t.Context(), "", 10)
	require.NoError(t, err)
	require.Len(t, all, 2)
	require.Equal(t, []stream.Entry{forged, first.Entry}, []stream.Entry{all[0].Entry, all[1].Entry})
}

func TestReplayedOrderIsFulfilled(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	sale := s.Open(t, 5)
	o := s.Buy(t, sale, "alice")
	entry := testwork.TakeOut(t, s)
	require.NoError(t, letters.Park(t.Context(), entry, errors.New("an earlier bug")))
	require.Contains(t, testwork.Broken(testwork.Audit(t, s, sale)), "S3")

	testwork.Work(t, testwork.Config(t, s))
	_, _, err := letters.Replay(t.Context(), testwork.OnlyLetter(t, s, letters).ID, "ann")
	require.NoError(t, err)
	s.AwaitConfirmed(t, 1)
	testwork.AwaitRest(t, s)
	require.Len(t, testshop.History(t, s.Pool, o), 2)
	testwork.RequireUnbroken(t, s, sale)
}

func TestDiscardRejectsOrderAndReleasesUnits(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	sale := s.Open(t, 5)
	o := s.Buy(t, sale, "alice")
	require.NoError(t, letters.Park(t.Context(), testwork.TakeOut(t, s), errors.New("rubbish")))
	id := testwork.OnlyLetter(t, s, letters).ID
	require.NoError(t, letters.Discard(t.Context(), id, "the operator said so", "ann"))

	got, err := ledger.New(s.Pool).Order(t.Context(), o)
	require.NoError(t, err)
	require.Equal(t, order.StatusRejected, got.Status)
	require.Equal(t, deadletter.RejectedDiscarded, got.Reason)
	letter := testwork.OnlyLetter(t, s, letters)
	require.Equal(t, deadletter.StatusDiscarded, letter.Status)
	require.Equal(
		t, "the operator said so; order "+o.String()+" is rejected and its units are back in the sale", letter.Resolution,
	)
	require.EqualValues(t, 5, testwork.RequireUnbroken(t, s, sale).Sales[0].Available)
	require.ErrorIs(t, letters.Discard(t.Context(), id, "again", "ann"), deadletter.ErrNotParked)
	_, _, err = letters.Replay(t.Context(), id, "ann")
	require.ErrorIs(t, err, deadletter.ErrNotParked)
	require.NotEqual(t, o, s.Buy(t, sale, "alice"), "alice may buy again")
}

func TestDiscardKeepsFulfilledOrder(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	sale := s.Open(t, 5)
	o := s.Buy(t, sale, "alice")
	entries := s.Rdb.XRange(t.Context(), s.Keys.Orders(0), "-", "+").Val()
	entry, err := stream.ReadEntry(t.Context(), s.Rdb, s.Keys.Orders(0), entries[0].ID)
	require.NoError(t, err)
	require.NoError(t, letters.Park(t.Context(), entry, errors.New("rubbish")))
	testwork.Fulfil(t, s)
	require.NoError(t, letters.Discard(t.Context(), testwork.OnlyLetter(t, s, letters).ID, "not needed", "ann"))
	require.Contains(t, testwork.OnlyLetter(t, s, letters).Resolution, "order "+o.String()+" is confirmed")
	require.EqualValues(t, 1, testwork.RequireUnbroken(t, s, sale).Sales[0].LiveUnits)
}

func TestConcurrentReplaysAppendOnce(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	s.Buy(t, s.Open(t, 5), "alice")
	require.NoError(t, letters.Park(t.Context(), testwork.TakeOut(t, s), errors.New("an earlier bug")))
	id := testwork.OnlyLetter(t, s, letters).ID
	var appended atomic.Int64
	var all errgroup.Group
	for range 6 {
		all.Go(func() error {
			_, fresh, err := letters.Replay(context.Background(), id, "ann")
			if fresh {
				appended.Add(1)
			}
			return err
		})
	}
	require.NoError(t, all.Wait())
	require.EqualValues(t, 1, appended.Load())
	require.EqualValues(t, 1, s.Rdb.XLen(t.Context(), s.Keys.Orders(0)).Val())
	require.Equal(t, 1, testwork.OnlyLetter(t, s, letters).Replays)
}

func TestDiscardFailsUntilUnitsCanBeReleased(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	sale := s.Open(t, 5)
	s.Buy(t, sale, "alice")
	require.NoError(t, letters.Park(t.Context(), testwork.TakeOut(t, s), errors.New("rubbish")))
	id := testwork.OnlyLetter(t, s, letters).ID
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), s.Keys.Sale(0, sale), "left", 1).Err()) // as many as the stock
	require.ErrorIs(t, letters.Discard(t.Context(), id, "rubbish", "ann"), ledger.ErrRefused)
	require.Equal(t, deadletter.StatusParked, testwork.OnlyLetter(t, s, letters).Status)
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), s.Keys.Sale(0, sale), "left", -1).Err())
	require.NoError(t, letters.Discard(t.Context(), id, "rubbish", "ann"))
	require.EqualValues(t, 5, s.Left(t, sale))
}

func TestDiscardRejectsOrderWhoseSaleIsMissingInRedis(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	sale := s.Open(t, 5)
	o := s.Buy(t, sale, "alice")
	require.NoError(t, letters.Park(t.Context(), testwork.TakeOut(t, s), errors.New("rubbish")))
	s.Lose(t, sale)
	require.NoError(t, letters.Discard(t.Context(), testwork.OnlyLetter(t, s, letters).ID, "rubbish", "ann"))
	require.Equal(
		t, "rubbish; order "+o.String()+" is rejected and its sale is not in Redis",
		testwork.OnlyLetter(t, s, letters).Resolution,
	)
	require.Equal(t, order.StatusRejected, testwork.Order(t, s.Pool, o).Status)
}

func TestDiscardMarksEntryWithoutOrder(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	require.NoError(t, letters.Park(t.Context(), testwork.AppendUnreadable(t, s), errors.New("rubbish")))
	require.NoError(t, letters.Discard(t.Context(), testwork.OnlyLetter(t, s, letters).ID, "stray", "ann"))
	require.Equal(t, "stray; the entry names no order", testwork.OnlyLetter(t, s, letters).Resolution)
	require.ErrorIs(t, letters.Discard(t.Context(), 12345, "x", "ann"), deadletter.ErrNotFound)
}

// findLetter parks the only entry of the stream, with some of its fields changed, and returns its letter.
func findLetter(t testing.TB, s *testshop.Shop, letters *deadletter.Store, changed map[string]func(string) string,
) deadletter.Letter {
	t.Helper()
	entry := testwork.TakeOut(t, s)
	for i, f := range entry.Fields {
		if change := changed[f.Name]; change != nil {
			entry.Fields[i].Value = change(f.Value)
		}
	}
	require.NoError(t, letters.Park(t.Context(), entry, order.ErrUndecodable))
	return testwork.OnlyLetter(t, s, letters)
}

func replacing(from, to string) func(string) string {
	return func(value string) string { return strings.Replace(value, from, to, 1) }
}

// The buyer received 202, whichever version of the event this program can read.
func TestDiscardRejectsOrderOfUnknownVersion(t *testing.T) {
	t.Parallel()
	for name, changed := range map[string]map[string]func(string) string{
		"unknown version": {"metadata": replacing("\xadevent_version\xa12", "\xadevent_version\xa19")},
		"wrong count":     {"metadata": replacing("\xa5count\xa11", "\xa5count\xa12")},
		"another line":    {"payload": func(text string) string { return text + "\nbob" }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
			sale := s.Open(t, 5)
			o := s.Buy(t, sale, "alice")
			letter := findLetter(t, s, letters, changed)
			require.NoError(t, letters.Discard(t.Context(), letter.ID, "rolled back", "ann"))
			got, err := ledger.New(s.Pool).Order(t.Context(), o)
			require.NoError(t, err)
			require.Equal(t, order.StatusRejected, got.Status)
			require.Equal(t, deadletter.RejectedDiscarded, got.Reason)
			require.WithinDuration(t, time.Now(), got.ReservedAt, time.Minute)
			require.EqualValues(t, 5, testwork.RequireUnbroken(t, s, sale).Sales[0].Available)
		})
	}
}

// The reservation in Redis holds what the entry lacks.
func TestReconcileRecordsOrderOfDiscardedUnreadableDeadLetter(t *testing.T) {
	t.Parallel()
	for name, changed := range map[string]map[string]func(string) string{
		"payload missing":  {"payload": func(string) string { return "" }},
		"user missing":     {"payload": replacing("alice", "")},
		"quantity zero":    {"payload": replacing(" 1 1 ", " 0 1 ")},
		"damaged metadata": {"metadata": func(string) string { return "not msgpack" }},
		"sale missing":     {"metadata": replacing("sale_id", "shop_id")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
			sale := s.Open(t, 5)
			o := s.Buy(t, sale, "alice")
			letter := findLetter(t, s, letters, changed)
			require.Contains(t, testwork.Broken(testwork.Audit(t, s, sale)), "S3")
			require.NoError(t, letters.Discard(t.Context(), letter.ID, "unreadable", "ann"))
			require.Contains(t, testwork.OnlyLetter(t, s, letters).Resolution,
				"if it was accepted, `stampede reconcile` records it from its reservation")
			testwork.RequireMended(t, s, sale, "")
			require.Equal(t, order.StatusConfirmed, testwork.Order(t, s.Pool, o).Status)
		})
	}
}

// Events of other names also carry an order id.
func TestDiscardOfOtherEventRecordsNoOrder(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	o := s.Buy(t, s.Open(t, 5), "alice")
	letter := findLetter(t, s, letters, map[string]func(string) string{
		"metadata": replacing(string(order.EventReserved), strings.Repeat("x", len(order.EventReserved))),
	})
	require.NoError(t, letters.Discard(t.Context(), letter.ID, "stray", "ann"))
	require.Equal(t, "stray; the entry names no order", testwork.OnlyLetter(t, s, letters).Resolution)
	_, err := ledger.New(s.Pool).Order(t.Context(), o)
	require.ErrorIs(t, err, order.ErrNotFound)
}

func TestReplayWaitsForRunningDiscard(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	sale := s.Open(t, 5)
	o := s.Buy(t, sale, "alice")
	require.NoError(t, letters.Park(t.Context(), testwork.TakeOut(t, s), errors.New("rubbish")))
	id := testwork.OnlyLetter(t, s, letters).ID

	hold, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = hold.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = hold.Exec(t.Context(), "LOCK TABLE orders") // Discard locks it while it holds the letter
	require.NoError(t, err)
	waiting := func() int64 { return testshop.TransactionsWaiting(t, s.Pool) }
	discarded, replayed := make(chan error, 1), make(chan error, 1)
	go func() { discarded <- letters.Discard(context.Background(), id, "the operator said so", "ann") }()
	testkit.Eventually(t, testshop.Soon, "Discard waits for the table", func() bool { return waiting() == 1 })
	go func() {
		_, _, err := letters.Replay(context.Background(), id, "ann")
		replayed <- err
	}()
	testkit.Eventually(t, testshop.Soon, "Replay waits, or is done",
		func() bool { return waiting() == 2 || len(replayed) == 1 })
	require.NoError(t, hold.Rollback(t.Context()))

	require.NoError(t, testshop.Answer(t, discarded))
	require.ErrorIs(t, testshop.Answer(t, replayed), deadletter.ErrNotParked)
	require.Zero(t, s.Rdb.XLen(t.Context(), s.Keys.Orders(0)).Val(), "nothing was appended")
	got, err := ledger.New(s.Pool).Order(t.Context(), o)
	require.NoError(t, err)
	require.Equal(t, order.StatusRejected, got.Status)
}

// Each Discard holds a connection while the ledger needs another.
func TestConcurrentDiscardsShareTwoConnections(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	config := s.Pool.Config()
	config.MaxConns = 2
	narrow, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(narrow.Close)
	letters := deadletter.NewStore(narrow, s.Rdb, s.Store)
	sale := s.Open(t, 5)
	s.Buy(t, sale, "alice")
	entry := testwork.TakeOut(t, s)
	const n = 8
	discarded := make(chan error, n)
	for i := range n {
		entry.ID = fmt.Sprintf("1-%d", i)
		require.NoError(t, letters.Park(t.Context(), entry, errors.New("rubbish")))
	}
	all, err := letters.List(t.Context(), deadletter.StatusParked, n)
	require.NoError(t, err)
	for _, letter := range all {
		go func() { discarded <- letters.Discard(context.Background(), letter.ID, "concurrently", "ann") }()
	}
	for range all {
		require.NoError(t, testshop.Answer(t, discarded))
	}
}

func TestReadDeadLetterTakesNoLock(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	require.NoError(t, letters.Park(t.Context(), testwork.AppendUnreadable(t, s), errors.New("rubbish")))
	id := testwork.OnlyLetter(t, s, letters).ID
	hold, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = hold.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = hold.Exec(t.Context(), "SELECT FROM dead_letters WHERE id = $1 FOR UPDATE", id)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err = letters.Get(ctx, id)
	require.NoError(t, err)
}

package designs

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/front"
)

// requireRows checks the rows of the sale's orders against those of the product's ledger.
func (s *testSale) requireRows(t *testing.T, orders, units int64) {
	t.Helper()
	var rows, quantity, users, places int64
	require.NoError(t, s.pool.QueryRow(t.Context(), `
		SELECT count(*), coalesce(sum(quantity), 0)::bigint, count(DISTINCT user_id), count(DISTINCT sequence) FROM orders
		WHERE sale_id = $1 AND status = 'confirmed' AND version = 2 AND epoch = 1 AND key_fingerprint IS NULL AND due IS
		NULL`,
		s.id).Scan(&rows, &quantity, &users, &places))
	require.Equal(t, []int64{orders, units, orders, orders}, []int64{rows, quantity, users, places},
		"orders, their units, users and places")
	var events, confirmed int64
	require.NoError(t, s.pool.QueryRow(t.Context(), `
		SELECT count(*), count(*) FILTER (WHERE e.version = 2 AND e.type = 'OrderConfirmed' AND e.reserved_at = o.reserved_at
		                                  AND e.sequence = o.sequence AND e.epoch = o.epoch)
		FROM order_events AS e JOIN orders AS o ON o.id = e.order_id AND o.user_id = e.user_id AND o.quantity = e.quantity
		WHERE e.sale_id = $1`, s.id).Scan(&events, &confirmed))
	require.Equal(t, []int64{orders, orders}, []int64{events, confirmed}, "events")
}

func TestPostgresDesignsRejectConcurrentClicks(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"lock-transaction", "postgres-row", "postgres-units", "postgres-batched"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSale(t, 10, All[name].Guarded)
			s.requireOneOfClicks(t, openDesign[front.Design](t, s, All[name].New), openDesign[front.Design](t, s, All[name].New))
		})
	}
}

// requireOneOfClicks lets a buyer click many times at once, and requires one order.
func (s *testSale) requireOneOfClicks(t *testing.T, d ...front.Design) {
	t.Helper()
	var clicks []<-chan purchaseResult
	for i := range 16 {
		clicks = append(clicks, s.startBuying(t, d[i%len(d)], "alice"))
	}
	counts := map[purchaseResult]int{}
	for _, click := range clicks {
		counts[<-click]++
	}
	require.Equal(t, map[purchaseResult]int{{verdict: front.Confirmed}: 1, {verdict: front.AlreadyPurchased}: 15}, counts)
	s.requireRows(t, 1, 1)
}

// batchWith is a batch of unanswered purchases.
func batchWith(orders ...front.Order) *batch {
	b := newBatch(len(orders))
	for _, o := range orders {
		b.add(&purchase{order: o, done: make(chan struct{}, 1)})
	}
	return b
}

func (b *batch) verdicts() (all []front.Verdict) {
	for _, p := range b.purchases {
		all = append(all, p.verdict)
	}
	return all
}

func TestBatchSentTwiceIsSoldOnce(t *testing.T) {
	t.Parallel()
	s := newSale(t, 3, true)
	d := openDesign[*postgresBatched](t, s, newPostgresBatched)
	orders := []front.Order{s.order("alice"), s.order("bob")}
	for range 2 {
		b := batchWith(orders...)
		skipped, err := d.sell(b)
		require.NoError(t, err)
		require.Equal(t, []bool{false, false}, skipped)
		require.Equal(t, []front.Verdict{front.Confirmed, front.Confirmed}, b.verdicts())
	}
	s.requireRows(t, 2, 2)
}

func TestBatchContinuesAfterRejectedPurchases(t *testing.T) {
	t.Parallel()
	s := newSale(t, 4, true)
	d := openDesign[*postgresBatched](t, s, newPostgresBatched)
	require.Equal(t, front.Confirmed, s.buy(t, d, "alice"))
	orders := make([]front.Order, 5)
	for i, want := range []struct {
		user     string
		quantity int64
	}{{"alice", 1}, {"bob", 2}, {"carol", 3}, {"dave", 1}, {"eve", 1}} {
		orders[i] = s.order(want.user)
		orders[i].Quantity = want.quantity
	}
	b := batchWith(orders...)
	purchases := b.purchases
	d.decide(b)
	require.Len(t, b.purchases, 2, "dave and eve, who were skipped although a unit is left")
	d.decide(b)
	require.Empty(t, b.purchases)
	var verdicts []front.Verdict
	for _, p := range purchases {
		<-p.done
		require.NoError(t, p.err)
		verdicts = append(verdicts, p.verdict)
	}
	require.Equal(t, []front.Verdict{
		front.AlreadyPurchased, front.Confirmed, front.SoldOut, front.Confirmed, front.SoldOut,
	}, verdicts)
	s.requireRows(t, 3, 4)
}

func TestBatchTakesAtMostItsMax(t *testing.T) {
	t.Parallel()
	s := newSale(t, 100, true)
	d := openDesign[*postgresBatched](t, s, newPostgresBatched)
	for i := range 10 {
		d.waiting = append(d.waiting, &purchase{order: s.order(fmt.Sprint("user-", i%6)), done: make(chan struct{}, 1)})
	}
	d.sending = 1
	var sizes []int
	for b := newBatch(4); d.take(b); b.empty() {
		sizes = append(sizes, len(b.purchases))
	}
	require.Equal(t, []int{4, 4, 2}, sizes)
	require.Zero(t, d.sending)
}

func TestBuyersGetErrorWhilePostgresFails(t *testing.T) {
	t.Parallel()
	s := newSale(t, 100, true)
	d := openDesign[*postgresBatched](t, s, newPostgresBatched)
	_, err := s.pool.Exec(t.Context(), "ALTER TABLE orders RENAME TO gone")
	require.NoError(t, err)
	_, err = d.Buy(t.Context(), s.order("alice"))
	require.ErrorContains(t, err, "sell to 1 buyers")
	_, err = s.pool.Exec(t.Context(), "ALTER TABLE gone RENAME TO orders")
	require.NoError(t, err)
	require.Equal(t, front.Confirmed, s.buy(t, d, "alice"))
}

func TestLockTransactionSecondClickWaitsForLock(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, true)
	d := openDesign[*lockTransaction](t, s, newLockTransaction)
	unlock, err := d.locks.Lock(t.Context(), d.lockKey("alice"))
	require.NoError(t, err)
	click := s.startBuying(t, d, "alice")
	require.Equal(t, front.Confirmed, s.buy(t, d, "bob"), "users have separate locks")
	select {
	case <-click:
		t.Fatal("the second click did not wait for the lock")
	default:
	}
	require.NoError(t, unlock())
	require.Equal(t, purchaseResult{verdict: front.Confirmed}, <-click)
}

func TestLockTransactionWaitsForLockOfDeadProcess(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, true)
	d := openDesign[*lockTransaction](t, s, newLockTransaction)
	_, err := d.locks.Lock(t.Context(), d.lockKey("alice")) // its holder never releases it
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = d.Buy(ctx, s.order("alice"))
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestLockTransactionRejectsSecondOrderAfterLostLock(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, true)
	d := openDesign[*lockTransaction](t, s, newLockTransaction)
	d.locks = lost{d.locks}
	s.requireOneOfClicks(t, d)
}

// lost grants every lock immediately and excludes no one, like locks whose leases have ended.
type lost struct{ userLocks }

func (lost) Lock(context.Context, string) (func() error, error) {
	return func() error { return nil }, nil
}

// TestLockTransactionWithRedisson starts Java. Without Java it is skipped, and says so.
func TestLockTransactionWithRedisson(t *testing.T) {
	t.Parallel()
	entry := All["lock-transaction-redisson"]
	if missing := entry.Missing(); missing != "" {
		t.Skip("NOT TESTED WITH REDISSON: " + missing)
	}
	s := newSale(t, 100, entry.Guarded)
	s.backend.Options = map[string]string{"warm-up": "64"}
	d := openDesign[*lockTransaction](t, s, entry.New)
	require.Equal(t, map[front.Verdict]int{front.Confirmed: 100, front.SoldOut: 60}, s.crowd(t, 160, d))
	s.requireRows(t, 100, 100)

	var winner string
	require.NoError(t, s.pool.QueryRow(t.Context(),
		"SELECT user_id FROM orders WHERE sale_id = $1 LIMIT 1", s.id).Scan(&winner))
	unlock, err := d.locks.Lock(t.Context(), d.lockKey(winner))
	require.NoError(t, err)
	click := s.startBuying(t, d, winner)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = d.locks.Lock(canceled, d.lockKey(winner))
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, unlock())
	require.Equal(t, purchaseResult{verdict: front.AlreadyPurchased}, <-click, "a canceled wait does not keep the lock")
}

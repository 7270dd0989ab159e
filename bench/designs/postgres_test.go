package designs

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/bench/front"
)

// postgresDesigns keep their stock in Postgres.
var postgresDesigns = []string{"lock-transaction", "postgres-row", "postgres-units", "postgres-batched"}

// testPostgresDesigns runs a test for each of these designs, with two processes' worth of it.
func testPostgresDesigns(t *testing.T, stock int64, test func(t *testing.T, s *testSale, d ...front.Design)) {
	t.Parallel()
	for _, name := range postgresDesigns {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			entry := All[name]
			s := newSale(t, stock, entry.Guarded)
			test(t, s, openDesign[front.Design](t, s, entry.New), openDesign[front.Design](t, s, entry.New))
		})
	}
}

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

func TestPostgresDesignsSellStockToCrowd(t *testing.T) {
	testPostgresDesigns(t, 100, func(t *testing.T, s *testSale, d ...front.Design) {
		require.Equal(t, map[front.Verdict]int{front.Confirmed: 100, front.SoldOut: 60}, s.crowd(t, 160, d...))
		s.requireRows(t, 100, 100)
	})
}

func TestPostgresDesignsRejectSecondOrder(t *testing.T) {
	testPostgresDesigns(t, 10, func(t *testing.T, s *testSale, d ...front.Design) {
		require.Equal(t, front.Confirmed, s.buy(t, d[0], "alice"))
		require.Equal(t, front.AlreadyPurchased, s.buy(t, d[0], "alice"))
		require.Equal(t, front.AlreadyPurchased, s.buy(t, d[1], "alice"))
		require.Equal(t, front.Confirmed, s.buy(t, d[1], "bob"), "a refused order takes no unit")
		s.requireRows(t, 2, 2)
	})
}

func TestPostgresDesignsRejectConcurrentClicks(t *testing.T) {
	testPostgresDesigns(t, 10, func(t *testing.T, s *testSale, d ...front.Design) {
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
	})
}

func TestPostgresDesignsReportExistingOrderWhenSoldOut(t *testing.T) {
	testPostgresDesigns(t, 1, func(t *testing.T, s *testSale, d ...front.Design) {
		require.Equal(t, front.Confirmed, s.buy(t, d[0], "alice"))
		require.Equal(t, front.AlreadyPurchased, s.buy(t, d[0], "alice"))
		require.Equal(t, front.SoldOut, s.buy(t, d[0], "bob"))
	})
}

func TestPostgresDesignsKeepUnitsOfRejectedOrder(t *testing.T) {
	testPostgresDesigns(t, 3, func(t *testing.T, s *testSale, d ...front.Design) {
		buy := func(user string, quantity int64) front.Verdict {
			o := s.order(user)
			o.Quantity = quantity
			verdict, err := d[0].Buy(t.Context(), o)
			require.NoError(t, err)
			return verdict
		}
		require.Equal(t, front.Confirmed, buy("alice", 2))
		require.Equal(t, front.SoldOut, buy("bob", 2))
		require.Equal(t, front.Confirmed, buy("carol", 1))
		s.requireRows(t, 2, 3)
	})
}

func TestPostgresDesignsShareStockBetweenProcesses(t *testing.T) {
	testPostgresDesigns(t, 2, func(t *testing.T, s *testSale, d ...front.Design) {
		require.Equal(t, front.Confirmed, s.buy(t, d[0], "alice"))
		require.NoError(t, d[1].Prepare(t.Context(), s.id, s.stock))
		require.Equal(t, front.Confirmed, s.buy(t, d[1], "bob"))
		require.NoError(t, d[0].Prepare(t.Context(), s.id, s.stock))
		require.Equal(t, front.SoldOut, s.buy(t, d[0], "carol"))
		s.requireRows(t, 2, 2)
	})
}

// batchOf is a batch of unanswered purchases.
func batchOf(orders ...front.Order) *batch {
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
		b := batchOf(orders...)
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
	b := batchOf(orders...)
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

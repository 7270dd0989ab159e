package offers_test

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/draw"
	"stampede/fulfillment/offers"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

func TestMain(m *testing.M) { testwork.Main(m) }

// drawn is a draw of a shop.
type drawn struct {
	*testshop.Shop
	*draws.Store
	goods, entries uuid.UUID
	receipts       map[string]order.Receipt // by user
}

// newDraw makes a draw of so many units, or of items with so many each, and users that enter. Its entries are over, but
// not in Postgres.
func newDraw(t *testing.T, s *testshop.Shop, users int, stocks ...int64) *drawn {
	t.Helper()
	d := &drawn{Shop: s, Store: draws.New(s.Pool), receipts: map[string]order.Receipt{}}
	goods := reservation.Terms{Name: "shoe", PerOrderLimit: 1, PaymentWindow: testshop.PaymentWindow}
	entries := reservation.Terms{Name: "entries", PerOrderLimit: 1, ClosesAt: time.Now().Add(time.Hour)}
	for i, stock := range stocks {
		goods.Stock, entries.Stock = goods.Stock+stock, entries.Stock+10_000
		if len(stocks) > 1 {
			item := reservation.Item{Code: order.ItemLetter(i), Name: "size"}
			item.Stock = stock
			goods.Items = append(goods.Items, item)
			item.Stock = 10_000
			entries.Items = append(entries.Items, item)
		}
	}
	for terms, id := range map[*reservation.Terms]*uuid.UUID{&goods: &d.goods, &entries: &d.entries} {
		sale, err := s.Catalog.Create(t.Context(), *terms)
		require.NoError(t, err)
		*id = sale.ID
	}
	_, err := s.Catalog.CreateDraw(t.Context(), d.goods, catalog.DrawTerms{Entries: d.entries, Freeze: time.Minute})
	require.NoError(t, err)
	var group errgroup.Group
	group.SetLimit(100)
	answers := make([]reservation.Answer, users)
	for n := range users {
		group.Go(func() (err error) {
			r := reservation.Request{Sale: d.entries, User: user(n), Quantity: 1}
			if len(stocks) > 1 {
				r.Quantity, r.Items = 0, map[string]int64{order.ItemLetter(n % len(stocks)): 1}
			}
			answers[n], err = s.Reserve(t.Context(), r)
			return err
		})
	}
	require.NoError(t, group.Wait())
	for n, a := range answers {
		require.Equal(t, reservation.Reserved, a.Verdict)
		r := a.Reservation
		d.receipts[user(n)] = order.Receipt{
			OrderID: r.OrderID, SaleID: d.entries, User: user(n), Epoch: r.Epoch, Sequence: r.Sequence, Quantity: r.Quantity,
			Lines: r.Lines, ReservedAt: r.ReservedAt,
		}
	}
	require.NoError(t, s.Exec(t, "UPDATE sales SET closes_at = now() - interval '1 second' WHERE id = $1", d.entries))
	return d
}

func user(n int) string { return fmt.Sprintf("user-%d", n) }

func (d *drawn) find(t *testing.T) draws.Draw {
	t.Helper()
	found, err := d.Store.Find(t.Context(), d.goods)
	require.NoError(t, err)
	return found
}

// offerer is that of a worker.
func offerer(t testing.TB, s *testshop.Shop) *offers.Offerer {
	return offers.New(offers.Config{Catalog: s.Catalog, Logger: testkit.Logger(t)})
}

// moveToRound moves the frozen draw to the time of the round that the tests know.
func (d *drawn) moveToRound(t *testing.T) {
	t.Helper()
	testshop.MoveDrawToRound(t, d.Pool, d.goods)
	closed := d.find(t).ClosesAt.UnixMilli()
	require.NoError(t, d.Rdb.HSet(t.Context(), d.Keys.Sale(0, d.entries), "closes_at_ms", closed).Err())
}

func (d *drawn) seed(t *testing.T) {
	t.Helper()
	d.moveToRound(t)
	signature, err := hex.DecodeString(testshop.BeaconSignature)
	require.NoError(t, err)
	_, err = d.Beacon(t.Context(), d.goods, testshop.BeaconRound, signature)
	require.NoError(t, err)
}

// rank brings a draw to its offers.
func (d *drawn) rank(t *testing.T) *offers.Offerer {
	t.Helper()
	testwork.Fulfil(t, d.Shop)
	o := offerer(t, d.Shop)
	require.NoError(t, o.Prepare(t.Context()))
	d.seed(t)
	require.NoError(t, o.Prepare(t.Context()))
	require.Equal(t, draws.Offering, d.find(t).State)
	return o
}

func offer(t *testing.T, o *offers.Offerer) int {
	t.Helper()
	done, err := o.Offer(t.Context())
	require.NoError(t, err)
	return done
}

// verify verifies the draw as a stranger does, and returns the bundle.
func (d *drawn) verify(t *testing.T) *draw.Bundle {
	t.Helper()
	bundle, err := d.Bundle(t.Context(), d.goods)
	require.NoError(t, err)
	var list bytes.Buffer
	require.NoError(t, d.Leaves(t.Context(), d.goods, &list))
	for name, own := range d.receipts {
		report, err := draw.Verify(t.Context(), bundle, bytes.NewReader(list.Bytes()), int64(list.Len()), &own)
		require.NoError(t, err)
		require.False(t, report.Has(draw.Broken), "%s: %v", name, report)
		require.False(t, report.Has(draw.Unknown), "%s: %v", name, report)
		proof, err := d.Proof(t.Context(), d.goods, own)
		require.NoError(t, err)
		require.Contains(t, report[4].Text, fmt.Sprintf("place %d, rank %d of", proof.Place, *proof.Rank))
	}
	return bundle
}

// outcomes are those of all ranks, in their order.
func (d *drawn) outcomes(t *testing.T) (all []string) {
	return testshop.Rows(t, d.Pool, `SELECT item || rank || ' ' || coalesce(reason, 'offered')
		FROM draw_offers WHERE sale_id = $1 ORDER BY item, rank`, d.goods)
}

// userOf is the entrant with a rank.
func (d *drawn) userOf(t *testing.T, rank int64) string {
	t.Helper()
	for name, own := range d.receipts {
		proof, err := d.Proof(t.Context(), d.goods, own)
		require.NoError(t, err)
		if *proof.Rank == rank {
			return name
		}
	}
	t.Fatalf("no entry has rank %d", rank)
	return ""
}

// A list is frozen only when Redis accepts no entry any more, and Postgres has each.
func TestEntriesAreFrozenWhenFinal(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 20, 5)
	o := offerer(t, s)
	prepare := func() draws.State {
		require.NoError(t, o.Prepare(t.Context()))
		return d.find(t).State
	}
	require.Equal(t, draws.Freezing, prepare(), "entries wait in the stream")
	require.Equal(t, reservation.Ended, s.Ask(t, d.entries, "late").Verdict, "whatever the clock of Redis says")
	testwork.Fulfil(t, s)
	require.NoError(t, s.Store.Distrust(t.Context(), 0))
	require.Equal(t, draws.Freezing, prepare(), "Redis may have lost entries")
	testwork.Rebuild(t, s)
	require.Equal(t, draws.Frozen, prepare())
	require.Equal(t, int64(20), d.find(t).Entries)

	_, err := s.Catalog.PublishPending(t.Context())
	require.NoError(t, err)
	require.Equal(t, int64(20), s.Count(t, "SELECT stock FROM sales WHERE id = $1", d.entries), "nothing is left")
	for name, own := range d.receipts {
		proof, err := d.Proof(t.Context(), d.goods, own)
		require.NoError(t, err, name)
		record, err := draw.NewRecord(own)
		require.NoError(t, err)
		require.Equal(t, record, proof.Record, "the receipt is the one of the list, also after a rebuild")
	}
}

// Who has bought before the draw was created is published with the list, once it is known of all.
func TestEarlierOrdersArePublished(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 20, 3, 4)
	sale := s.Keys.Sale(0, d.goods)
	require.NoError(t, s.Rdb.HSet(t.Context(), sale, "state", "open").Err())
	for _, name := range []string{"stranger", user(8), user(3)} {
		answer, err := s.Reserve(t.Context(), reservation.Request{
			Sale: d.goods, User: name, Items: map[string]int64{"b": 1},
		})
		require.NoError(t, err)
		require.Equal(t, reservation.Reserved, answer.Verdict)
	}
	require.NoError(t, s.Rdb.HSet(t.Context(), sale, "state", "offers").Err())
	testwork.Fulfil(t, s)
	o := offerer(t, s)
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), sale, "left.b", -1).Err())
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), sale, "left", -1).Err())
	require.NoError(t, o.Prepare(t.Context()))
	require.Equal(t, draws.Freezing, d.find(t).State, "an order is not in Postgres")
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), sale, "left.b", 1).Err())
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), sale, "left", 1).Err())
	require.NoError(t, o.Prepare(t.Context()))

	frozen := d.find(t)
	require.Equal(t, draws.Frozen, frozen.State)
	var places []draw.Place
	for _, name := range []string{user(8), user(3)} {
		proof, err := d.Proof(t.Context(), d.goods, d.receipts[name])
		require.NoError(t, err)
		places = append(places, draw.Place(proof.Place))
	}
	slices.Sort(places)
	require.Equal(t, &draw.Goods{
		Revision: 2, Stock: 7, Sold: 3, Holders: places,
		Items: []draw.Item{{Code: "a", Stock: 3}, {Code: "b", Stock: 4, Sold: 3}},
	}, frozen.Goods)
	d.seed(t)
	require.NoError(t, o.Prepare(t.Context()))
	for offer(t, o) > 0 {
	}
	require.Len(t, d.verify(t).Offers, 4+int(d.find(t).Skipped))
	d.requireUnbroken(t)
}

// Retired entries are final, too.
func TestRetiredEntriesAreFrozen(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 20, 5)
	testwork.Fulfil(t, s)
	shown, err := s.Catalog.End(t.Context(), d.entries)
	require.NoError(t, err)
	require.NoError(t, s.Catalog.Retire(t.Context(), d.entries, shown.Epoch, shown.Revision))
	require.NoError(t, offerer(t, s).Prepare(t.Context()))
	require.Equal(t, draws.Frozen, d.find(t).State)
}

// Units go by rank: first those of the stock, then each that returns. Holders and cancelled entries are skipped.
func TestUnitsAreOfferedByRank(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 40, 5)
	o := d.rank(t)
	l := ledger.New(s.Pool)
	holder, cancelled := d.userOf(t, 1), d.userOf(t, 3)
	// A purchase that was decided before the draw was published.
	state := func(now string) {
		require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, d.goods), "state", now).Err())
	}
	state("open")
	s.Buy(t, d.goods, holder)
	state("offers")
	bought, err := d.Proof(t.Context(), d.goods, d.receipts[holder])
	require.NoError(t, err)
	require.NoError(t, s.Exec(t, `UPDATE sale_events SET data = jsonb_set(data, '{goods}', data -> 'goods' ||
		jsonb_build_object('sold', 1, 'holders', ARRAY[$2::bigint])) WHERE sale_id = $1 AND type = 'DrawFrozen'`, d.goods,
		bought.Place))
	_, err = l.Withdraw(t.Context(), d.receipts[cancelled].OrderID, "a mistake", "ada")
	require.NoError(t, err)
	testwork.Fulfil(t, s)

	state("paused")
	require.Zero(t, offer(t, o))
	require.Empty(t, d.outcomes(t), "no rank has its turn before one that got no unit")
	state("offers")
	done := 0
	testkit.Eventually(t, testshop.Soon, "all have their turn", func() bool {
		done += offer(t, o)
		return done == 6
	})
	want := []string{"0 offered", "1 already-purchased", "2 offered", "3 entry-cancelled", "4 offered", "5 offered"}
	require.Equal(t, want, d.outcomes(t))
	require.Zero(t, s.Left(t, d.goods))
	require.Zero(t, offer(t, o))
	testwork.Fulfil(t, s)

	// A returned unit goes to the next one.
	winner := d.userOf(t, 2)
	proof, err := d.Proof(t.Context(), d.goods, d.receipts[winner])
	require.NoError(t, err)
	require.Equal(t, draw.Offered, proof.Outcome)
	testwork.EndWindow(t, s.Pool, proof.OrderID)
	require.Equal(t, 1, testwork.Expire(t, s))
	require.Equal(t, 2, testwork.ReleaseUnits(t, s), "and that of the cancelled entry")
	returned := time.Now()
	testkit.Eventually(t, testshop.Soon, "the unit is offered", func() bool { return offer(t, o) == 1 })
	t.Logf("the next rank was offered the unit %v after its return", time.Since(returned))
	require.Equal(t, append(want, "6 offered"), d.outcomes(t))
	testwork.Fulfil(t, s)
	require.Equal(t, int64(5), s.Count(t, "SELECT sold FROM sales WHERE id = $1", d.goods))

	found := d.find(t)
	require.Equal(t, []int64{5, 2}, []int64{found.Offered, found.Skipped})
	bundle := d.verify(t)
	require.Len(t, bundle.Offers, 7)
	skipped, err := d.Proof(t.Context(), d.goods, d.receipts[holder])
	require.NoError(t, err)
	require.Equal(t, []any{draw.Skipped, draw.SkippedHolder, uuid.Nil},
		[]any{skipped.Outcome, skipped.Reason, skipped.OrderID})

	// A halted sale offers nothing.
	require.NoError(t, s.Exec(t, "UPDATE sales SET state = 'paused' WHERE id = $1", d.goods))
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, d.goods), "left", 1).Err())
	require.Zero(t, offer(t, o))
}

// An offer that was reserved and not recorded is repeated with the same order, also after that order has ended.
func TestOfferIsRepeatedWithTheSameOrder(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 40, 5)
	o := d.rank(t)
	require.Equal(t, 5, offer(t, o))
	orders := func() []string {
		return testshop.Rows(t, s.Pool, "SELECT order_id::text FROM draw_offers ORDER BY rank")
	}
	first := orders()
	for _, id := range first {
		require.True(t, order.MayBelongTo(uuid.MustParse(id), d.goods))
		require.Equal(t, uuid.Version(7), uuid.MustParse(id).Version())
		require.Equal(t, uuid.RFC4122, uuid.MustParse(id).Variant())
	}
	forget := func() {
		require.NoError(t, s.Exec(t, "DELETE FROM draw_offers"))
		require.NoError(t, s.Exec(t, "UPDATE draws SET offered = 0, skipped = 0"))
	}
	forget()
	require.Zero(t, offer(t, o), "nobody looks at what was done")
	require.NoError(t, d.NoteDue(t.Context(), []uuid.UUID{d.goods})) // as it stays if a worker dies
	require.Equal(t, 5, offer(t, offerer(t, s)), "a worker that died had the last units")
	require.Equal(t, first, orders())
	require.Len(t, s.Events(t, 0), 45, "no order was made twice")

	testwork.Fulfil(t, s)
	testwork.EndWindow(t, s.Pool, uuid.MustParse(first[0]))
	require.Equal(t, 1, testwork.Expire(t, s))
	testwork.ReleaseUnits(t, s)
	s.Flush(t)
	testwork.Rebuild(t, s) // knows the orders, and the one that has ended
	forget()
	testkit.Eventually(t, testshop.Soon, "the unit of the ended order is the next one's", func() bool {
		_, _ = o.Offer(t.Context()) // the first call learns that the stock was rebuilt
		return len(orders()) == 6
	})
	require.Equal(t, first, orders()[:5], "an offer that was made and is over is not made again")
	require.Equal(t, int64(1), s.Count(t, "SELECT count(*) FROM orders WHERE user_id = $1 AND sale_id = $2",
		d.userOf(t, 0), d.goods))
}

// Several workers offer a unit once.
func TestWorkersOfferTogether(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 900, 700)
	d.rank(t)
	var workers errgroup.Group
	for range 4 {
		o := offerer(t, s)
		workers.Go(func() error {
			for s.Count(t, "SELECT count(*) FROM draw_offers") < 700 {
				if _, err := o.Offer(t.Context()); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, workers.Wait())
	require.Zero(t, s.Left(t, d.goods))
	require.Len(t, s.Events(t, 0), 1600)
	d.receipts = map[string]order.Receipt{user(0): d.receipts[user(0)]}
	require.Len(t, d.verify(t).Offers, 700)
}

// Each item has its own ranks and its own units.
func TestItemsAreOfferedEachByItsRank(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 30, 2, 20, 3)
	o := d.rank(t)
	for offer(t, o) > 0 {
	}
	bundle := d.verify(t)
	require.Len(t, bundle.Offers, 2+10+3)
	require.Len(t, bundle.Items, 3)
	testwork.Fulfil(t, s)
	require.Equal(t, "2,10,3 15", testwork.SoldItems(t, s.Pool, d.goods))
}

// A draw that leaves nothing is open when its last rank had its turn: it is sold out, not offered only.
func TestRestOfSoldOutDrawIsForEverybody(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	d := newDraw(t, s, 2, 2)
	o := d.rank(t)
	require.NoError(t, d.Catalog.OpenDraw(t.Context(), d.goods))
	require.Equal(t, 2, offer(t, o))
	testwork.Fulfil(t, s)
	testkit.Eventually(t, testshop.Soon, "the draw is open", func() bool {
		offer(t, o)
		return d.find(t).State == draws.Open
	})
	_, err := s.PublishPending(t.Context())
	require.NoError(t, err)
	testkit.Eventually(t, testshop.Soon, "it is sold out", func() bool {
		return s.Ask(t, d.goods, "eve").Verdict == reservation.SoldOut
	})
}

// An operator has what a draw leaves sold to everybody: not before each rank had its turn, and each order that was
// offered is in Postgres.
func TestRestOfDrawIsForEverybody(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 2, 3)
	ctx := t.Context()
	o := d.rank(t)
	open := func() {
		t.Helper()
		require.NoError(t, d.Catalog.OpenDraw(ctx, d.goods))
	}
	open()
	require.Equal(t, []any{draws.Offering, true}, []any{d.find(t).State, d.find(t).Opening})
	opened, waits, err := d.OpenRest(ctx, d.goods) // of a worker that has seen the draw over
	require.NoError(t, err)
	require.False(t, opened || waits, "no rank had its turn")
	require.Equal(t, 2, offer(t, o))
	require.Zero(t, offer(t, o))
	found := d.find(t)
	require.Equal(t, draws.Over, found.State, "the offers are not in Postgres")
	require.Equal(t, reservation.OffersOnly, s.Ask(t, d.goods, "eve").Verdict)
	testwork.Fulfil(t, s)
	awaitOpen := func() {
		t.Helper()
		testkit.Eventually(t, testshop.Soon, "the rest is for everybody", func() bool {
			offer(t, o)
			_, err := s.PublishPending(ctx)
			require.NoError(t, err)
			return d.find(t).State == draws.Open
		})
	}
	openOffers := func() int64 {
		watched, err := d.Watch(ctx, 10)
		require.NoError(t, err)
		return watched[0].Offers.Open
	}
	require.EqualValues(t, 2, openOffers())
	awaitOpen()
	require.Zero(t, openOffers(), "nobody watches how they end any more")
	sale, err := s.Catalog.Show(ctx, d.goods)
	require.NoError(t, err)
	require.Equal(t, []any{false, uuid.Nil, false}, []any{sale.OffersOnly, sale.EntriesID, sale.Waitlist})
	testkit.Eventually(t, testshop.Soon, "everybody may buy it", func() bool {
		return s.Ask(t, d.goods, "eve").Verdict == reservation.Reserved
	})
	require.Equal(t, reservation.SoldOut, s.Ask(t, d.goods, "ida").Verdict)
	testwork.Fulfil(t, s)
	open()
	require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM sale_events WHERE sale_id = $1 AND type = 'DrawOpening'", d.goods))
	d.requireUnbroken(t)

	s.Flush(t)
	testwork.Rebuild(t, s)
	offer(t, o)
	require.Equal(t, draws.Open, d.find(t).State)
	require.Equal(t, reservation.SoldOut, s.Ask(t, d.goods, "ida").Verdict)
	require.NoError(t, s.Exec(t, `WITH old AS (UPDATE orders SET updated_at = updated_at - interval '1 hour' WHERE sale_id = $1)
		UPDATE order_events SET occurred_at = occurred_at - interval '1 hour' WHERE sale_id = $1`, d.goods))
	d.requireUnbroken(t)

	require.NoError(t, s.Exec(t, `WITH gone AS (DELETE FROM draw_offers WHERE sale_id = $1 AND rank = 0)
		UPDATE draws SET offered = offered - 1 WHERE sale_id = $1`, d.goods))
	text := testwork.Text(t, testwork.Audit(t, s, d.goods))
	require.Contains(t, text, "what is left is for everybody, and 1 of 2 ranks had their turn")
	require.Equal(t, 1, strings.Count(text, "it is of a unit that was offered, and no turn has it"))
}

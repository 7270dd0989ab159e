package dashboard

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/dashboard/fleet"
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

// testDraw is a draw whose seed two parties make.
type testDraw struct {
	*testDesk
	draws          *draws.Store
	goods, entries uuid.UUID
}

var partySecrets = map[string][]byte{
	"notary": []byte(strings.Repeat("n", 32)), "club <b>": []byte(strings.Repeat("c", 32)),
}

// draw creates a draw that people have entered; its entries are recorded.
func (d *testDesk) draw(users int, stock int64) *testDraw {
	t := d.t
	t.Helper()
	drawn := &testDraw{testDesk: d, draws: draws.New(d.Shop.Pool)}
	for terms, id := range map[*reservation.Terms]*uuid.UUID{
		{Name: "Air <b>One", Stock: stock, PerOrderLimit: 1, PaymentWindow: time.Hour}:                  &drawn.goods,
		{Name: "entries", Stock: 10_000, PerOrderLimit: 1, ClosesAt: time.Now().Add(125 * time.Second)}: &drawn.entries,
	} {
		sale, err := d.Shop.Catalog.Create(t.Context(), *terms)
		require.NoError(t, err)
		*id = sale.ID
	}
	terms := catalog.DrawTerms{Entries: drawn.entries, Freeze: time.Minute}
	for name, secret := range partySecrets {
		hash := sha256.Sum256(secret)
		terms.Parties = append(terms.Parties, catalog.Party{Name: name, Commitment: hex.EncodeToString(hash[:])})
	}
	_, err := d.Shop.Catalog.CreateDraw(t.Context(), drawn.goods, terms)
	require.NoError(t, err)
	for n := range users {
		d.Buy(t, drawn.entries, fmt.Sprintf("user-%d", n))
	}
	testwork.FulfilAll(t, d.Shop)
	return drawn
}

// freeze ends the entries, and freezes their list.
func (d *testDraw) freeze() {
	d.t.Helper()
	const over = "UPDATE sales SET closes_at = now() - interval '1 second' WHERE id = $1"
	require.NoError(d.t, d.Shop.Exec(d.t, over, d.entries))
	_, err := d.Shop.Catalog.End(d.t.Context(), d.entries)
	require.NoError(d.t, err)
	require.NoError(d.t, d.draws.Prepare(d.t.Context(), d.goods, testshop.Clocks))
}

func (d *testDraw) reveal(party string) {
	d.t.Helper()
	_, err := d.draws.Reveal(d.t.Context(), d.goods, party, partySecrets[party])
	require.NoError(d.t, err)
}

// offer ranks the entries, and offers what is left, until so many ranks had their turn.
func (d *testDraw) offer(turns int64) {
	d.t.Helper()
	require.NoError(d.t, d.draws.Prepare(d.t.Context(), d.goods, testshop.Clocks))
	d.awaitTurns(turns)
}

func (d *testDesk) awaitTurns(turns int64) {
	d.t.Helper()
	worker := offers.New(offers.Config{Catalog: d.Shop.Catalog, Logger: testkit.Logger(d.t)})
	testkit.Eventually(d.t, within, "turns", func() bool {
		for _, offer := range []func(context.Context) (int, error){worker.Offer, worker.OfferWaiting} {
			_, err := offer(d.t.Context())
			require.NoError(d.t, err)
		}
		return d.Count(d.t, "SELECT count(*) FROM draw_offers") == turns
	})
	testwork.FulfilAll(d.t, d.Shop)
}

// orderOf returns the order or the entry of a rank.
func (d *testDraw) orderOf(column string, rank int) (id uuid.UUID) {
	d.t.Helper()
	require.NoError(d.t, d.Shop.Pool.QueryRow(d.t.Context(),
		"SELECT "+column+" FROM draw_offers WHERE sale_id = $1 AND rank = $2", d.goods, rank).Scan(&id))
	return id
}

func TestDrawIsShownInWords(t *testing.T) {
	t.Parallel()
	desk := openDesk(t)
	d := desk.draw(30, 5)
	b := d.as("vic")
	path := "/sales/" + d.goods.String() + "/draw"
	shows := func(want ...string) (page string) {
		t.Helper()
		_, page = b.get(path)
		for _, text := range want {
			require.Regexp(t, text, page)
		}
		_, rows := b.get(path + "?rows")
		require.NotContains(t, rows, "<html")
		require.Regexp(t, want[0], rows)
		return page
	}
	for _, sale := range []uuid.UUID{d.goods, d.entries} {
		_, page := b.get("/sales/" + sale.String())
		require.Contains(t, page, `<a href="`+path+`">Draw`)
	}
	_, page := b.get("/sales/" + d.entries.String() + "/draw")
	require.Contains(t, page, "<h1>Draw of <bdi>Air &lt;b&gt;One</bdi>", "the entries lead to the draw")
	status, _ := b.get("/sales/" + desk.sale("plain", 5).String() + "/draw")
	require.Equal(t, 404, status)

	shows(`>entering<.*People enter`, `Until <time.*in <b>02:0\d</b>.*and 2 parties reveal`, `none before the freeze`,
		`<dt>Entries</dt><dd>30<`)
	d.freeze()
	shows(`>frozen<.*The list is frozen`, `It waits for the secrets of <b><bdi>.*, .*</bdi></b>`,
		`stampede draw reveal `+d.goods.String()+" --party", `The list is frozen: 30 entries`,
		`Root of the list</dt><dd><code>[0-9a-f]{64}<`)
	d.reveal("notary")
	shows(`It waits for the secret of <b><bdi>club &lt;b&gt;</bdi></b>`, `secret <code>6e6e6e`,
		`Seed</dt><dd>not known yet`)
	d.reveal("club <b>")
	shows(`>ranking<`, `Seed</dt><dd><code>[0-9a-f]{64}<`)
	_, err := ledger.New(d.Shop.Pool).Withdraw(t.Context(), d.cancelNext(), "a mistake", "ada")
	require.NoError(t, err)
	d.offer(6)
	page = shows(`>offering<.*Units are offered by rank`, `6 of 30 ranks had their turn`, `offered, not paid <b>5<`,
		`skipped <b>1<`, `waiting <b>24<`, `<dt>1</dt><dd>the entry was cancelled<`, `aria-label="Offers per second, at most`)
	require.Equal(t, 24, strings.Count(pathOf(page, "o-waiting"), "M"), "a cell for each rank")
	require.Equal(t, "M0 0m6 1h3l-5 8h-3z", pathOf(page, "o-skipped"), "rank 0")

	_, err = ledger.New(d.Shop.Pool).Withdraw(t.Context(), d.orderOf("order_id", 2), "a mistake", "ada")
	require.NoError(t, err)
	testwork.ReleaseUnits(t, d.Shop)
	d.report(order.Money{Reference: "pi", OrderID: d.orderOf("order_id", 1)})
	d.offer(7)
	page = shows(`7 of 30 ranks`, `paid <b>1<`, `offered, not paid <b>4<`, `expired or cancelled <b>1<`)
	require.Equal(t, "M10 0m1 1h8v8h-8z", pathOf(page, "o-paid"), "rank 1")
	require.Contains(t, page, `<a href="/orders/`+d.orderOf("order_id", 6).String()+`">offered`)
	_, err = d.Shop.Catalog.Pause(t.Context(), d.goods)
	require.NoError(t, err)
	shows(`The sale is paused`)
	_, err = d.Shop.Catalog.End(t.Context(), d.goods)
	require.NoError(t, err)
	shows(`>over<.*The sale has ended`, `23 ranks had no turn`)
	d.Shop.Exec(t, "UPDATE draws SET voided_at = now(), void_reason = 'a secret is missing'")
	shows(`The draw is void: a secret is missing`)
}

// cancelNext returns the entry with rank 0, before it is offered.
func (d *testDraw) cancelNext() (entry uuid.UUID) {
	d.t.Helper()
	require.NoError(d.t, d.draws.Prepare(d.t.Context(), d.goods, testshop.Clocks))
	require.NoError(d.t, d.Shop.Pool.QueryRow(d.t.Context(), `
		SELECT encode(substring(ids FROM 16 * place + 1 FOR 16), 'hex')::uuid
		FROM draw_chunks AS c, (SELECT ('x' || encode(substring(places FOR 4), 'hex'))::bit(32)::int AS place
			FROM draw_ranks WHERE sale_id = $1) AS first WHERE c.sale_id = $1`, d.goods).Scan(&entry))
	return entry
}

// pathOf is the path of the last drawing of an outcome, which is that of the map.
func pathOf(page, class string) string {
	for _, m := range regexp.MustCompile(`class="`+class+`" d="([^"]*)"`).FindAllStringSubmatch(page, 2)[1:] {
		return m[1]
	}
	return ""
}

// A large draw is read in part, and drawn in cells of many ranks.
func TestMapOfLargeDrawIsBounded(t *testing.T) {
	t.Parallel()
	desk := openDesk(t)
	d := desk.draw(1, 5)
	d.freeze()
	d.Shop.Exec(t, `INSERT INTO draw_offers (sale_id, rank, place, entry_id, reason, order_id, epoch, offered_at)
		SELECT $1, n, n, gen_random_uuid(), CASE WHEN n < 20000 THEN 'already-purchased' END,
			CASE WHEN n >= 20000 THEN gen_random_uuid() END, 1, now() + n / 1000 * interval '1 second'
		FROM generate_series(0, 99999) AS n`, d.goods)
	d.Shop.Exec(t, `UPDATE draws SET entries = 3000000, seed = root, seeded_at = now(), ranked_at = now(),
		item_entries = ARRAY[3000000], offered = 80000, skipped = 20000`)
	_, page := d.as("vic").get("/sales/" + d.goods.String() + "/draw")
	for _, text := range []string{
		`offered, not paid <b>≈ 80,000<`, `skipped <b>≈ 20,000<`, `waiting <b>2,900,000<`, `Each cell is 334 ranks`,
		`The first 200,000 of 3,000,000: all others wait`, `at most 1,000"`,
		`<dt>≈ 20,000</dt><dd>the entrant had an order`,
	} {
		require.Contains(t, page, text)
	}
	cells := 0
	for _, class := range []string{"o-skipped", "o-offered", "o-waiting"} {
		cells += strings.Count(pathOf(page, class), "M")
	}
	require.Equal(t, 599, cells)
	require.Less(t, len(page), 40_000)
}

// The waiting list of a sale has its page, too. Who had a turn may join again at its end.
func TestWaitingListIsShown(t *testing.T) {
	t.Parallel()
	desk := openDesk(t)
	sale, err := desk.Shop.Catalog.Create(t.Context(), reservation.Terms{
		Name: "Air Two", Stock: 2, PerOrderLimit: 1, PaymentWindow: time.Hour, Waitlist: true, Shards: 1,
	})
	require.NoError(t, err)
	b := desk.as("vic")
	path := "/sales/" + sale.ID.String() + "/draw"
	_, page := b.get("/sales/" + sale.ID.String())
	require.Contains(t, page, `<a href="`+path+`">Waiting list</a>`)
	_, page = b.get(path)
	require.Contains(t, page, "Nobody waits")
	held := map[string]uuid.UUID{}
	for _, user := range []string{"h1", "h2"} {
		held[user] = desk.Buy(t, sale.ID, user)
	}
	join := func(user string) {
		answer, err := desk.Shop.Store.Join(t.Context(), sale.Sale, "", user, "")
		require.NoError(t, err)
		require.Equal(t, reservation.Reserved, answer.Verdict)
		held[user] = answer.Reservation.OrderID
		testwork.FulfilAll(t, desk.Shop)
	}
	ends := func(order uuid.UUID) {
		_, err := ledger.New(desk.Shop.Pool).Withdraw(t.Context(), order, "a mistake", "ada")
		require.NoError(t, err)
		testwork.ReleaseUnits(t, desk.Shop)
	}
	join("ann")
	join("bob")
	ends(held["h1"])
	desk.awaitTurns(1)
	first := held["ann"]
	var offered uuid.UUID
	require.NoError(t, desk.Shop.Pool.QueryRow(t.Context(), "SELECT order_id FROM draw_offers").Scan(&offered))
	ends(offered)
	desk.awaitTurns(2)
	ends(first)
	join("ann")
	desk.Shop.Exec(t, "UPDATE orders SET status = 'paid', version = 3 WHERE id = $1", held["bob"]) // with money for nothing
	_, page = b.get(path)
	require.Contains(t, page, "1 wait")
	require.Contains(t, page, "<dt>Wait</dt><dd>1<")
	require.Contains(t, page, "<dt>Had a turn</dt><dd>2<")
	require.Regexp(t, `expired or cancelled <b>1<`, page)
	require.Regexp(t, `<th scope="row"><a href="/orders/`+first.String()+`">1</a>`, page)
	require.Equal(t, 1, strings.Count(pathOf(page, "o-waiting"), "M"))
	require.NotContains(t, page, "Root of the list")
	shown, err := desk.Shop.Catalog.Show(t.Context(), sale.ID)
	require.NoError(t, err)
	require.EqualValues(t, 1, shown.Waiting)
}

// What a draw leaves is for everybody when an operator says so; until then the page says how.
func TestDrawSaysWhoGetsTheRest(t *testing.T) {
	t.Parallel()
	d := openDesk(t).draw(2, 3)
	d.freeze()
	for party := range partySecrets {
		d.reveal(party)
	}
	d.offer(2)
	b := d.as("vic")
	shows := func(want string) {
		t.Helper()
		_, page := b.get("/sales/" + d.goods.String() + "/draw")
		require.Regexp(t, want, page)
	}
	shows(`Each rank had its turn</h2>(?s:.*)To sell to everybody what is left, and what returns:</p>\s+` +
		`<pre>stampede draw open ` + d.goods.String())
	require.NoError(t, d.Shop.Catalog.OpenDraw(t.Context(), d.goods))
	shows("Nothing is offered any more: everybody can buy what is left when each offer is in Postgres.</p>")
	_, _, err := d.draws.OpenRest(t.Context(), d.goods)
	require.NoError(t, err)
	shows(`class="badge open">open</span> Everybody can buy</h2>`)
	_, page := b.get("/orders/" + d.orderOf("order_id", 0).String())
	require.Contains(t, page, "a unit that was offered")
	_, page = b.get("/orders/" + d.orderOf("entry_id", 0).String())
	require.Contains(t, page, `an entry of <a href="/sales/`+d.entries.String()+`/draw">a draw</a>`)
	_, page = b.get("/orders?sale=" + d.entries.String())
	require.Contains(t, page, `<span class="sub">entry</span>`)
}

// A draw that waits for a round of drand says which, and how anyone brings it.
func TestDrawAsksForItsRound(t *testing.T) {
	t.Parallel()
	d := openDesk(t).draw(2, 1)
	d.Shop.Exec(t, "UPDATE draws SET parties = NULL")
	b := d.as("vic")
	path := "/sales/" + d.goods.String() + "/draw"
	_, page := b.get(path)
	require.Regexp(t, `Until <time.*and the seed is round \d+ of drand, of <time`, page)
	_, err := d.Shop.Catalog.End(t.Context(), d.entries)
	require.NoError(t, err)
	_, page = b.get(path)
	require.Regexp(t, `>entering<.*Nobody enters any more`, page)
	require.Regexp(t, `ended the entries before their time, <time.*Then a worker freezes the list, and the seed is`, page)
	d.freeze()
	_, page = b.get(path)
	require.Regexp(t, `It waits for round \d+ of drand, of <time.*in <b>0[01]:\d\d</b>`, page)
	require.Regexp(t, draw.QuicknetChain+`/public/\d+ \|\n  stampede draw beacon `+d.goods.String(), page)
}

// A draw that is not frozen says why, and no more than that.
func TestDrawSaysWhyItWaits(t *testing.T) {
	t.Parallel()
	d := openDesk(t).draw(2, 1)
	d.Shop.Exec(t, "UPDATE sales SET closes_at = now() - interval '1 second' WHERE id = $1", d.entries)
	b := d.as("vic")
	shown := func() string {
		_, page := b.get("/sales/" + d.goods.String() + "/draw")
		require.Contains(t, page, "A worker freezes the list when each entry is in Postgres.")
		return page
	}
	const letter, worker = "dead letter</a> of the entries waits for your decision", "No worker runs."
	d.park(1) // of no sale that can be read
	page := shown()
	require.NotContains(t, page, letter)
	require.NotContains(t, page, worker)
	require.NoError(t, d.Shop.Exec(t, `INSERT INTO dead_letters (stream, entry_id, reason, deliveries, fields)
		SELECT 's', '1-1', 'why', 1, jsonb_build_array(jsonb_build_array('metadata', jsonb_build_object('base64',
			encode(convert_to($1, 'UTF8'), 'base64'))))`, d.entries.String()))
	d.fleet.publish(func(s *fleet.Snapshot) { s.Troubles = []fleet.Trouble{{Key: "NoWorker critical stream a"}} })
	page = shown()
	require.Contains(t, page, letter)
	require.NotContains(t, page, worker)
	d.Shop.Exec(t, "UPDATE dead_letters SET status = 'discarded'")
	d.fleet.publish(func(s *fleet.Snapshot) {
		s.Troubles = []fleet.Trouble{{Key: "RedisGone", Consequences: []fleet.Trouble{{Key: "NoWorker critical "}}}}
	})
	page = shown()
	require.NotContains(t, page, letter)
	require.Contains(t, page, worker)
}

// Sales say that their units are drawn, or only offered, where operators see them.
func TestOffersAreBadges(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	b := d.as("vic")
	sale := d.sale("drop", 5)
	d.show(sale)
	for badge, change := range map[string]func(*fleet.Sale){
		`<span class="badge void">draw: void</span>`: func(s *fleet.Sale) { s.DrawState, s.OffersOnly = draws.Void, true },
		`<span class="badge">offers only</span>`:     func(s *fleet.Sale) { s.DrawState, s.OffersOnly = "", true },
	} {
		d.fleet.publish(func(s *fleet.Snapshot) {
			s.Sales = slices.Clone(s.Sales)
			change(&s.Sales[0])
		})
		for _, path := range []string{"/", "/sales/" + sale.String()} {
			_, page := b.get(path)
			require.Contains(t, page, badge)
			require.Equal(t, 1, strings.Count(page, "draw: ")+strings.Count(page, "offers only"))
		}
	}
}

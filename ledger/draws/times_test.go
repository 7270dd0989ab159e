package draws_test

import (
	"encoding/hex"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/draw"
	"stampede/internal/pg"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger/draws"
)

func TestMain(m *testing.M) { testwork.Main(m) }

// A commit that hangs until the round is over, as with a standby that is away: the round after it gives the seed.
func TestFrozenAtIsReadAfterTheCommit(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 5)
	// At the commit, the entries are found to have closed longer ago than the freeze.
	d.exec(t, `CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		UPDATE sales SET closes_at = closes_at - interval '70 seconds' WHERE id = NEW.entries_id; RETURN NULL; END $$`)
	d.exec(t, `CREATE CONSTRAINT TRIGGER hangs AFTER UPDATE ON draws DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW WHEN (OLD.root IS NULL AND NEW.root IS NOT NULL) EXECUTE FUNCTION hang()`)
	frozen := d.prepare(t)
	require.Equal(t, draws.Frozen, frozen.State)
	require.Len(t, frozen.Rounds, 2)
	require.Equal(t, int64(1), testshop.QueryInt(t, d.pool,
		"SELECT count(*) FROM draws WHERE sale_id = $1 AND round = $2", d.goods, frozen.Round()))
	events := d.events(t, d.goods)
	require.Len(t, events, 1, "no time is told that is not proved")
	require.Contains(t, events[0], fmt.Sprint(frozen.Round()))

	// Until then the root is public, and nobody gives the seed. After the last round the draw is void.
	d = newDraw(t, 5)
	d.exec(t, "UPDATE draws SET entries = 5, root = sha256(''), frozen_at = now() WHERE sale_id = $1", d.goods)
	listed := d.find(t)
	require.Equal(t, draws.Freezing, listed.State)
	require.NotEmpty(t, listed.View().Root)
	require.Empty(t, listed.View().FrozenAt)
	_, err := d.Beacon(t.Context(), d.goods, beaconRound, beacon)
	require.ErrorIs(t, err, draws.ErrNotFrozen)
	d.exec(t, "UPDATE sales SET closes_at = now() - interval '190 seconds' WHERE id = $1", d.entries)
	require.Equal(t, draws.Void, d.prepare(t).State)
}

// After Postgres was restored from a time before the freeze, the list has the time and the round that were published.
func TestFrozenListIsRestored(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 5)
	d.exec(t, "UPDATE draws SET version = 2")
	frozen := d.prepare(t)
	// Later revisions are lost, and the orders from before the draw have ended.
	frozen.Goods = &draw.Goods{Revision: 7, Stock: 10, Sold: 1, Holders: []draw.Place{2}}
	kept := draw.Frozen{
		Version:       draw.Version,
		EntriesSaleID: d.entries, Entries: 5, Root: frozen.Root, FrozenAt: frozen.FrozenAt, Rounds: frozen.Rounds,
		ClosesAt: frozen.ClosesAt, FreezeSeconds: 60, Goods: frozen.Goods,
	}
	events := d.events(t, d.goods)
	d.exec(t, `WITH gone AS (DELETE FROM draw_chunks WHERE sale_id = $1), event AS (DELETE FROM sale_events
		WHERE sale_id = $1 AND type = 'DrawFrozen')
		UPDATE draws SET frozen_at = NULL, root = NULL, entries = NULL, round = NULL WHERE sale_id = $1`, d.goods)

	for says, change := range map[string]func(*draw.Frozen){
		"the root 00":                    func(f *draw.Frozen) { f.Root = draw.Hex{0} },
		"it has a draw of version 1":     func(f *draw.Frozen) { f.Version = 1 },
		"it has at revision 7 9 units":   func(f *draw.Frozen) { f.Goods = &draw.Goods{Revision: 7, Stock: 9} },
		"6 entries":                      func(f *draw.Frozen) { f.Entries++ },
		"a freeze of 61 seconds":         func(f *draw.Frozen) { f.FreezeSeconds++ },
		"the rounds":                     func(f *draw.Frozen) { f.FrozenAt = f.FrozenAt.Add(time.Hour) },
		"the sale " + d.entries.String(): func(f *draw.Frozen) { f.SaleID = d.entries },
		"never frozen at that time":      func(f *draw.Frozen) { f.FrozenAt = f.ClosesAt.Add(-time.Second) },
	} {
		other := kept
		change(&other)
		_, err := d.Restore(t.Context(), d.goods, &other, "ann")
		require.ErrorIs(t, err, draws.ErrNotRestored)
		require.ErrorContains(t, err, says)
	}
	require.Equal(t, draws.Freezing, d.find(t).State)
	for range 2 {
		restored, err := d.Restore(t.Context(), d.goods, &kept, "ann")
		require.NoError(t, err)
		require.Equal(t, frozen, restored)
	}
	again := d.events(t, d.goods)
	require.Len(t, again, 1)
	require.Contains(t, again[0], `"restored_by": "ann"`)
	require.Contains(t, events[0], hex.EncodeToString(frozen.Root))
	require.Equal(t, frozen, d.prepare(t))
}

// A genuine signature of a round that is still to come proves that the clock is behind.
func TestBeaconBeforeItsTimeMakesTheDrawVoid(t *testing.T) {
	t.Parallel()
	server, set := testkit.ClockedPostgres(t)
	pool, err := pgxpool.New(t.Context(), server.URL)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	for name, c := range map[string]struct {
		before time.Duration
		want   draws.State
	}{
		"as far as clocks may be apart": {500 * time.Millisecond, draws.Ranking},
		"further":                       {time.Minute, draws.Void},
	} {
		set(0)
		d := newDrawIn(t, pool, 5)
		d.prepare(t)
		testshop.MoveDrawToRound(t, pool, d.goods)
		set(time.Until(draw.RoundTime(beaconRound)) - c.before)
		given, err := d.Beacon(t.Context(), d.goods, beaconRound, beacon)
		require.Equal(t, c.want, given.State, name)
		if c.want != draws.Void {
			require.NoError(t, err, name)
			continue
		}
		require.ErrorIs(t, err, draws.ErrVoid)
		require.Empty(t, given.Seed)
		require.Contains(t, given.VoidReason, "the clock of Postgres, which was behind")
		require.Contains(t, d.events(t, d.goods)[1], "DrawVoided")
	}
}

// A draw with many entries holds up no other, whose last round may come meanwhile.
func TestDrawsDoNotWaitForEachOther(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 3)
	other := testshop.NewSale(t, d.pool, 10)
	for sale, want := range map[uuid.UUID]error{d.goods: pg.ErrLockHeld, other: nil} {
		lock, err := pg.Begin(t.Context(), d.pool, pg.DrawLock(sale), 0)
		require.NoError(t, err)
		require.ErrorIs(t, d.Prepare(t.Context(), d.goods, testshop.Clocks), want)
		lock.End()
	}

	entries := testshop.NewSale(t, d.pool, 10)
	d.exec(t, "INSERT INTO draws (sale_id, entries_id, kind, freeze_seconds) VALUES ($1, $2, 'draw', 90)", other, entries)
	d.exec(t, "UPDATE sales SET closes_at = now() - interval '2 seconds', state = 'ended' WHERE id = $1", entries)
	due := func() (ids []uuid.UUID) {
		sales, err := d.Unprepared(t.Context())
		require.NoError(t, err)
		for _, d := range sales {
			ids = append(ids, d.SaleID)
		}
		return ids
	}
	require.Equal(t, []uuid.UUID{other}, due(), "a frozen list waits for its round")
	d.exec(t, "UPDATE draws SET parties = '[]', round = NULL WHERE sale_id = $1", d.goods)
	require.Equal(t, []uuid.UUID{other, d.goods}, due(), "parties may be late")
	d.exec(t, "UPDATE draws SET frozen_at = NULL, root = NULL, entries = NULL")
	require.Equal(t, []uuid.UUID{d.goods, other}, due(), "the sooner round comes first")
}

// A crowd of entrants that ask for their proofs has the hashes of the chunks read once.
func TestProofsShareHashes(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 1500)
	d.prepare(t)
	entries := d.receipts(t)
	first, err := d.Proof(t.Context(), d.goods, entries[0])
	require.NoError(t, err)
	d.exec(t, "DELETE FROM draw_chunks WHERE sale_id = $1 AND chunk = 1", d.goods)
	again, err := d.Proof(t.Context(), d.goods, entries[0])
	require.NoError(t, err)
	require.Equal(t, first, again)
}

// A bundle has the stock of the freeze and each change since, as of one revision.
func TestBundleHasChangesOfTheStock(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 20, "a1", "b1")
	d.exec(t, "UPDATE draws SET version = 2")
	items := func(a, b int64) []draw.Item {
		return []draw.Item{{Code: "item-a", Stock: a}, {Code: "item-b", Stock: b}}
	}
	frozen := &draw.Goods{Revision: 1, Stock: 10, Items: items(5, 5)}
	prepared := d.prepare(t)
	require.Equal(t, frozen, prepared.Goods)
	require.Equal(t, frozen, prepared.View().Goods)
	b, err := d.Bundle(t.Context(), d.goods)
	require.NoError(t, err)
	require.Equal(t, []any{int64(2), frozen, []draw.Restock(nil)}, []any{b.Revision, b.Goods, b.Restocks})
	for _, change := range []string{
		`'SaleRestocked', '{"stock": 13, "items": [{"code": "item-a", "stock": 8, "name": "A"}, {"code": "item-b", "stock": 5}]}'`,
		`'SaleLowering', '{"stock": 11, "units": -2}'`,
		`'SaleRestocked', '{"stock": 11, "lowering": 4, "items": [{"code": "item-a", "stock": 8}, {"code": "item-b", "stock": 3}]}'`,
	} {
		d.exec(t, `WITH next AS (UPDATE sales SET revision = revision + 1, stock = 11 WHERE id = $1 RETURNING revision),
			items AS (UPDATE sale_items SET stock = CASE item WHEN 'a' THEN 8 ELSE 3 END WHERE sale_id = $1)
			INSERT INTO sale_events (sale_id, revision, occurred_at, type, data)
			SELECT $1, revision, '2026-11-22T18:00:00.5Z', `+change+` FROM next`, d.goods)
	}
	b, err = d.Bundle(t.Context(), d.goods)
	require.NoError(t, err)
	at := time.Date(2026, 11, 22, 18, 0, 0, 5e8, time.UTC)
	require.Equal(t, []draw.Restock{
		{Revision: 3, At: at, Stock: 13, Items: items(8, 5)}, {Revision: 5, At: at, Stock: 11, Items: items(8, 3)},
	}, b.Restocks)
	require.Equal(t, []any{int64(5), int64(11), items(8, 3), frozen}, []any{b.Revision, b.Stock, b.Items, b.Goods})

	d.exec(t, "UPDATE draws SET version = 1")
	b, err = d.Bundle(t.Context(), d.goods)
	require.NoError(t, err)
	require.Equal(t, []any{int64(0), []draw.Restock(nil)}, []any{b.Revision, b.Restocks}, "its verifiers know none of it")
}

// The void and the late draws come first, whatever else there is, and a draw whose goods have ended is over.
func TestWatchedAreTheVoidAndLateDraws(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	var ready, late, void, over, entering drawn
	for _, d := range []*drawn{&ready, &late, &void, &over, &entering} {
		*d = newDrawIn(t, pool, 2)
	}
	ready.exec(t, "UPDATE draws SET ranked_at = now() WHERE sale_id = $1", ready.goods)
	late.exec(t, "UPDATE sales SET closes_at = now() - interval '70 seconds' WHERE id = $1", late.entries)
	void.exec(t, "UPDATE draws SET voided_at = now(), void_reason = 'late' WHERE sale_id = $1", void.goods)
	over.exec(t, "UPDATE sales SET state = 'ended' WHERE id = $1", over.goods)
	entering.exec(t, "UPDATE sales SET closes_at = now() + interval '1 hour', state = 'open' WHERE id = $1", entering.entries)

	watch := func(most int) (sales []uuid.UUID, found []draws.Watched) {
		found, err := ready.Watch(t.Context(), most)
		require.NoError(t, err)
		for _, w := range found {
			sales = append(sales, w.SaleID)
		}
		return sales, found
	}
	sales, found := watch(10)
	require.Equal(t, []uuid.UUID{void.goods, late.goods, ready.goods, entering.goods}, sales)
	sales, _ = watch(2)
	require.Equal(t, []uuid.UUID{void.goods, late.goods}, sales)
	require.Equal(t, draws.Void, found[0].State)
	require.Equal(t, "late", found[0].VoidReason)
	step, overdue, until := found[1].Next()
	require.Equal(t, draws.StepFreeze, step)
	require.InDelta(t, 40, overdue.Seconds(), 20, "after half of the freeze")
	require.InDelta(t, 110, until.Sub(found[1].At).Seconds(), 25, "three times the freeze after the end")
	_, overdue, _ = found[3].Next()
	require.Zero(t, overdue)
}

func TestNextStepOfDraw(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	at := func(seconds int) time.Time { return noon.Add(time.Duration(seconds) * time.Second) }
	party := []draw.Party{{Name: "notary"}}
	for name, test := range map[string]struct {
		of    draws.Draw
		step  draws.Step
		late  time.Duration
		until time.Time
	}{
		"entering": {of: draws.Draw{State: draws.Entering, ClosesAt: at(-90)}},
		"offering": {of: draws.Draw{State: draws.Offering, RankedAt: at(-9000)}},
		"void":     {of: draws.Draw{State: draws.Void, ClosesAt: at(-9000)}},
		"in time to freeze": {
			draws.Draw{State: draws.Freezing, ClosesAt: at(-9), Freeze: 20 * time.Second}, draws.StepFreeze, 0, at(51),
		},
		"late to freeze": {
			draws.Draw{State: draws.Freezing, ClosesAt: at(-129), Freeze: time.Hour},
			draws.StepFreeze, 9 * time.Second,
			at(3*3600 - 129),
		},
		"late to freeze, with parties": {
			draws.Draw{State: draws.Freezing, ClosesAt: at(-129), Freeze: time.Hour, Parties: party},
			draws.StepFreeze,
			9 * time.Second,
			time.Time{},
		},
		"before the round": {
			draws.Draw{State: draws.Frozen, Rounds: []int64{draw.RoundAt(at(60))}}, draws.StepBeacon, 0, time.Time{},
		},
		"after the round": {
			draws.Draw{State: draws.Frozen, Rounds: []int64{draw.RoundAt(at(-180))}},
			draws.StepBeacon, time.Minute,
			time.Time{},
		},
		"late to reveal": {
			draws.Draw{State: draws.Frozen, Parties: party, FrozenAt: at(-2000), RevealBy: at(1600)},
			draws.StepReveal,
			200 * time.Second, at(1600),
		},
		"late to rank": {
			draws.Draw{State: draws.Ranking, SeededAt: at(-301)}, draws.StepRank, time.Second, time.Time{},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := draws.Watched{Draw: test.of, At: noon}
			step, late, until := w.Next()
			require.Equal(t, test.step, step)
			require.WithinDuration(t, at(int(test.late/time.Second)), noon.Add(late), 3*time.Second) // a round is as long
			require.WithinDuration(t, test.until, until, 3*time.Second)
		})
	}
}

// Offers of the latest turns are open, expired or answered; an order that is not recorded yet is open.
func TestWatchedOffers(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	d := newDrawIn(t, pool, 2)
	list := newDrawIn(t, pool, 30)
	list.exec(t, "UPDATE draws SET kind = 'waitlist', offered = 25 WHERE sale_id = $1", list.goods)
	list.exec(t, `INSERT INTO draw_offers (sale_id, rank, place, entry_id, order_id, reason, epoch, offered_at)
		SELECT $1, n, n, id, CASE WHEN n <> 24 THEN md5(n::text)::uuid END, CASE n WHEN 24 THEN 'already-purchased' END, 1,
			now() - interval '1 hour' + n * interval '1 minute'
		FROM (SELECT id, row_number() OVER (ORDER BY id) - 1 AS n FROM orders WHERE sale_id = $2) AS entry WHERE n < 25`,
		list.goods, list.entries)
	// The ranks 0 to 4 are too old, 24 was skipped, and 23 is on its way.
	list.exec(t, `INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at,
			updated_at, due)
		SELECT md5(n::text)::uuid, $1, 'user-' || n, 1, CASE WHEN n < 14 THEN 'expired' WHEN n < 17 THEN 'paid'
			WHEN n < 19 THEN 'cancelled' ELSE 'confirmed' END, 2, n, 1, now(), now(), CASE WHEN n <> 22 THEN now() END
		FROM generate_series(0, 22) AS n`, list.goods)
	// One who had a turn left thereafter.
	list.exec(t, `UPDATE orders SET status = 'cancelled' WHERE sale_id = $1
		AND id = (SELECT entry_id FROM draw_offers WHERE sale_id = $2 AND rank = 3)`, list.entries, list.goods)
	list.exec(t, "UPDATE sales SET sold = 29 WHERE id = $1", list.entries)

	found, err := d.Watch(t.Context(), 1)
	require.NoError(t, err)
	require.Len(t, found, 2)
	require.Equal(t, d.goods, found[0].SaleID)
	require.Equal(t, draws.Offers{}, found[0].Offers)
	w := found[1]
	require.Equal(t, list.goods, w.SaleID)
	require.Equal(t, testshop.Rows(t, pool, "SELECT name FROM sales WHERE id = $1", list.goods), []string{w.Name})
	require.EqualValues(t, 5, w.Waiting)
	require.InDelta(t, 41, w.Offers.Oldest.Minutes(), 1)
	w.Offers.Oldest = 0
	require.Equal(t, draws.Offers{Open: 4, Expired: 9, Answered: 6}, w.Offers)
	step, _, _ := w.Next()
	require.Empty(t, step)
}

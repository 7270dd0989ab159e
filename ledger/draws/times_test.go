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
	"stampede/ledger/draws"
)

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

package draws_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/mod/sumdb/tlog"

	"stampede/draw"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/reservation/order"
)

// drawn is a draw in Postgres alone. Its entries are over.
type drawn struct {
	*draws.Store
	pool           *pgxpool.Pool
	goods, entries uuid.UUID
}

// newDraw makes a draw whose entries are of these users and lines, and closed a second ago.
func newDraw(t *testing.T, users int, lines ...order.Lines) drawn {
	t.Helper()
	return newDrawIn(t, testkit.Pool(t), users, lines...)
}

func newDrawIn(t *testing.T, pool *pgxpool.Pool, users int, lines ...order.Lines) drawn {
	t.Helper()
	d := drawn{draws.New(pool), pool, testshop.NewSale(t, pool, 10), testshop.NewSale(t, pool, 1_000_000)}
	if len(lines) > 0 {
		d.goods, d.entries = testwork.NewSaleWithItems(t, pool, 5, 5), testwork.NewSaleWithItems(t, pool, 5000, 5000)
	}
	events := testshop.ReservedCrowd(d.entries, users)
	for i := range events {
		if len(lines) > 0 {
			events[i].Lines = lines[i%len(lines)]
		}
	}
	for portion := range slices.Chunk(events, 500) {
		testwork.Record(t, ledger.New(pool), portion)
	}
	d.exec(t, "INSERT INTO draws (sale_id, entries_id, kind, freeze_seconds) VALUES ($1, $2, 'draw', 60)",
		d.goods, d.entries)
	d.exec(t, "UPDATE sales SET closes_at = now() - interval '1 second', state = 'ended' WHERE id = $1", d.entries)
	return d
}

func (d drawn) exec(t *testing.T, statement string, args ...any) {
	t.Helper()
	testshop.Exec(t, d.pool, statement, args...)
}

func (d drawn) find(t *testing.T) draws.Draw {
	t.Helper()
	found, err := d.Find(t.Context(), d.goods)
	require.NoError(t, err)
	return found
}

func (d drawn) prepare(t *testing.T) draws.Draw {
	t.Helper()
	require.NoError(t, d.Prepare(t.Context(), d.goods, testshop.Clocks))
	return d.find(t)
}

// events are those of a sale, each as "type data".
func (d drawn) events(t *testing.T, sale uuid.UUID) []string {
	t.Helper()
	return testshop.Rows(t, d.pool,
		"SELECT type || ' ' || data FROM sale_events WHERE sale_id = $1 ORDER BY revision", sale)
}

// receipts are those of the live and the cancelled entries, by place.
func (d drawn) receipts(t *testing.T) (all []order.Receipt) {
	t.Helper()
	rows, err := d.pool.Query(t.Context(), `SELECT id, user_id, quantity, coalesce(lines, ''), sequence, epoch, reserved_at
		FROM orders WHERE sale_id = $1 ORDER BY id`, d.entries)
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		r := order.Receipt{SaleID: d.entries}
		require.NoError(t, rows.Scan(&r.OrderID, &r.User, &r.Quantity, &r.Lines, &r.Sequence, &r.Epoch, &r.ReservedAt))
		all = append(all, r)
	}
	return all
}

func (d drawn) leaves(t *testing.T) []byte {
	t.Helper()
	var list bytes.Buffer
	require.NoError(t, d.Leaves(t.Context(), d.goods, &list))
	return list.Bytes()
}

// listOf is the list of these entries, and its root.
func listOf(t *testing.T, entries []order.Receipt) (list []byte, root draw.Hex) {
	t.Helper()
	var tree draw.Tree
	for _, r := range entries {
		record, err := draw.NewRecord(r)
		require.NoError(t, err)
		tree.Add(record.Leaf())
		list = append(list, record[:]...)
	}
	hash := tree.Root()
	return list, hash[:]
}

// An entry counts if it was live when the entries closed, whatever became of it since.
func TestFrozenListHasEachEntry(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 2500)
	entries := d.receipts(t)
	before := entries[7]
	for _, cancelled := range []order.Receipt{before, entries[1030]} {
		_, err := ledger.New(d.pool).Withdraw(t.Context(), cancelled.OrderID, "a mistake", "ada")
		require.NoError(t, err)
	}
	d.exec(t, "UPDATE orders SET updated_at = now() - interval '1 hour' WHERE id = $1", before.OrderID)
	entries = slices.Delete(entries, 7, 8)

	for _, ask := range []func() error{
		func() error { return d.Leaves(t.Context(), d.goods, new(bytes.Buffer)) },
		func() error { _, err := d.Bundle(t.Context(), d.goods); return err },
		func() error { _, err := d.Proof(t.Context(), d.goods, entries[0]); return err },
	} {
		require.ErrorIs(t, ask(), draws.ErrNotFrozen)
	}
	require.Equal(t, draws.Freezing, d.find(t).State)
	frozen := d.prepare(t)
	list, root := listOf(t, entries)
	require.Equal(t, draws.Frozen, frozen.State)
	require.Equal(t, int64(2499), frozen.Entries)
	require.Equal(t, root, frozen.Root)
	require.True(t, bytes.Equal(list, d.leaves(t)))
	require.Equal(t, draw.Rounds(frozen.ClosesAt, time.Minute, frozen.FrozenAt), frozen.Rounds)
	require.Equal(t, frozen, d.prepare(t), "it is frozen once")

	require.Equal(t, []string{fmt.Sprintf(`DrawFrozen {"root": "%x", "rounds": [%d], "entries": 2499, "version": 1, `+
		`"closes_at": %q, "frozen_at": %q, "freeze_seconds": 60, "entries_sale_id": %q}`, []byte(root), frozen.Round(),
		frozen.ClosesAt.Format(time.RFC3339Nano), frozen.FrozenAt.Format(time.RFC3339Nano), d.entries)},
		d.events(t, d.goods))
	require.Equal(t, []string{`SaleLowering {"stock": 2498, "units": -997502}`}, d.events(t, d.entries))

	for _, place := range []int64{0, 1023, 1024, 1029, 2048, 2498} {
		p, err := d.Proof(t.Context(), d.goods, entries[place])
		require.NoError(t, err)
		require.Equal(t, place, p.Place)
		require.Nil(t, p.Rank)
		require.Empty(t, p.Outcome)
		record, err := draw.NewRecord(entries[place])
		require.NoError(t, err)
		require.Equal(t, record, p.Record)
		require.NoError(t, tlog.CheckRecord(p.Path, p.Entries, draw.Hash(p.Root), place, record.Leaf()))
	}
	for _, stranger := range []order.Receipt{
		before, {SaleID: d.entries}, {SaleID: d.entries, OrderID: uuid.Max}, {SaleID: d.goods, OrderID: entries[0].OrderID},
	} {
		_, err := d.Proof(t.Context(), d.goods, stranger)
		require.ErrorIs(t, err, draws.ErrNoEntry)
	}
}

func TestDrawWithoutEntries(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 0)
	frozen := d.prepare(t)
	empty := sha256.Sum256(nil)
	require.Equal(t, draws.Frozen, frozen.State)
	require.Equal(t, draw.Hex(empty[:]), frozen.Root)
	require.Empty(t, d.leaves(t))
	_, err := d.Proof(t.Context(), d.goods, order.Receipt{SaleID: d.entries, OrderID: d.entries})
	require.ErrorIs(t, err, draws.ErrNoEntry)
	d.seed(t)
	require.Equal(t, draws.Over, d.prepare(t).State)
}

// A freeze that was killed goes on with the next part of the list.
func TestFreezeGoesOn(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 0)
	const portion, entries = 64 * draw.ChunkLeaves, 64*draw.ChunkLeaves + 1500
	d.exec(t, `INSERT INTO orders
		(id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
		SELECT gen_random_uuid(), $1, 'user-' || n, 1, 'confirmed', 2, n, 1, now(), now() FROM generate_series(1, $2) AS n`,
		d.entries, entries)
	d.exec(t, "UPDATE sales SET sold = $2 WHERE id = $1", d.entries, entries)
	want := d.prepare(t)
	list := d.leaves(t)
	_, root := listOf(t, d.receipts(t))
	require.Equal(t, root, want.Root)
	require.Equal(t, int64(entries), want.Entries)
	written := func() []string {
		return testshop.Rows(t, d.pool, "SELECT xmin::text FROM draw_chunks WHERE chunk < 64 ORDER BY chunk")
	}
	first := written()
	for name, killed := range map[string]string{
		"after the first part":      "DELETE FROM draw_chunks WHERE chunk >= 64",
		"before the list is frozen": "",
	} {
		d.exec(t, killed)
		d.exec(t, "UPDATE draws SET frozen_at = NULL, root = NULL, entries = NULL")
		require.Equal(t, want.Root, d.prepare(t).Root, name)
		require.True(t, bytes.Equal(list, d.leaves(t)), name)
		require.Equal(t, first, written(), name)
	}
	d.exec(t, "DELETE FROM draw_chunks")
	d.exec(t, "UPDATE draws SET frozen_at = NULL, root = NULL, entries = NULL")
	require.Equal(t, want.Root, d.prepare(t).Root)
}

// A list that lacks a live order is not frozen.
func TestListIsComparedWithLiveOrders(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 5)
	d.exec(t, "UPDATE sales SET sold = sold + 1 WHERE id = $1", d.entries)
	require.ErrorContains(t, d.Prepare(t.Context(), d.goods, testshop.Clocks),
		"it has 5 entries, and there are 6 live orders")
	require.Zero(t, testshop.QueryInt(t, d.pool, "SELECT count(*) FROM draw_chunks"), "it begins again")
	require.Equal(t, draws.Freezing, d.find(t).State)
	require.Empty(t, d.events(t, d.goods))
	d.exec(t, "UPDATE sales SET sold = sold - 1 WHERE id = $1", d.entries)
	require.Equal(t, draws.Frozen, d.prepare(t).State)
}

// The clock that says which round gives the seed is read when nothing is left to wait for, so that no round is known
// before the root is committed.
func TestFreezeReadsTheClockWithAllLocks(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 5)
	other, err := d.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = other.Rollback(t.Context()) }() // it is committed
	lock := func(sale uuid.UUID) {
		_, err := other.Exec(t.Context(), "SELECT FROM sales WHERE id = $1 FOR NO KEY UPDATE NOWAIT", sale)
		require.NoError(t, err)
	}
	lock(d.goods)
	frozen := make(chan error, 1)
	go func() { frozen <- d.Prepare(t.Context(), d.goods, testshop.Clocks) }()
	testshop.AwaitWaiting(t, d.pool, 1)
	lock(d.entries) // in the order of a repeated creation
	var later time.Time
	require.NoError(t, other.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&later))
	require.NoError(t, other.Commit(t.Context()))
	require.NoError(t, <-frozen)
	require.True(t, later.Before(d.find(t).FrozenAt))

	// What waits after the clock is read does not wait long.
	d = newDraw(t, 5)
	d.exec(t, "UPDATE draws SET freeze_seconds = 20")
	d.exec(t, `CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NEW; END $$`)
	d.exec(t, `CREATE TRIGGER waits BEFORE INSERT ON sale_events
		FOR EACH ROW WHEN (NEW.type = 'DrawFrozen') EXECUTE FUNCTION wait()`)
	other, err = d.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = other.Exec(t.Context(), "SELECT pg_advisory_xact_lock(7)")
	require.NoError(t, err)
	require.ErrorContains(t, d.Prepare(t.Context(), d.goods, testshop.Clocks), "statement timeout")
	require.Equal(t, draws.Freezing, d.find(t).State)
	require.NoError(t, other.Rollback(t.Context()))
	require.Equal(t, draws.Frozen, d.prepare(t).State)
}

const beaconRound = testshop.BeaconRound

var beacon = unhex(testshop.BeaconSignature)

func unhex(text string) []byte {
	raw, err := hex.DecodeString(text)
	if err != nil {
		panic(err)
	}
	return raw
}

func (d drawn) seed(t *testing.T) draws.Draw {
	t.Helper()
	testshop.MoveDrawToRound(t, d.pool, d.goods)
	seeded, err := d.Beacon(t.Context(), d.goods, beaconRound, beacon)
	require.NoError(t, err)
	return seeded
}

func TestBeaconSeedsTheDraw(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 5)
	give := func(round int64, signature []byte) (draws.Draw, error) {
		return d.Beacon(t.Context(), d.goods, round, signature)
	}
	_, err := give(beaconRound, beacon)
	require.ErrorIs(t, err, draws.ErrNotFrozen)
	d.prepare(t)
	testshop.MoveDrawToRound(t, d.pool, d.goods)
	for name, signature := range map[string][]byte{
		"none": nil, "another": append([]byte{beacon[0] ^ 0x20}, beacon[1:]...),
		"infinity": append([]byte{0xc0}, make([]byte, 47)...), "too long": make([]byte, 1<<20),
	} {
		_, err = give(beaconRound, signature)
		require.ErrorIs(t, err, draw.ErrBeacon, name)
	}
	_, err = give(beaconRound+1, beacon)
	var wrong *draws.WrongRoundError
	require.ErrorAs(t, err, &wrong)
	require.Equal(t, int64(beaconRound), wrong.Round)
	_, err = d.Reveal(t.Context(), d.goods, "ann", beacon)
	require.ErrorIs(t, err, draws.ErrOtherSeed)
	require.Len(t, d.events(t, d.goods), 1)

	seeded, err := give(beaconRound, beacon)
	require.NoError(t, err)
	require.Equal(t, draws.Ranking, seeded.State)
	require.Equal(t, "fc1873a13f3545aeade8401532ef5519920652eee6b0d2b19ca12643b87b3587", hex.EncodeToString(seeded.Seed))
	again, err := give(beaconRound, beacon)
	require.NoError(t, err)
	require.Equal(t, seeded, again)
	_, err = give(beaconRound, beacon[:47])
	require.ErrorIs(t, err, draw.ErrBeacon)
	require.Equal(t, []string{fmt.Sprintf(`DrawSeeded {"seed": "%x", "round": %d, "signature": "%x"}`,
		[]byte(seeded.Seed), beaconRound, beacon)}, d.events(t, d.goods)[1:])
	_, err = d.Beacon(t.Context(), d.entries, beaconRound, beacon)
	require.ErrorIs(t, err, draws.ErrNoDraw)
}

func TestLateDrawIsVoid(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 5)
	endLate := func() bool {
		found := d.find(t)
		ended, err := d.EndLate(t.Context(), &found, testshop.Clocks)
		require.NoError(t, err)
		return ended
	}
	require.False(t, endLate())
	// A list whose last step comes after the last round.
	d.exec(t, "UPDATE sales SET closes_at = now() - interval '190 seconds' WHERE id = $1", d.entries)
	late := d.prepare(t)
	require.Equal(t, draws.Void, late.State)
	require.Zero(t, late.Entries)
	_, err := d.Beacon(t.Context(), d.goods, beaconRound, beacon)
	require.ErrorIs(t, err, draws.ErrVoid)
	_, err = d.Bundle(t.Context(), d.goods)
	require.ErrorIs(t, err, draws.ErrVoid)
	want := []string{`DrawVoided {"reason": "the list of the entries was not frozen before the last round"}`}
	require.Equal(t, want, d.events(t, d.goods))
	require.False(t, endLate(), "once")

	d.exec(t, "UPDATE draws SET voided_at = NULL, void_reason = NULL")
	require.True(t, endLate())
	require.Equal(t, append(want, want...), d.events(t, d.goods))

	// The second round gives the seed of a list that was frozen between the first and the second.
	d = newDraw(t, 5)
	d.exec(t, "UPDATE sales SET closes_at = now() - interval '70 seconds' WHERE id = $1", d.entries)
	require.Len(t, d.prepare(t).Rounds, 2)
}

func TestPartiesSeedTheDraw(t *testing.T) {
	t.Parallel()
	for _, version := range []int{draw.FirstVersion, draw.Version} {
		t.Run(fmt.Sprint("version ", version), func(t *testing.T) {
			t.Parallel()
			partiesSeedTheDraw(t, version)
		})
	}
}

func partiesSeedTheDraw(t *testing.T, version int) {
	t.Helper()
	secrets := map[string][]byte{"ann": bytes.Repeat([]byte{1}, 32), "bob": bytes.Repeat([]byte{2}, 32)}
	withParties := func() drawn {
		d := newDraw(t, 5)
		var parties []draw.Party
		for _, name := range []string{"bob", "ann"} {
			sum := sha256.Sum256(secrets[name])
			parties = append(parties, draw.Party{Name: name, Commitment: sum[:]})
		}
		d.exec(t, "UPDATE draws SET parties = $1, version = $2", parties, version)
		return d
	}
	d := withParties()
	reveal := func(name string, secret []byte) (draws.Draw, error) {
		limited, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		return d.Reveal(limited, d.goods, name, secret)
	}
	_, err := reveal("ann", secrets["ann"])
	require.ErrorIs(t, err, draws.ErrNotFrozen)
	frozen := d.prepare(t)
	require.Contains(t, d.events(t, d.goods)[0], fmt.Sprintf(
		`"parties": [{"name": "bob", "commitment": "%x"}, {"name": "ann", "commitment": "%x"}]`,
		[]byte(frozen.Parties[0].Commitment), []byte(frozen.Parties[1].Commitment)))
	require.Empty(t, frozen.Rounds)
	require.Equal(t, frozen.FrozenAt.Add(time.Hour), frozen.RevealBy)
	offering, err := d.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = offering.Rollback(context.Background()) }()
	_, err = offering.Exec(t.Context(), "SELECT FROM draws FOR NO KEY UPDATE")
	require.NoError(t, err)
	_, err = reveal("eve", secrets["ann"])
	require.ErrorIs(t, err, draws.ErrNoParty, "who guesses does not wait for the draw")
	_, err = reveal("ann", secrets["bob"])
	require.ErrorIs(t, err, draw.ErrParties)
	require.NoError(t, offering.Rollback(t.Context()))
	_, err = d.Beacon(t.Context(), d.goods, beaconRound, beacon)
	require.ErrorIs(t, err, draws.ErrOtherSeed)
	for range 2 {
		revealed, err := reveal("ann", secrets["ann"])
		require.NoError(t, err)
		require.Equal(t, draws.Frozen, revealed.State)
		require.Equal(t, draw.Hex(secrets["ann"]), revealed.Parties[1].Secret)
	}
	_, err = reveal("ann", secrets["bob"])
	require.ErrorIs(t, err, draw.ErrParties, "a secret that is known does not change")
	seeded, err := reveal("bob", secrets["bob"])
	require.NoError(t, err)
	want, err := draw.PartiesSeed(version, d.goods, seeded.Root, seeded.Parties)
	require.NoError(t, err)
	require.Equal(t, draw.Hex(want[:]), seeded.Seed)
	require.Len(t, d.events(t, d.goods), 2)
	require.Equal(t, draws.Offering, d.prepare(t).State)
	offered, err := d.Bundle(t.Context(), d.goods)
	require.NoError(t, err)
	list := d.leaves(t)
	report, err := draw.Verify(t.Context(), offered, bytes.NewReader(list), int64(len(list)), nil)
	require.NoError(t, err)
	require.False(t, report.Has(draw.Broken), report)

	d = withParties()
	d.prepare(t)
	_, err = reveal("ann", secrets["ann"])
	require.NoError(t, err)
	d.exec(t, "UPDATE draws SET frozen_at = now() - interval '1 hour'")
	_, err = reveal("bob", secrets["bob"])
	require.ErrorIs(t, err, draws.ErrLate)
	late := d.find(t)
	require.Equal(t, draws.Frozen, late.State, "one clock alone does not end it")
	ended, err := d.EndLate(t.Context(), &late, testshop.Clocks)
	require.NoError(t, err)
	require.True(t, ended)
	bundle, err := d.Bundle(t.Context(), d.goods)
	require.NoError(t, err)
	require.Equal(t, draw.VoidSilent, bundle.VoidReason)
	list = d.leaves(t)
	report, err = draw.Verify(t.Context(), bundle, bytes.NewReader(list), int64(len(list)), nil)
	require.NoError(t, err)
	require.False(t, report.Has(draw.Broken), report)
	_, err = reveal("bob", secrets["bob"])
	require.ErrorIs(t, err, draws.ErrVoid)
}

// Ranks are those that anyone computes from the list and the seed, and each entry finds its own.
func TestRanksFollowFromListAndSeed(t *testing.T) {
	t.Parallel()
	for name, lines := range map[string][]order.Lines{"without items": {}, "with items": {"a1", "b1", "b1"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDraw(t, 2100, lines...)
			d.prepare(t)
			seed := draw.Seed(d.seed(t).Seed)
			ranked := d.prepare(t)
			require.Equal(t, draws.Offering, ranked.State)
			entries := d.receipts(t)
			list, _ := listOf(t, entries)
			lowest := map[byte]*draw.Lowest{}
			for place := range entries {
				record := draw.Record(list[place*draw.RecordBytes:])
				if lowest[record[0]] == nil {
					lowest[record[0]] = draw.NewLowest(len(entries), draw.Score{})
				}
				lowest[record[0]].Add(int64(place), seed.Score(record.Leaf()))
			}
			letters := []byte{0}
			if len(lines) > 0 {
				letters = []byte("ab")
			}
			require.Len(t, ranked.ItemEntries, len(letters))
			for item, letter := range letters {
				ranks := lowest[letter].Ranks()
				require.Equal(t, int64(len(ranks)), ranked.ItemEntries[item])
				for rank := 0; rank < len(ranks); rank += 97 {
					p, err := d.Proof(t.Context(), d.goods, entries[ranks[rank].Place])
					require.NoError(t, err)
					require.Equal(t, int64(rank), *p.Rank)
				}
			}
		})
	}
}

// A draw for which there is more to do since it was found is not left.
func TestDueAgainIsNotDone(t *testing.T) {
	t.Parallel()
	d := newDraw(t, 1)
	due := func() draws.Draw {
		require.NoError(t, d.NoteDue(t.Context(), []uuid.UUID{d.goods, uuid.New()}))
		found, err := d.Due(t.Context(), draws.ByHash)
		require.NoError(t, err)
		require.Len(t, found, 1)
		return found[0]
	}
	first, second := due(), due()
	for _, found := range []struct {
		*draws.Draw
		left int
	}{{&first, 1}, {&second, 0}} {
		require.NoError(t, d.Done(t.Context(), found.Draw))
		again, err := d.Due(t.Context(), draws.ByHash)
		require.NoError(t, err)
		require.Len(t, again, found.left)
	}
}

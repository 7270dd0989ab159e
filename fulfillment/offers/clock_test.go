package offers_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/clocks"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger/draws"
	"stampede/reservation"
)

// closes sets the end of the entries, from now.
func (d *drawn) closes(t *testing.T, fromNow string) {
	t.Helper()
	require.NoError(t, d.Exec(t, "UPDATE sales SET closes_at = now() + $2::interval WHERE id = $1", d.entries, fromNow))
}

// A clock of Postgres that is ahead for a moment neither ends the entries of a draw nor makes it void.
func TestClockAheadEndsNoDraw(t *testing.T) {
	t.Parallel()
	s, set := testshop.OnClockedPostgres(t)
	d := newDraw(t, s, 20, 5)
	d.closes(t, "40 seconds")
	testwork.Fulfil(t, s)
	o := offerer(t, s)
	for _, ahead := range []time.Duration{45 * time.Second, time.Hour} { // after the end, and after the last round
		set(ahead)
		require.Equal(t, draws.Freezing, d.find(t).State, "by that clock")
		require.ErrorIs(t, o.Prepare(t.Context()), clocks.ErrApart)
		set(0)
		require.NoError(t, o.Prepare(t.Context()))
		require.Equal(t, draws.Entering, d.find(t).State)
	}
	require.Equal(t, reservation.Reserved, s.Ask(t, d.entries, "late").Verdict)
	d.closes(t, "-1 second")
	testwork.FulfilAll(t, s)
	require.NoError(t, o.Prepare(t.Context()))
	testwork.FulfilAll(t, s)
	require.NoError(t, o.Prepare(t.Context()))
	frozen := d.find(t)
	require.Equal(t, draws.Frozen, frozen.State)
	require.Equal(t, int64(21), frozen.Entries)
}

// A clock of Postgres that is behind does not freeze a list whose round is known to the world.
func TestClockBehindFreezesNoList(t *testing.T) {
	t.Parallel()
	s, set := testshop.OnClockedPostgres(t)
	d := newDraw(t, s, 20, 5)
	testwork.Fulfil(t, s)
	_, err := s.Catalog.End(t.Context(), d.entries)
	require.NoError(t, err)
	d.closes(t, "-65 seconds")
	o := offerer(t, s)
	set(-30 * time.Second)
	require.Len(t, d.find(t).Rounds, 1, "by that clock")
	require.ErrorIs(t, o.Prepare(t.Context()), clocks.ErrApart)
	require.Equal(t, draws.Freezing, d.find(t).State)
	set(0)
	require.NoError(t, o.Prepare(t.Context()))
	require.Len(t, d.find(t).Rounds, 2)
	require.Equal(t, draws.Frozen, d.find(t).State)
}

// Who waits is not sent away because the sale is over by one clock. Its list has the same end.
func TestWaitingListDoesNotEndByClock(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	l := newList(t, s, "ann")
	l.join(t, "bob")
	require.NoError(t, s.Exec(t, "UPDATE sales SET closes_at = now() WHERE id = $1", l.sale.ID))
	_, err := offerer(t, s).OfferWaiting(t.Context())
	require.NoError(t, err)
	found, err := l.Store.Find(t.Context(), l.sale.ID)
	require.NoError(t, err)
	require.Equal(t, draws.Over, found.State)
	entries, err := s.Catalog.Show(t.Context(), found.EntriesID)
	require.NoError(t, err)
	require.Equal(t, reservation.StateOpen, entries.State)
}

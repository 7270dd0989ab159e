package offers_test

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/draw"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger/draws"
	"stampede/upkeep/archive"
)

// archived ends a sale and its entries, and returns the files of both: that of the goods first.
func archived(t *testing.T, s *testshop.Shop, goods, entries uuid.UUID) (files []string) {
	t.Helper()
	_, err := s.Catalog.End(t.Context(), goods)
	require.NoError(t, err)
	testwork.FulfilAll(t, s)
	testwork.ReleaseUnits(t, s)
	a, err := archive.New(t.Context(), archive.Config{
		Pool: s.Pool, Redis: s.Rdb, Keys: s.Keys, Store: s.Store, Dir: t.TempDir(), Logger: s.Logger,
	})
	require.NoError(t, err)
	defer a.Close()
	for _, sale := range []uuid.UUID{goods, entries} {
		shown, err := s.Catalog.Show(t.Context(), sale)
		require.NoError(t, err)
		require.NoError(t, s.Catalog.Retire(t.Context(), sale, shown.Epoch, shown.Revision))
		done, err := a.Sale(t.Context(), sale)
		require.NoError(t, err)
		files = append(files, done.Path)
	}
	return files
}

// inOtherDatabase takes files into another database, where no promise is broken.
func inOtherDatabase(t *testing.T, files []string, check func(t *testing.T, other *testshop.Shop)) {
	t.Helper()
	t.Run("in another database", func(t *testing.T) {
		other := testshop.OnOwnRedis(t, 1)
		for _, file := range files {
			_, err := archive.Restore(t.Context(), other.Pool, file)
			require.NoError(t, err)
		}
		check(t, other)
		testwork.RequireUnbroken(t, other, uuid.Nil)
	})
}

// A draw that is archived is the same draw in another database: list, seed, ranks and turns.
func TestArchivedDrawComesBack(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 12, 3, 2)
	offer(t, d.rank(t))
	testwork.FulfilAll(t, s)
	for _, o := range testshop.Rows(t, s.Pool, "SELECT id::text FROM orders WHERE sale_id = $1", d.goods) {
		testwork.EndWindow(t, s.Pool, uuid.MustParse(o))
	}
	require.Equal(t, 5, testwork.Expire(t, s))
	bundle := func(s *testshop.Shop) string {
		var all bytes.Buffer
		d := &drawn{Shop: s, Store: draws.New(s.Pool), goods: d.goods, entries: d.entries, receipts: d.receipts}
		require.NoError(t, d.Leaves(t.Context(), d.goods, &all))
		text, err := json.Marshal(d.verify(t))
		require.NoError(t, err)
		return all.String() + string(text)
	}
	turns := "SELECT row_to_json(o)::text FROM draw_offers AS o ORDER BY item, rank"
	had := testshop.Rows(t, s.Pool, turns)
	require.Len(t, had, 5)
	files := archived(t, s, d.goods, d.entries)
	before := bundle(s) // it stays in Postgres, too
	inOtherDatabase(t, files, func(t *testing.T, other *testshop.Shop) {
		require.Equal(t, before, bundle(other))
		require.Equal(t, had, testshop.Rows(t, other.Pool, turns))
	})
	back, err := archive.Restore(t.Context(), s.Pool, files[0])
	require.NoError(t, err)
	require.EqualValues(t, 1+1+1+5, back.DrawRows, "the draw, its list, its ranks and its turns")
	require.Equal(t, had, testshop.Rows(t, s.Pool, turns), "they were there")
}

// So is a waiting list.
func TestArchivedWaitingListComesBack(t *testing.T) {
	forms(t, func(t *testing.T, s *testshop.Shop, newList func(holders ...string) *list) {
		l := newList("h1", "h2")
		l.join(t, "ann", "bob")
		l.expire(t, "h1")
		l.awaitTurns(t, offerer(t, s), "ann offered")
		testwork.FulfilAll(t, s)
		l.expire(t, "ann", "h2")
		was, err := l.Waiter(t.Context(), l.sale.ID, "ann")
		require.NoError(t, err)
		require.Equal(t, draw.Offered, was.Outcome)
		files := archived(t, s, l.sale.ID, l.sale.EntriesID)
		inOtherDatabase(t, files, func(t *testing.T, other *testshop.Shop) {
			w, err := draws.New(other.Pool).Waiter(t.Context(), l.sale.ID, "ann")
			require.NoError(t, err)
			require.Equal(t, was, w)
		})
	})
}

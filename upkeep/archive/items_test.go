package archive_test

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/upkeep/archive"
)

// endedBaskets returns a sale with items which has left Redis, and of which ann has two m and one l, and carol one m.
func endedBaskets(t *testing.T, s *testshop.Shop) (sale uuid.UUID, ann reservation.Answer) {
	t.Helper()
	l := ledger.New(s.Pool)
	created, err := s.Create(t.Context(), reservation.Terms{
		Name: "shirt", Stock: 8, PerOrderLimit: 4, PaymentWindow: testshop.PaymentWindow, Currency: "EUR",
		Items: []reservation.Item{
			{Code: "m", Name: "M", Stock: 5, UnitPrice: 1000, PerOrderLimit: 3},
			{Code: "l", Name: "L", Stock: 3, UnitPrice: 3000},
		},
	})
	require.NoError(t, err)
	buy := func(user string, items map[string]int64) reservation.Answer {
		t.Helper()
		a, err := s.Reserve(t.Context(), reservation.Request{Sale: created.ID, User: user, Items: items})
		require.NoError(t, err)
		require.Equal(t, reservation.Reserved, a.Verdict)
		return a
	}
	ann = buy("ann", map[string]int64{"m": 2, "l": 1})
	bob := buy("bob", map[string]int64{"l": 2})
	carol := buy("carol", map[string]int64{"m": 1})
	testwork.Fulfil(t, s)
	testwork.Pay(t, l, carol.Reservation.OrderID, "carol", "pi")
	testwork.Pay(t, l, ann.Reservation.OrderID, "ann", "pi")
	testwork.Cancel(t, l, bob.Reservation.OrderID, "bob")
	testwork.ReleaseUnits(t, s)
	name := "tee"
	_, err = s.Rename(t.Context(), created.ID, catalog.Names{Sale: &name, Items: map[string]string{"m": "Medium"}})
	require.NoError(t, err)
	_, err = s.Catalog.End(t.Context(), created.ID)
	require.NoError(t, err)
	require.Equal(t, 1, retireAll(t, s))
	return created.ID, ann
}

func TestArchivedItemsComeBack(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale, ann := endedBaskets(t, s)
	before, dir := rows(t, s, sale), t.TempDir()
	seen, err := s.Catalog.Show(t.Context(), sale)
	require.NoError(t, err)
	require.Equal(t, []string{"tee", "Medium"}, []string{seen.Name, seen.Items[0].Name})
	_, err = s.Rename(t.Context(), sale, catalog.Names{Items: map[string]string{"m": "M"}})
	require.ErrorAs(t, err, new(*reservation.IllegalTransitionError), "a retired sale keeps its names")

	done, err := archiveSale(t, s, dir, sale)
	require.NoError(t, err)
	header, _, err := archive.Verify(done.Path)
	require.NoError(t, err)
	require.Equal(t, 2, header.Version, "a program that does not know items refuses the file")
	report, err := archive.Audit(t.Context(), s.Pool, done.Path)
	require.NoError(t, err)
	require.Empty(t, report.Findings)
	requireSound(t, s)
	archived, err := s.Catalog.Show(t.Context(), sale)
	require.NoError(t, err)
	require.Equal(t, seen.Items, archived.Items)

	_, err = archive.Restore(t.Context(), s.Pool, done.Path)
	require.NoError(t, err)
	require.Equal(t, before, rows(t, s, sale))
	requireSound(t, s)
	past, err := ledger.New(s.Pool).PastAnswer(t.Context(), reservation.Request{
		Sale: sale, User: "ann", Items: map[string]int64{"m": 1},
	})
	require.NoError(t, err)
	require.Equal(t, []any{reservation.AlreadyPurchased, ann.Reservation, order.Items(`{"m":2,"l":1}`)},
		[]any{past.Verdict, past.Reservation, past.Of.Units})

	done, err = archiveSale(t, s, dir, sale)
	require.NoError(t, err)
	t.Run("in another database", func(t *testing.T) { requireTakenByOther(t, done.Path, sale, before) })
}

func TestArchiveAuditComparesItems(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale, _ := endedBaskets(t, s)
	require.NoError(t, s.Exec(t, "UPDATE sale_items SET sold = 1, stock = 1 WHERE item = 'a'"))
	done, err := archiveSale(t, s, t.TempDir(), sale)
	require.NoError(t, err)
	report, err := archive.Audit(t.Context(), s.Pool, done.Path)
	require.NoError(t, err)
	require.Equal(t, []archive.Finding{
		{Promise: "S1", What: "3 units of the item m are sold of a stock of 1"},
		{Promise: "S4", What: "sold of the item m is 1, and the live orders hold 3 units"},
	}, report.Findings)
}

package archive_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/upkeep/archive"
)

// requireRepeats checks that late reports of the payments of an archived sale are answered with what became of them,
// and change nothing.
func requireRepeats(t testing.TB, s *testshop.Shop, sale uuid.UUID) {
	t.Helper()
	l := ledger.New(s.Pool)
	for _, reference := range []string{"pi_early", "pi_second"} {
		p, err := l.Payment(t.Context(), reference)
		require.NoError(t, err)
		for _, id := range []uuid.UUID{uuid.Nil, p.OrderID} {
			require.Equal(t, order.PaymentRefunded, report(t, l, reference, id).State)
		}
		require.Equal(t, []any{sale, "re", "zoe", int64(5)}, []any{p.SaleID, p.RefundReference, p.Operator, p.Amount})
		require.True(t, p.ReceivedAt.Before(p.UpdatedAt))
		_, err = l.Refund(t.Context(), reference, "re", "ann")
		require.NoError(t, err)
		_, err = l.Refund(t.Context(), reference, "re_2", "ann")
		require.ErrorIs(t, err, order.ErrRefundNotDue)
	}
	var buyers string
	require.NoError(t, s.Pool.QueryRow(t.Context(),
		"SELECT reference FROM archived_payments WHERE reference LIKE '%user-1'").Scan(&buyers))
	id, reference, _ := strings.Cut(buyers, ":")
	p := report(t, l, reference, uuid.MustParse(id))
	require.Equal(t, []any{order.PaymentSettled, buyers}, []any{p.State, p.Reference}, "the shop reports it, too")
	require.Zero(t, s.Count(t, "SELECT count(*) FROM payment_events WHERE reference NOT LIKE 'late%'"))
}

// An older version has archived the sale: nobody knows its payments until its file is read.
func TestPaymentsOfOlderArchiveAreReadFromItsFile(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, receipt := endedSale(t, s, 1)
	done, err := archiveSale(t, s, t.TempDir(), sale)
	require.NoError(t, err)
	require.NoError(t, s.Exec(t, "DELETE FROM archived_payments"))
	require.NoError(t, s.Exec(t, "UPDATE sales SET archive = archive - 'remembered_at' WHERE id = $1", sale))
	var isForgotten bool
	require.NoError(t, s.Pool.QueryRow(t.Context(), sql.PaymentIsForgotten, receipt.OrderID).Scan(&isForgotten))
	require.True(t, isForgotten)
	l := ledger.New(s.Pool)
	require.Equal(t, order.PaymentWaiting, report(t, l, "pi_early", receipt.OrderID).State)

	a := archiver(t, s, t.TempDir(), 0)
	due, err := a.Due(t.Context())
	require.NoError(t, err)
	require.Equal(t, []uuid.UUID{sale}, due)
	moved := t.TempDir()
	require.NoError(t, os.Rename(done.Path, filepath.Join(moved, filepath.Base(done.Path))))
	_, err = a.Sale(t.Context(), sale)
	require.ErrorContains(t, err, "it needs the file that Postgres names, here or in --dir: open "+done.Path)
	a.Close()
	_, err = archiveSale(t, s, moved, sale)
	require.NoError(t, err)
	requireRepeats(t, s, sale)
	_, err = archiveSale(t, s, moved, sale)
	require.ErrorIs(t, err, archive.ErrRefused)
	live := testwork.Confirm(t, s.Pool, testshop.NewSale(t, s.Pool, 1), 1)[0]
	require.Equal(t, order.UnclearOtherOrder, report(t, l, "pi_early", live).Reason, "it settles no other order")
}

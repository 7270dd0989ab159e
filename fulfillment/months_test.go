package fulfillment_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
	"stampede/sql"
)

// A worker creates the tables of the next month.
func TestWorkerMakesMonthsAhead(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	const complete = "SELECT count(*) FROM order_months WHERE first > '01800000-0000-0000-0000-000000000000' AND " +
		"orders IS NOT NULL AND events IS NOT NULL"
	made := s.Count(t, complete)
	require.NoError(t, s.Exec(t, `DO $$
		DECLARE part text := (SELECT events FROM order_months ORDER BY first DESC LIMIT 1);
		BEGIN EXECUTE 'DROP TABLE ' || part; END $$`))
	_, missing, err := sql.Guards(t.Context(), s.Pool)
	require.NoError(t, err)
	require.Len(t, missing, 1)
	require.Contains(t, missing[0].What, "the table order_events has no part for the sales of")
	testwork.Work(t, testwork.Config(t, s))
	testkit.Eventually(t, testshop.Soon, "the month is complete", func() bool { return s.Count(t, complete) == made })
}

// The tables of a sale were removed manually: the next order creates them.
func TestOrderIsRecordedWithoutTables(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	l := ledger.New(s.Pool)
	sale := oldSale(t, s)
	require.NoError(t, s.Exec(t, "DROP TABLE orders_2026_03, order_events_2026_03"))
	outcomes := testwork.Record(t, l, testshop.ReservedCrowd(sale, 3))
	require.Equal(t, order.StatusConfirmed, outcomes[2].Status)

	unknown := testshop.Reserved(uuid.MustParse("01c30000-0000-7000-8000-000000001234"), "stranger", 1)
	outcomes, err := l.Refuse(t.Context(), []order.OrderReserved{unknown}, order.RejectedSoldOut)
	require.NoError(t, err, "of a sale that Postgres never had")
	require.Equal(t, order.StatusRejected, outcomes[0].Status)
}

// oldSale makes an open sale of March 2026, which is in tables of its own.
func oldSale(t *testing.T, s *testshop.Shop) uuid.UUID {
	t.Helper()
	id := uuid.Must(uuid.NewV7())
	ms := time.Date(2026, time.March, 7, 0, 0, 0, 0, time.UTC).UnixMilli()
	for i := range 6 {
		id[i] = byte(ms >> (8 * (5 - i)))
	}
	require.NoError(t, s.Exec(t, "INSERT INTO sales (id, name, stock) VALUES ($1, 'old', 1000)", id))
	return id
}

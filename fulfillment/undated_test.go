package fulfillment

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
	"stampede/reservation"
)

// confirmAsBefore records orders of so many users as a worker did before there were deadlines, and returns one of them.
func confirmAsBefore(t testing.TB, pool *pgxpool.Pool, sale uuid.UUID, n int) (one uuid.UUID) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `WITH confirmed AS (
			INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
			SELECT gen_random_uuid(), $1, 'user-' || n, 1, 'confirmed', 2, n, 1, now(), now() FROM generate_series(1, $2::int) AS n
			RETURNING *
		), logged AS (
			INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
			SELECT c.id, e.version, e.type, c.sale_id, c.user_id, c.quantity, now()
			FROM confirmed AS c, (VALUES (1, 'OrderReserved'), (2, 'OrderConfirmed')) AS e (version, type)
		)
		UPDATE sales SET sold = sold + $2 WHERE id = $1`, sale, n)
	require.NoError(t, err)
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT id FROM orders WHERE sale_id = $1 AND user_id = 'user-1'", sale).Scan(&one))
	return one
}

func TestOrdersOfAnOlderWorkerGetTheirTimeToPay(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := NewLedger(pool)
	payable, final := newPayableSale(t, pool, 5000), newSale(t, pool, 5000)
	ours := confirm(t, pool, payable, 1)[0]
	deadline := orderOfID(t, pool, ours).ExpiresAt
	const n = 2*sweepMax + 100
	sale := newPayableSale(t, pool, 5000)
	theirs, theirFinal := confirmAsBefore(t, pool, sale, n), confirmAsBefore(t, pool, final, 3)
	_, err := ledger.Pay(t.Context(), theirs, "user-1", "pi_1")
	require.ErrorIs(t, err, reservation.ErrIllegalTransition, "without a deadline there is nothing to pay")
	away(t, pool, "1 h")
	beat(t, pool) // so that the clock of deadlines is another one

	began := time.Now()
	dated, err := ledger.dateAll(t.Context())
	require.NoError(t, err)
	require.Equal(t, n+3, dated)
	require.Zero(t, queryInt(t, pool, "SELECT count(*) FROM orders WHERE sale_id = $1 AND due IS NULL", sale))
	require.WithinRange(t, orderOfID(t, pool, theirs).ExpiresAt, began.Add(paymentWindow-time.Minute), time.Now().Add(paymentWindow+time.Minute))
	require.Zero(t, orderOfID(t, pool, theirFinal).ExpiresAt)
	require.Zero(t, queryInt(t, pool, `SELECT count(*) FROM orders AS o JOIN order_events AS e ON e.order_id = o.id AND e.type = 'OrderConfirmed'
		WHERE (e.data ->> 'due')::timestamptz IS DISTINCT FROM o.due`), "the log says the same")
	require.True(t, orderOfID(t, pool, ours).ExpiresAt.After(deadline), "put off by the outage")
	require.Less(t, orderOfID(t, pool, ours).ExpiresAt.Sub(deadline), 65*time.Minute, "and not given a new one")

	first := orderOfID(t, pool, theirs)
	dated, err = ledger.dateAll(t.Context())
	require.NoError(t, err)
	require.Zero(t, dated)
	require.Equal(t, first, orderOfID(t, pool, theirs))
	_, err = ledger.Pay(t.Context(), theirs, "user-1", "pi_1")
	require.NoError(t, err)
}

// Two workers start at once, and a buyer has an order in hand.
func TestWorkersDateOrdersWhenTheyStart(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	beat(t, s.pool)
	sale := newPayableSale(t, s.pool, 5000)
	_, err := s.pool.Exec(t.Context(), "UPDATE sales SET published_revision = revision WHERE id = $1", sale)
	require.NoError(t, err)
	confirmAsBefore(t, s.pool, sale, sweepMax+1)
	second := s.config(t)
	second.Consumer = "second"
	stops := []func(){work(t, s.config(t)), work(t, second)}
	testkit.Eventually(t, 20*time.Second, "all have a deadline", func() bool {
		return s.count(t, "SELECT count(*) FROM orders WHERE due IS NULL") == 0
	})
	for _, stop := range stops {
		stop()
	}
	require.Zero(t, s.count(t, "SELECT count(*) FROM orders WHERE due < pay_clock() + interval '9 minutes'"))
}

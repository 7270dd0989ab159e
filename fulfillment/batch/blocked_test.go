package batch_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/batch"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
)

// lockFromOtherRole locks the row of a sale in a session of another role, which no worker may end,
// until release is called.
func lockFromOtherRole(t testing.TB, s *testshop.Shop, sale uuid.UUID) (release func()) {
	t.Helper()
	role := "other_" + strings.ToLower(rand.Text())
	for _, statement := range []string{
		"CREATE ROLE " + role + " LOGIN PASSWORD 'other'", "GRANT SELECT, UPDATE ON sales TO " + role,
	} {
		require.NoError(t, s.Exec(t, statement))
	}
	u, err := url.Parse(testkit.DatabaseURL(t))
	require.NoError(t, err)
	u.User = url.UserPassword(role, "other")
	conn, err := pgx.Connect(t.Context(), u.String())
	require.NoError(t, err)
	ctx := context.WithoutCancel(t.Context())
	t.Cleanup(func() {
		_ = conn.Close(ctx)
		_, err := s.Pool.Exec(ctx, "DROP OWNED BY "+role+"; DROP ROLE "+role)
		require.NoError(t, err)
	})
	_, err = conn.Exec(t.Context(), "BEGIN")
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), "SELECT FROM sales WHERE id = $1 FOR UPDATE", sale)
	require.NoError(t, err)
	return func() {
		_, err := conn.Exec(ctx, "COMMIT")
		require.NoError(t, err)
	}
}

const confirmedInSale = testshop.ConfirmedOrders + " AND sale_id = $1"

func TestLockedSaleDoesNotBlockOtherSales(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	locked := s.Open(t, 1000)
	others := make([]uuid.UUID, 5)
	for i := range others {
		others[i] = s.Open(t, 1000)
	}
	for i := range 10 {
		s.Buy(t, locked, fmt.Sprint("user-", i))
		for _, sale := range others {
			s.Buy(t, sale, fmt.Sprint("user-", i)) // the same users in all sales
		}
	}
	release := lockFromOtherRole(t, s, locked)
	testwork.Work(t, testwork.Config(t, s))
	testkit.Eventually(t, testshop.Soon, "the orders of the other sales are confirmed", func() bool {
		return s.Count(t, testshop.ConfirmedOrders) == 50
	})
	for _, sale := range others {
		s.Buy(t, sale, "late")
	}
	testkit.Eventually(t, testshop.Soon, "later orders are confirmed",
		func() bool { return s.Count(t, testshop.ConfirmedOrders) == 55 })
	require.Zero(t, s.Count(t, confirmedInSale, locked))
	release()
	s.AwaitConfirmed(t, 65)
	testwork.AwaitRest(t, s)
	require.EqualValues(t, 10, testshop.Sold(t, s.Pool, locked))
	require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters"))
}

// The locked sale has more orders in the stream than a worker holds in memory.
func TestBacklogOfLockedSaleDoesNotBlockOtherSales(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	locked, other := s.Open(t, 1000), s.Open(t, 1000)
	config := testwork.Config(t, s)
	config.BatchMax, config.MinIdle = 10, 2*time.Second
	s.Crowd(t, locked, 200)
	s.Crowd(t, other, 20)
	release := lockFromOtherRole(t, s, locked)
	testwork.Work(t, config)
	testkit.Eventually(t, testshop.Soon, "the orders of the other sale are confirmed", func() bool {
		return s.Count(t, confirmedInSale, other) == 20
	})
	require.Zero(t, s.Count(t, confirmedInSale, locked))
	release()
	s.AwaitConfirmed(t, 220)
	testwork.AwaitRest(t, s)
	require.EqualValues(t, 200, testshop.Sold(t, s.Pool, locked))
	require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters"))
}

// The locked row is an order's, not a sale's: the error does not say which sale is blocked.
func TestLockedOrderBlocksOnlyItsSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	locked, other := s.Open(t, 1000), s.Open(t, 1000)
	s.Crowd(t, locked, 3)
	s.Crowd(t, other, 3)
	// Another session inserts one of the orders, and does not commit.
	hold, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = hold.Rollback(context.WithoutCancel(t.Context())) })
	_, err = hold.Exec(t.Context(), "SET LOCAL idle_in_transaction_session_timeout = 0")
	require.NoError(t, err)
	_, err = hold.Exec(t.Context(),
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
		VALUES (gen_random_uuid(), $1, 'user-1', 1, 'confirmed', 2, 9, 1, now(), now())`, locked)
	require.NoError(t, err)

	b := testwork.Batch(t, s, func(c *batch.Config) {
		c.Ledger = ledger.New(s.Pool).WithLockTimeout(200 * time.Millisecond)
	})
	answers := testwork.Handle(b, testwork.Messages(t, s)...)
	testkit.Eventually(t, testshop.Soon, "all others are confirmed",
		func() bool { return s.Count(t, testshop.ConfirmedOrders) == 5 })
	require.EqualValues(t, 2, s.Count(t, confirmedInSale, locked), "the other orders of its sale are confirmed as well")
	require.NoError(t, hold.Rollback(t.Context()))
	testwork.RequireDone(t, answers)
	require.EqualValues(t, 6, s.Count(t, testshop.ConfirmedOrders))
}

// TestSlowBatchIsHalved uses a database that needs 10 ms per order and cancels statements after 250 ms.
func TestSlowBatchIsHalved(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	for _, statement := range []string{
		`CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.01); RETURN NEW; END $$`,
		"CREATE TRIGGER slow BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION slow()",
	} {
		require.NoError(t, s.Exec(t, statement))
	}
	sale := s.Open(t, 1000)
	s.Crowd(t, sale, 100)
	limited := testkit.PoolAt(t, testkit.DatabaseURL(t)+"&statement_timeout=250", 8)
	config := testwork.Config(t, s)
	config.Pool = limited
	testwork.Work(t, config)
	s.AwaitConfirmed(t, 100)
	require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters"))
}

// TestLockedSaleDoesNotDelayExpiryOfOtherSales also checks that the orders of the locked sale are not
// locked for long: a buyer may want to pay.
func TestLockedSaleDoesNotDelayExpiryOfOtherSales(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	locked, other := testshop.NewPayableSale(t, s.Pool, 100), testshop.NewPayableSale(t, s.Pool, 100)
	orders := append(testwork.Confirm(t, s.Pool, locked, 6), testwork.Confirm(t, s.Pool, other, 5)...)
	unexpired := orders[0]
	testwork.EndWindow(t, s.Pool, orders[1:]...)
	release := lockFromOtherRole(t, s, locked)
	expired, err := testwork.TryExpire(t.Context(), s)
	require.True(t, ledger.IsLocked(err), "%v", err)
	require.ErrorContains(t, err, "sale="+locked.String())
	require.Equal(t, 5, expired)

	var user string
	require.NoError(t, s.Pool.QueryRow(t.Context(), "SELECT user_id FROM orders WHERE id = $1", unexpired).Scan(&user))
	_, err = ledger.New(s.Pool).Cancel(t.Context(), unexpired, user)
	require.True(t, ledger.IsLocked(err), "%v", err)
	_, err = ledger.New(s.Pool).Pay(t.Context(), unexpired, user, "pi")
	require.NoError(t, err, "paying does not use the sale's row")
	release()
	expired = testwork.Expire(t, s)
	require.Equal(t, 5, expired)
}

func TestLockedSaleDoesNotDelayPublishingOfOtherSales(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	locked := s.Open(t, 10)
	for range 20 {
		s.Open(t, 10)
	}
	require.NoError(t, s.Exec(t, "UPDATE sales SET published_revision = 0"))
	release := lockFromOtherRole(t, s, locked)
	ctx, cancel := context.WithTimeout(t.Context(), ledger.RecordTimeout)
	defer cancel()
	published, err := s.Catalog.PublishPending(ctx)
	require.ErrorContains(t, err, "sale="+locked.String())
	require.Equal(t, 20, published)
	release()
	// A statement that its client has given up may still have published the sale.
	_, err = s.Catalog.PublishPending(t.Context())
	require.NoError(t, err)
	require.Zero(t, s.Count(t, "SELECT count(*) FROM sales WHERE published_revision <> revision"))
}

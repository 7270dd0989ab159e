package testshop

import (
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/reservation"
)

// LostShop is a shop on a Redis of its own, which can be lost.
type LostShop struct {
	*Shop
	Server *localserver.Redis
}

func NewLostShop(t testing.TB) LostShop {
	t.Helper()
	server := testkit.OwnRedis(t)
	return LostShop{NewShopOn(t, testkit.Pool(t), server.URL, reservation.Keys{Prefix: "test", Partitions: 1}), server}
}

func (s LostShop) Flush(t testing.TB) {
	t.Helper()
	require.NoError(t, s.Rdb.FlushAll(t.Context()).Err())
}

// Reserve asks for units as a buyer with an idempotency key.
func (s *Shop) Reserve(t testing.TB, sale uuid.UUID, user string, quantity int64, key string) reservation.Answer {
	t.Helper()
	answer, err := s.Store.Reserve(t.Context(), reservation.Request{
		Sale: sale, User: user, Quantity: quantity,
		IdempotencyKey: key,
	})
	require.NoError(t, err)
	return answer
}

func (s *Shop) RequireClosed(t testing.TB, sale uuid.UUID) {
	t.Helper()
	_, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: "eve", Quantity: 1})
	require.ErrorIs(t, err, reservation.ErrUnavailable)
}

func (s *Shop) SaleInRedis(t testing.TB, sale uuid.UUID) map[string]string {
	t.Helper()
	fields, err := s.Rdb.HGetAll(t.Context(), s.Keys.Sale(0, sale)).Result()
	require.NoError(t, err)
	return fields
}

func (s *Shop) EpochOf(t testing.TB, sale uuid.UUID) int64 {
	t.Helper()
	return s.Count(t, "SELECT epoch FROM sales WHERE id = $1", sale)
}

// RequireSound compares sales, orders, events and Redis with each other.
func (s *Shop) RequireSound(t testing.TB) {
	t.Helper()
	require.Zero(t, s.Count(t, BrokenLogs))
	require.Zero(t, s.Count(t, `SELECT count(*) FROM sales AS s
		WHERE sold <> (SELECT coalesce(sum(quantity), 0) FROM orders WHERE sale_id = s.id AND status IN ('confirmed',
		'paid'))`))
	rows, err := s.Pool.Query(t.Context(), "SELECT id, stock - sold, epoch, revision, published_revision FROM sales")
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		var sale uuid.UUID
		var left, epoch, revision, published int64
		require.NoError(t, rows.Scan(&sale, &left, &epoch, &revision, &published))
		fields := s.SaleInRedis(t, sale)
		require.Equal(t, fmt.Sprint(left), fields["left"], "units left of %s", sale)
		require.Equal(t, fmt.Sprint(epoch), fields["epoch"])
		require.Equal(t, fmt.Sprint(revision), fields["revision"])
		require.Equal(t, revision, published)
	}
	require.NoError(t, rows.Err())
}

func ExecSQL(t testing.TB, s *Shop, query string, args ...any) error {
	t.Helper()
	_, err := s.Pool.Exec(t.Context(), query, args...)
	return err
}

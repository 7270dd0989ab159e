package catalog_test

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

// Units that Redis lost belong to no buyer, so they must not be counted as held.
func TestCountRefusesSaleThatAwaitsRebuild(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, other := s.Sale(t, 10), s.Sale(t, 5)
	s.Buy(t, sale.ID, "ann")
	unknown := func() {
		t.Helper()
		_, err := s.Show(t.Context(), sale.ID)
		require.ErrorIs(t, err, reservation.ErrUnavailable)
		_, err = s.List(t.Context(), uuid.Nil, 10)
		require.ErrorIs(t, err, reservation.ErrUnavailable)
		_, err = s.Pause(t.Context(), sale.ID)
		require.ErrorIs(t, err, catalog.ErrNotInForce)
		counted, err := s.Show(t.Context(), other.ID)
		require.NoError(t, err)
		require.EqualValues(t, 5, counted.Available)
	}
	key := s.Keys.Sale(0, sale.ID)
	require.NoError(t, s.Rdb.Copy(t.Context(), key, key+"-kept", 0, false).Err())
	_, err := s.CloseSale(t.Context(), sale.ID, 0, testshop.Token, 0)
	require.NoError(t, err)
	unknown()
	require.NoError(t, s.Rdb.Del(t.Context(), key).Err())
	unknown()
	_, err = s.CloseSale(t.Context(), sale.ID, 0, testshop.Token, 0)
	require.NoError(t, err)
	unknown()

	require.NoError(t, s.Rdb.Rename(t.Context(), key+"-kept", key).Err())
	_, err = s.PublishPending(t.Context())
	require.NoError(t, err)
	sales, err := s.List(t.Context(), uuid.Nil, 10)
	require.NoError(t, err)
	require.Len(t, sales, 2)
	require.Equal(t, []int64{10, 9, 1, 0}, []int64{sales[1].Stock, sales[1].Available, sales[1].Held, sales[1].Sold})
	require.Equal(t, reservation.StatePaused, sales[1].State, "the recorded change is published")
}

// Operators may delete the keys of ended sales to free memory.
func TestEndedSaleIsCountedWithoutRedis(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 10)
	_, err := s.End(t.Context(), sale.ID)
	require.NoError(t, err)
	_, err = s.Pool.Exec(t.Context(), "UPDATE sales SET sold = 3 WHERE id = $1", sale.ID)
	require.NoError(t, err)
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Sale(0, sale.ID)).Err())
	sales, err := s.List(t.Context(), uuid.Nil, 10)
	require.NoError(t, err)
	require.Equal(t, []int64{10, 7, 0, 3}, []int64{sales[0].Stock, sales[0].Available, sales[0].Held, sales[0].Sold})
}

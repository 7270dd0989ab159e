package rebuild_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
)

// Ended sales are checked less often than others, and count in between as they were.
func TestBehindCountsOrdersOfAllSales(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	open, ended := s.Open(t, 100), s.Open(t, 100)
	r := testwork.Rebuilder(t, s)
	behind := func(withEnded bool) int64 {
		required, err := r.Required(t.Context(), withEnded)
		require.NoError(t, err)
		_, err = r.HealPartition(t.Context(), 0, required)
		require.NoError(t, err)
		return r.Behind(0)
	}
	require.Zero(t, behind(true))
	for _, user := range []string{"ann", "bob", "cid"} {
		s.Buy(t, open, user)
		s.Buy(t, ended, user)
	}
	_, err := s.Catalog.End(t.Context(), ended)
	require.NoError(t, err)
	require.EqualValues(t, 3, behind(false))
	require.EqualValues(t, 6, behind(true))
	testwork.Fulfil(t, s)
	require.EqualValues(t, 3, behind(false))
	require.Zero(t, behind(true))
	require.Zero(t, r.Behind(1))
}

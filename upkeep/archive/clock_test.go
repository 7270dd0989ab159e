package archive_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/clocks"
	"stampede/internal/test/testshop"
	"stampede/upkeep/archive"
)

// A clock of Postgres that is ahead for a moment makes no sale old.
func TestClockAheadArchivesNoSale(t *testing.T) {
	t.Parallel()
	s, set := testshop.OnClockedPostgres(t)
	sale := s.Open(t, 10)
	_, err := s.Catalog.End(t.Context(), sale)
	require.NoError(t, err)
	require.Equal(t, 1, retireAll(t, s))
	a := archiver(t, s, t.TempDir(), time.Hour)
	for _, ahead := range []time.Duration{2 * time.Hour, 0} {
		set(ahead)
		_, err = a.Sale(t.Context(), sale)
		require.ErrorIs(t, err, archive.ErrRefused)
		if ahead > 0 {
			require.ErrorIs(t, err, clocks.ErrApart)
		} else {
			require.ErrorContains(t, err, "its last change was at")
		}
	}
}

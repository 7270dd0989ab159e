package retire_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/clocks"
	"stampede/internal/test/testshop"
	"stampede/reservation"
)

// A clock of Postgres that is ahead for a moment retires no sale.
func TestClockAheadRetiresNoSale(t *testing.T) {
	t.Parallel()
	s, set := testshop.OnClockedPostgres(t)
	sale, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "test", Stock: 10, PerOrderLimit: 1, ClosesAt: time.Now().Add(time.Minute),
	})
	require.NoError(t, err)
	set(2 * time.Minute)
	_, err = retirer(t, s).Sweep(t.Context())
	require.ErrorIs(t, err, clocks.ErrApart)
	set(0)
	require.Zero(t, sweep(t, s))
	require.Equal(t, reservation.Reserved, s.Ask(t, sale.ID, "ann").Verdict)
}

package dashboard

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/pg"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

// An operator learns that a change was recorded, or may have been, whatever kept it from being shown.
func TestRecordedChangeIsExplainedFirst(t *testing.T) {
	t.Parallel()
	for _, change := range []error{catalog.ErrNotInForce, catalog.ErrRestockUndecided, pg.ErrChangeUnknown} {
		want, _, _ := explain(change)
		for _, cause := range []error{
			reservation.ErrSaleNotFound, reservation.ErrUnavailable, reservation.ErrOutcomeUnknown, reservation.ErrOverloaded,
		} {
			text, _, _ := explain(fmt.Errorf("%w: %w", change, cause))
			require.Equal(t, want, text, "%v: %v", change, cause)
		}
	}
}

package dashboard

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/dashboard/fleet"
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

// An open sale wears its state only while somebody can buy.
func TestBadgeSaysWhatBuyersMeet(t *testing.T) {
	t.Parallel()
	open := fleet.Sale{State: reservation.StateOpen, Available: 1, UnitsKnown: true}
	up := fleet.Server{Reachable: true}
	for name, c := range map[string]struct {
		change func(*fleet.Snapshot, *fleet.Sale)
		want   string
	}{
		"open":          {func(*fleet.Snapshot, *fleet.Sale) {}, "open"},
		"no unit":       {func(_ *fleet.Snapshot, s *fleet.Sale) { s.Available, s.Held = 0, 9 }, soldOut},
		"units unknown": {func(_ *fleet.Snapshot, s *fleet.Sale) { s.Available, s.UnitsKnown = 0, false }, "open"},
		"shut":          {func(_ *fleet.Snapshot, s *fleet.Sale) { s.Shut = "a reason" }, notSelling},
		"Redis is gone": {func(s *fleet.Snapshot, _ *fleet.Sale) { s.Redis = fleet.Server{Error: "refused"} }, notSelling},
		"not asked yet": {func(s *fleet.Snapshot, _ *fleet.Sale) { s.Redis = fleet.Server{} }, "open"},
		"no ingress":    {func(s *fleet.Snapshot, _ *fleet.Sale) { s.Processes[0].Up = false }, notSelling},
		"none is known": {func(s *fleet.Snapshot, _ *fleet.Sale) { s.Processes = s.Processes[1:] }, "open"},
		"paused": {func(_ *fleet.Snapshot, s *fleet.Sale) {
			s.State, s.Available = reservation.StatePaused, 0
		}, "paused"},
		"ended": {func(_ *fleet.Snapshot, s *fleet.Sale) { s.State, s.Available = reservation.StateEnded, 0 }, "ended"},
	} {
		sale, s := open, &fleet.Snapshot{Redis: up, Processes: []fleet.Process{
			{Kind: "ingress, worker", Up: true}, {Kind: "worker", Up: true},
		}}
		c.change(s, &sale)
		require.Equal(t, c.want, shown{s}.Selling(sale), name)
	}
}

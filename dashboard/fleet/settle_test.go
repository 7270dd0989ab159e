package fleet

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Nobody has to wait for what a trouble explains.
func TestConsequencesOfTroublesAreNotPending(t *testing.T) {
	t.Parallel()
	f, s, r := healthy()
	f.processes[0].last.notReady, f.processes[0].last.guardAge = "Redis is away", 2*guardAgeMax
	f.processes[0].last.releases = 1
	f.troubles.update(f, s, r)
	require.Len(t, s.Pending, 2)
	s.Redis = Server{Error: "refused", Since: noon}
	f.troubles.update(f, s, r)
	require.Empty(t, s.Pending)
}

func TestWhatOneProcessMissesIsNotPendingTwice(t *testing.T) {
	t.Parallel()
	f, s, r := healthy()
	f.processes[0].url = "one"
	f.processes[0].last.postgresGone, f.processes[0].last.failing = true, []string{"record"}
	pending := func(second float64) (names []string) {
		s.At = at(second)
		f.troubles.update(f, s, r)
		for _, p := range s.Pending {
			names = append(names, p.Name)
		}
		return names
	}
	require.Equal(t, []string{postgresGone.name, stepFails.name}, pending(0))
	require.Empty(t, pending(delayedStep.Seconds()), "the cause is shown")
	f.records.readOnly = true
	require.Empty(t, pending(delayedStep.Seconds()+1))
	require.Equal(t, []string{postgresGone.name}, troubleNames(s), "it is one, not that of each process")
}

// The paid units of a sale are known a look after the sale.
func TestSettledSnapshotHasAllUnits(t *testing.T) {
	t.Parallel()
	f, s := newFleet(t)
	for range 6 {
		s.OpenPayable(t, 10)
	}
	settled := f.play(t, "it is settled", func(x *Snapshot) bool {
		return len(x.Sales) > 0 && x.IsSettled(x.At.Add(time.Hour))
	})
	for _, sale := range settled.Sales {
		require.True(t, sale.UnitsKnown)
	}
}

// One look tells of events that no relay delivers, which is the last that is asked.
func TestSettledSnapshotHasLookedAtAll(t *testing.T) {
	t.Parallel()
	f, s := newFleet(t)
	s.Open(t, 10)
	s.Exec(t, `INSERT INTO relay_targets (name, url, secrets, allow_private, position, fence)
		VALUES ('shop', 'https://shop', '{}', false, 0, 1)`)
	settled := f.play(t, "it is settled", func(x *Snapshot) bool { return x.Number > 0 && x.IsSettled(x.At) })
	var pending []string
	for _, p := range settled.Pending {
		pending = append(pending, p.Name)
	}
	require.Contains(t, pending, noRelay.name)
}

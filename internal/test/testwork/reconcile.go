package testwork

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/stream"
	"stampede/upkeep/audit"
)

func ReconcileConfig(s *testshop.Shop, t testing.TB) audit.ReconcileConfig {
	t.Helper()
	return audit.ReconcileConfig{
		Pool: s.Pool, Redis: s.Rdb, Keys: s.Keys, Store: s.Store, Catalog: s.Catalog, Rebuilder: Rebuilder(s, t),
		Pause: time.Millisecond, Logger: testkit.Logger(t),
	}
}

func Reconcile(s *testshop.Shop, t testing.TB) audit.ReconcileReport {
	t.Helper()
	report, err := audit.Reconcile(t.Context(), ReconcileConfig(s, t))
	require.NoError(t, err)
	return report
}

// LeftOf names the remedies with remaining findings, separated by spaces.
func LeftOf(r audit.ReconcileReport) string {
	var left []string
	for _, remedy := range r.Remedies {
		if remedy.Found > remedy.Mended {
			left = append(left, string(remedy.Remedy))
		}
	}
	return strings.Join(left, " ")
}

// ProcessWaiting records unread events and applies waiting releases, as a worker does.
func ProcessWaiting(s *testshop.Shop, t testing.TB) {
	t.Helper()
	for p := range s.Keys.Partitions {
		backlog, err := stream.ReadBacklog(t.Context(), s.Rdb, s.Keys.Orders(p), reservation.Group)
		require.NoError(t, err)
		if backlog.Lag > 0 {
			fulfilIn(s, t, p)
		}
	}
	_, err := ReleaseUnits(s, t.Context())
	require.NoError(t, err)
}

// RequireMended reconciles, first in a dry run, and requires that only the remedies in left remain: "" for none.
func RequireMended(s *testshop.Shop, t testing.TB, sale uuid.UUID, left string) {
	t.Helper()
	before := s.Everything(t)
	config := ReconcileConfig(s, t)
	config.DryRun, config.Sale = true, sale
	explained := 0
	config.Explain = func(f audit.Finding) error {
		explained++
		require.NotEmpty(t, f.What)
		require.NotEmpty(t, f.Remedy.Says())
		return nil
	}
	planned, err := audit.Reconcile(t.Context(), config)
	require.NoError(t, err)
	require.Equal(t, before, s.Everything(t), "a dry run changes nothing")
	require.Positive(t, explained)

	config.DryRun, config.Explain = false, nil
	report, err := audit.Reconcile(t.Context(), config)
	require.NoError(t, err)
	require.Equal(t, left, LeftOf(report), "%+v", report)
	require.Len(t, report.Remedies, len(planned.Remedies), "the plan was carried out")
	require.Equal(t, slices.Contains([]string{"", "worker"}, left), report.Remaining == 0)
	if left == "projections" {
		RebuildProjections(s, t)
		report, err = audit.Reconcile(t.Context(), config)
		require.NoError(t, err)
		left = LeftOf(report)
		require.Empty(t, left, "%+v", report)
	}
	if left != "" {
		return
	}
	require.Empty(t, report.Failures)
	ProcessWaiting(s, t)
	again := Reconcile(s, t)
	require.Empty(t, again.Remedies, "a second reconcile finds nothing")
	after := Audit(s, t, uuid.Nil)
	require.False(t, after.Broken(), TextOf(t, after))
}

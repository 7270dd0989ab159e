package fulfillment_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/testkit"
	"stampede/reservation"
)

func (s *shop) reconcileConfig(t testing.TB) fulfillment.ReconcileConfig {
	t.Helper()
	return fulfillment.ReconcileConfig{
		Pool: s.pool, Redis: s.rdb, Keys: s.keys, Store: s.store, Catalog: s.catalog, Rebuilder: s.rebuilder(t),
		Pause: time.Millisecond, Logger: testkit.Logger(t),
	}
}

func (s *shop) reconcile(t testing.TB) fulfillment.ReconcileReport {
	t.Helper()
	report, err := fulfillment.Reconcile(t.Context(), s.reconcileConfig(t))
	require.NoError(t, err)
	return report
}

// everything is what Postgres and Redis hold.
func (s *shop) everything(t testing.TB) (all []string) {
	t.Helper()
	for _, table := range rowsOf(t, s.pool, "SELECT tablename::text FROM pg_tables WHERE schemaname = 'public' ORDER BY 1") {
		for _, row := range rowsOf(t, s.pool, "SELECT row_to_json(r)::text FROM "+table+" AS r ORDER BY 1") {
			all = append(all, table+" "+row)
		}
	}
	keys, err := s.rdb.Keys(t.Context(), s.keys.Prefix+":*").Result()
	require.NoError(t, err)
	slices.Sort(keys)
	for _, key := range keys {
		dump, err := s.rdb.Dump(t.Context(), key).Result()
		require.NoError(t, err)
		all = append(all, key+" "+dump)
	}
	return all
}

// leftOf names the remedies of which something is left.
func leftOf(r fulfillment.ReconcileReport) string {
	var left []string
	for _, remedy := range r.Remedies {
		if remedy.Found > remedy.Mended {
			left = append(left, string(remedy.Remedy))
		}
	}
	return strings.Join(left, " ")
}

// arrive brings what is on its way to its end, as a worker does.
func (s *shop) arrive(t testing.TB) {
	t.Helper()
	backlog, err := fulfillment.ReadBacklog(t.Context(), s.rdb, s.keys.Orders(0), reservation.Group)
	require.NoError(t, err)
	if backlog.Lag > 0 {
		s.fulfil(t)
	}
	_, err = s.giveBack(t.Context())
	require.NoError(t, err)
}

// requireMended reconciles until only that is left which is left to others: "" for nothing.
func (s *shop) requireMended(t testing.TB, sale uuid.UUID, left string) {
	t.Helper()
	before := s.everything(t)
	config := s.reconcileConfig(t)
	config.DryRun, config.Sale = true, sale
	explained := 0
	config.Explain = func(f fulfillment.Finding) error {
		explained++
		require.NotEmpty(t, f.What)
		require.NotEmpty(t, f.Remedy.Says())
		return nil
	}
	planned, err := fulfillment.Reconcile(t.Context(), config)
	require.NoError(t, err)
	require.Equal(t, before, s.everything(t), "it was told to change nothing")
	require.Positive(t, explained)

	config.DryRun, config.Explain = false, nil
	report, err := fulfillment.Reconcile(t.Context(), config)
	require.NoError(t, err)
	require.Equal(t, left, leftOf(report), "%+v", report)
	require.Len(t, report.Remedies, len(planned.Remedies), "what was done is what was planned")
	require.Equal(t, slices.Contains([]string{"", "worker"}, left), report.Remaining == 0)
	if left == "projections" {
		s.rebuildProjections(t)
		report, err = fulfillment.Reconcile(t.Context(), config)
		require.NoError(t, err)
		left = leftOf(report)
		require.Empty(t, left, "%+v", report)
	}
	if left != "" {
		return
	}
	require.Empty(t, report.Failures)
	s.arrive(t)
	again := s.reconcile(t)
	require.Empty(t, again.Remedies, "a second time finds nothing")
	audit := s.audit(t, uuid.Nil)
	require.False(t, audit.Broken(), textOf(t, audit))
}

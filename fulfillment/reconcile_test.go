package fulfillment_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/fulfillment/stream"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
	"stampede/internal/testwork"
	"stampede/reservation"
)

func reconcileConfig(s *testshop.Shop, t testing.TB) fulfillment.ReconcileConfig {
	t.Helper()
	return fulfillment.ReconcileConfig{
		Pool: s.Pool, Redis: s.Rdb, Keys: s.Keys, Store: s.Store, Catalog: s.Catalog, Rebuilder: rebuilder(s, t),
		Pause: time.Millisecond, Logger: testkit.Logger(t),
	}
}

func reconcile(s *testshop.Shop, t testing.TB) fulfillment.ReconcileReport {
	t.Helper()
	report, err := fulfillment.Reconcile(t.Context(), reconcileConfig(s, t))
	require.NoError(t, err)
	return report
}

// everything is what Postgres and Redis hold.
func everything(s *testshop.Shop, t testing.TB) (all []string) {
	t.Helper()
	for _, table := range rowsOf(t, s.Pool, "SELECT tablename::text FROM pg_tables WHERE schemaname = 'public' ORDER BY 1") {
		for _, row := range rowsOf(t, s.Pool, "SELECT row_to_json(r)::text FROM "+table+" AS r ORDER BY 1") {
			all = append(all, table+" "+row)
		}
	}
	keys, err := s.Rdb.Keys(t.Context(), s.Keys.Prefix+":*").Result()
	require.NoError(t, err)
	slices.Sort(keys)
	for _, key := range keys {
		dump, err := s.Rdb.Dump(t.Context(), key).Result()
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
func arrive(s *testshop.Shop, t testing.TB) {
	t.Helper()
	backlog, err := stream.ReadBacklog(t.Context(), s.Rdb, s.Keys.Orders(0), reservation.Group)
	require.NoError(t, err)
	if backlog.Lag > 0 {
		testwork.Fulfil(s, t)
	}
	_, err = testwork.GiveBack(s, t.Context())
	require.NoError(t, err)
}

// requireMended reconciles until only that is left which is left to others: "" for nothing.
func requireMended(s *testshop.Shop, t testing.TB, sale uuid.UUID, left string) {
	t.Helper()
	before := everything(s, t)
	config := reconcileConfig(s, t)
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
	require.Equal(t, before, everything(s, t), "it was told to change nothing")
	require.Positive(t, explained)

	config.DryRun, config.Explain = false, nil
	report, err := fulfillment.Reconcile(t.Context(), config)
	require.NoError(t, err)
	require.Equal(t, left, leftOf(report), "%+v", report)
	require.Len(t, report.Remedies, len(planned.Remedies), "what was done is what was planned")
	require.Equal(t, slices.Contains([]string{"", "worker"}, left), report.Remaining == 0)
	if left == "projections" {
		rebuildProjections(s, t)
		report, err = fulfillment.Reconcile(t.Context(), config)
		require.NoError(t, err)
		left = leftOf(report)
		require.Empty(t, left, "%+v", report)
	}
	if left != "" {
		return
	}
	require.Empty(t, report.Failures)
	arrive(s, t)
	again := reconcile(s, t)
	require.Empty(t, again.Remedies, "a second time finds nothing")
	audit := testwork.Audit(s, t, uuid.Nil)
	require.False(t, audit.Broken(), testwork.TextOf(t, audit))
}

package testwork

import (
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/upkeep/rebuild"
)

// Guarded runs a worker that often checks what has to be rebuilt, and returns its metrics and its log.
func Guarded(s *testshop.Shop, t testing.TB) (registry *prometheus.Registry, log *testshop.CountingLog) {
	t.Helper()
	registry, log = prometheus.NewRegistry(), &testshop.CountingLog{}
	config := Config(s, t)
	config.GuardInterval, config.Registerer, config.Logger = 20*time.Millisecond, registry, slog.New(log)
	Work(t, config)
	return registry, log
}

// Rebuilds returns the number of finished rebuilds, for all reasons.
func Rebuilds(t testing.TB, registry *prometheus.Registry) (n float64) {
	t.Helper()
	for _, reason := range []string{
		rebuild.ReasonServer, rebuild.ReasonUnverified, rebuild.ReasonSaleLost, rebuild.ReasonUnfinished,
		rebuild.ReasonSetBack, rebuild.ReasonRefused, rebuild.ReasonByHand, rebuild.ReasonReconciled,
	} {
		n += testshop.ValueOf(t, registry, "stampede_rebuilds_total", reason)
	}
	return n
}

// RequireNoNeeds requires that neither a partition nor a sale needs a rebuild, including ended sales.
func RequireNoNeeds(s *testshop.Shop, t testing.TB, partitions int) {
	t.Helper()
	found, err := Rebuilder(s, t).Needs(t.Context(), partitions, true)
	require.NoError(t, err)
	require.Empty(t, found)
}

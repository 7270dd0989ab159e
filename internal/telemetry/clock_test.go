package telemetry

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"stampede/internal/clocks"
)

func TestClockIsComparedWithPostgres(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		postgres clocks.Reading
		err      error
		series   int
	}{
		"behind":       {clocks.Reading{Offset: 3 * time.Second, Margin: time.Second}, nil, 1},
		"not answered": {clocks.Reading{}, errors.ErrUnsupported, 0},
	} {
		registry := prometheus.NewRegistry()
		ctx, stop := context.WithCancel(t.Context())
		run, err := WatchClock(registry, func(context.Context) (clocks.Reading, error) {
			stop() // this look is the last
			return c.postgres, c.err
		})
		require.NoError(t, err)
		run(ctx)
		families, err := registry.Gather()
		require.NoError(t, err)
		require.Len(t, families, c.series, name)
		if c.series > 0 {
			require.InDelta(t, -2, families[0].GetMetric()[0].GetGauge().GetValue(), 0.01, "less the half round trip")
		}
	}
}

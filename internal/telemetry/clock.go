package telemetry

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/clocks"
	"stampede/internal/retry"
)

// clockInterval is the pause between two looks at the clock.
const clockInterval = 5 * time.Second

// WatchClock registers the metric of by how much the clock of this process is ahead of that of Postgres, which read
// reads. run looks until its context is done; the series is absent while nothing is known.
func WatchClock(
	reg prometheus.Registerer, read func(context.Context) (clocks.Reading, error),
) (run func(context.Context), err error) {
	ahead, err := RegisterOnce(reg, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "stampede_clock_ahead_seconds",
		Help: "By how much the clock of this process is ahead of that of Postgres at least, below 0: behind it. What the round " +
			"trip may have added is taken off. Absent while unknown.",
	}, nil))
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) {
		for {
			limited, cancel := context.WithTimeout(ctx, readyTimeout)
			postgres, err := read(limited)
			cancel()
			if err == nil {
				ahead.WithLabelValues().Set(clocks.Own().Ahead(postgres).Seconds())
			} else {
				ahead.Reset()
			}
			if !retry.Pause(retry.Delay(1, clockInterval, clockInterval), ctx.Done()) {
				return
			}
		}
	}, nil
}

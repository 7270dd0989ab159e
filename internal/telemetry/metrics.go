package telemetry

import (
	"context"
	"errors"
	"regexp"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"stampede/internal/clocks"
	"stampede/internal/retry"
)

// schedulerLatency is how long goroutines wait for a processor: go_sched_latencies_seconds. No latency of a request
// shows it, because a request that waits cannot look at the clock.
var schedulerLatency = collectors.GoRuntimeMetricsRule{Matcher: regexp.MustCompile(`^/sched/latencies:seconds$`)}

// NewRegistry returns a new registry with the metrics of the Go runtime, the process and the build. It does not use the
// global registry, so that tests can have their own.
func NewRegistry() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collectors.NewGoCollector(collectors.WithGoCollectorRuntimeMetrics(schedulerLatency)),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name:        "stampede_build_info",
			Help:        "Always 1; the labels identify the build.",
			ConstLabels: prometheus.Labels{"version": BuildVersion(), "go_version": runtime.Version()},
		}, func() float64 { return 1 }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "stampede_log_lines_lost_total",
			Help: "Lines of the log that were lost because their reader was too slow or had gone, or the disk was full.",
		}, func() float64 { return float64(linesLost.Load()) }),
	)
	return registry
}

// OneIf is 1 for true and 0 for false, as gauges show it.
func OneIf(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

// RegisterOnce registers a collector and returns it, or an equal one that is already registered: a process
// may have several subscribers. Without a Registerer it only returns the collector.
func RegisterOnce[C prometheus.Collector](reg prometheus.Registerer, collector C) (C, error) {
	if reg == nil {
		return collector, nil
	}
	err := reg.Register(collector)
	var already prometheus.AlreadyRegisteredError
	if errors.As(err, &already) {
		if existing, ok := already.ExistingCollector.(C); ok {
			return existing, nil
		}
	}
	return collector, err
}

const (
	// nativeFactor is how much wider a bucket of a native histogram is than the one below it, at most.
	nativeFactor = 1.1
	// nativeBucketsMax bounds the buckets of a series. Beyond it, neighbours are merged or, after nativeReset, dropped.
	nativeBucketsMax = 160
	nativeReset      = time.Hour
)

// Native returns the options with a native histogram beside the classic buckets. A server that asks for protobuf gets
// both, others only the classic ones.
func Native(o prometheus.HistogramOpts) prometheus.HistogramOpts {
	o.NativeHistogramBucketFactor = nativeFactor
	o.NativeHistogramMaxBucketNumber = nativeBucketsMax
	o.NativeHistogramMinResetDuration = nativeReset
	return o
}

// OrdersByOutcome returns stampede_orders_total, with these outcomes. Workers count what they record, and ingresses
// what buyers and operators change; a process may be both.
func OrdersByOutcome(reg prometheus.Registerer, outcomes ...string) (*prometheus.CounterVec, error) {
	counted, err := RegisterOnce(reg, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_orders_total",
		Help: "Orders by outcome. Workers count confirmed, rejected, voided and expired ones, and deliveries that were " +
			"duplicate (recorded before) or unusable; ingresses count paid and cancelled ones.",
	}, []string{"outcome"}))
	if err != nil {
		return nil, err
	}
	for _, outcome := range outcomes {
		counted.WithLabelValues(outcome) // it exists before the first event, which increase() would miss otherwise
	}
	return counted, nil
}

// GuardAge measures how long ago a guard has verified that Redis is the server that Postgres names: the longest time
// of any partition that it guards. It is safe for concurrent use; nil measures nothing.
type GuardAge struct {
	mu sync.Mutex
	// verified has the guarded partitions. idle counts while there are none.
	verified map[int]time.Time
	idle     time.Time
}

// NewGuardAge registers stampede_guard_age_seconds for the guard of an ingress or a worker. It counts from now on.
func NewGuardAge(reg prometheus.Registerer, of string) (*GuardAge, error) {
	a := &GuardAge{verified: map[int]time.Time{}, idle: time.Now()}
	_, err := RegisterOnce(reg, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "stampede_guard_age_seconds",
		Help: "Time since the guard of this ingress or worker verified that Redis is the server that Postgres names, of the " +
			"partition for which it is longest.",
		ConstLabels: prometheus.Labels{"of": of},
	}, a.seconds))
	return a, err
}

// Guards says which partitions are guarded from now on. New ones count from now on.
func (a *GuardAge) Guards(partitions []int) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	guarded := make(map[int]time.Time, len(partitions))
	for _, p := range partitions {
		if guarded[p] = now; !a.verified[p].IsZero() {
			guarded[p] = a.verified[p]
		}
	}
	a.verified, a.idle = guarded, now
}

// Verified notes that a guarded partition was verified.
func (a *GuardAge) Verified(partition int) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, guarded := a.verified[partition]; guarded {
		a.verified[partition] = time.Now()
	}
}

func (a *GuardAge) seconds() float64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	oldest := a.idle
	if len(a.verified) > 0 {
		oldest = time.Now()
	}
	for _, at := range a.verified {
		if at.Before(oldest) {
			oldest = at
		}
	}
	return time.Since(oldest).Seconds()
}

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

// version is set in a release build: -ldflags "-X stampede/internal/telemetry.version=v1.2.3".
var version string

// BuildVersion returns the version of a release, else the one that the go command recorded (of the
// module, or the commit of the work tree), else "devel".
func BuildVersion() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	return versionFrom(info)
}

func versionFrom(info *debug.BuildInfo) string {
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	var commit, dirty string
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			commit = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "+dirty"
		}
	}
	if commit == "" {
		return "devel"
	}
	return "devel-" + commit + dirty
}

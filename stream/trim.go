package stream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/internal/retry"
	"stampede/internal/telemetry"
	"stampede/lua"
)

// TrimmerConfig configures a Trimmer. Control and Stream have no default.
type TrimmerConfig struct {
	Control redis.UniversalClient
	Stream  string
	// Interval is how often the stream is trimmed.
	Interval time.Duration
	Logger   *slog.Logger
	// Registerer receives the metrics; nil for none.
	Registerer prometheus.Registerer
}

func (c *TrimmerConfig) setDefaults() {
	c.Interval = cmp.Or(c.Interval, 10*time.Second)
	c.Logger = cmp.Or(c.Logger, slog.Default())
}

// Validate returns an error for an invalid config. It expects the defaults to be set.
func (c *TrimmerConfig) Validate() error {
	switch {
	case c.Control == nil:
		return errors.New("trimmer config: Control is missing")
	case c.Stream == "":
		return errors.New("trimmer config: Stream is missing")
	case c.Interval < 0:
		return errors.New("trimmer config: Interval must be positive")
	}
	return nil
}

// Trimmer frees the entries of a stream that all groups have acknowledged, and no others. Several
// may work on the same stream.
type Trimmer struct {
	config  TrimmerConfig
	trimmed prometheus.Counter
}

// NewTrimmer returns a Trimmer.
func NewTrimmer(config TrimmerConfig) (*Trimmer, error) {
	config.setDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	trimmed, err := telemetry.RegisterOnce(config.Registerer, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_entries_trimmed_total", Help: "Stream entries freed after all groups acknowledged them.",
	}, []string{"stream"}))
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return &Trimmer{config: config, trimmed: trimmed.WithLabelValues(config.Stream)}, nil
}

// Run trims until ctx is cancelled. It continues while Redis is away.
func (t *Trimmer) Run(ctx context.Context) {
	outage := retry.Outage{Log: t.config.Logger, Doing: "trim " + t.config.Stream}
	for retry.Pause(t.config.Interval, ctx.Done()) {
		if err := t.trim(ctx); ctx.Err() == nil { // a stop is no failure
			outage.Note(err)
		}
	}
}

func (t *Trimmer) trim(ctx context.Context) error {
	for {
		removed, err := TrimOnce(ctx, t.config.Control, t.config.Stream)
		t.trimmed.Add(float64(removed))
		if err != nil || removed == 0 {
			return err
		}
	}
}

// TrimOnce frees at most one page of entries of a stream, and returns their number.
func TrimOnce(ctx context.Context, rdb redis.UniversalClient, stream string) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	reply, err := lua.Trim.Run(ctx, rdb, []string{stream}).Slice()
	if err != nil {
		return 0, fmt.Errorf("trim %s: %w", stream, err)
	}
	if len(reply) == 2 {
		if removed, ok := reply[1].(int64); ok {
			return removed, nil
		}
	}
	return 0, fmt.Errorf("trim %s: unexpected reply %v", stream, reply)
}

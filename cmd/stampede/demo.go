package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"stampede/internal/dev/crowd"
	"stampede/internal/dev/demo"
	"stampede/reservation"
)

type demoCmd struct {
	optionalServers
	outputFlag
	Stock        int64         `env:"STAMPEDE_DEMO_STOCK" default:"10000" placeholder:"UNITS" help:"Units for sale, at least 100 (${default})."`
	Items        []saleItem    `env:"STAMPEDE_DEMO_ITEMS" placeholder:"CODE:STOCK" help:"Items of the sale with their units, in place of --stock; buyers take two at once."`
	Shards       int           `env:"STAMPEDE_DEMO_SHARDS" default:"1" placeholder:"N" help:"Partitions that share the stock (${default})."`
	Buyers       int           `env:"STAMPEDE_DEMO_BUYERS" default:"50000" placeholder:"N" help:"Number of buyers, at least 100 (${default})."`
	Over         time.Duration `env:"STAMPEDE_DEMO_OVER" default:"8s" placeholder:"DURATION" help:"Time over which the buyers arrive, evenly spread (${default})."`
	Dashboard    bool          `env:"STAMPEDE_DEMO_DASHBOARD" help:"Run a dashboard too, and keep everything running after the verdict, until Ctrl-C."`
	DoubleClicks float64       `env:"STAMPEDE_DEMO_DOUBLE_CLICKS" default:"0.05" placeholder:"SHARE" help:"Share of buyers who click twice at the same time, 0 to 1 (${default})."`
}

// Validate is called by kong.
func (c *demoCmd) Validate() error {
	return cmp.Or(
		c.optionalServers.Validate(),
		checkFlag(c.Buyers <= crowd.MaxBuyers, "--buyers", c.Buyers, fmt.Sprintf("at most %d", crowd.MaxBuyers)),
		checkFlag(c.Shards >= 1 && c.Shards <= reservation.MaxPartitions, "--shards", c.Shards,
			fmt.Sprintf("1 to %d", reservation.MaxPartitions)),
		wantAtLeast("--over", c.Over, 0),
		wantShare("--double-clicks", c.DoubleClicks),
	)
}

func (c *demoCmd) Run(ctx context.Context, s *streams) error {
	raiseGOGC()
	// Only the demo's own text is printed; its processes write their logs to files.
	slog.SetDefault(slog.New(slog.NewTextHandler(io.Discard, nil)))
	partitions := 1
	if c.Cluster {
		partitions = clusterPartitions
	}
	config := demo.Config{
		Stock: c.Stock, Shards: c.Shards, Buyers: c.Buyers, Over: c.Over, DoubleClicks: c.DoubleClicks,
		Servers: c.wanted(), Partitions: partitions, Dashboard: c.Dashboard, Out: s.out,
	}
	if len(c.Items) > 0 {
		config.Items, config.Stock = itemTerms(c.Items)
	}
	if c.json() {
		config.Out = s.err
		config.Verdict = func(v demo.Verdict) error { return writeJSON(s.out, v) }
	}
	config.Terminal = isTerminal(config.Out)
	err := demo.Run(ctx, config)
	switch {
	case errors.Is(err, demo.ErrBroken):
		return errBroken
	case errors.Is(err, demo.ErrUnchecked):
		return errUnchecked
	}
	return err
}

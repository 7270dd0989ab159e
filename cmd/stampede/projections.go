package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"stampede/fulfillment/projection"
	"stampede/internal/connect"
	"stampede/internal/figure"
	"stampede/sql"
)

type projectionsCmd struct {
	Rebuild projectionsRebuildCmd `cmd:"" help:"Rebuild the orders and the counters of sales from the log of events, beside the ones in use, and swap them in. Sales continue."`
}

type projectionsRebuildCmd struct {
	databaseFlag
	jsonFlag
}

func (c *projectionsRebuildCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	pool, err := connect.Postgres(ctx, c.DatabaseURL, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := sql.Check(ctx, pool); err != nil {
		return err
	}
	report, err := projection.Rebuild(ctx, pool, logger)
	if err != nil {
		return err
	}
	if c.JSON {
		return writeJSON(s.out, report)
	}
	_, err = fmt.Fprintf(s.out,
		"%s orders rebuilt from their events in %v; %s changes arrived meanwhile; reads and writes of orders were blocked for %v\n",
		figure.Count(report.Orders), report.Took.Round(time.Millisecond), figure.Count(report.Changes),
		report.Held.Round(time.Millisecond/10))
	for _, r := range report.Recounted {
		if err == nil {
			_, err = fmt.Fprintf(s.out, "sale %s: sold was %s and is %s\n", r.Sale, figure.Count(r.Was), figure.Count(r.Is))
		}
	}
	return err
}

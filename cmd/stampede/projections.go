package main

import (
	"context"
	"fmt"
	"time"

	"stampede/fulfillment/projection"
	"stampede/internal/connect"
	"stampede/internal/figure"
	"stampede/sql"
)

type projectionsCmd struct {
	Rebuild projectionsRebuildCmd `cmd:"" help:"Make the orders and the counters of sales those of the log of events, month by month. Sales continue."`
}

type projectionsRebuildCmd struct {
	databaseFlag
	jsonFlag
}

func (c *projectionsRebuildCmd) Run(ctx context.Context, s *streams) error {
	pool, err := connect.Postgres(ctx, c.DatabaseURL, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := sql.Check(ctx, pool); err != nil {
		return err
	}
	report, err := projection.Rebuild(ctx, pool)
	if err != nil {
		return err
	}
	if c.JSON {
		return writeJSON(s.out, report)
	}
	_, err = fmt.Fprintf(s.out,
		"%s orders compared with their events in %v; %s of them differed and were replaced\n",
		figure.Count(report.Orders), report.Took.Round(time.Millisecond), figure.Count(report.Replaced))
	for _, r := range report.Recounted {
		if err == nil {
			_, err = fmt.Fprintf(s.out, "sale %s: sold was %s and is %s\n", r.Sale, figure.Count(r.Was), figure.Count(r.Is))
		}
	}
	return err
}

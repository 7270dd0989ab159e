package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/connect"
	"stampede/internal/figure"
	"stampede/sql"
	"stampede/upkeep/archive"
	"stampede/upkeep/projection"
)

type projectionsCmd struct {
	Rebuild projectionsRebuildCmd `cmd:"" help:"Make the orders and the counters of sales those of the log of events, month by month. Sales continue."`
}

type projectionsRebuildCmd struct {
	databaseFlag
	outputFlag
	Archive string `env:"STAMPEDE_PROJECTIONS_ARCHIVE" placeholder:"FILE" type:"existingfile" help:"Bring the events of an archived sale back from this file, and make its orders from them. Others stay as they are."`
}

func (c *projectionsRebuildCmd) Run(ctx context.Context, s *streams) error {
	pool, err := connect.Postgres(ctx, c.DatabaseURL, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	ctx, stop := s.watch(ctx, "looking at the log")
	defer stop()
	if err := sql.Check(ctx, pool); err != nil {
		return err
	}
	if c.Archive != "" {
		return c.restore(ctx, s, pool)
	}
	report, damaged := projection.Rebuild(ctx, pool)
	if damaged != nil && !errors.Is(damaged, projection.ErrDamagedLog) {
		return damaged
	}
	if c.json() {
		return cmp.Or(writeJSON(s.out, report), damaged)
	}
	_, err = fmt.Fprintf(s.out,
		"%s orders compared with their events in %v; %s of them differed and were replaced\n",
		figure.Count(report.Orders), report.Took.Round(time.Millisecond), figure.Count(report.Replaced))
	for _, r := range report.Recounted {
		if err == nil {
			_, err = fmt.Fprintf(s.out, "sale %s: sold was %s and is %s, the last place was %s and is %s\n", r.Sale,
				figure.Count(r.Was), figure.Count(r.Is), figure.Count(r.LastWas), figure.Count(r.LastIs))
		}
	}
	return cmp.Or(err, damaged)
}

// restore brings an archived sale back.
func (c *projectionsRebuildCmd) restore(ctx context.Context, s *streams, pool *pgxpool.Pool) error {
	restored, err := archive.Restore(ctx, pool, c.Archive)
	if err != nil {
		return err
	}
	if c.json() {
		return writeJSON(s.out, restored)
	}
	_, err = fmt.Fprintf(s.out, "sale %s: %s orders with %s events are back in Postgres, in %v\n", restored.Sale,
		figure.Count(restored.Orders), figure.Count(restored.Events), restored.Took.Round(time.Millisecond))
	return err
}

package main

import (
	"context"
	"fmt"
	"text/tabwriter"
	"time"

	"stampede/sql"
)

type migrateCmd struct {
	Up     migrateUpCmd     `cmd:"" help:"Apply all migrations that are missing. Safe to run by several processes at once."`
	Down   migrateDownCmd   `cmd:"" help:"Undo the latest migration, with the data that it holds. Refused where there are sales, unless it is told to discard them."`
	Status migrateStatusCmd `cmd:"" help:"List the migrations."`
}

type migrateUpCmd struct{ databaseFlag }

func (c *migrateUpCmd) Run(ctx context.Context, s *streams) error {
	if err := sql.Up(ctx, c.DatabaseURL); err != nil {
		return err
	}
	_, err := fmt.Fprintln(s.out, "the schema is up to date")
	return err
}

type migrateDownCmd struct {
	databaseFlag
	DiscardData bool `env:"STAMPEDE_MIGRATE_DISCARD_DATA" help:"Delete the sales and orders that the database holds."`
}

func (c *migrateDownCmd) Run(ctx context.Context, s *streams) error {
	down := sql.Down
	if c.DiscardData {
		down = sql.DownWithData
	}
	if err := down(ctx, c.DatabaseURL); err != nil {
		return err
	}
	_, err := fmt.Fprintln(s.out, "one migration is undone")
	return err
}

type migrateStatusCmd struct{ databaseFlag }

func (c *migrateStatusCmd) Run(ctx context.Context, s *streams) error {
	migrations, err := sql.Status(ctx, c.DatabaseURL)
	if err != nil {
		return err
	}
	t := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "NAME\tAPPLIED") // Flush tells the error
	for _, m := range migrations {
		at := "-"
		if m.Applied {
			at = m.AppliedAt.UTC().Format(time.RFC3339)
		}
		_, _ = fmt.Fprintf(t, "%s\t%s\n", m.Name, at)
	}
	return t.Flush()
}

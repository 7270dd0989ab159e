package main

import (
	"context"
	"errors"
	"fmt"
	"text/tabwriter"
	"time"

	"stampede/internal/connect"
	"stampede/sql"
)

type migrateCmd struct {
	Up     migrateUpCmd     `cmd:"" help:"Apply all migrations that are missing. Safe to run by several processes at once."`
	Down   migrateDownCmd   `cmd:"" help:"Undo the latest migration, with the data that it holds. Refused where there are sales, unless it is told to discard them."`
	Status migrateStatusCmd `cmd:"" help:"List the migrations, and what is missing of what they made. Exit status 1 if something is, 3 if Postgres does not answer."`
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
		return couldNotLook(err)
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
	if err := t.Flush(); err != nil {
		return err
	}
	return c.guards(ctx, s)
}

// guards names the constraints and indexes that were taken away from a schema that has all migrations.
func (c *migrateStatusCmd) guards(ctx context.Context, s *streams) error {
	pool, err := connect.Postgres(ctx, c.DatabaseURL, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := sql.Check(ctx, pool); errors.Is(err, sql.ErrNotMigrated) || errors.Is(err, sql.ErrSchemaAhead) {
		return nil // the list says so
	} else if err != nil {
		return couldNotLook(err)
	}
	_, missing, err := sql.Guards(ctx, pool)
	for _, m := range missing {
		if _, err := fmt.Fprintf(s.out, "%s: put it back with\n    %s\n", m.What, m.Mend); err != nil {
			return err
		}
	}
	if len(missing) > 0 {
		return errBroken
	}
	return couldNotLook(err)
}

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
	Up     migrateUpCmd     `cmd:"" help:"Apply all missing migrations. Several processes may run it at the same time."`
	Down   migrateDownCmd   `cmd:"" help:"Undo the latest migration and delete its data. Refused if there are sales, unless --discard-data is given."`
	Status migrateStatusCmd `cmd:"" help:"List the migrations, and missing constraints and indexes. Exit status 1 if one is missing, 3 if Postgres does not answer."`
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
	DiscardData bool `env:"STAMPEDE_MIGRATE_DISCARD_DATA" help:"Delete the sales and orders in the database."`
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
		return unchecked(err)
	}
	t := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "NAME\tAPPLIED") // Flush returns the error
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

// guards lists missing constraints and indexes of a schema that has all migrations.
func (c *migrateStatusCmd) guards(ctx context.Context, s *streams) error {
	pool, err := connect.Postgres(ctx, c.DatabaseURL, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := sql.Check(ctx, pool); errors.Is(err, sql.ErrNotMigrated) || errors.Is(err, sql.ErrSchemaAhead) {
		return nil // the list shows it
	} else if err != nil {
		return unchecked(err)
	}
	_, missing, err := sql.Guards(ctx, pool)
	for _, m := range missing {
		if _, err := fmt.Fprintf(s.out, "%s: restore it with\n    %s\n", m.What, m.Mend); err != nil {
			return err
		}
	}
	if len(missing) > 0 {
		return errBroken
	}
	return unchecked(err)
}

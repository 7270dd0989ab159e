package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"stampede/internal/connect"
	"stampede/internal/progress"
	"stampede/sql"
	"stampede/sql/migrate"
)

type migrateCmd struct {
	Up     migrateUpCmd     `cmd:"" help:"Apply all missing migrations. Several processes may run it at the same time."`
	Down   migrateDownCmd   `cmd:"" help:"Undo the latest migration and delete its data. Refused if there are sales, unless --discard-data is given."`
	Status migrateStatusCmd `cmd:"" help:"List the migrations, also those of a newer version, and missing constraints and indexes. Exit status 1 if one is missing, 3 if Postgres does not answer."`
}

type migrateUpCmd struct {
	databaseFlag
	outputFlag
}

func (c *migrateUpCmd) Run(ctx context.Context, s *streams) error {
	ctx, stop := s.watch(ctx, "looking at the schema")
	defer stop()
	applied, err := migrate.UpEach(ctx, c.DatabaseURL, func(n, missing int) {
		progress.Step(ctx, "migrating")
		progress.At(ctx, int64(n), int64(missing), "migrations")
	})
	if err != nil {
		return err
	}
	return c.print(s.out, struct {
		Applied []string `json:"applied"`
	}{append([]string{}, applied...)}, "the schema is up to date\n")
}

type migrateDownCmd struct {
	databaseFlag
	outputFlag
	yesFlag
	DiscardData bool `env:"STAMPEDE_MIGRATE_DISCARD_DATA" help:"Delete the sales and orders in the database. Asks before it does."`
}

func (c *migrateDownCmd) Run(ctx context.Context, s *streams) error {
	down := migrate.Down
	if c.DiscardData {
		down = migrate.DownWithData
		if err := c.askable(s); err != nil {
			return err
		}
	}
	latest, err := latestMigration(ctx, c.DatabaseURL)
	if err == nil && c.DiscardData {
		err = c.confirm(ctx, s, func() (string, error) {
			return fmt.Sprintf("Migration %s is undone, and the sales and orders in what it made are deleted.", latest), nil
		})
	}
	if err != nil {
		return err
	}
	if err := down(ctx, c.DatabaseURL); err != nil {
		return err
	}
	return c.print(s.out, struct {
		Undone string `json:"undone"`
	}{latest}, "one migration is undone: %s\n", latest)
}

// latestMigration is the name of the one that migrate down undoes, empty without any.
func latestMigration(ctx context.Context, databaseURL string) (name string, err error) {
	all, err := migrate.Status(ctx, databaseURL)
	for _, m := range all {
		if m.Applied {
			name = m.Name
		}
	}
	return name, err
}

type migrateStatusCmd struct {
	readOnly
	databaseFlag
	outputFlag
}

// schemaStatus is the result of migrate status as JSON.
type schemaStatus struct {
	Migrations []migrationStatus `json:"migrations"`
	// Missing is empty while a migration is.
	Missing []missingGuard `json:"missing"`
}

type migrationStatus struct {
	Name      string    `json:"name"`
	Applied   bool      `json:"applied"`
	AppliedAt time.Time `json:"applied_at,omitzero"`
}

type missingGuard struct {
	What string `json:"what"`
	Mend string `json:"mend"`
}

func (c *migrateStatusCmd) Run(ctx context.Context, s *streams) error {
	migrations, err := migrate.Status(ctx, c.DatabaseURL)
	if err != nil {
		return unchecked(err)
	}
	missing, missingErr := c.missing(ctx)
	status := schemaStatus{[]migrationStatus{}, []missingGuard{}}
	for _, m := range migrations {
		status.Migrations = append(status.Migrations, migrationStatus{m.Name, m.Applied, utc(m.AppliedAt)})
	}
	for _, m := range missing {
		status.Missing = append(status.Missing, missingGuard{m.What, m.Mend})
	}
	if err := verdict(c.write(s.out, status, status.writeText), len(missing) > 0, false); err != nil {
		return err
	}
	return unchecked(missingErr)
}

func (status schemaStatus) writeText(w io.Writer) error {
	t := newTable(w, "NAME", "APPLIED")
	for _, m := range status.Migrations {
		t.row(m.Name, second(m.AppliedAt))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, m := range status.Missing {
		if _, err := fmt.Fprintf(w, "%s: restore it with\n    %s\n", m.What, m.Mend); err != nil {
			return err
		}
	}
	return nil
}

// missing returns the missing constraints and indexes of a schema that has all migrations.
func (c *migrateStatusCmd) missing(ctx context.Context) ([]sql.MissingGuard, error) {
	pool, err := connect.Postgres(ctx, c.DatabaseURL, 1)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	if err := sql.Check(ctx, pool); errors.Is(err, sql.ErrNotMigrated) {
		return nil, nil // the list shows it
	} else if err != nil {
		return nil, err
	}
	_, missing, err := sql.Guards(ctx, pool)
	return missing, err
}

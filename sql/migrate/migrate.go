// Package migrate applies the migrations of package sql to a database, and undoes them.
package migrate

import (
	"context"
	stdsql "database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"stampede/sql"
)

var (
	// ErrNothingToUndo is returned by Down when no migration is applied.
	ErrNothingToUndo = errors.New("no migration is applied")
	// ErrHoldsSales is returned by Down if it would delete sales.
	ErrHoldsSales = errors.New("the database holds sales, and undoing a migration deletes them with all their orders: " +
		"repeat it with --discard-data if they may go")
)

// Up waits for concurrent migrations: it polls once a second, for five minutes. A blocking lock
// would hold a snapshot while it waits, and CREATE INDEX CONCURRENTLY in the other process would
// wait for that.
const (
	lockEverySeconds = 1
	lockTries        = 300
)

// Migration is one step of the schema.
type Migration struct {
	Version int64
	Name    string
	Applied bool
	// AppliedAt is zero for a migration that is not applied.
	AppliedAt time.Time
}

// Up applies all missing migrations. Concurrent processes wait for each other, and only one of them
// applies each migration.
func Up(ctx context.Context, databaseURL string) error {
	_, err := UpEach(ctx, databaseURL, func(int, int) {})
	return err
}

// UpEach is Up that calls applied with the number of migrations that it has applied so far, and with how many of them
// were missing at its start; first with 0. It returns the names of those that it has applied.
func UpEach(ctx context.Context, databaseURL string, applied func(n, missing int)) (names []string, err error) {
	err = withProvider(ctx, databaseURL, func(p *goose.Provider) error {
		missing, err := countMissing(ctx, p)
		if err != nil || missing == 0 {
			return err
		}
		applied(0, missing)
		for {
			result, err := p.UpByOne(ctx)
			if errors.Is(err, goose.ErrNoNextVersion) {
				return nil // also if another process has applied the rest
			}
			if err != nil {
				return fmt.Errorf("migrate up: %w", err)
			}
			names = append(names, migrationName(result.Source))
			applied(len(names), missing)
		}
	})
	return names, err
}

func countMissing(ctx context.Context, p *goose.Provider) (n int, err error) {
	states, err := p.Status(ctx)
	if err != nil {
		return 0, fmt.Errorf("migrate up: %w", err)
	}
	for _, s := range states {
		if s.State != goose.StateApplied {
			n++
		}
	}
	return n, nil
}

// migrationName is the name of a migration.
func migrationName(source *goose.Source) string {
	return strings.TrimSuffix(filepath.Base(source.Path), ".sql")
}

// Down undoes the latest migration in a database without sales, and otherwise returns
// ErrHoldsSales.
func Down(ctx context.Context, databaseURL string) error {
	return down(ctx, databaseURL, refuseWithSales)
}

// DownWithData undoes the latest migration and deletes its data.
func DownWithData(ctx context.Context, databaseURL string) error {
	return down(ctx, databaseURL, func(context.Context, *stdsql.DB) error { return nil })
}

func down(ctx context.Context, databaseURL string, allow func(context.Context, *stdsql.DB) error) error {
	return withDatabase(ctx, databaseURL, func(db *stdsql.DB, p *goose.Provider) error {
		if err := allow(ctx, db); err != nil {
			return err
		}
		_, err := p.Down(ctx)
		if errors.Is(err, goose.ErrNoNextVersion) {
			return ErrNothingToUndo
		}
		if err != nil {
			return fmt.Errorf("migrate down: %w", err)
		}
		return nil
	})
}

func refuseWithSales(ctx context.Context, db *stdsql.DB) error {
	var found bool
	err := db.QueryRowContext(ctx, sql.SchemaHasSales).Scan(&found)
	switch {
	case sql.IsUndefinedTable(err):
		return nil
	case err != nil:
		return fmt.Errorf("look for sales: %w", err)
	case found:
		return ErrHoldsSales
	}
	return nil
}

// Status returns all migrations of this program, oldest first, and then those that a newer one has applied.
func Status(ctx context.Context, databaseURL string) ([]Migration, error) {
	var all []Migration
	err := withDatabase(ctx, databaseURL, func(db *stdsql.DB, p *goose.Provider) error {
		states, err := p.Status(ctx)
		if err != nil {
			return fmt.Errorf("migration status: %w", err)
		}
		for _, s := range states {
			all = append(all, Migration{
				Version:   s.Source.Version,
				Name:      migrationName(s.Source),
				Applied:   s.State == goose.StateApplied,
				AppliedAt: s.AppliedAt,
			})
		}
		newer, err := newerMigrations(ctx, db, all)
		all = append(all, newer...)
		return err
	})
	return all, err
}

// newerMigrations returns the applied migrations that are not among the known ones.
func newerMigrations(ctx context.Context, db *stdsql.DB, known []Migration) (newer []Migration, err error) {
	rows, err := db.QueryContext(ctx, sql.SchemaVersions)
	if sql.IsUndefinedTable(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the schema's version: %w", err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		m := Migration{Applied: true}
		if err := rows.Scan(&m.Version, &m.AppliedAt); err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(known, func(k Migration) bool { return k.Version == m.Version }) {
			m.Name = fmt.Sprintf("%05d of a newer version", m.Version)
			newer = append(newer, m)
		}
	}
	return newer, rows.Err()
}

func withProvider(ctx context.Context, databaseURL string, do func(*goose.Provider) error) error {
	return withDatabase(ctx, databaseURL, func(_ *stdsql.DB, p *goose.Provider) error { return do(p) })
}

func withDatabase(ctx context.Context, databaseURL string, do func(*stdsql.DB, *goose.Provider) error) (err error) {
	config, err := pgx.ParseConfig(databaseURL)
	if databaseURL == "" || err != nil {
		return sql.ErrDatabaseURL
	}
	sql.PrepareSessions(&config.Config, "")
	db := stdlib.OpenDB(*config)
	defer func() { err = errors.Join(err, db.Close()) }()
	conn, err := db.Conn(ctx)
	if err != nil {
		return fmt.Errorf("connect to Postgres: %w", err)
	}
	err = conn.Raw(func(conn any) error { return sql.CheckPooler(ctx, conn.(*stdlib.Conn).Conn()) })
	if err = errors.Join(err, conn.Close()); err != nil {
		return err
	}
	if err := sql.RefuseUnreleased(db.QueryRowContext(ctx, sql.SchemaUnreleased)); err != nil {
		return err
	}
	provider, err := newProvider(db)
	if err != nil {
		return fmt.Errorf("read the migrations: %w", err)
	}
	return do(db, provider)
}

func newProvider(db *stdsql.DB) (*goose.Provider, error) {
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(lockEverySeconds, lockTries))
	if err != nil {
		return nil, err
	}
	files, err := sql.Migrations()
	if err != nil {
		return nil, err
	}
	return goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithSessionLocker(locker), goose.WithDisableGlobalRegistry(true))
}

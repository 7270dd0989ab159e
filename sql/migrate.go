package sql

import (
	"context"
	"crypto/sha256"
	stdsql "database/sql"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

var (
	// ErrNotMigrated is wrapped by Check's error for a database that lacks migrations.
	ErrNotMigrated = errors.New("the database is not migrated: run `stampede migrate up`")
	// ErrSchemaAhead is wrapped by Check's error for a database with migrations that this program
	// lacks.
	ErrSchemaAhead = errors.New("the database was migrated by a newer stampede: run that one, or `stampede migrate " +
		"down` with it")
	// ErrNothingToUndo is returned by Down when no migration is applied.
	ErrNothingToUndo = errors.New("no migration is applied")
	// ErrHoldsSales is returned by Down if it would delete sales.
	ErrHoldsSales = errors.New("the database holds sales, and undoing a migration deletes them with all their orders: " +
		"repeat it with --discard-data if they may go")
	// ErrDatabaseURL is returned for an invalid URL. It gives no details, because the URL contains a
	// password.
	ErrDatabaseURL = errors.New("DATABASE_URL must look like postgres://user:password@host:5432/database, special " +
		"characters percent-encoded")
)

// Up waits for concurrent migrations: it polls once a second, for five minutes. A blocking lock
// would hold a snapshot while it waits, and CREATE INDEX CONCURRENTLY in the other process would
// wait for that.
const (
	lockEverySeconds = 1
	lockTries        = 300
)

// undefinedTable is Postgres's SQLSTATE for a table that does not exist.
const undefinedTable = "42P01"

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
	err = withProvider(databaseURL, func(p *goose.Provider) error {
		missing, err := missingOf(ctx, p)
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
			names = append(names, nameOf(result.Source))
			applied(len(names), missing)
		}
	})
	return names, err
}

func missingOf(ctx context.Context, p *goose.Provider) (n int, err error) {
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

// nameOf is the name of a migration.
func nameOf(source *goose.Source) string {
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
	return withDatabase(databaseURL, func(db *stdsql.DB, p *goose.Provider) error {
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
	err := db.QueryRowContext(ctx, schemaHasSales).Scan(&found)
	switch {
	case isUndefinedTable(err):
		return nil
	case err != nil:
		return fmt.Errorf("look for sales: %w", err)
	case found:
		return ErrHoldsSales
	}
	return nil
}

func isUndefinedTable(err error) bool {
	pgErr := (*pgconn.PgError)(nil)
	return errors.As(err, &pgErr) && pgErr.Code == undefinedTable
}

// Status returns all migrations of this program, oldest first.
func Status(ctx context.Context, databaseURL string) ([]Migration, error) {
	var all []Migration
	err := withProvider(databaseURL, func(p *goose.Provider) error {
		states, err := p.Status(ctx)
		if err != nil {
			return fmt.Errorf("migration status: %w", err)
		}
		for _, s := range states {
			all = append(all, Migration{
				Version:   s.Source.Version,
				Name:      nameOf(s.Source),
				Applied:   s.State == goose.StateApplied,
				AppliedAt: s.AppliedAt,
			})
		}
		return nil
	})
	return all, err
}

// Check compares the schema of the database with that of this program in one query. The error wraps
// ErrNotMigrated or ErrSchemaAhead, or is that of the query.
func Check(ctx context.Context, pool *pgxpool.Pool) error {
	known, err := versions()
	if err != nil {
		return err
	}
	rows, _ := pool.Query(ctx, schemaVersions) // its error comes with the rows
	applied, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	all := len(known)
	if isUndefinedTable(err) {
		return fmt.Errorf("%w (migrations applied: 0 of %d)", ErrNotMigrated, all)
	}
	if err != nil {
		return fmt.Errorf("read the schema's version: %w", err)
	}
	for _, v := range applied {
		if !known[v] {
			return fmt.Errorf("%w (it has migration %d, which this one does not know)", ErrSchemaAhead, v)
		}
		delete(known, v)
	}
	if len(known) > 0 {
		return fmt.Errorf("%w (migrations applied: %d of %d)", ErrNotMigrated, all-len(known), all)
	}
	return nil
}

// versions returns the versions of the embedded migrations.
func versions() (map[int64]bool, error) {
	names, err := fs.Glob(migrations, "migrations/*.sql")
	if err != nil {
		return nil, err
	}
	known := make(map[int64]bool, len(names))
	for _, name := range names {
		v, err := goose.NumericComponent(name)
		if err != nil {
			return nil, fmt.Errorf("name of migration %s: %w", name, err)
		}
		known[v] = true
	}
	return known, nil
}

// Fingerprint is a hash of all migrations: databases with the same fingerprint have the same
// schema.
func Fingerprint() (string, error) {
	hash := sha256.New()
	err := fs.WalkDir(migrations, "migrations", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := migrations.ReadFile(path)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(hash, "%s %d\n%s", path, len(text), text)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read the migrations: %w", err)
	}
	return fmt.Sprintf("%x", hash.Sum(nil)[:8]), nil
}

func withProvider(databaseURL string, do func(*goose.Provider) error) error {
	return withDatabase(databaseURL, func(_ *stdsql.DB, p *goose.Provider) error { return do(p) })
}

func withDatabase(databaseURL string, do func(*stdsql.DB, *goose.Provider) error) (err error) {
	config, err := pgx.ParseConfig(databaseURL)
	if databaseURL == "" || err != nil {
		return ErrDatabaseURL
	}
	db := stdlib.OpenDB(*config)
	defer func() { err = errors.Join(err, db.Close()) }()
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
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return nil, err
	}
	return goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithSessionLocker(locker), goose.WithDisableGlobalRegistry(true))
}

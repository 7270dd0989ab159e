package sql

import (
	"context"
	"crypto/sha256"
	stdsql "database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

//go:embed migrations/*.sql
var migrations embed.FS

var (
	// ErrNotMigrated is wrapped by Check's error for a database that lacks migrations.
	ErrNotMigrated = errors.New("the database is not migrated: run `stampede migrate up`")
	// ErrSchemaAhead is wrapped by Check's error for a database in which a later migration has removed
	// what this program needs.
	ErrSchemaAhead = errors.New("a newer stampede has removed from the database what this one needs")
	// ErrNothingToUndo is returned by Down when no migration is applied.
	ErrNothingToUndo = errors.New("no migration is applied")
	// ErrHoldsSales is returned by Down if it would delete sales.
	ErrHoldsSales = errors.New("the database holds sales, and undoing a migration deletes them with all their orders: " +
		"repeat it with --discard-data if they may go")
	// ErrUnreleased is returned for a database with tables from before the first release.
	ErrUnreleased = errors.New("the database has the schema of an unreleased version: create a new database")
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
	rows, err := db.QueryContext(ctx, schemaVersions)
	if isUndefinedTable(err) {
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

// Check compares the schema of the database with that of this program. The error wraps ErrNotMigrated,
// ErrSchemaAhead, ErrUnreleased or ErrPooler, or is the error of a query.
//
// Migrations that this program does not know are no error, because processes of two versions run side by
// side during an upgrade. They only add to the schema, except contracts: those record which migrations a
// program must know to work after them (CONTRIBUTING.md, "A migration").
func Check(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := Compare(ctx, pool)
	return err
}

// IsUnfit reports whether an error of Check says that this program cannot work with the database, and not only that it
// did not answer.
func IsUnfit(err error) bool {
	return errors.Is(err, ErrNotMigrated) || errors.Is(err, ErrSchemaAhead) || errors.Is(err, ErrUnreleased) ||
		errors.Is(err, ErrPooler)
}

// Compare is Check. It also returns the migrations that this program does not know, oldest first.
func Compare(ctx context.Context, pool *pgxpool.Pool) (newer []int64, err error) {
	err = pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error { return checkPooler(ctx, conn.Conn()) })
	if err != nil {
		return nil, err
	}
	known, err := versions()
	if err != nil {
		return nil, err
	}
	if err := refuseUnreleased(pool.QueryRow(ctx, schemaUnreleased)); err != nil {
		return nil, err
	}
	rows, _ := pool.Query(ctx, schemaVersions) // its error comes with the rows
	var applied []int64
	var version int64
	_, err = pgx.ForEachRow(rows, []any{&version, nil}, func() error {
		applied = append(applied, version)
		return nil
	})
	if isUndefinedTable(err) {
		return nil, fmt.Errorf("%w (migrations applied: 0 of %d)", ErrNotMigrated, len(known))
	}
	if err != nil {
		return nil, fmt.Errorf("read the schema's version: %w", err)
	}
	missing := maps.Clone(known)
	for _, v := range applied {
		if !known[v] {
			newer = append(newer, v)
		}
		delete(missing, v)
	}
	if len(missing) > 0 {
		return newer, fmt.Errorf("%w (migrations applied: %d of %d)", ErrNotMigrated, len(known)-len(missing), len(known))
	}
	if len(newer) == 0 {
		return nil, nil
	}
	return newer, checkContracts(ctx, pool, slices.Max(slices.Collect(maps.Keys(known))))
}

// checkContracts returns an error that wraps ErrSchemaAhead if a migration has removed what a program needs whose
// newest one is known.
func checkContracts(ctx context.Context, pool *pgxpool.Pool, known int64) error {
	var migration int64
	var release string
	err := pool.QueryRow(ctx, schemaContracts, known).Scan(&migration, &release)
	switch {
	case errors.Is(err, pgx.ErrNoRows), isUndefinedTable(err):
		return nil
	case err != nil:
		return fmt.Errorf("read what was removed from the schema: %w", err)
	}
	return fmt.Errorf("%w: run %s or later (removed by migration %d; this one knows them up to %d)",
		ErrSchemaAhead, release, migration, known)
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

func withProvider(ctx context.Context, databaseURL string, do func(*goose.Provider) error) error {
	return withDatabase(ctx, databaseURL, func(_ *stdsql.DB, p *goose.Provider) error { return do(p) })
}

func withDatabase(ctx context.Context, databaseURL string, do func(*stdsql.DB, *goose.Provider) error) (err error) {
	config, err := pgx.ParseConfig(databaseURL)
	if databaseURL == "" || err != nil {
		return ErrDatabaseURL
	}
	PrepareSessions(&config.Config, "")
	db := stdlib.OpenDB(*config)
	defer func() { err = errors.Join(err, db.Close()) }()
	conn, err := db.Conn(ctx)
	if err != nil {
		return fmt.Errorf("connect to Postgres: %w", err)
	}
	err = conn.Raw(func(conn any) error { return checkPooler(ctx, conn.(*stdlib.Conn).Conn()) })
	if err = errors.Join(err, conn.Close()); err != nil {
		return err
	}
	if err := refuseUnreleased(db.QueryRowContext(ctx, schemaUnreleased)); err != nil {
		return err
	}
	provider, err := newProvider(db)
	if err != nil {
		return fmt.Errorf("read the migrations: %w", err)
	}
	return do(db, provider)
}

// refuseUnreleased returns ErrUnreleased if row, the answer to schemaUnreleased, is true.
func refuseUnreleased(row interface{ Scan(into ...any) error }) error {
	var unreleased bool
	if err := row.Scan(&unreleased); err != nil {
		return fmt.Errorf("look at the schema: %w", err)
	}
	if unreleased {
		return ErrUnreleased
	}
	return nil
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

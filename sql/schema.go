package sql

import (
	"context"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

//go:embed migrations/*.sql
var migrations embed.FS

// Migrations are the files of the migrations, by version and name.
func Migrations() (fs.FS, error) { return fs.Sub(migrations, "migrations") }

var (
	// ErrNotMigrated is wrapped by Check's error for a database that lacks migrations.
	ErrNotMigrated = errors.New("the database is not migrated: run `stampede migrate up`")
	// ErrSchemaAhead is wrapped by Check's error for a database in which a later migration has removed
	// what this program needs.
	ErrSchemaAhead = errors.New("a newer stampede has removed from the database what this one needs")
	// ErrUnreleased is returned for a database with tables from before the first release.
	ErrUnreleased = errors.New("the database has the schema of an unreleased version: create a new database")
	// ErrDatabaseURL is returned for an invalid URL. It gives no details, because the URL contains a
	// password.
	ErrDatabaseURL = errors.New("DATABASE_URL must look like postgres://user:password@host:5432/database, special " +
		"characters percent-encoded")
)

// undefinedTable is Postgres's SQLSTATE for a table that does not exist.
const undefinedTable = "42P01"

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
	err = pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error { return CheckPooler(ctx, conn.Conn()) })
	if err != nil {
		return nil, err
	}
	known, err := versions()
	if err != nil {
		return nil, err
	}
	if err := RefuseUnreleased(pool.QueryRow(ctx, SchemaUnreleased)); err != nil {
		return nil, err
	}
	rows, _ := pool.Query(ctx, SchemaVersions) // its error comes with the rows
	var applied []int64
	var version int64
	_, err = pgx.ForEachRow(rows, []any{&version, nil}, func() error {
		applied = append(applied, version)
		return nil
	})
	if IsUndefinedTable(err) {
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
	case errors.Is(err, pgx.ErrNoRows), IsUndefinedTable(err):
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
		number, _, _ := strings.Cut(strings.TrimPrefix(name, "migrations/"), "_")
		v, err := strconv.ParseInt(number, 10, 64)
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

// RefuseUnreleased returns ErrUnreleased if row, the answer to SchemaUnreleased, is true.
func RefuseUnreleased(row interface{ Scan(into ...any) error }) error {
	var unreleased bool
	if err := row.Scan(&unreleased); err != nil {
		return fmt.Errorf("look at the schema: %w", err)
	}
	if unreleased {
		return ErrUnreleased
	}
	return nil
}

// IsUndefinedTable is true for the error of a query of a table that does not exist.
func IsUndefinedTable(err error) bool {
	pgErr := (*pgconn.PgError)(nil)
	return errors.As(err, &pgErr) && pgErr.Code == undefinedTable
}

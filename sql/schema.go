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

// guardsText lists the constraints, indexes and NOT NULL columns of the migrations, one per line. A
// test compares it with a migrated database, and writes it with -update.
//
//go:embed guards.txt
var guardsText string

// guard is a constraint or index that excludes wrong rows, or an index for speed.
type guard struct {
	Table string
	// Kind is "constraint", "unique index", "index" or "column" (NOT NULL), or "month" for a part of a
	// partitioned table; empty for a missing table.
	Kind       string
	Name       string
	Definition string
	// Trouble is NOT VALID or INVALID for one that is not enforced, and MISSING for a month.
	Trouble string
}

// MissingGuard is a constraint or an index of the migrations that the database lacks or has in
// another form.
type MissingGuard struct {
	Table, Name string
	// What is wrong, in words.
	What string
	// Mend is the SQL that restores it. It fails if there are rows that the guard would have
	// refused.
	Mend string
	// ForSpeed is true for an index that only speed depends on.
	ForSpeed bool
}

// Guards returns the number of constraints and indexes in the schema of this program, and those
// that the database behind db lacks. It takes one query.
func Guards(ctx context.Context, db interface {
	Query(ctx context.Context, query string, args ...any) (pgx.Rows, error)
},
) (wanted int, missing []MissingGuard, err error) {
	all := guards()
	var tables []string
	for _, g := range all {
		if !slices.Contains(tables, g.Table) {
			tables = append(tables, g.Table)
		}
	}
	rows, _ := db.Query(ctx, schemaGuards, tables) // its error comes with the rows
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[guard])
	if err != nil {
		return 0, nil, fmt.Errorf("look for constraints and indexes: %w", err)
	}
	existing := make(map[[3]string]guard, len(found))
	months := map[string][]string{}
	for _, g := range found {
		switch {
		case g.Kind != "month":
			existing[g.key()] = g
		case g.Trouble == "":
			months[g.Table] = append(months[g.Table], g.Name)
		default:
			missing = append(missing, MissingGuard{
				Table: g.Table, Name: g.Name, What: fmt.Sprintf("the table %s has no part for the sales of %s", g.Table, g.Name),
				Mend: fmt.Sprintf("SELECT make_month('%s');", g.Definition),
			})
		}
	}
	for _, g := range all {
		if _, gone := existing[guard{Table: g.Table}.key()]; gone {
			if !slices.ContainsFunc(missing, func(m MissingGuard) bool { return m.Table == g.Table }) {
				missing = append(missing, MissingGuard{
					Table: g.Table, Name: g.Table, What: "the table " + g.Table + " is missing",
					Mend: "-- restore the table from a backup",
				})
			}
		} else if m, ok := g.compare(existing, months[g.Table]); ok {
			missing = append(missing, m)
		}
	}
	return len(all), missing, nil
}

// key identifies a guard. Unique and plain indexes of one name have the same key.
func (g guard) key() [3]string {
	return [3]string{g.Table, strings.TrimPrefix(g.Kind, "unique "), g.Name}
}

// compare returns how a guard differs from the existing ones, if it does. months are the parts of a partitioned
// table.
func (g guard) compare(existing map[[3]string]guard, months []string) (MissingGuard, bool) {
	is, found := existing[g.key()]
	if found && is.Definition == g.Definition && is.Trouble == "" {
		return MissingGuard{}, false
	}
	m := MissingGuard{Table: g.Table, Name: g.Name, ForSpeed: g.Kind == "index"}
	named := fmt.Sprintf("the %s %s of the table %s", g.Kind, g.Name, g.Table)
	create, drop := "", ""
	switch g.Kind {
	case "column":
		create = fmt.Sprintf("ALTER TABLE %s ALTER COLUMN %s SET NOT NULL;", g.Table, g.Name)
	case "constraint":
		create = fmt.Sprintf("ALTER TABLE %s ADD CONSTRAINT %s %s;", g.Table, g.Name, g.Definition)
		drop = fmt.Sprintf("ALTER TABLE %s DROP CONSTRAINT %s; ", g.Table, g.Name)
	case "index", "unique index":
		if len(months) > 0 {
			create, drop = g.createInMonths(months), fmt.Sprintf("DROP INDEX %s; ", g.Name)
			break
		}
		create = concurrently(g.Definition) + ";"
		drop = fmt.Sprintf("DROP INDEX CONCURRENTLY %s; ", g.Name)
	}
	switch {
	case !found && g.Kind == "column":
		m.What, m.Mend = named+" may be NULL", create
	case !found:
		m.What, m.Mend = named+" is missing", create
	case is.Definition != g.Definition:
		m.What, m.Mend = fmt.Sprintf("%s differs: %s", named, is.Definition), drop+create
	case is.Trouble == "NOT VALID" && g.Kind == "constraint":
		m.What, m.Mend = named+" is NOT VALID", fmt.Sprintf("ALTER TABLE %s VALIDATE CONSTRAINT %s;", g.Table, g.Name)
	case g.Kind == "column":
		m.What, m.Mend = named+" is NOT VALID", create
	case is.Trouble == "INVALID" && len(months) > 0: // it lacks a month
		m.What, m.Mend = named+" is INVALID", drop+create
	default:
		name := g.Name
		if _, ofMonth, ok := strings.Cut(is.Trouble, " in "); ok {
			name = ofMonth
		}
		m.What, m.Mend = named+" is "+is.Trouble, fmt.Sprintf("REINDEX INDEX CONCURRENTLY %s;", name)
	}
	return m, true
}

// createInMonths returns the statements that create an index of a partitioned table without blocking writers: in the
// table alone, and in each month.
func (g guard) createInMonths(months []string) string {
	statements := g.Definition + ";"
	for _, month := range months {
		name := month + strings.TrimPrefix(g.Name, g.Table)
		ofMonth := strings.Replace(g.Definition, g.Name+" ON ONLY "+g.Table, name+" ON "+month, 1)
		statements += fmt.Sprintf(" %s; ALTER INDEX %s ATTACH PARTITION %s;", concurrently(ofMonth), g.Name, name)
	}
	return statements
}

func concurrently(definition string) string {
	return strings.Replace(definition, "INDEX ", "INDEX CONCURRENTLY ", 1)
}

// guardsSeparator separates table, kind, name and definition in a line of guards.txt.
const guardsSeparator = " | "

// guards returns the guards of guards.txt.
func guards() []guard {
	var all []guard
	for line := range strings.Lines(guardsText) {
		parts := strings.SplitN(strings.TrimSpace(line), guardsSeparator, 4)
		all = append(all, guard{Table: parts[0], Kind: parts[1], Name: parts[2], Definition: parts[3]})
	}
	return all
}

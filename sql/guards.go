package sql

import (
	"context"
	_ "embed"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

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

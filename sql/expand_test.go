package sql_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// firstMigration makes the schema. Those after it run while processes of the version before them work.
const firstMigration = 1

// contracts is the table that programs read (queries/schema/contracts.sql).
const contracts = "schema_contracts"

// contractsTable is the first statement of a contract: what it records refuses the programs that still need what it
// removes.
const contractsTable = `CREATE TABLE IF NOT EXISTS schema_contracts (
    migration bigint PRIMARY KEY, works_from bigint NOT NULL, release text NOT NULL)`

// A migration runs beside processes of the version before it. So it only adds (expand), unless it is a contract, which
// the programs that it would break recognize (sql.Check). No statement rewrites a table or locks it for long.
func TestEachMigrationExpandsOrIsContract(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("migrations/*.sql")
	require.NoError(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		version, err := strconv.Atoi(filepath.Base(file)[:5])
		require.NoError(t, err)
		if version > firstMigration {
			require.NoError(t, checkMigration(version, string(text)), file)
		}
	}
}

func TestMigrationsThatBreakPreviousVersionAreFound(t *testing.T) {
	t.Parallel()
	const timeout = "SET LOCAL lock_timeout = '3s';\n"
	record := func(values string) string {
		return "-- contract: nothing reads it from 00002 on\n" + contractsTable +
			";\nINSERT INTO schema_contracts (migration, works_from, release) VALUES (" + values + ");\n" + timeout
	}
	for want, ups := range map[string][]string{
		"": {
			"CREATE TABLE audits (id bigint PRIMARY KEY, at timestamptz DEFAULT now()); CREATE INDEX a ON audits (lower(at))",
			"CREATE TABLE IF NOT EXISTS t (a text -- ; no end\n, b text CHECK (b <> ';'));\nCOMMENT ON TABLE t IS 'x;y'",
			timeout + "ALTER TABLE orders ADD COLUMN note text, ADD COLUMN n int NOT NULL DEFAULT 0",
			timeout + "ALTER TABLE sales ADD note text DEFAULT 'a'",
			"CREATE FUNCTION f() RETURNS int LANGUAGE sql AS $$ SELECT 1; DROP TABLE orders $$",
			"CREATE VIEW v AS SELECT id FROM orders",
			"CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ x $$;\n" + timeout + "CREATE TRIGGER t AFTER INSERT ON orders " +
				"REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION f()",
			"SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true)",
			"REVOKE EXECUTE ON FUNCTION f() FROM PUBLIC; GRANT EXECUTE ON FUNCTION f() TO pg_read_all_data",
			"-- +goose NO TRANSACTION\nCREATE INDEX CONCURRENTLY IF NOT EXISTS a ON sales (id DESC)",
			"CREATE TABLE t (a int); INSERT INTO t VALUES (1); ALTER TABLE t ADD CONSTRAINT c CHECK (a > 0)",
			record("3, 2, 'v1.3.0'") + "ALTER TABLE orders DROP COLUMN note; ALTER TABLE orders DROP COLUMN b",
			record("3, 2, 'v1.3.0'") + "DROP VIEW v",
			record("3, 2, 'v1.3.0'") + "ALTER TABLE orders ADD CONSTRAINT c CHECK (quantity > 1) NOT VALID",
			record("3, 2, 'v1.3.0'") + "CREATE OR REPLACE VIEW v AS SELECT 1",
		},
		"only a contract may": {
			"CREATE TABLE t (a int); ALTER TABLE t RENAME TO sales",
			"DROP TABLE releases",
			timeout + "ALTER TABLE orders DROP COLUMN note",
			timeout + "ALTER TABLE orders RENAME COLUMN a TO b",
			timeout + "ALTER TABLE orders RENAME TO b",
			timeout + "ALTER TABLE orders ADD COLUMN a text, DROP COLUMN b",
			timeout + "ALTER TABLE orders ALTER COLUMN a SET DEFAULT 1",
			timeout + "ALTER TABLE orders ADD CONSTRAINT c CHECK (a) NOT VALID",
			"CREATE OR REPLACE FUNCTION make_month(sale uuid) RETURNS void LANGUAGE sql AS ''",
			"DROP FUNCTION make_month",
			timeout + "ALTER TABLE orders ADD a text DEFAULT 'x', DROP COLUMN b, ADD c text DEFAULT 'y'",
			"/* a /* nested */ comment */ DROP TABLE orders",
			`CREATE TABLE "t" (a int); DROP TABLE "orders"`,
		},
		"not known to be safe": {
			timeout + "ALTER TABLE orders ALTER COLUMN a TYPE bigint",
			timeout + "ALTER TABLE orders ALTER COLUMN a SET NOT NULL",
			timeout + "ALTER TABLE orders ADD CHECK (a > 1)",
			timeout + "ALTER TABLE orders ADD CONSTRAINT c CHECK (a)",
			timeout + "ALTER TABLE orders ADD COLUMN a timestamptz DEFAULT now()",
			timeout + "ALTER TABLE orders ADD COLUMN a bigserial",
			timeout + "ALTER TABLE orders ADD COLUMN a int UNIQUE",
			timeout + "ALTER TABLE orders ADD COLUMN a int REFERENCES t",
			timeout + "ALTER TABLE orders ADD COLUMN a int GENERATED ALWAYS AS (1) STORED",
			"SET LOCAL lock_timeout = '90s'; ALTER TABLE orders ADD COLUMN note text",
			"-- +goose NO TRANSACTION\nCREATE UNIQUE INDEX CONCURRENTLY a ON sales (id)",
			"-- +goose NO TRANSACTION\nCREATE INDEX CONCURRENTLY a ON sales (f(id))",
			"-- +goose NO TRANSACTION\nCREATE INDEX CONCURRENTLY a ON sales (id) WHERE x::int > 1",
			"CREATE TABLE t PARTITION OF orders FOR VALUES FROM (1) TO (2)",
			"CREATE TABLE t AS SELECT 1",
			"CREATE TABLE t (a int) INHERITS (orders)",
			"CREATE TABLE t (a) AS SELECT (1)",
			contractsTable,
			"CREATE TABLE t (LIKE orders)",
			"CREATE TRIGGER t BEFORE INSERT ON orders EXECUTE FUNCTION f()",
			timeout + "CREATE TRIGGER t AFTER INSERT ON orders REFERENCING NEW TABLE AS a FOR EACH STATEMENT EXECUTE FUNCTION f()",
			"UPDATE orders SET note = ''",
			"DELETE FROM orders",
			"INSERT INTO sales (id) VALUES ('x')",
			"TRUNCATE orders",
			"LOCK TABLE orders",
			"DO $$ BEGIN DROP TABLE orders; END $$",
			"SELECT set_config('lock_timeout', '0', true)",
			"REVOKE INSERT ON orders FROM PUBLIC",
			"SELECT 1",
			"CREATE TABLE t (a int); SELECT 'it''s'; DROP TABLE sales",
			record("3, 2, 'v1.3.0'") + "ALTER TABLE orders ALTER COLUMN a TYPE text",
			record("3, 2, 'v1.3.0'") + "UPDATE orders SET a = 1",
			strings.TrimPrefix(record("3, 2, 'v1.3.0'"), "-- contract") + "DROP TABLE t",
		},
		"without a default": {
			timeout + "ALTER TABLE orders ADD COLUMN a text NOT NULL",
		},
		"lock_timeout": {
			"ALTER TABLE orders ADD COLUMN note text",
			"-- SET LOCAL lock_timeout = '3s'\nALTER TABLE orders ADD COLUMN note text",
			strings.Replace(record("3, 2, 'v1.3.0'"), timeout, "", 1) + "DROP TABLE t",
		},
		"CONCURRENTLY": {
			"CREATE INDEX a ON sales (id)",
		},
		"NO TRANSACTION": {
			"CREATE INDEX CONCURRENTLY a ON sales (id)",
		},
		"REFERENCES": {
			"CREATE TABLE t (a uuid REFERENCES sales (id))",
		},
		"unfinished": {
			"SELECT $a$ unfinished",
		},
		"make two migrations": {
			timeout + "ALTER TABLE sales ADD COLUMN a text; ALTER TABLE orders ADD COLUMN a text",
			record("3, 2, 'v1.3.0'") + "ALTER TABLE orders DROP COLUMN note; DROP VIEW v",
		},
		"must begin with": {
			"-- contract: why\n" + timeout + "DROP TABLE t",
		},
		"must record": {
			"-- contract: why\n" + contractsTable + ";\nDROP TABLE t",
			record("4, 2, 'v1.3.0'") + "DROP TABLE t",
			record("3, 2, ''") + "DROP TABLE t",
		},
		"before this one": {
			record("3, 3, 'v1.3.0'") + "DROP TABLE t",
			record("3, 0, 'v1.3.0'") + "DROP TABLE t",
		},
	} {
		for _, up := range ups {
			err := checkMigration(3, "-- +goose Up\n"+up+";\n-- +goose Down\nDROP TABLE orders;\n")
			if want == "" {
				require.NoError(t, err, up)
			} else {
				require.ErrorContains(t, err, want, up)
			}
		}
	}
}

// migration is what the check of a migration has seen so far.
type migration struct {
	version     int
	contract    bool // it says that it is one
	transaction bool
	// patient is true until a bound for waiting for locks is set: what waits for a lock of orders makes all others wait.
	patient bool
	created map[string]bool
	// altered is the table that exists and is changed.
	altered string
}

// checkMigration returns an error unless every statement of a migration is known to be harmless beside the previous
// version.
func checkMigration(version int, text string) error {
	_, up, found := strings.Cut(text, "-- +goose Up\n")
	if !found {
		return fmt.Errorf("no -- +goose Up")
	}
	up, _, _ = strings.Cut(up, "-- +goose Down")
	statements, err := splitStatements(up)
	if err != nil {
		return err
	}
	m := &migration{
		version: version, contract: regexp.MustCompile(`(?m)^-- contract: \S`).MatchString(up),
		transaction: !strings.Contains(text, "-- +goose NO TRANSACTION"), patient: true, created: map[string]bool{},
	}
	for i, s := range statements {
		if err := m.check(i, s); err != nil {
			return fmt.Errorf("%w: %s", err, strings.Join(s, " "))
		}
	}
	return nil
}

const (
	name      = `(?:[a-z_][a-z0-9_]*)`
	typeName  = `(?:text|bigint|int|integer|smallint|boolean|uuid|timestamptz|jsonb|bytea|numeric)(?: \[ \])?`
	constant  = `(?:'[^']*'|-?\d+|true|false|null)`
	newColumn = `add (?:column )?(?:if not exists )?` + name + ` ` + typeName +
		`(?: not null| null| default ` + constant + `)*`
	plainIndex = `\( ` + name + `(?: asc| desc| nulls (?:first|last)| , ` + name + `)* \)`
)

// The statements are matched as their tokens with one space between them, words in lower case.
var (
	settings = regexp.MustCompile(`^set (?:local )?(?:lock_timeout = '(?:[1-5]s|[1-9]\d{1,2}ms)'|` +
		`statement_timeout = '\w+')$`)

	createTable = regexp.MustCompile(`^create table (?:if not exists )?(` + name + `) \( (.*) \)$`)
	createIndex = regexp.MustCompile(`^create (unique )?index (concurrently )?(?:if not exists )?` +
		name + ` on (` + name + `) (.*)$`)
	plainColumns   = regexp.MustCompile(`^` + plainIndex + `$`)
	createFunction = regexp.MustCompile(`^create (?:function|view|sequence|type) (?:if not exists )?(` + name + `)\b`)
	rights         = regexp.MustCompile(`^(?:(?:grant|revoke) execute on function |select set_config \( 'search_path' , )`)
	// It was tried with what the previous version writes: it gets its rows, and cannot refuse one by itself.
	createTrigger = regexp.MustCompile(`^create trigger ` + name + ` after insert on (` + name + `) ` +
		`referencing new table as ` + name + ` for each statement execute function (` + name + `) \( \)$`)
	comment    = regexp.MustCompile(`^comment on (?:table|column|function|view|index|type) .* is '.*'$`)
	alterTable = regexp.MustCompile(`^alter table (?:only )?(` + name + `) (.*)$`)
	addColumns = regexp.MustCompile(`^` + newColumn + `(?: , ` + newColumn + `)*$`)
	insert     = regexp.MustCompile(`^insert into (` + name + `) `)

	// Only in a contract. None of them reads a whole table, except VALIDATE, which locks out no order.
	contracting = regexp.MustCompile(`^(?:drop (?:table|view|function|type|sequence|trigger) |` +
		`drop index |create or replace (?:function|view) |` +
		`alter table (?:only )?` + name + ` (?:rename |` +
		`(?:(?:drop column|drop constraint) (?:if exists )?` + name + `|validate constraint ` + name + `|` +
		`alter (?:column )?` + name + ` (?:drop not null|drop default|set default ` + constant + `)|` +
		newColumn + `)(?: , (?:(?:drop column|drop constraint) (?:if exists )?` + name + `|` + newColumn + `))*$|` +
		`add constraint ` + name + ` .* not valid$))`)
	contractRecord = regexp.MustCompile(`^insert into schema_contracts \( migration , works_from , release \) ` +
		`values \( (\d+) , (\d+) , '[^']+' \)$`)
)

func (m *migration) check(at int, tokens []string) error {
	statement := strings.Join(tokens, " ")
	if m.contract && at < 2 {
		return m.checkRecord(at, statement)
	}
	if found := settings.FindString(statement); found != "" {
		m.patient = m.patient && !strings.Contains(found, "lock_timeout")
		return nil
	}
	if done, err := m.checkExpand(statement); done {
		return err
	}
	switch {
	case !contracting.MatchString(statement):
		return fmt.Errorf("it is not known to be safe beside the previous version, and quick")
	case !m.contract:
		return fmt.Errorf("only a contract may remove or change what is there")
	}
	table := "what is dropped"
	if a := alterTable.FindStringSubmatch(statement); a != nil {
		table = a[1]
	}
	return m.lock(table)
}

// lock notes that a table that exists is locked.
func (m *migration) lock(table string) error {
	switch {
	case m.patient:
		return fmt.Errorf("without a lock_timeout before it, all orders wait while it waits for a lock")
	case m.altered != "" && m.altered != table:
		return fmt.Errorf("it locks %s after %s, and workers may lock them in the other order (a deadlock, which was seen): "+
			"make two migrations", table, m.altered)
	}
	m.altered = table
	return nil
}

// checkExpand checks a statement that adds. It returns false for any other one.
func (m *migration) checkExpand(statement string) (adds bool, err error) {
	if t := createTable.FindStringSubmatch(statement); t != nil {
		for _, referenced := range regexp.MustCompile(`references (\S+)`).FindAllStringSubmatch(t[2], -1) {
			if !m.created[referenced[1]] && referenced[1] != t[1] {
				return true, fmt.Errorf("REFERENCES locks %s, and refuses what the previous version does there", referenced[1])
			}
		}
		m.created[t[1]] = t[1] != contracts
		return m.created[t[1]] && !regexp.MustCompile(`^like |\) (?:inherits|as) `).MatchString(t[2]), nil
	}
	if i := createIndex.FindStringSubmatch(statement); i != nil {
		switch {
		case m.created[i[3]]:
			return true, nil
		case i[2] == "":
			return true, fmt.Errorf("an index of a table that exists must be made CONCURRENTLY")
		case m.transaction:
			return true, fmt.Errorf("CONCURRENTLY needs -- +goose NO TRANSACTION")
		}
		// A unique one refuses what the previous version writes, and an expression may fail.
		return i[1] == "" && plainColumns.MatchString(i[4]), nil
	}
	if f := createFunction.FindStringSubmatch(statement); f != nil {
		m.created[f[1]] = true
		return true, nil
	}
	if a := alterTable.FindStringSubmatch(statement); a != nil {
		if m.created[a[1]] {
			return !strings.HasPrefix(a[2], "rename ") && !strings.Contains(a[2], "references "), nil
		}
		if !addColumns.MatchString(a[2]) {
			return false, nil
		}
		for column := range strings.SplitSeq(a[2], " , ") {
			if strings.Contains(column, " not null") && !strings.Contains(column, " default ") {
				return true, fmt.Errorf("the previous version writes rows without a default for this column")
			}
		}
		return true, m.lock(a[1])
	}
	if t := createTrigger.FindStringSubmatch(statement); t != nil {
		if !m.created[t[2]] {
			return false, nil
		}
		return true, m.lock(t[1])
	}
	if i := insert.FindStringSubmatch(statement); i != nil {
		return m.created[i[1]], nil
	}
	return comment.MatchString(statement) || rights.MatchString(statement), nil
}

// checkRecord checks the first two statements of a contract.
func (m *migration) checkRecord(at int, statement string) error {
	if at == 0 {
		want, err := splitStatements(contractsTable)
		if err == nil && statement != strings.Join(want[0], " ") {
			err = fmt.Errorf("a contract must begin with: %s", contractsTable)
		}
		return err
	}
	record := contractRecord.FindStringSubmatch(statement)
	if record == nil || record[1] != strconv.Itoa(m.version) {
		return fmt.Errorf("a contract must record its migration (%d), the oldest newest migration of a program that works "+
			"after it, and that program's release", m.version)
	}
	if from, err := strconv.Atoi(record[2]); err != nil || from >= m.version || from < firstMigration {
		return fmt.Errorf("works_from must be a migration before this one")
	}
	return nil
}

// splitStatements returns the tokens of each statement: words in lower case, strings and bodies of functions in quotes,
// other characters by themselves. Comments are left out.
func splitStatements(text string) (statements [][]string, err error) {
	token := regexp.MustCompile(`(?s)^(?:\s+|--[^\n]*|[A-Za-z_][A-Za-z0-9_]*|\d+(?:\.\d+)?|` +
		`'(?:[^']|'')*'|"[^"]*"|::|<=|>=|<>|.)`)
	dollar := regexp.MustCompile(`^\$[A-Za-z_]*\$`)
	var current []string
	for text != "" {
		var found string
		if tag := dollar.FindString(text); tag != "" {
			end := strings.Index(text[len(tag):], tag)
			if end < 0 {
				return nil, fmt.Errorf("an unfinished %s", tag)
			}
			current = append(current, "'"+text[len(tag):len(tag)+end]+"'")
			text = text[len(tag)+end+len(tag):]
			continue
		}
		if strings.HasPrefix(text, "/*") {
			end := commentEnd(text)
			if end < 0 {
				return nil, fmt.Errorf("an unfinished comment")
			}
			text = text[end:]
			continue
		}
		found = token.FindString(text)
		text = text[len(found):]
		switch {
		case strings.TrimSpace(found) == "", strings.HasPrefix(found, "--"):
		case found == "'":
			return nil, fmt.Errorf("an unfinished string")
		case found == ";":
			statements = append(statements, current)
			current = nil
		case strings.HasPrefix(found, "'"):
			current = append(current, found)
		default:
			current = append(current, strings.ToLower(strings.Trim(found, `"`)))
		}
	}
	statements = append(statements, current)
	return slices.DeleteFunc(statements, func(s []string) bool { return len(s) == 0 }), nil
}

// commentEnd returns the length of the comment at the start of text, which may hold others; -1 if it does not end.
func commentEnd(text string) int {
	depth := 0
	for i := 0; i+1 < len(text); i++ {
		switch text[i : i+2] {
		case "/*":
			depth++
			i++
		case "*/":
			i++
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return -1
}

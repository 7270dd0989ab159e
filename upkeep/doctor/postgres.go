package doctor

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/sql"
)

// Postgres checks the server behind pool and the schema of its database. It fails only if the server
// does not answer.
func Postgres(ctx context.Context, pool *pgxpool.Pool) ([]Finding, error) {
	unfit := sql.Check(ctx, pool)
	if errors.Is(unfit, sql.ErrPooler) {
		return []Finding{{
			Severity: Unsafe, Server: "postgres", What: "a pooler in transaction or statement mode is in front of it",
			Why:  "locks, settings and prepared statements last for a session: nothing starts, and nothing is rebuilt",
			Mend: "pool_mode = session for this database (PgBouncer), or set DATABASE_URL to Postgres itself",
		}}, nil
	}
	p, err := readPostgres(ctx, pool)
	if err != nil {
		return nil, fmt.Errorf("read the settings of Postgres: %w", err)
	}
	findings := p.findings()
	if unfit != nil {
		mend := "stampede migrate up"
		switch {
		case errors.Is(unfit, sql.ErrSchemaAhead):
			mend = "run the version that is named here"
		case errors.Is(unfit, sql.ErrUnreleased):
			mend = "create a new database"
		}
		findings = append(findings, Finding{
			Severity: Unsafe, Server: "postgres", What: unfit.Error(),
			Why: "ingresses and workers need the schema of their own version, or one that only adds to it", Mend: mend,
		})
		return findings, nil //nolint:nilerr // it is a finding
	}
	rows, _ := pool.Query(ctx, sql.DoctorDefaultPartitions) // its error comes with the rows
	var table, part string
	_, err = pgx.ForEachRow(rows, []any{&table, &part}, func() error {
		findings = append(findings, defaultPartition(table, part))
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for DEFAULT partitions: %w", err)
	}
	_, missing, err := sql.Guards(ctx, pool)
	if err != nil {
		return nil, fmt.Errorf("read the settings of Postgres: %w", err)
	}
	for _, m := range missing {
		f := Finding{
			Severity: Unsafe, Server: "postgres", What: m.What,
			Why: "without it Postgres accepts rows that break a promise, or refuses all that depend on it", Mend: m.Mend,
		}
		if m.ForSpeed {
			f.Severity, f.Why = Warning, "without it queries read whole tables"
		}
		findings = append(findings, f)
	}
	return findings, nil
}

// defaultPartition is the finding for a partition that takes the rows of all months that have no table.
func defaultPartition(table, part string) Finding {
	return Finding{
		Severity: Warning, Server: "postgres", What: fmt.Sprintf("%s is a DEFAULT partition of %s", part, table),
		Why: "a month whose rows are in it, or beside a large one, gets no table of its own; each other new month locks it",
		Mend: fmt.Sprintf("while nothing is sold: BEGIN; ALTER TABLE %[1]s DETACH PARTITION %[2]s; "+
			"SELECT make_month(sale_id) FROM (SELECT DISTINCT ON (sale_month(sale_id)) sale_id FROM %[2]s) AS months; "+
			"INSERT INTO %[1]s OVERRIDING SYSTEM VALUE SELECT * FROM %[2]s; DROP TABLE %[2]s; COMMIT;", table, part),
	}
}

type postgresServer struct {
	settings map[string]string
	// sources say where a setting comes from: "configuration file", "database", "user".
	sources  map[string]string
	recovery bool
}

func readPostgres(ctx context.Context, pool *pgxpool.Pool) (postgresServer, error) {
	p := postgresServer{settings: make(map[string]string), sources: make(map[string]string)}
	rows, _ := pool.Query(ctx, sql.DoctorServerSettings) // its error comes with the rows
	var name, setting, source string
	_, err := pgx.ForEachRow(rows, []any{&name, &setting, &source, &p.recovery}, func() error {
		p.settings[name], p.sources[name] = setting, source
		return nil
	})
	return p, err
}

const (
	// oldestPostgres is the oldest supported version.
	oldestPostgres = 15
	// shortestTimeout is about how long a service waits for Postgres.
	shortestTimeout = 10 * time.Second
)

func resetWhereSet(name string) string {
	return fmt.Sprintf("reset it where it was set: ALTER SYSTEM RESET %[1]s; SELECT pg_reload_conf(); "+
		"or ALTER DATABASE … or ALTER ROLE … RESET %[1]s", name)
}

func (p postgresServer) findings() []Finding {
	var all []Finding
	add := func(s Severity, what, why, mend string) {
		all = append(all, Finding{Severity: s, Server: "postgres", What: what, Why: why, Mend: mend})
	}
	if n, err := strconv.Atoi(p.settings["server_version_num"]); err != nil || n/10000 < oldestPostgres {
		add(Unsafe, fmt.Sprintf("version %q", p.settings["server_version_num"]),
			fmt.Sprintf("Stampede needs Postgres %d or later", oldestPostgres), "run a later version")
	}
	if p.recovery {
		add(Unsafe, "the server is a standby", "it accepts no writes, so no order is ever confirmed",
			"set DATABASE_URL to the primary")
	} else if p.settings["default_transaction_read_only"] == "on" {
		add(Unsafe, fmt.Sprintf("the server takes no writes: default_transaction_read_only is on (%s)",
			p.sources["default_transaction_read_only"]),
			"orders wait in Redis, and payments and cancellations are refused; all goes on by itself when it takes writes again",
			"find out who set it, and why: a full disk, or a switch-over after which DATABASE_URL has to name another server. "+
				"Then "+resetWhereSet("default_transaction_read_only"))
	}
	if role := p.settings["session_replication_role"]; role != "origin" {
		add(Unsafe, "session_replication_role is "+role, "triggers and foreign keys do not work",
			resetWhereSet("session_replication_role"))
	}
	for _, s := range []struct{ name, why string }{
		{"fsync", "a power loss can destroy the database"},
		{"full_page_writes", "a power loss in the middle of writing a page can destroy the page"},
		{
			"synchronous_commit",
			"a crash of Postgres loses orders that were acknowledged as written, and they are no longer in a stream",
		},
	} {
		if p.settings[s.name] == "off" {
			add(Unsafe, s.name+" is off", s.why, fmt.Sprintf("ALTER SYSTEM SET %s = on; SELECT pg_reload_conf();", s.name))
		}
	}
	if p.settings["public_create"] == "on" {
		add(Warning, "every role may create objects in the schema of Stampede",
			"its processes, and functions with the rights of the tables' owner, can find those in place of others",
			"REVOKE CREATE ON SCHEMA … FROM PUBLIC")
	}
	const inherited = "a batch of orders that waits for a lock or a slow disk is cancelled and starts again"
	const lifted = "it ends what people do by other means, such as a restore, and all of Stampede's if DATABASE_URL sets it: " +
		"otherwise its sessions have their own limit"
	for _, s := range []struct{ name, why string }{
		{"statement_timeout", inherited},
		{"lock_timeout", inherited},
		{"transaction_timeout", lifted},
		{"idle_session_timeout", lifted},
		{"idle_in_transaction_session_timeout", lifted},
	} {
		ms, err := strconv.Atoi(p.settings[s.name])
		if limit := time.Duration(ms) * time.Millisecond; err == nil && ms > 0 && limit < shortestTimeout {
			add(Warning, fmt.Sprintf("%s is %d ms", s.name, ms), s.why,
				fmt.Sprintf("ALTER ROLE … SET %s = '30s' for the roles of Stampede; look into DATABASE_URL, too", s.name))
		}
	}
	return all
}

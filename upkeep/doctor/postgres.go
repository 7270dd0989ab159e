package doctor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/clocks"
	"stampede/internal/pg"
	"stampede/internal/redisinfo"
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
	findings := run(Finding{Server: "postgres"}, p, ofPostgres)
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

// Clocks compares those of this machine and of each master of Redis with that of Postgres. It fails only if Postgres
// does not answer.
func Clocks(ctx context.Context, rdb redis.UniversalClient, pool *pgxpool.Pool) (findings []Finding, err error) {
	// The first call may connect, and its round trip hide what is to be seen.
	if err := pool.Ping(ctx); err != nil {
		return nil, fmt.Errorf("read the clock of Postgres: %w", err)
	}
	postgres, err := pg.ReadClock(ctx, pool)
	if err != nil {
		return nil, fmt.Errorf("read the clock of Postgres: %w", err)
	}
	compare := func(of Finding, whose string, clock clocks.Reading) {
		ahead := clock.Ahead(postgres)
		if ahead.Abs() <= clocks.ApartMax {
			return
		}
		where := "ahead of"
		if ahead < 0 {
			where = "behind"
		}
		of.Severity = Warning
		of.What = fmt.Sprintf("the clock of %s is %v %s that of Postgres", whose, ahead.Abs().Round(time.Millisecond), where)
		of.Mend = "synchronize the clocks of all machines (NTP, such as chrony), and look which of them is wrong"
		findings = append(findings, of)
	}
	_, isCluster := rdb.(*redis.ClusterClient)
	for _, server := range redisinfo.Masters(ctx, rdb) {
		if server.Clock == nil {
			continue
		}
		of := Finding{
			Server: "redis", Why: "no draw is frozen, and no sale retired or archived, while these clocks are more than " +
				clocks.ApartMax.String() + " apart",
		}
		if isCluster {
			of.Node = server.Name
		}
		compare(of, "this server", *server.Clock)
	}
	compare(Finding{
		Server: "postgres", Why: "times in logs and pages are wrong, and tokens and tickets expire too early or too late",
	}, "this machine", clocks.Own())
	return findings, nil
}

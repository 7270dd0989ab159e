package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/clocks"
	"stampede/internal/pg"
	"stampede/internal/redisinfo"
)

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

package reservation

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/retry"
	"stampede/sql"
)

const (
	// guardInterval is how often the servers are compared, and so how long a replaced server may
	// sell.
	guardInterval = time.Second
	// guardRefusedInterval is the interval while a partition is refused, so that a restored sale resumes
	// soon.
	guardRefusedInterval = 200 * time.Millisecond
	// guardTimeout bounds one comparison, of all partitions.
	guardTimeout = 5 * time.Second
	// guardGrace is how long an unverified server counts as a rebuild in progress.
	guardGrace = 5 * time.Second
)

// Guard makes a Store refuse a partition whose Redis server is not the one recorded in Postgres. A
// server that was frozen, replaced and thawed still has a record that says it is verified; only a
// comparison with Postgres shows that it is not. Orders that such a server accepts until then have
// the old epoch and are voided. Every ingress runs one.
type Guard struct {
	Store *Store
	// Redis, if set, is the client of the guard instead of the Store's, so that requests cannot use
	// up its connections.
	Redis  redis.UniversalClient
	Pool   *pgxpool.Pool
	Logger *slog.Logger
}

// Run compares until ctx ends, and returns nil then. A server that does not answer changes nothing.
func (g Guard) Run(ctx context.Context) error {
	failing := false
	doubts := make(map[int]*doubt)
	missing := ""
	for {
		err := g.compare(ctx, doubts)
		missing = g.logMissingRights(ctx, missing)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // a stop is not a failure
		}
		if err != nil && !failing {
			g.Logger.Warn("cannot compare the Redis servers with those recorded in Postgres", "error", err)
		}
		failing = err != nil
		wait := guardInterval
		if g.Store.refusesAny() {
			wait = guardRefusedInterval
		}
		if !retry.Pause(wait, ctx.Done()) {
			return nil
		}
	}
}

// logMissingRights logs the commands that a purchase needs and Redis does not allow, if they changed.
// The script itself refuses to sell then (lua/reserve.lua).
func (g Guard) logMissingRights(ctx context.Context, before string) (missing string) {
	ctx, cancel := context.WithTimeout(ctx, guardTimeout)
	defer cancel()
	commands, err := missingRights(ctx, g.redis(), g.Store.Keys.in(0, "rights"), sellingCommands)
	if err != nil {
		return before // unknown, or reported by the comparison
	}
	missing = strings.Join(commands, ", ")
	switch {
	case missing == before:
	case missing == "":
		g.Logger.Info("the Redis user has all permissions for purchases again")
	default:
		g.Logger.Error("nothing is sold: the Redis user lacks permissions for purchases", "commands", missing)
	}
	return missing
}

func (g Guard) redis() redis.UniversalClient {
	if g.Redis != nil {
		return g.Redis
	}
	return g.Store.Redis
}

type recordedServer struct {
	Partition int
	RunID     string
}

// doubt is a partition that is refused.
type doubt struct {
	since    time.Time
	reported bool // as an error
}

func (g Guard) compare(ctx context.Context, doubts map[int]*doubt) error {
	ctx, cancel := context.WithTimeout(ctx, guardTimeout)
	defer cancel()
	rows, _ := g.Pool.Query(ctx, sql.ReservationVerifiedServers) // its error comes with the rows
	recorded, err := pgx.CollectRows(rows, pgx.RowToStructByPos[recordedServer])
	if err != nil {
		return fmt.Errorf("list the verified servers: %w", err)
	}
	rdb := g.redis()
	for _, r := range recorded {
		state, err := g.Store.inspect(ctx, rdb, r.Partition)
		if err != nil {
			return err
		}
		if state.unverified {
			_, _ = g.Store.admitThrough(ctx, rdb, r.Partition) // marks the server as distrusted for all ingresses
		}
		// A server without a record has no sale, so it cannot sell.
		g.refuse(doubts, r.Partition, state.Recorded && (!state.Known || state.RunID != r.RunID))
	}
	return nil
}

// refuse refuses a partition, or admits it again. A rebuild of lost data takes a moment; a longer
// refusal suggests a replaced server and is logged as an error.
func (g Guard) refuse(doubts map[int]*doubt, partition int, yes bool) {
	changed := g.Store.refused[partition].Swap(yes) != yes
	now := doubts[partition]
	if !yes {
		delete(doubts, partition)
	}
	switch {
	case yes && now == nil:
		doubts[partition] = &doubt{since: time.Now()}
		g.Store.fences[partition].Store(nil)
		g.Logger.Warn("nothing is sold from this partition: its Redis server is not verified; a rebuild may be in progress",
			"partition", partition)
	case yes && !now.reported && time.Since(now.since) >= guardGrace:
		now.reported = true
		g.Logger.Error("nothing is sold from this partition: its Redis server is still not the one recorded in Postgres",
			"partition", partition, "since", now.since)
	case !yes && changed:
		g.Logger.Info("this partition sells again: its Redis server is the one recorded in Postgres", "partition", partition)
	}
}

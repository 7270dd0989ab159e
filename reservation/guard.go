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

	"stampede/internal/pause"
	"stampede/sql"
)

const (
	// guardInterval is how often the servers are compared, and so how long a replaced server may
	// sell.
	guardInterval = time.Second
	// guardImpatience is the interval while something is refused, so that a restored sale resumes
	// soon.
	guardImpatience = 200 * time.Millisecond
	// guardTimeout bounds one comparison, of all partitions.
	guardTimeout = 5 * time.Second
	// guardPatience is how long an unverified server counts as a rebuild in progress.
	guardPatience = 5 * time.Second
)

// Guard makes a Store refuse a partition whose Redis server is not the one that Postgres names. A
// server that is frozen, replaced and thawed still holds a record that says it is verified; only a
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
		missing = g.nameRights(ctx, missing)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // it is to end
		}
		if err != nil && !failing {
			g.Logger.Warn("cannot compare the Redis servers with those that Postgres names", "error", err)
		}
		failing = err != nil
		wait := guardInterval
		if g.Store.refusesAny() {
			wait = guardImpatience
		}
		if !pause.For(wait, ctx.Done()) {
			return nil
		}
	}
}

// nameRights logs the commands that a purchase needs and Redis does not allow, if they changed. The
// script itself refuses to sell then (lua/reserve.lua).
func (g Guard) nameRights(ctx context.Context, before string) (missing string) {
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
		g.Logger.Info("the user of Redis is allowed again what a purchase needs")
	default:
		g.Logger.Error("nothing is sold: the user of Redis is not allowed what a purchase needs", "commands", missing)
	}
	return missing
}

func (g Guard) redis() redis.UniversalClient {
	if g.Redis != nil {
		return g.Redis
	}
	return g.Store.Rdb
}

type recordedServer struct {
	Partition int
	RunID     string
}

// doubt is the refusal of a partition and its begin.
type doubt struct {
	since time.Time
	told  bool // that it lasts
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
			_, _ = g.Store.admitThrough(ctx, rdb, r.Partition) // which tells all others; if it cannot, this one is told below
		}
		// A server without a record has no sale and is no danger.
		g.refuse(doubts, r.Partition, state.Recorded && (!state.Known || state.RunID != r.RunID))
	}
	return nil
}

// refuse refuses a partition, or admits it again. Lost data is rebuilt in a moment; only a lasting
// refusal suggests a replaced server, and is logged as an error.
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
		g.Logger.Warn("nothing is sold from this partition: Redis is not known to hold all that it should; "+
			"a rebuild may be under way", "partition", partition)
	case yes && !now.told && time.Since(now.since) >= guardPatience:
		now.told = true
		g.Logger.Error("Redis is still not the server that Postgres names: nothing is sold from this partition",
			"partition", partition, "since", now.since)
	case !yes && changed:
		g.Logger.Info("Redis is the server that Postgres names again", "partition", partition)
	}
}

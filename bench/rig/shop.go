package rig

import (
	"context"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/retry"
	"stampede/reservation"
)

// Shop is one turn's own database, migrated and empty, and its own keys in Redis.
type Shop struct {
	RedisURL, DatabaseURL string
	Prefix                string
	// Pool and Redis are for the benchmark to look and to prepare; no candidate uses them.
	Pool  *pgxpool.Pool
	Redis *redis.Client

	b        testing.TB
	servers  *servers
	database string
	closed   bool
}

var shopSerial atomic.Uint64

// Open makes a shop, which is closed at the latest when the benchmark ends. Postgres has written out all
// that was changed before, so that it does not write it during the turn; a smoke, whose figures nobody reads,
// does without.
func Open(b testing.TB) *Shop {
	b.Helper()
	on := start(b)
	name := "bench" + strconv.FormatUint(shopSerial.Add(1), 10)
	on.administer(b, "CREATE DATABASE "+name+" TEMPLATE "+templateDatabase)
	if !isSmoke(b) {
		on.administer(b, "CHECKPOINT")
	}
	s := &Shop{
		RedisURL: on.redis.URL, DatabaseURL: databaseURL(on.postgres.URL, name), Prefix: name,
		Redis: on.control, b: b, servers: on, database: name,
	}
	b.Cleanup(s.Close)
	var err error
	s.Pool, err = connect.Postgres(b.Context(), s.DatabaseURL, 2)
	require.NoError(b, err)
	return s
}

// Keys are the product's keys in this shop.
func (s *Shop) Keys(partitions int) reservation.Keys {
	return reservation.Keys{Prefix: s.Prefix, Partitions: partitions}
}

// Close drops the database, and deletes the keys. All processes that used them must have ended. It may be
// called more than once.
func (s *Shop) Close() {
	if s.closed {
		return
	}
	s.closed = true
	if s.Pool != nil {
		s.Pool.Close()
	}
	// Postgres makes a checkpoint before it drops a database. A smoke leaves its few to the end of the server.
	if !isSmoke(s.b) {
		s.servers.administer(s.b, "DROP DATABASE "+s.database+" WITH (FORCE)")
	}
	ctx := context.Background()
	found := s.Redis.Scan(ctx, 0, s.Prefix+":*", 1000).Iterator()
	for found.Next(ctx) {
		// DEL, not UNLINK: nothing is to be freed during the next turn.
		require.NoError(s.b, s.Redis.Del(ctx, found.Val()).Err())
	}
	require.NoError(s.b, found.Err())
	s.rewriteLog(ctx)
}

// logMaxBytes is when Redis's append-only file is made anew, between two turns.
const logMaxBytes = 256 << 20

func (s *Shop) rewriteLog(ctx context.Context) {
	persistence := func() map[string]string {
		info, err := s.Redis.InfoMap(ctx, "persistence").Result()
		require.NoError(s.b, err)
		return info["Persistence"]
	}
	bytes, err := strconv.ParseInt(persistence()["aof_current_size"], 10, 64)
	require.NoError(s.b, err)
	if bytes < logMaxBytes {
		return
	}
	require.NoError(s.b, s.Redis.BgRewriteAOF(ctx).Err())
	for persistence()["aof_rewrite_in_progress"] != "0" {
		retry.Pause(10*time.Millisecond, nil)
	}
}

// insertSale makes the row of a sale for a design that is not ours. Without the guard, Postgres takes
// whatever orders it is given.
func (s *Shop) insertSale(stock int64, guarded bool) uuid.UUID {
	s.b.Helper()
	sale, err := uuid.NewV7()
	require.NoError(s.b, err)
	_, err = s.Pool.Exec(s.b.Context(), "INSERT INTO sales (id, name, stock) VALUES ($1, 'bench', $2)", sale, stock)
	require.NoError(s.b, err)
	if !guarded {
		_, err = s.Pool.Exec(s.b.Context(), "DROP INDEX orders_one_live_per_user")
		require.NoError(s.b, err)
	}
	return sale
}

// Units is how many units of live orders are in Postgres; with orders for one unit each it is also how
// many orders.
func (s *Shop) Units() int64 {
	s.b.Helper()
	var units int64
	err := s.Pool.QueryRow(s.b.Context(),
		"SELECT coalesce(sum(quantity), 0)::bigint FROM orders WHERE status IN ('confirmed', 'paid')").Scan(&units)
	require.NoError(s.b, err)
	return units
}

// Delays are percentiles of times in milliseconds.
type Delays struct{ P50, P99, P999 float64 }

// CommitDelays tells how long it took from the decision in Redis, which a 202 tells of, until the
// order was committed, for all that were decided since then.
func (s *Shop) CommitDelays(since time.Time) Delays {
	s.b.Helper()
	var d Delays
	require.NoError(s.b, s.Pool.QueryRow(s.b.Context(), `
		SELECT p[1], p[2], p[3] FROM (
			SELECT percentile_cont(ARRAY[0.5, 0.99, 0.999]) WITHIN GROUP (ORDER BY extract(epoch FROM
			pg_xact_commit_timestamp(xmin) - reserved_at) * 1000) AS p
			FROM orders WHERE reserved_at >= $1) AS delays`, since).Scan(&d.P50, &d.P99, &d.P999))
	return d
}

// databaseURL is the URL of a server with the name of another database.
func databaseURL(server, name string) string {
	u, err := url.Parse(server)
	if err != nil || !strings.HasPrefix(u.Scheme, "postgres") {
		panic("rig: the private Postgres has the URL " + server)
	}
	u.Path = "/" + name
	return u.String()
}

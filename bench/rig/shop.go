package rig

import (
	"context"
	_ "embed"
	"fmt"
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
	prefix                string
	// Pool and Redis are for the benchmark's queries and setup; no candidate uses them.
	Pool  *pgxpool.Pool
	Redis redis.UniversalClient

	b        testing.TB
	servers  *servers
	database string
	closed   bool
}

var shopSerial atomic.Uint64

// Open creates a shop, which is closed at the latest when the benchmark ends. A checkpoint before it
// keeps Postgres from writing earlier changes during the turn; a smoke run, whose figures do not count,
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
		RedisURL: on.redis.URL, DatabaseURL: databaseURL(on.postgres.URL, name), prefix: name,
		Redis: on.control, b: b, servers: on, database: name,
	}
	b.Cleanup(s.Close)
	var err error
	s.Pool, err = connect.Postgres(b.Context(), s.DatabaseURL, 2)
	require.NoError(b, err)
	return s
}

// Keys are Stampede's keys in this shop.
func (s *Shop) Keys(partitions int) reservation.Keys {
	return reservation.Keys{Prefix: s.prefix, Partitions: partitions}
}

// Close drops the database and deletes the keys. All processes that used them must have ended. It may
// be called more than once.
func (s *Shop) Close() {
	if s.closed {
		return
	}
	s.closed = true
	if s.Pool != nil {
		s.Pool.Close()
	}
	// Postgres makes a checkpoint before it drops a database. A smoke run leaves its few databases to
	// the end of the server.
	if !isSmoke(s.b) {
		s.servers.administer(s.b, "DROP DATABASE "+s.database+" WITH (FORCE)")
	}
	ctx := context.Background()
	found := s.Redis.Scan(ctx, 0, s.prefix+":*", 1000).Iterator()
	for found.Next(ctx) {
		// DEL, not UNLINK: no memory is to be freed during the next turn.
		require.NoError(s.b, s.Redis.Del(ctx, found.Val()).Err())
	}
	require.NoError(s.b, found.Err())
	s.rewriteAOF(ctx)
}

// aofMaxBytes is the size from which Redis's append-only file is rewritten between two turns.
const aofMaxBytes = 256 << 20

func (s *Shop) rewriteAOF(ctx context.Context) {
	persistence := func(name string) int64 {
		n, err := InfoNumber(ctx, s.Redis, "Persistence", name)
		require.NoError(s.b, err)
		return n
	}
	if persistence("aof_current_size") < aofMaxBytes {
		return
	}
	require.NoError(s.b, s.Redis.BgRewriteAOF(ctx).Err())
	for persistence("aof_rewrite_in_progress") != 0 {
		retry.Pause(10*time.Millisecond, nil)
	}
}

// InfoNumber reads a whole number of Redis's INFO. The section is written as in its answer: "Memory".
func InfoNumber(ctx context.Context, rdb redis.UniversalClient, section, name string) (int64, error) {
	info := rdb.InfoMap(ctx, section)
	if err := info.Err(); err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(info.Item(section, name), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("INFO %s: %s: %w", section, name, err)
	}
	return n, nil
}

var (
	//go:embed sql/insert_sale.sql
	insertSaleSQL string
	//go:embed sql/live_units.sql
	liveUnitsSQL string
	//go:embed sql/commit_delays.sql
	commitDelaysSQL string
)

// InsertSale inserts the row of a sale for candidates other than Stampede, and returns its id.
func (s *Shop) InsertSale(stock int64) uuid.UUID {
	s.b.Helper()
	sale, err := uuid.NewV7()
	require.NoError(s.b, err)
	_, err = s.Pool.Exec(s.b.Context(), insertSaleSQL, sale, stock)
	require.NoError(s.b, err)
	return sale
}

// dropGuard drops the unique index of live orders: Postgres then accepts several orders of a user.
func (s *Shop) dropGuard() {
	s.b.Helper()
	_, err := s.Pool.Exec(s.b.Context(), "DROP INDEX orders_one_live_per_user")
	require.NoError(s.b, err)
}

// Units is the number of units of live orders in Postgres; if every order has one unit it is also the
// number of orders.
func (s *Shop) Units() int64 {
	s.b.Helper()
	var units int64
	require.NoError(s.b, s.Pool.QueryRow(s.b.Context(), liveUnitsSQL).Scan(&units))
	return units
}

// soldPoll is the pause between two looks at the counters. Each look costs CPU time as well.
const soldPoll = 10 * time.Millisecond

// AwaitSold waits until at least so many units are sold, at most for the given time, and returns how many are. It reads
// the counters of the sales, because counting orders would load Postgres.
func (s *Shop) AwaitSold(ctx context.Context, units int64, within time.Duration) (sold int64, err error) {
	for deadline := time.Now().Add(within); ; retry.Pause(soldPoll, ctx.Done()) {
		if err := s.Pool.QueryRow(ctx, "SELECT sum(sold)::bigint FROM sales").Scan(&sold); err != nil {
			return 0, fmt.Errorf("look for %d sold units: %w", units, err)
		}
		if sold >= units || time.Now().After(deadline) {
			return sold, nil
		}
	}
}

// CommitDelays are percentiles of how long orders took from the decision in Redis until the commit in
// Postgres, in milliseconds, for all orders decided since the given time.
func (s *Shop) CommitDelays(since time.Time) (p50, p99 float64) {
	s.b.Helper()
	require.NoError(s.b, s.Pool.QueryRow(s.b.Context(), commitDelaysSQL, since).Scan(&p50, &p99))
	return p50, p99
}

// databaseURL is the URL of a server with the name of another database.
func databaseURL(server, name string) string {
	u, err := url.Parse(server)
	if err != nil || !strings.HasPrefix(u.Scheme, "postgres") {
		panic("rig: unexpected URL of the private Postgres: " + server)
	}
	u.Path = "/" + name
	return u.String()
}

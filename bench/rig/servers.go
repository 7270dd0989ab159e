package rig

import (
	"context"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/dev/localserver"
	"stampede/sql/migrate"
)

// templateDatabase is migrated and empty; each shop gets a copy.
const templateDatabase = "stampede_bench_template"

// servers are the Redis and the Postgres of this process, shared by all its benchmarks.
type servers struct {
	redis    *localserver.Redis
	postgres *localserver.Postgres
	control  redis.UniversalClient // for cleanup and queries; no candidate uses it
}

var running *servers

// start starts the servers on first use.
func start(b testing.TB) *servers {
	b.Helper()
	if running != nil {
		return running
	}
	ctx := context.Background() // the servers outlive the benchmark
	s := &servers{}
	var err error
	s.redis, err = localserver.StartRedis(ctx, localserver.RedisOptions{Settings: map[string]string{
		// A rewrite of the append-only file during a turn would be measured as well: see Shop.Close.
		"auto-aof-rewrite-percentage": "0",
	}})
	require.NoError(b, err)
	running = s
	AtExit(s.stop)
	s.postgres, err = localserver.StartPostgres(ctx, localserver.PostgresOptions{Settings: map[string]string{
		// So would a timed checkpoint: Open makes one before each turn.
		"checkpoint_timeout": "1h",
		// Records when each order was committed.
		"track_commit_timestamp": "on",
	}})
	require.NoError(b, err)
	s.control, err = connect.Control(s.redis.URL)
	require.NoError(b, err)
	s.administer(b, "CREATE DATABASE "+templateDatabase)
	require.NoError(b, migrate.Up(ctx, databaseURL(s.postgres.URL, templateDatabase)))
	MeasuredWith(s.versions(b))
	return s
}

func (s *servers) stop() {
	if s.control != nil {
		_ = s.control.Close()
	}
	(&localserver.Pair{Redis: s.redis, Postgres: s.postgres}).Stop()
}

// administer runs a statement outside of the databases of the shops.
func (s *servers) administer(b testing.TB, statement string) {
	b.Helper()
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, s.postgres.URL)
	require.NoError(b, err)
	_, err = conn.Exec(ctx, statement)
	require.NoError(b, err, statement)
	require.NoError(b, conn.Close(ctx))
}

func (s *servers) versions(b testing.TB) string {
	b.Helper()
	ctx := context.Background()
	info, err := s.control.InfoMap(ctx, "server").Result()
	require.NoError(b, err)
	conn, err := pgx.Connect(ctx, s.postgres.URL)
	require.NoError(b, err)
	var postgres string
	require.NoError(b, conn.QueryRow(ctx, "SHOW server_version").Scan(&postgres))
	require.NoError(b, conn.Close(ctx))
	postgres, _, _ = strings.Cut(postgres, " ") // distributions append their own version
	return "Redis " + info["Server"]["redis_version"] + " (appendfsync always), PostgreSQL " + postgres +
		" (fsync and synchronous_commit on)"
}

// versions lists what was named by MeasuredWith, and the versions of the modules. It reads go.mod,
// because a test binary does not know its modules.
func versions(modules []string) string {
	names := slices.Clone(measuredWith)
	mod, _ := os.ReadFile("../go.mod")
	for _, found := range regexp.MustCompile(`(?m)^\s+(\S+) (v\S+)`).FindAllStringSubmatch(string(mod), -1) {
		path, version := found[1], found[2]
		for _, module := range modules {
			if strings.Contains(path, module) {
				names = append(names, module+" "+version)
			}
		}
	}
	return strings.Join(names, ", ")
}

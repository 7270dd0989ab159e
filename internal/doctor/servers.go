package doctor

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
)

// Servers returns the servers and their versions: "Redis 7.0.15, PostgreSQL 15.13". A server that does
// not answer has no version.
func Servers(ctx context.Context, rdb redis.UniversalClient, pool *pgxpool.Pool) string {
	names := []string{"Redis", "PostgreSQL"}
	if text, err := rdb.Info(ctx, "server").Result(); err == nil {
		info := parseInfo(text)
		if version := info["valkey_version"]; version != "" { // its redis_version is that of the compatible Redis
			names[0] = "Valkey " + version
		} else {
			names[0] += " " + info["redis_version"]
		}
	}
	var version string
	if err := pool.QueryRow(ctx, "SHOW server_version").Scan(&version); err == nil {
		version, _, _ = strings.Cut(version, " ") // cut the name of the package
		names[1] += " " + version
	}
	return strings.Join(names, ", ")
}

package limits

import (
	"os"
	"testing"

	"stampede/bench/rig"
)

// The test binary also runs as a consumer process.
func TestMain(m *testing.M) {
	if os.Getenv(consumerEnv) != "" {
		os.Exit(consumerMain())
	}
	rig.Main(m, "limits", "labstack/echo", "redis/go-redis", "jackc/pgx", "hibiken/asynq", "riverdriver/riverpgxv5",
		"watermill-redisstream")
}

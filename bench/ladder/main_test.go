package ladder

import (
	"testing"

	"stampede/bench/rig"
)

func TestMain(m *testing.M) {
	rig.Main(m, "ladder", "labstack/echo", "redis/go-redis", "jackc/pgx", "watermill-redisstream")
}

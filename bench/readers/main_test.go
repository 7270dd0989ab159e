package readers

import (
	"testing"

	"stampede/bench/rig"
)

func TestMain(m *testing.M) {
	rig.Main(m, "readers", "labstack/echo", "redis/go-redis", "jackc/pgx")
}

package arrivals

import (
	"testing"

	"stampede/bench/rig"
)

func TestMain(m *testing.M) {
	rig.Main(m, "arrivals", "labstack/echo", "redis/go-redis", "jackc/pgx")
}

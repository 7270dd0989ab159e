package shards

import (
	"testing"

	"stampede/bench/rig"
)

func TestMain(m *testing.M) {
	rig.Main(m, "shards", "redis/go-redis", "jackc/pgx")
}

package locks

import (
	"testing"

	"stampede/bench/designs/redisson"
	"stampede/bench/rig"
)

func TestMain(m *testing.M) {
	if version := redisson.Version(); version != "" {
		rig.MeasuredWith("Redisson " + version)
	}
	rig.Main(m, "lock", "bsm/redislock", "go-redsync/redsync", "redis/go-redis", "redis/rueidis")
}

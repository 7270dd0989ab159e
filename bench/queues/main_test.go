package queues

import (
	"os"
	"testing"

	"stampede/bench/rig"
)

// The test binary is a consumer of a queue as well, in a process of its own.
func TestMain(m *testing.M) {
	if os.Getenv(consumerEnv) != "" {
		os.Exit(consumerMain())
	}
	rig.Main(m, "queues", "hibiken/asynq", "riverdriver/riverpgxv5", "watermill-redisstream")
}

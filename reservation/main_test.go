package reservation_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.WithRedisInMemory()) }

// commandsServed counts the commands that a Redis has served, except INFO.
func commandsServed(t *testing.T, rdb redis.UniversalClient) (n int) {
	t.Helper()
	stats, err := rdb.Info(t.Context(), "commandstats").Result()
	require.NoError(t, err)
	for line := range strings.Lines(stats) {
		name, rest, _ := strings.Cut(line, ":calls=")
		if rest != "" && name != "cmdstat_info" {
			var calls int
			_, err := fmt.Sscanf(rest, "%d,", &calls)
			require.NoError(t, err)
			n += calls
		}
	}
	return n
}

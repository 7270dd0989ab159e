//go:build system

package localserver_test

import (
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
)

func TestServersEndWithKilledParent(t *testing.T) {
	temp := tempFolder(t)
	parent := testkit.Command(t)
	parent.Setenv("TMPDIR", temp)
	parent.Start()
	var redisURL, databaseURL string
	var redisPid, postgresPid int
	scan(t, parent.WaitOutput(30*time.Second, "urls"), "urls %s %s", &redisURL, &databaseURL)
	scan(t, parent.WaitOutput(30*time.Second, "pids"), "pids %d %d", &redisPid, &postgresPid)
	require.True(t, listens(t, redisURL))
	require.True(t, listens(t, databaseURL))
	require.Len(t, serverFolders(t, temp), 2)

	parent.Kill()
	testkit.Eventually(t, 30*time.Second, "both servers have ended", func() bool {
		return !exists(redisPid) && !exists(postgresPid) && !listens(t, redisURL) && !listens(t, databaseURL)
	})
	require.Len(t, serverFolders(t, temp), 2, "no process is left to remove them")

	t.Setenv("TMPDIR", temp)
	next, err := localserver.StartRedis(t.Context(), localserver.RedisOptions{})
	require.NoError(t, err)
	require.Len(t, serverFolders(t, temp), 1, "only the folder of the running server")
	next.Stop()
	require.Empty(t, serverFolders(t, temp))
}

func TestServersDoNotRunAsRoot(t *testing.T) {
	t.Parallel()
	pair, err := localserver.Provide(t.Context(), localserver.Wanted{})
	require.NoError(t, err)
	t.Cleanup(pair.Stop)
	for name, pid := range map[string]int{"Redis": pair.Redis.Pid(), "Postgres": pair.Postgres.Pid()} {
		info, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
		require.NoError(t, err)
		require.NotZero(t, info.Sys().(*syscall.Stat_t).Uid, name)
	}
}

func exists(pid int) bool { return syscall.Kill(pid, 0) == nil }

func scan(t *testing.T, line, format string, into ...any) {
	t.Helper()
	_, err := fmt.Sscanf(line, format, into...)
	require.NoError(t, err)
}

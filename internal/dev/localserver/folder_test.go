//go:build system

package localserver

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestFolderStaysLockedUntilServerEnds(t *testing.T) {
	t.Parallel()
	redis, err := StartRedis(t.Context(), RedisOptions{})
	require.NoError(t, err)
	t.Cleanup(redis.Stop)
	f := redis.server.folder
	require.NoError(t, f.lock.Close()) // as when the parent dies

	lock, err := os.OpenFile(f.lock.Name(), os.O_RDWR, 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, lock.Close()) })
	require.ErrorIs(t, lockFile(lock), errLocked, "the server holds the lock")
	redis.Kill()
	// Until its exec, a child that is being started holds the lock too. Another process may sweep the
	// folder first; then the lock file does not exist.
	require.Eventually(t, func() bool {
		_, err := os.Stat(lock.Name())
		return lockFile(lock) == nil || errors.Is(err, os.ErrNotExist)
	}, 10*time.Second, 10*time.Millisecond)
}

func TestSweepIsBounded(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	for range sweepMax + 1 {
		lock, err := os.CreateTemp(base, "redis-*"+lockSuffix)
		require.NoError(t, err)
		require.NoError(t, lock.Close())
	}
	sweep(base)
	left, err := os.ReadDir(base)
	require.NoError(t, err)
	require.Len(t, left, 1)
	sweep(base)
	left, err = os.ReadDir(base)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestLockFileRejectsRemovedFile(t *testing.T) {
	t.Parallel()
	lock, err := os.CreateTemp(t.TempDir(), "*"+lockSuffix)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, lock.Close()) })
	require.NoError(t, os.Remove(lock.Name())) // as by a sweep of another process
	require.ErrorIs(t, lockFile(lock), errLocked)
}

// Not parallel: it changes TMPDIR.
func TestBaseFolderRejectsFoldersOfOthers(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	own := account{}
	base, err := baseFolder(own)
	require.NoError(t, err)
	require.Equal(t, temp, filepath.Dir(base))
	require.NoError(t, os.Chmod(base, 0o777))
	_, err = baseFolder(own)
	require.ErrorContains(t, err, base)

	require.NoError(t, os.Remove(base))
	require.NoError(t, os.Symlink(t.TempDir(), base))
	_, err = baseFolder(own)
	require.ErrorContains(t, err, base)
}

func TestBaseFolderSkipsUnreachableFolders(t *testing.T) {
	closed := t.TempDir()
	require.NoError(t, os.Chmod(closed, 0o700))
	t.Setenv("TMPDIR", closed)
	other := account{credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	base, err := baseFolder(other)
	require.NoError(t, err)
	require.NotEqual(t, closed, filepath.Dir(base))
}

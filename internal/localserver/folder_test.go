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

func TestFolderIsInUseUntilItsServerIsGoneToo(t *testing.T) {
	t.Parallel()
	redis, err := StartRedis(t.Context(), RedisOptions{})
	require.NoError(t, err)
	t.Cleanup(redis.Stop)
	f := redis.server.folder
	require.NoError(t, f.lock.Close()) // as the death of the parent does

	lock, err := os.OpenFile(f.lock.Name(), os.O_RDWR, 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, lock.Close()) })
	require.ErrorIs(t, lockFile(lock), errLocked, "the server has it still")
	redis.Kill()
	// A child that is just being started inherits the lock until its exec. Another process that
	// starts a server may sweep the folder first: then the lock file is gone.
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

func TestLockOfARemovedFolderIsNotTaken(t *testing.T) {
	t.Parallel()
	lock, err := os.CreateTemp(t.TempDir(), "*"+lockSuffix)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, lock.Close()) })
	require.NoError(t, os.Remove(lock.Name())) // by a sweep that took it for one of a dead process
	require.ErrorIs(t, lockFile(lock), errLocked)
}

// TestBaseFolderOfSomebodyElseIsRefused is not parallel: it changes TMPDIR.
func TestBaseFolderOfSomebodyElseIsRefused(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	ours := account{}
	base, err := baseFolder(ours)
	require.NoError(t, err)
	require.Equal(t, temp, filepath.Dir(base))
	require.NoError(t, os.Chmod(base, 0o777))
	_, err = baseFolder(ours)
	require.ErrorContains(t, err, base)

	require.NoError(t, os.Remove(base))
	require.NoError(t, os.Symlink(t.TempDir(), base))
	_, err = baseFolder(ours)
	require.ErrorContains(t, err, base)
}

func TestFolderThatTheServersCannotEnterIsPassedOver(t *testing.T) {
	closed := t.TempDir()
	require.NoError(t, os.Chmod(closed, 0o700))
	t.Setenv("TMPDIR", closed)
	other := account{credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	base, err := baseFolder(other)
	require.NoError(t, err)
	require.NotEqual(t, closed, filepath.Dir(base))
}

//go:build system

package localserver

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestStartTriesAnotherPort(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, taken.Close()) })

	servers := map[string]func(*testing.T, account, *serverFolder) *server{
		"redis": func(t *testing.T, a account, f *serverFolder) *server {
			binary, found := findRedis()
			require.True(t, found)
			return &server{
				name: "Redis", binary: binary, account: a, folder: f,
				readyMark: readyMark, args: func(port int) []string { return redisArgs(port, nil) },
			}
		},
		"postgres": func(t *testing.T, a account, f *serverFolder) *server {
			programs, found := findPostgres()
			require.True(t, found)
			data := filepath.Join(f.path, "data")
			require.NoError(t, makeCluster(t.Context(), programs, data, f, a))
			return &server{
				name: "Postgres", binary: filepath.Join(programs, "postgres"), account: a, folder: f,
				readyMark: readyMark, args: func(port int) []string { return postgresArgs(data, port, nil) },
			}
		},
	}
	for name, prepare := range servers {
		t.Run(name, func(t *testing.T) {
			a, err := serverAccount()
			require.NoError(t, err)
			f, err := newFolder(name, a)
			require.NoError(t, err)
			s := prepare(t, a, f)
			picked := 0
			err = s.start(t.Context(), func() (int, error) {
				if picked++; picked == 1 {
					return taken.Addr().(*net.TCPAddr).Port, nil
				}
				return freePort()
			})
			require.NoError(t, err)
			s.stop(syscall.SIGQUIT)
			require.Equal(t, 2, picked)
		})
	}
}

func TestFreePortIsBelowClientPorts(t *testing.T) {
	t.Parallel()
	port, err := freePort()
	require.NoError(t, err)
	require.GreaterOrEqual(t, port, portMin)
	require.Less(t, port, portMax)
}

func TestOutputDetectsReadinessAcrossWrites(t *testing.T) {
	t.Parallel()
	o := newOutput(readyMark)
	write := func(text string) {
		n, err := o.Write([]byte(text))
		require.NoError(t, err)
		require.Equal(t, len(text), n)
	}
	write("* Ready to acc")
	select {
	case <-o.ready:
		t.Fatal("ready too early")
	default:
	}
	write("ept connections\n")
	<-o.ready
	write(strings.Repeat("x", 2*outputMax) + "end")
	require.Len(t, o.String(), outputMax)
	require.True(t, strings.HasSuffix(o.String(), "xend"))
}

// The tests of this file are not parallel: they change the search path for servers.
func TestProvideReportsAllMissingServers(t *testing.T) {
	searchOnlyIn(t, t.TempDir())
	_, err := Provide(context.Background(), Wanted{})
	require.ErrorIs(t, err, errNotInstalled)
	for _, part := range []string{
		"Redis (redis-server or valkey-server) and Postgres (postgres and initdb): not installed",
		"sh tools/setup.sh",
		"apt-get install --no-install-recommends redis-server postgresql",
		"set REDIS_URL and DATABASE_URL",
	} {
		require.ErrorContains(t, err, part)
	}

	_, err = Provide(context.Background(), Wanted{RedisURL: "redis://given"})
	require.ErrorIs(t, err, errNotInstalled)
	require.NotContains(t, err.Error(), "Redis (")

	_, err = StartRedis(context.Background(), RedisOptions{})
	require.ErrorIs(t, err, errNotInstalled)
	_, err = StartPostgres(context.Background(), PostgresOptions{})
	require.ErrorIs(t, err, errNotInstalled)
}

func TestFindPostgresPrefersPathThenNewest(t *testing.T) {
	root := t.TempDir()
	searchOnlyIn(t, filepath.Join(root, "path"))
	for _, version := range []string{"9.6", "10", "18", "15"} {
		program(t, filepath.Join(root, "lib", version, "bin"), "initdb")
		program(t, filepath.Join(root, "lib", version, "bin"), "postgres")
	}
	program(t, filepath.Join(root, "lib", "99", "bin"), "initdb") // without a server
	postgresFolders = []string{filepath.Join(root, "lib", "*", "bin")}

	folder, found := findPostgres()
	require.True(t, found)
	require.Equal(t, filepath.Join(root, "lib", "18", "bin"), folder)

	program(t, filepath.Join(root, "path"), "initdb")
	program(t, filepath.Join(root, "path"), "postgres")
	folder, found = findPostgres()
	require.True(t, found)
	require.Equal(t, filepath.Join(root, "path"), folder)
}

func TestFindRedisAcceptsValkey(t *testing.T) {
	path := t.TempDir()
	searchOnlyIn(t, path)
	program(t, path, "valkey-server")
	found, ok := findRedis()
	require.True(t, ok)
	require.Equal(t, filepath.Join(path, "valkey-server"), found)

	// The first folder in PATH wins, whatever the name of the program.
	later := t.TempDir()
	program(t, later, "redis-server")
	t.Setenv("PATH", path+string(filepath.ListSeparator)+later)
	found, ok = findRedis()
	require.True(t, ok)
	require.Equal(t, filepath.Join(path, "valkey-server"), found)
}

// searchOnlyIn makes path the only folder in which servers are searched.
func searchOnlyIn(t *testing.T, path string) {
	t.Helper()
	t.Setenv("PATH", path)
	redis, postgres := redisFolders, postgresFolders
	t.Cleanup(func() { redisFolders, postgresFolders = redis, postgres })
	redisFolders, postgresFolders = nil, nil
}

func program(t *testing.T, folder, name string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(folder, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(folder, name), nil, 0o755))
}

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

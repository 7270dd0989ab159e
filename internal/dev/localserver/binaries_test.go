//go:build system

package localserver

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

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

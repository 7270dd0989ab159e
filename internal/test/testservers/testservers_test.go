package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

func TestCommandGetsRunningServersAndTemporaryFolder(t *testing.T) {
	wanted := t.TempDir()
	t.Setenv("TMPDIR", wanted)
	require.NoError(t, run(t.Context(), []string{"sh", "-c", `
		case "$` + testkit.EnvRedis + `" in redis://*) ;; *) exit 3;; esac
		case "$` + testkit.EnvPostgres + `" in postgres://*) ;; *) exit 4;; esac
		test "$TMPDIR" = "` + wanted + `"`}))
	assert.ErrorContains(t, run(t.Context(), []string{"sh", "-c", "exit 5"}), "exit status 5")
}

func TestTemporaryFilesAreKeptWhereThereIsRoom(t *testing.T) {
	t.Setenv("TMPDIR", "")
	if folder := temporaryFolder(); folder != os.TempDir() {
		made, err := os.MkdirTemp(folder, "testservers-")
		require.NoError(t, err)
		require.NoError(t, os.Remove(made))
	}
}

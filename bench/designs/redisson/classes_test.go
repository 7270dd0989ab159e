package redisson

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestProgramIsRecompiledOnlyAfterChanges(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	source, library := filepath.Join(folder, "src", "Driver.java"), filepath.Join(t.TempDir(), "redisson.jar")
	write := func(path, text string) {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	past := time.Now().Add(-time.Minute)
	age := func(paths ...string) {
		for _, path := range paths {
			require.NoError(t, os.Chtimes(path, past, past))
		}
	}
	write(source, "")
	write(library, "")
	write(filepath.Join(folder, target, "classpath"), library)
	write(filepath.Join(folder, target, "classes", "Driver.class"), "")
	age(folder, filepath.Dir(source), source)
	require.False(t, isCompiled(folder), "the build is not finished")

	write(filepath.Join(folder, target, stamp), "")
	require.True(t, isCompiled(folder))

	write(source, "changed")
	require.False(t, isCompiled(folder), "a file has changed")
	age(source)
	require.True(t, isCompiled(folder))

	write(filepath.Join(folder, "src", "More.java"), "")
	age(filepath.Join(folder, "src", "More.java"))
	require.False(t, isCompiled(folder), "a folder has changed")
	age(filepath.Dir(source))
	require.True(t, isCompiled(folder))

	require.NoError(t, os.Remove(library))
	require.False(t, isCompiled(folder), "a library is missing")
}

package main

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each patch names a test that exists, and applies.
func TestPatchesApply(t *testing.T) {
	root, err := filepath.Abs("../../..")
	require.NoError(t, err)
	// git takes the tree for a repository of its own, whether it is one or is inside another.
	t.Setenv("GIT_CEILING_DIRECTORIES", filepath.Dir(root))
	mutants, err := load(root, nil)
	require.NoError(t, err)
	require.NotEmpty(t, mutants)
	for _, m := range mutants {
		_, err := runWith(m.patch, root, "git", "apply", "--check", "-")
		require.NoError(t, err, m.name)
	}
}

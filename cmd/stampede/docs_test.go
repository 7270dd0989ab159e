package main

import (
	"flag"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/docs"
)

var update = flag.Bool("update", false, "write docs/reference.md and docs/metrics.md")

func TestDocumentationMatchesTheCode(t *testing.T) {
	t.Parallel()
	program := newParser(new(cli)).Model
	text, err := docs.Reference("../..", program)
	require.NoError(t, err)
	requirePage(t, docs.ReferencePage, text)
	found, err := docs.Check("../..", program)
	require.NoError(t, err)
	for _, difference := range found {
		assert.Fail(t, difference)
	}
}

// requirePage compares a page of docs with what the code gives, or writes it.
func requirePage(t *testing.T, name, want string) {
	t.Helper()
	name = "../../docs/" + name
	if *update {
		require.NoError(t, os.WriteFile(name, []byte(want), 0o644))
	}
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	require.Equal(t, want, string(text), "the code gives another page: run `task docs`")
}

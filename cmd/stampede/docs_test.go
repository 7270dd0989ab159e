package main

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/docs"
)

func TestDocumentationMatchesTheCode(t *testing.T) {
	t.Parallel()
	found, err := docs.Check("../..", newParser(new(cli)).Model)
	require.NoError(t, err)
	for _, difference := range found {
		assert.Fail(t, difference)
	}
}

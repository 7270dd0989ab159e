package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/docs"
)

func TestDocumentationMatchesTheCode(t *testing.T) {
	t.Parallel()
	found, err := docs.Check("../..", newParser(new(cli)).Model)
	require.NoError(t, err)
	for _, difference := range found {
		if !isUnfinished(difference) {
			assert.Fail(t, difference)
		}
	}
}

// isUnfinished excepts pages that are not wrapped or written yet.
func isUnfinished(difference string) bool {
	return strings.Contains(difference, " columns, want ") || strings.Contains(difference, " is missing") ||
		strings.HasPrefix(difference, "docs/operations.md does") || strings.HasPrefix(difference, "docs/http-api.md does")
}

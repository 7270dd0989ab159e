package sql_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// withoutComments returns the SQL of a file.
func withoutComments(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	return regexp.MustCompile(`--[^\n]*`).ReplaceAllString(string(text), "")
}

func columnFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("columns/*.sql")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	return files
}

// facts are what many queries need: a pattern of each, and the files that may have it.
var facts = []struct {
	name, pattern string
	homes         []string
}{
	{
		"the columns of an order or a sale: write {{columns/order}} or {{columns/sale}}",
		`AS (entry_for|expires_at)\b`,
		[]string{
			"columns/order.sql", "columns/sale.sql", "queries/relay/read_orders.sql", // of an event
			"queries/ledger/lock_overdue.sql", // without what is joined
		},
	},
	{"the columns of a sale: write {{columns/sale}}", `AS (entries_id|waitlist_closed)\b`, []string{"columns/sale.sql"}},
	{
		"the terms of a sale: write {{columns/terms}}", `payment_window_seconds,\s+(\w+\.)?payment_grace_seconds`,
		[]string{"columns/terms.sql"},
	},
}

// What a query needs and others need, too, is written once.
func TestFactsHaveOnePlace(t *testing.T) {
	t.Parallel()
	files := slices.Concat(queryFiles(t), columnFiles(t))
	for _, fact := range facts {
		pattern := regexp.MustCompile(fact.pattern)
		for _, file := range files {
			if !slices.Contains(fact.homes, file) {
				require.Empty(t, pattern.FindString(withoutComments(t, file)), "%s says %s", file, fact.name)
			}
		}
		for _, file := range fact.homes {
			require.Regexp(t, pattern, withoutComments(t, file), "%s: it has no place there any more", file)
		}
	}
}

// A list of columns is in a file of its own because several queries return it.
func TestListsOfColumnsAreShared(t *testing.T) {
	t.Parallel()
	used := map[string]int{}
	for _, file := range slices.Concat(queryFiles(t), columnFiles(t)) {
		for _, found := range regexp.MustCompile(`\{\{(columns/[^}]*)\}\}`).FindAllStringSubmatch(withoutComments(t, file), -1) {
			used[found[1]+".sql"]++
		}
	}
	for _, file := range columnFiles(t) {
		require.Greater(t, used[file], 1, file)
		delete(used, file)
	}
	require.Empty(t, used, "no such files")
}

package testshop

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// Everything returns the contents of Postgres and Redis.
func (s *Shop) Everything(t testing.TB) (all []string) {
	t.Helper()
	for _, table := range RowsOf(t, s.Pool,
		"SELECT tablename::text FROM pg_tables WHERE schemaname = 'public' ORDER BY 1") {
		for _, row := range RowsOf(t, s.Pool, "SELECT row_to_json(r)::text FROM "+table+" AS r ORDER BY 1") {
			all = append(all, table+" "+row)
		}
	}
	keys, err := s.Rdb.Keys(t.Context(), s.Keys.Prefix+":*").Result()
	require.NoError(t, err)
	slices.Sort(keys)
	for _, key := range keys {
		dump, err := s.Rdb.Dump(t.Context(), key).Result()
		require.NoError(t, err)
		all = append(all, key+" "+dump)
	}
	return all
}

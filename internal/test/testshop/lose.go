package testshop

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
)

// Lose deletes a sale from Redis, and returns a function that restores it.
func (s *Shop) Lose(t testing.TB, sale uuid.UUID) (bringBack func()) {
	t.Helper()
	dumps := map[string]string{}
	for _, key := range []string{s.Keys.Sale(0, sale), s.Keys.Buyers(0, sale)} {
		dumps[key] = s.Rdb.Dump(t.Context(), key).Val()
		require.NotEmpty(t, dumps[key])
		require.NoError(t, s.Rdb.Del(t.Context(), key).Err())
	}
	return func() {
		for key, dump := range dumps {
			require.NoError(t, s.Rdb.Restore(t.Context(), key, 0, dump).Err())
		}
	}
}

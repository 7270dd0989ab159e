package testsale

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
)

// SoldOutShop returns a shop on its own Redis that remembers its sale as sold out: ann has the only unit.
func SoldOutShop(t *testing.T) (*Shop, uuid.UUID) {
	t.Helper()
	own := testkit.OwnRedis(t)
	s := NewShopOn(t, OwnClient(t, own.URL), testkit.Keys(t), reservation.StoreOptions{})
	sale := s.Sale(1).ID
	require.Equal(t, reservation.Reserved, s.Buy(sale, "ann").Verdict)
	s.RememberSoldOut(sale)
	return s, sale
}

// RememberSoldOut waits until the shop refuses buyers without a call of Redis.
func (s *Shop) RememberSoldOut(sale uuid.UUID) {
	s.T.Helper()
	testkit.Eventually(s.T, 10*time.Second, "the sale is remembered as sold out", func() bool {
		before := ScriptCalls(s.T, s.Redis)
		require.Equal(s.T, reservation.SoldOut, s.Buy(sale, "loser").Verdict)
		return ScriptCalls(s.T, s.Redis) == before
	})
}

// ScriptCalls returns the number of scripts that Redis has run.
func ScriptCalls(t *testing.T, rdb redis.UniversalClient) int {
	t.Helper()
	calls := 0
	stats, err := rdb.InfoMap(t.Context(), "commandstats").Result()
	require.NoError(t, err)
	for _, section := range stats {
		if line := section["cmdstat_evalsha"]; line != "" {
			_, err := fmt.Sscanf(line, "calls=%d,", &calls)
			require.NoError(t, err)
		}
	}
	return calls
}

package relay

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/relay/webhook"
)

func TestBackoffIsRandomBelowItsLimit(t *testing.T) {
	t.Parallel()
	failed := errors.New("connection refused")
	for failures, limit := range map[int]time.Duration{
		1: time.Second, 2: 2 * time.Second, 5: 16 * time.Second, 17: 65536 * time.Second, 18: 24 * time.Hour,
		1_000_000: 24 * time.Hour,
	} {
		var sum time.Duration
		const tries = 2000
		for range tries {
			pause := backoff(failures, failed)
			require.GreaterOrEqual(t, pause, backoffMin)
			require.Less(t, pause, limit)
			sum += pause
		}
		require.InEpsilon(t, limit/2, sum/tries, 0.1, "full jitter")
	}
	asked := &webhook.Refusal{Status: 503, RetryAfter: time.Hour}
	require.Equal(t, time.Hour, backoff(1, asked), "what the receiver asks for")
	require.False(t, isFinal(asked))
	require.True(t, isFinal(&webhook.Refusal{Status: 410}))
}

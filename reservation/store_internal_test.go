//go:build system

package reservation

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
)

// To make room for a sale, the store locks queues while requests join them, and a queue that starts
// locks the store. That must not deadlock. The calls are abandoned beforehand, so that nothing waits
// for Redis.
func TestEvictionAndJoinDoNotDeadlock(t *testing.T) {
	t.Parallel()
	s := NewStore(nil, Keys{Prefix: DefaultPrefix, Partitions: 1}, StoreOptions{SalesMax: 2})
	sales := make([]uuid.UUID, 6)
	for i := range sales {
		sales[i] = uuid.Must(uuid.NewV7())
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range 20_000 {
					kept, err := s.keep(newSeller(s, sales[rand.IntN(len(sales))], address{layout: Layout{Partitions: 1, Shards: 1}}))
					if err != nil {
						require.ErrorIs(t, err, ErrOverloaded)
						continue
					}
					abandoned := &call{done: make(chan struct{}, 1)}
					abandoned.phase.Store(phaseAbandoned)
					require.NoError(t, kept.queues[0].join(abandoned))
				}
			})
		}
		wg.Wait()
		s.Close()
	}()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatal("deadlock of the store and its queues")
	}
}

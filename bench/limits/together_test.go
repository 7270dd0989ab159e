package limits

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/reservation/order"
)

// togetherMax is the maximum of orders per transaction, as in Stampede's worker.
const togetherMax = 500

// together is the batching that a user can add to any queue whose handlers run in one process: a
// handler waits until its order is written, and orders that arrive while a transaction is running go
// into the next one. No queue loses its guarantees, because each handler returns after its own order is
// in Postgres.
type together struct {
	// connections is the maximum of concurrent transactions.
	connections int
	write       func(ctx context.Context, events []order.OrderReserved) error

	mu      sync.Mutex
	waiting []handling
	writing int
}

// handling is an order whose handler waits.
type handling struct {
	event order.OrderReserved
	done  chan error
}

func newTogether(connections int, write func(context.Context, []order.OrderReserved) error) *together {
	return &together{connections: connections, write: write}
}

func (t *together) record(_ context.Context, event order.OrderReserved) error {
	h := handling{event, make(chan error, 1)}
	t.mu.Lock()
	t.waiting = append(t.waiting, h)
	if t.writing < t.connections {
		t.writing++
		go t.run()
	}
	t.mu.Unlock()
	return <-h.done
}

// run writes batches until no handler waits. Handlers wait for it, so it ends before they do.
func (t *together) run() {
	var batch []handling
	var events []order.OrderReserved
	for {
		t.mu.Lock()
		if len(t.waiting) == 0 {
			t.writing--
			t.mu.Unlock()
			return
		}
		n := min(len(t.waiting), togetherMax)
		batch = append(batch[:0], t.waiting[:n]...)
		t.waiting = append(t.waiting[:0], t.waiting[n:]...)
		t.mu.Unlock()

		events = events[:0]
		for _, h := range batch {
			events = append(events, h.event)
		}
		// Not the context of one handler: the other orders must not end with it.
		err := t.write(context.Background(), events)
		for _, h := range batch {
			h.done <- err
		}
	}
}

func TestConcurrentHandlersShareTransactions(t *testing.T) {
	t.Parallel()
	var calls, written atomic.Int64
	first := make(chan struct{})
	shared := newTogether(1, func(_ context.Context, events []order.OrderReserved) error {
		if calls.Add(1) == 1 {
			<-first
		}
		written.Add(int64(len(events)))
		if len(events) > togetherMax {
			return errors.New("too many")
		}
		return nil
	})
	const handlers = 2*togetherMax + 1
	var running errgroup.Group
	for i := range handlers {
		running.Go(func() error { return shared.record(t.Context(), order.OrderReserved{UserID: fmt.Sprint(i)}) })
	}
	require.Eventually(t, func() bool {
		shared.mu.Lock()
		defer shared.mu.Unlock()
		return len(shared.waiting) >= handlers-togetherMax
	}, 10e9, 1e6)
	close(first)
	require.NoError(t, running.Wait())
	require.EqualValues(t, handlers, written.Load())
	require.Less(t, calls.Load(), int64(handlers/2))
}

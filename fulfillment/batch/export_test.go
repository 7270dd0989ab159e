package batch

import (
	"context"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"stampede/ledger"
	"stampede/reservation/order"
)

// Queued is how many orders wait for a batch.
func (b *Batcher) Queued() int {
	b.queue.mu.Lock()
	defer b.queue.mu.Unlock()
	return len(b.queue.waiting)
}

// SetPageWait sets how long a batch waits for the rest of a page.
func (b *Batcher) SetPageWait(d time.Duration) { b.queue.pageWait = d }

// AwaitsPage reports whether a batch waits for the rest of a page.
func (b *Batcher) AwaitsPage() bool {
	b.queue.mu.Lock()
	defer b.queue.mu.Unlock()
	return b.queue.awaitsPage
}

// Submit queues a message, and returns where its result will be. ok is false if the batcher has
// stopped.
func (b *Batcher) Submit(msg *message.Message) (answer chan error, ok bool) {
	events, err := order.DecodeReserved(msg)
	if err != nil {
		panic(err)
	}
	d, orders := newDelivery(events)
	return d.done, b.queue.add(orders, false)
}

// ProcessBatch processes one batch, and returns where the results of its events are, and how many
// events were deferred.
func (b *Batcher) ProcessBatch(
	ctx context.Context, events ...order.OrderReserved,
) (answers []chan error, deferred int) {
	f := &inFlightBatch{}
	for _, event := range events {
		d, orders := newDelivery([]order.OrderReserved{event})
		f.batch, answers = append(f.batch, orders...), append(answers, d.done)
	}
	b.process(ctx, f)
	return answers, len(f.deferred)
}

func (b *Batcher) Record(ctx context.Context, events []order.OrderReserved) []ledger.Outcome {
	return b.record(ctx, events, false)
}

package batch

import (
	"context"
	"errors"

	"stampede/internal/retry"
	"stampede/ledger"
	"stampede/reservation/order"
	"stampede/stream"
)

// record returns the outcome of every event. A batch is retried while Postgres is away, and halved
// when one of its events is at fault, so that the good part commits. An event that was not recorded
// has Outcome.Err; ledger.ErrBlocked means that it is to be retried apart from other sales.
//
// A batch that waits too long for a lock is split by sale; one that takes too long is halved. If
// oneSale is set, all events are of one blocked sale, and a wait for a lock halves the batch as well.
func (b *Batcher) record(ctx context.Context, events []order.OrderReserved, oneSale bool) []ledger.Outcome {
	limit := int(b.recordMax.Load())
	r := ledger.BatchRecording{
		Ledger: b.Ledger, Try: b.try, SplitBlocked: true, OneSale: oneSale, Limit: limit,
	}
	outcomes := r.Record(ctx, events)
	switch {
	case r.Slow:
		b.recordMax.Store(int64(r.Limit))
		b.Logger.WarnContext(ctx, "recording orders took too long; fewer are recorded at a time", "orders", r.Limit,
			"before", limit)
	case limit < b.BatchMax:
		b.recordMax.Store(int64(min(2*limit, b.BatchMax)))
	}
	return outcomes
}

// epochTries bounds the immediate retries of a transaction whose epoch has ended. More than one
// rebuild during a batch is rare.
const epochTries = 3

// try retries a transaction after errors that no event causes. It returns ErrStopping when the worker
// stops; any other error is caused by one of the events, or says that they were blocked.
func (b *Batcher) try(ctx context.Context, t ledger.Transaction) ([]ledger.Outcome, error) {
	for tries := 1; ; tries++ {
		if b.recording.Lasts() && b.isDraining() {
			return nil, stream.ErrStopping
		}
		outcomes, err := ledger.Attempt(ctx, b.Logger, t)
		if err == nil || ledger.FaultOf(err) != ledger.Transient {
			b.recording.Over()
			return outcomes, err
		}
		if ledger.IsLocked(err) || ledger.IsTooSlow(err) {
			if b.isDraining() {
				return nil, stream.ErrStopping
			}
			return nil, err
		}
		if errors.Is(err, ledger.ErrEpochOver) && tries <= epochTries {
			continue // the next attempt reads the new epoch
		}
		if !retry.Pause(b.recording.Failed(err), b.draining) {
			return nil, stream.ErrStopping
		}
	}
}

func (b *Batcher) isDraining() bool {
	select {
	case <-b.draining:
		return true
	default:
		return false
	}
}

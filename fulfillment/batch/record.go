package batch

import (
	"context"
	"errors"

	"github.com/google/uuid"

	"stampede/fulfillment/ledger"
	"stampede/fulfillment/stream"
	"stampede/internal/retry"
	"stampede/reservation/order"
)

// Record finds the outcome of every event: a batch is retried while Postgres is away, and halved
// when one of its events is at fault, so that the good part commits. An event that was not recorded
// has Outcome.Err; after errBlocked it is to be retried apart from other sales.
//
// A batch that waits too long for a lock is split by sale; one that takes too long is halved. With
// patient, all events are of one blocked sale, and it is halved for a lock as well.
func (b *Batcher) Record(ctx context.Context, events []order.OrderReserved, patient bool) []ledger.Outcome {
	most := int(b.most.Load())
	s := ledger.BatchRecording{
		Ledger: b.Ledger, Try: b.try, TooMany: map[uuid.UUID]int64{}, Splits: true,
		Patient: patient, Most: most,
	}
	outcomes := s.Record(ctx, events)
	switch {
	case s.Slow:
		b.most.Store(int64(s.Most))
		b.Logger.Warn("recording orders took too long, so that fewer are recorded at a time", "orders", s.Most, "before",
			most)
	case most < b.BatchMax:
		b.most.Store(int64(min(2*most, b.BatchMax)))
	}
	return outcomes
}

// epochTries bounds the immediate retries of a transaction whose epoch has ended. More than one
// rebuild during a batch is rare.
const epochTries = 3

// try repeats a transaction while its surroundings are at fault. It returns ErrStopping when the
// worker stops; any other error is caused by one of the events, or says that they were blocked.
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
			continue // it is known now that the epoch is over
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

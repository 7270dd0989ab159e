package batch

import (
	"context"
	"errors"

	"github.com/google/uuid"

	"stampede/fulfillment/ledger"
	"stampede/fulfillment/stream"
	"stampede/internal/pause"
	"stampede/reservation/order"
)

// Record finds the outcome of every event, whatever it takes: a batch is tried again for as long as
// Postgres is away, and halved when one of its events is at fault, so that the good part commits and
// the bad event goes on alone. An event without an end has Outcome.Err; if that is errBlocked, it is to be tried again
// apart from those of other sales.
//
// A batch that waits too long for a lock is split by sale, and one that takes too long for the database is halved. If
// patient is set, it is all of one sale that was blocked before: then it is halved for a lock as well.
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

// epochTries is how often a transaction is repeated at once because an epoch has ended. It is ended by a
// rebuild, of which more than one in the course of a batch is rare.
const epochTries = 3

// try repeats a transaction while the surroundings are at fault. It returns ErrStopping when the
// worker stops meanwhile; every other error is one of the events, or says that they were blocked.
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
		if !pause.For(b.recording.Failed(err), b.draining) {
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

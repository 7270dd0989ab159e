package fulfillment

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/google/uuid"

	"stampede/internal/pause"
	"stampede/reservation"
)

// settle finds the outcome of every event, whatever it takes: a batch is tried again for as long as
// Postgres is away, and halved when one of its events is at fault, so that the good part commits and
// the bad event goes on alone. An event without an end has Outcome.Err.
func (b *batcher) settle(ctx context.Context, events []reservation.OrderReserved) []Outcome {
	s := settlement{batcher: b, tooMany: map[uuid.UUID]int64{}}
	return s.record(ctx, events)
}

// settlement is what is learned while one batch is being settled.
type settlement struct {
	*batcher
	// tooMany is, by sale, a quantity that its stock in Postgres did not hold. Without it, a batch for
	// a sale that is sold out would be halved down to every single event.
	tooMany map[uuid.UUID]int64
}

// record returns one outcome per event, in their order.
func (s *settlement) record(ctx context.Context, events []reservation.OrderReserved) []Outcome {
	if s.holdsNoneOf(events) {
		return s.refuse(ctx, events)
	}
	outcomes, err := s.try(ctx, func(ctx context.Context) ([]Outcome, error) { return s.ledger.Record(ctx, events) })
	switch {
	case err == nil:
		return outcomes
	case errors.Is(err, ErrStopping):
		return allFailed(events, err)
	case len(events) > 1:
		// The earlier half first: it has the older claim to what is left.
		half := len(events) / 2
		return append(s.record(ctx, events[:half:half]), s.record(ctx, events[half:])...)
	case faultOf(err) == oversold:
		s.tooMany[events[0].SaleID] = events[0].Quantity
		return s.refuse(ctx, events)
	default:
		return allFailed(events, err)
	}
}

func (s *settlement) holdsNoneOf(events []reservation.OrderReserved) bool {
	for _, e := range events {
		if quantity, known := s.tooMany[e.SaleID]; !known || e.Quantity < quantity {
			return false
		}
	}
	return true
}

func (s *settlement) refuse(ctx context.Context, events []reservation.OrderReserved) []Outcome {
	outcomes, err := s.try(ctx, func(ctx context.Context) ([]Outcome, error) {
		return s.ledger.Refuse(ctx, events, reservation.RejectedSoldOut)
	})
	if err != nil {
		return allFailed(events, err)
	}
	return outcomes
}

// try repeats a transaction while the surroundings are at fault. It returns ErrStopping when the
// worker stops meanwhile; every other error is one of the events.
func (b *batcher) try(ctx context.Context, transaction func(context.Context) ([]Outcome, error)) ([]Outcome, error) {
	for {
		if b.recording.lasts() && b.isDraining() {
			return nil, ErrStopping
		}
		outcomes, err := b.attempt(ctx, transaction)
		if err == nil || faultOf(err) != transient {
			b.recording.over()
			return outcomes, err
		}
		if !pause.For(b.recording.failed(err), b.draining) {
			return nil, ErrStopping
		}
	}
}

func (b *batcher) attempt(ctx context.Context, transaction func(context.Context) ([]Outcome, error)) (outcomes []Outcome, err error) {
	defer func() {
		if p := recover(); p != nil {
			b.logger.Error("panic while recording a batch", "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("%w: %v", errPanicked, p)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	return transaction(ctx)
}

func (b *batcher) isDraining() bool {
	select {
	case <-b.draining:
		return true
	default:
		return false
	}
}

func allFailed(events []reservation.OrderReserved, err error) []Outcome {
	outcomes := make([]Outcome, len(events))
	for i, e := range events {
		outcomes[i] = Outcome{Event: e, Err: err}
	}
	return outcomes
}

package fulfillment

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"

	"github.com/google/uuid"

	"stampede/internal/pause"
	"stampede/reservation"
)

// settle finds the outcome of every event, whatever it takes: a batch is tried again for as long as
// Postgres is away, and halved when one of its events is at fault, so that the good part commits and
// the bad event goes on alone. An event without an end has Outcome.Err.
func (b *batcher) settle(ctx context.Context, events []reservation.OrderReserved) []Outcome {
	return settle(ctx, b.ledger, b.try, events)
}

// transaction records some events.
type transaction func(context.Context) ([]Outcome, error)

// settle is batcher.settle with another way to try a transaction. An error of try whose fault is transient
// ends the settlement, and is that of all events that are not recorded by then; any other one is of an event.
func settle(ctx context.Context, ledger *Ledger, try func(context.Context, transaction) ([]Outcome, error), events []reservation.OrderReserved) []Outcome {
	s := settlement{ledger: ledger, try: try, tooMany: map[uuid.UUID]int64{}}
	return s.record(ctx, events)
}

// settlement is what is learned while one batch is being settled.
type settlement struct {
	ledger *Ledger
	try    func(context.Context, transaction) ([]Outcome, error)
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
	case faultOf(err) == transient:
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

// epochTries is how often a transaction is repeated at once because an epoch has ended. It is ended by a
// rebuild, of which more than one in the course of a batch is rare.
const epochTries = 3

// try repeats a transaction while the surroundings are at fault. It returns ErrStopping when the
// worker stops meanwhile; every other error is one of the events.
func (b *batcher) try(ctx context.Context, t transaction) ([]Outcome, error) {
	for tries := 1; ; tries++ {
		if b.recording.lasts() && b.isDraining() {
			return nil, ErrStopping
		}
		outcomes, err := attempt(ctx, b.logger, t)
		if err == nil || faultOf(err) != transient {
			b.recording.over()
			return outcomes, err
		}
		if errors.Is(err, errEpochOver) && tries <= epochTries {
			continue // it is known now that the epoch is over
		}
		if !pause.For(b.recording.failed(err), b.draining) {
			return nil, ErrStopping
		}
	}
}

// attempt runs a transaction, for so long that a server that hangs counts as away.
func attempt(ctx context.Context, log *slog.Logger, t transaction) (outcomes []Outcome, err error) {
	defer func() {
		if p := recover(); p != nil {
			log.Error("panic while recording a batch", "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("%w: %v", errPanicked, p)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	return t(ctx)
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

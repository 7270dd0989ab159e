package fulfillment

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"

	"github.com/google/uuid"

	"stampede/fulfillment/stream"
	"stampede/internal/pause"
	"stampede/reservation"
)

// Record finds the outcome of every event, whatever it takes: a batch is tried again for as long as
// Postgres is away, and halved when one of its events is at fault, so that the good part commits and
// the bad event goes on alone. An event without an end has Outcome.Err; if that is errBlocked, it is to be tried again
// apart from those of other sales.
//
// A batch that waits too long for a lock is split by sale, and one that takes too long for the database is halved. If
// patient is set, it is all of one sale that was blocked before: then it is halved for a lock as well.
func (b *batcher) Record(ctx context.Context, events []reservation.OrderReserved, patient bool) []Outcome {
	most := int(b.most.Load())
	s := batchRecording{ledger: b.Ledger, try: b.try, tooMany: map[uuid.UUID]int64{}, splits: true, patient: patient, most: most}
	outcomes := s.record(ctx, events)
	switch {
	case s.slow:
		b.most.Store(int64(s.most))
		b.Logger.Warn("recording orders took too long, so that fewer are recorded at a time", "orders", s.most, "before", most)
	case most < b.BatchMax:
		b.most.Store(int64(min(2*most, b.BatchMax)))
	}
	return outcomes
}

// transaction records some events.
type transaction func(context.Context) ([]Outcome, error)

// recordWith is batcher.record with another way to try a transaction. An error of try whose fault is transient
// ends the recording, and is that of all events that are not recorded by then; any other one is of an event.
func recordWith(ctx context.Context, ledger *Ledger, try func(context.Context, transaction) ([]Outcome, error), events []reservation.OrderReserved) []Outcome {
	s := batchRecording{ledger: ledger, try: try, tooMany: map[uuid.UUID]int64{}, most: len(events)}
	return s.record(ctx, events)
}

// batchRecording is what is learned while one batch is recorded.
type batchRecording struct {
	ledger *Ledger
	try    func(context.Context, transaction) ([]Outcome, error)
	// tooMany is, by sale, a quantity that its stock in Postgres did not hold. Without it, a batch for
	// a sale that is sold out would be halved down to every single event.
	tooMany map[uuid.UUID]int64

	// splits is set where events may be blocked. blocked is why those of a sale are.
	splits, patient bool
	blocked         map[uuid.UUID]error
	// most is how many events one transaction records at most, and slow is set when that was found to be fewer.
	most int
	slow bool
	// stopped is set when the worker stopped meanwhile.
	stopped error
}

// record returns one outcome per event, in their order. Those of a sale stand together.
func (s *batchRecording) record(ctx context.Context, events []reservation.OrderReserved) []Outcome {
	switch {
	case len(events) == 0:
		return nil
	case s.stopped != nil:
		return allFailed(events, s.stopped)
	}
	for sale, err := range s.blocked {
		if from, to := rangeOf(events, sale); from < to {
			others := append(s.record(ctx, events[:from:from]), allFailed(events[from:to], err)...)
			return append(others, s.record(ctx, events[to:])...)
		}
	}
	if len(events) > s.most {
		return s.inParts(ctx, events, s.most)
	}
	if s.holdsNoneOf(events) {
		return s.refuse(ctx, events)
	}
	outcomes, err := s.try(ctx, func(ctx context.Context) ([]Outcome, error) { return s.ledger.Record(ctx, events) })
	switch {
	case err == nil:
		return outcomes
	case errors.Is(err, stream.ErrStopping):
		s.stopped = err
		return allFailed(events, err)
	case s.splits && (isLocked(err) || isTooSlow(err)):
		return s.recordApart(ctx, events, err)
	case faultOf(err) == transient:
		return allFailed(events, err)
	case len(events) > 1:
		// The earlier half first: it has the older claim to what is left.
		return s.inParts(ctx, events, len(events)/2)
	case faultOf(err) == oversold:
		s.tooMany[events[0].SaleID] = events[0].Quantity
		return s.refuse(ctx, events)
	default:
		return allFailed(events, err)
	}
}

// inParts records the first n events and then the others.
func (s *batchRecording) inParts(ctx context.Context, events []reservation.OrderReserved, n int) []Outcome {
	return append(s.record(ctx, events[:n:n]), s.record(ctx, events[n:])...)
}

// bySale records the events of each sale apart.
func (s *batchRecording) bySale(ctx context.Context, events []reservation.OrderReserved) (outcomes []Outcome) {
	for len(events) > 0 {
		_, n := rangeOf(events, events[0].SaleID)
		outcomes = append(outcomes, s.record(ctx, events[:n:n])...)
		events = events[n:]
	}
	return outcomes
}

// recordApart records events after they were blocked together.
func (s *batchRecording) recordApart(ctx context.Context, events []reservation.OrderReserved, err error) []Outcome {
	blocked := fmt.Errorf("%w: %w", errBlocked, err)
	var ofSale *saleError
	if errors.As(err, &ofSale) && isLocked(err) {
		s.block(ofSale.sale, blocked)
		return s.record(ctx, events)
	}
	switch _, first := rangeOf(events, events[0].SaleID); {
	case first < len(events):
		return s.bySale(ctx, events)
	case len(events) > 1 && isTooSlow(err):
		s.most, s.slow = len(events)/2, true
		return s.record(ctx, events)
	case len(events) > 1 && s.patient:
		return s.inParts(ctx, events, len(events)/2)
	case !s.patient:
		s.block(events[0].SaleID, blocked)
	}
	return allFailed(events, blocked)
}

// block has the sale's events not tried again in this batch.
func (s *batchRecording) block(sale uuid.UUID, err error) {
	if s.blocked == nil {
		s.blocked = make(map[uuid.UUID]error)
	}
	s.blocked[sale] = err
}

// rangeOf is where the events of a sale stand, of which all stand together.
func rangeOf(events []reservation.OrderReserved, sale uuid.UUID) (from, to int) {
	ofSale := func(e reservation.OrderReserved) bool { return e.SaleID == sale }
	if from = slices.IndexFunc(events, ofSale); from < 0 {
		return 0, 0
	}
	for to = from + 1; to < len(events) && ofSale(events[to]); to++ {
	}
	return from, to
}

func (s *batchRecording) holdsNoneOf(events []reservation.OrderReserved) bool {
	for _, e := range events {
		if quantity, known := s.tooMany[e.SaleID]; !known || e.Quantity < quantity {
			return false
		}
	}
	return true
}

func (s *batchRecording) refuse(ctx context.Context, events []reservation.OrderReserved) []Outcome {
	outcomes, err := s.try(ctx, func(ctx context.Context) ([]Outcome, error) {
		return s.ledger.Refuse(ctx, events, reservation.RejectedSoldOut)
	})
	if s.splits && (isLocked(err) || isTooSlow(err)) {
		err = fmt.Errorf("%w: %w", errBlocked, err)
	}
	if err != nil {
		return allFailed(events, err)
	}
	return outcomes
}

// epochTries is how often a transaction is repeated at once because an epoch has ended. It is ended by a
// rebuild, of which more than one in the course of a batch is rare.
const epochTries = 3

// try repeats a transaction while the surroundings are at fault. It returns ErrStopping when the
// worker stops meanwhile; every other error is one of the events, or says that they were blocked.
func (b *batcher) try(ctx context.Context, t transaction) ([]Outcome, error) {
	for tries := 1; ; tries++ {
		if b.recording.lasts() && b.isDraining() {
			return nil, stream.ErrStopping
		}
		outcomes, err := attempt(ctx, b.Logger, t)
		if err == nil || faultOf(err) != transient {
			b.recording.over()
			return outcomes, err
		}
		if isLocked(err) || isTooSlow(err) {
			if b.isDraining() {
				return nil, stream.ErrStopping
			}
			return nil, err
		}
		if errors.Is(err, errEpochOver) && tries <= epochTries {
			continue // it is known now that the epoch is over
		}
		if !pause.For(b.recording.failed(err), b.draining) {
			return nil, stream.ErrStopping
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

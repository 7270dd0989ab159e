package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/google/uuid"

	"stampede/fulfillment/stream"
	"stampede/reservation/order"
)

// ByPlaceInSale is the order in which events are recorded, so that the earliest orders get the units that are left.
func ByPlaceInSale(x, y order.OrderReserved) int {
	return cmp.Or(strings.Compare(string(x.SaleID[:]), string(y.SaleID[:])), cmp.Compare(x.Sequence, y.Sequence))
}

// Transaction records some events.
type Transaction func(context.Context) ([]Outcome, error)

// RecordWith records a batch with another way to try a transaction. A transient error of try ends the recording and
// is the outcome of all events that are not recorded by then; any other error belongs to one event.
func RecordWith(ctx context.Context, ledger *Ledger,
	try func(context.Context, Transaction) ([]Outcome, error), events []order.OrderReserved,
) []Outcome {
	s := BatchRecording{Ledger: ledger, Try: try, TooMany: map[uuid.UUID]int64{}, Most: len(events)}
	return s.Record(ctx, events)
}

// BatchRecording holds what is learned while one batch is recorded.
type BatchRecording struct {
	Ledger *Ledger
	Try    func(context.Context, Transaction) ([]Outcome, error)
	// TooMany is, by sale, a quantity that its stock in Postgres did not hold. It saves a batch for a sold-out sale
	// from being halved down to every single event.
	TooMany map[uuid.UUID]int64

	// Splits is set if events may be blocked. blocked is why those of a sale are.
	Splits, Patient bool
	blocked         map[uuid.UUID]error
	// Most bounds the events of one transaction; slow is set when it was lowered.
	Most int
	Slow bool
	// stopped is set when the worker was stopped during the recording.
	stopped error
}

// Record returns one outcome per event, in their order. The events of a sale are adjacent.
func (s *BatchRecording) Record(ctx context.Context, events []order.OrderReserved) []Outcome {
	switch {
	case len(events) == 0:
		return nil
	case s.stopped != nil:
		return allFailed(events, s.stopped)
	}
	for sale, err := range s.blocked {
		if from, to := rangeOf(events, sale); from < to {
			others := append(s.Record(ctx, events[:from:from]), allFailed(events[from:to], err)...)
			return append(others, s.Record(ctx, events[to:])...)
		}
	}
	if len(events) > s.Most {
		return s.inParts(ctx, events, s.Most)
	}
	if s.holdsNoneOf(events) {
		return s.refuse(ctx, events)
	}
	outcomes, err := s.Try(ctx, func(ctx context.Context) ([]Outcome, error) { return s.Ledger.Record(ctx, events) })
	switch {
	case err == nil:
		return outcomes
	case errors.Is(err, stream.ErrStopping):
		s.stopped = err
		return allFailed(events, err)
	case s.Splits && (IsLocked(err) || IsTooSlow(err)):
		return s.recordApart(ctx, events, err)
	case FaultOf(err) == Transient:
		return allFailed(events, err)
	case len(events) > 1:
		// The earlier half first: its orders have priority.
		return s.inParts(ctx, events, len(events)/2)
	case FaultOf(err) == oversold:
		s.TooMany[events[0].SaleID] = events[0].Quantity
		return s.refuse(ctx, events)
	default:
		return allFailed(events, err)
	}
}

func (s *BatchRecording) inParts(ctx context.Context, events []order.OrderReserved, n int) []Outcome {
	return append(s.Record(ctx, events[:n:n]), s.Record(ctx, events[n:])...)
}

func (s *BatchRecording) bySale(ctx context.Context, events []order.OrderReserved) (outcomes []Outcome) {
	for len(events) > 0 {
		_, n := rangeOf(events, events[0].SaleID)
		outcomes = append(outcomes, s.Record(ctx, events[:n:n])...)
		events = events[n:]
	}
	return outcomes
}

// recordApart records events after they were blocked together.
func (s *BatchRecording) recordApart(ctx context.Context, events []order.OrderReserved, err error) []Outcome {
	blocked := fmt.Errorf("%w: %w", ErrBlocked, err)
	var ofSale *saleError
	if errors.As(err, &ofSale) && IsLocked(err) {
		s.block(ofSale.sale, blocked)
		return s.Record(ctx, events)
	}
	switch _, first := rangeOf(events, events[0].SaleID); {
	case first < len(events):
		return s.bySale(ctx, events)
	case len(events) > 1 && IsTooSlow(err):
		s.Most, s.Slow = len(events)/2, true
		return s.Record(ctx, events)
	case len(events) > 1 && s.Patient:
		return s.inParts(ctx, events, len(events)/2)
	case !s.Patient:
		s.block(events[0].SaleID, blocked)
	}
	return allFailed(events, blocked)
}

// block excludes the sale's events from further tries of this batch.
func (s *BatchRecording) block(sale uuid.UUID, err error) {
	if s.blocked == nil {
		s.blocked = make(map[uuid.UUID]error)
	}
	s.blocked[sale] = err
}

// rangeOf returns the range of a sale's events, which are adjacent.
func rangeOf(events []order.OrderReserved, sale uuid.UUID) (from, to int) {
	ofSale := func(e order.OrderReserved) bool { return e.SaleID == sale }
	if from = slices.IndexFunc(events, ofSale); from < 0 {
		return 0, 0
	}
	for to = from + 1; to < len(events) && ofSale(events[to]); to++ {
	}
	return from, to
}

func (s *BatchRecording) holdsNoneOf(events []order.OrderReserved) bool {
	for _, e := range events {
		if quantity, known := s.TooMany[e.SaleID]; !known || e.Quantity < quantity {
			return false
		}
	}
	return true
}

func (s *BatchRecording) refuse(ctx context.Context, events []order.OrderReserved) []Outcome {
	outcomes, err := s.Try(ctx, func(ctx context.Context) ([]Outcome, error) {
		return s.Ledger.Refuse(ctx, events, order.RejectedSoldOut)
	})
	if s.Splits && (IsLocked(err) || IsTooSlow(err)) {
		err = fmt.Errorf("%w: %w", ErrBlocked, err)
	}
	if err != nil {
		return allFailed(events, err)
	}
	return outcomes
}

// Attempt runs a transaction under RecordTimeout.
func Attempt(ctx context.Context, log *slog.Logger, t Transaction) (outcomes []Outcome, err error) {
	defer func() {
		if p := recover(); p != nil {
			log.Error("panic while recording a batch", "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("%w: %v", ErrPanicked, p)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, RecordTimeout)
	defer cancel()
	return t(ctx)
}

func allFailed(events []order.OrderReserved, err error) []Outcome {
	outcomes := make([]Outcome, len(events))
	for i, e := range events {
		outcomes[i] = Outcome{Event: e, Err: err}
	}
	return outcomes
}

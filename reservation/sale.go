package reservation

import (
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/reservation/order"
)

// State is the state of a sale. Operators set it to open, paused or ended; an open sale is
// Scheduled before its opening time, and an open or paused sale is Ended after its closing time.
type State string

// The states of a sale.
const (
	StateScheduled State = "scheduled"
	StateOpen      State = "open"
	StatePaused    State = "paused"
	StateEnded     State = "ended"
)

// ErrSaleNotFound is returned when no sale has the id.
var ErrSaleNotFound = errors.New("sale not found")

// IllegalTransitionError is returned when an operator's action does not fit the state of the sale.
type IllegalTransitionError struct {
	Action string
	State  State
}

func (e *IllegalTransitionError) Error() string {
	return fmt.Sprintf("cannot %s a sale that is %s", e.Action, e.State)
}

// Terms are the settings of a new sale.
type Terms struct {
	Name string
	// Stock is how many units are for sale.
	Stock int64
	// PerOrderLimit is how many units one order may hold.
	PerOrderLimit int64
	// OpensAt is when the sale opens; zero for immediately.
	OpensAt time.Time
	// ClosesAt is when the sale closes; zero for never.
	ClosesAt time.Time
	// PaymentWindow is how long a confirmed order waits for its payment; 0 where confirmed is final.
	PaymentWindow time.Duration
}

// Validate returns an *InvalidError for the first term that does not hold.
func (t Terms) Validate() error {
	switch {
	case t.Name == "" || len(t.Name) > order.MaxNameBytes || !utf8.ValidString(t.Name):
		return &order.InvalidError{Field: "name", Reason: fmt.Sprintf("must be 1 to %d bytes of UTF-8", order.MaxNameBytes)}
	case hasControl(t.Name):
		return &order.InvalidError{Field: "name", Reason: "must not hold control characters"}
	case t.Stock < 1 || t.Stock > order.MaxStock:
		return &order.InvalidError{Field: "stock", Reason: fmt.Sprintf("must be a whole number from 1 to %d", order.MaxStock)}
	case t.PerOrderLimit < 1 || t.PerOrderLimit > order.MaxPerOrder:
		return &order.InvalidError{
			Field:  "per_order_limit",
			Reason: fmt.Sprintf("must be a whole number from 1 to %d", order.MaxPerOrder),
		}
	case !t.OpensAt.IsZero() && !representable(t.OpensAt):
		return &order.InvalidError{Field: "opens_at", Reason: "must be between the years 1970 and 9999"}
	case !t.ClosesAt.IsZero() && !representable(t.ClosesAt):
		return &order.InvalidError{Field: "closes_at", Reason: "must be between the years 1970 and 9999"}
	case !t.OpensAt.IsZero() && !t.ClosesAt.IsZero() && !t.OpensAt.Before(t.ClosesAt):
		return &order.InvalidError{Field: "closes_at", Reason: "must be later than opens_at"}
	case t.PaymentWindow < 0 || t.PaymentWindow > order.MaxPaymentWindow || t.PaymentWindow%time.Second != 0:
		return &order.InvalidError{
			Field:  "payment_window_seconds",
			Reason: fmt.Sprintf("must be a whole number from 0 to %d", int(order.MaxPaymentWindow/time.Second)),
		}
	}
	return nil
}

// Equal is true for terms that are the same in Postgres, which keeps microseconds.
func (t Terms) Equal(other Terms) bool {
	for _, of := range []*Terms{&t, &other} {
		of.OpensAt, of.ClosesAt = of.OpensAt.UTC().Truncate(time.Microsecond), of.ClosesAt.UTC().Truncate(time.Microsecond)
	}
	return t == other
}

// representable is true for times that the scripts can compare: they hold milliseconds since 1970,
// where 0 means none.
func representable(t time.Time) bool {
	return t.UnixMilli() > 0 && t.UTC().Year() <= 9999
}

// Sale is the definition of a sale, as Postgres holds it.
type Sale struct {
	ID uuid.UUID
	Terms
	// State is what the operators last set: open, paused or ended.
	State State
	// Sold is how many units the live orders in Postgres hold. Invariant: 0 <= Sold <= Stock.
	Sold int64
	// Epoch counts the rebuilds of the sale's stock in Redis; a script refuses a caller of another
	// epoch.
	Epoch int64
	// Revision counts the operators' changes; Redis takes a change only if it is newer than what it has.
	Revision int64
	// Partitions is how many there were when the sale was created; its partition follows from it.
	Partitions int
	CreatedAt  time.Time
}

// SaleRow is a sale as queries answer it, without the units sold.
type SaleRow struct {
	ID                   uuid.UUID
	Name                 string
	Stock                int64
	State                State
	PerOrderLimit        int64
	OpensAt, ClosesAt    zeronull.Timestamptz
	PaymentWindowSeconds int64
	Epoch, Revision      int64
	Partitions           int
	CreatedAt            time.Time
}

// Sale returns the definition that the row holds.
func (r *SaleRow) Sale() Sale {
	return Sale{
		ID: r.ID,
		Terms: Terms{
			Name: r.Name, Stock: r.Stock, PerOrderLimit: r.PerOrderLimit, OpensAt: inUTC(r.OpensAt), ClosesAt: inUTC(r.ClosesAt),
			PaymentWindow: time.Duration(r.PaymentWindowSeconds) * time.Second,
		},
		State: r.State, Epoch: r.Epoch, Revision: r.Revision, Partitions: r.Partitions, CreatedAt: r.CreatedAt.UTC(),
	}
}

// inUTC is the time in UTC, and zero for none.
func inUTC(at zeronull.Timestamptz) time.Time {
	if t := time.Time(at); !t.IsZero() {
		return t.UTC()
	}
	return time.Time{}
}

// Partition is the partition of the sale in Redis.
func (s Sale) Partition() int { return PartitionAmong(s.ID, s.Partitions) }

// StateAt is the state of the sale as a buyer would find it at that time.
func (s Sale) StateAt(now time.Time) State {
	switch {
	case s.State == StateEnded, !s.ClosesAt.IsZero() && !now.Before(s.ClosesAt):
		return StateEnded
	case s.State == StateOpen && now.Before(s.OpensAt):
		return StateScheduled
	}
	return s.State
}

func hasControl(s string) bool {
	for _, r := range s {
		if r < ' ' || r == 0x7f {
			return true
		}
	}
	return false
}

package reservation

import (
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
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

// The states that an open sale has in Redis (lua/reserve.lua) if it is in a draw or has a waiting list.
const (
	// StateOffers: units are given by Store.Offer only.
	StateOffers State = "offers"
	// StateWaitlist: the sale sells to everybody until units return to it when none are left.
	StateWaitlist State = "waitlist"
)

// ErrSaleNotFound is returned when no sale has the id.
var ErrSaleNotFound = errors.New("sale not found")

// IllegalTransitionError is returned when an operator's action does not fit the state of the sale.
type IllegalTransitionError struct {
	Action string
	State  State
	// Instead is what to do, or empty.
	Instead string
}

func (e *IllegalTransitionError) Error() string {
	text := fmt.Sprintf("cannot %s a sale that is %s", e.Action, e.State)
	if e.Instead != "" {
		text += ": " + e.Instead
	}
	return text
}

// Sale is the definition of a sale in Postgres.
type Sale struct {
	ID uuid.UUID
	Terms
	// State is the state that operators last set: open, paused or ended.
	State State
	// Sold is the units of live orders in Postgres. Invariant: 0 <= Sold <= Stock.
	Sold int64
	// Epoch counts the rebuilds of the sale's stock in Redis, from 1; a script refuses a caller of
	// another epoch.
	Epoch int64
	// Revision counts the changes of the definition, from 1; Redis applies them in this order.
	Revision int64
	// Partitions is the number of partitions at the sale's creation, which determines those of its shards.
	Partitions int
	// OffersOnly is true for the goods of a draw, and for the sale in which people wait: it has a route of its own.
	OffersOnly bool
	// EntriesID is the sale in which people enter the draw, or wait; uuid.Nil without one.
	EntriesID uuid.UUID
	// WaitlistClosed is true if nobody can join the waiting list any more.
	WaitlistClosed bool
	// EntryFor is the sale whose units are offered to those who enter this one, which has no stock; uuid.Nil of all
	// others.
	EntryFor  uuid.UUID
	CreatedAt time.Time
}

// SaleRow is a sale as queries return it, without the units sold.
type SaleRow struct {
	ID uuid.UUID
	TermsView
	Items               []Item
	State               State
	Epoch, Revision     int64
	Partitions          int
	OffersOnly          bool
	EntriesID, EntryFor zeronull.UUID
	WaitlistClosed      bool
	CreatedAt           time.Time
}

// Sale returns the definition that the row holds.
func (r *SaleRow) Sale() Sale {
	sale := Sale{
		ID: r.ID, Terms: r.Terms(r.Items), State: r.State, Epoch: r.Epoch, Revision: r.Revision, Partitions: r.Partitions,
		OffersOnly: r.OffersOnly, EntriesID: uuid.UUID(r.EntriesID), WaitlistClosed: r.WaitlistClosed,
		EntryFor: uuid.UUID(r.EntryFor), CreatedAt: r.CreatedAt.UTC(),
	}
	sale.Waitlist = sale.EntriesID != uuid.Nil && !sale.OffersOnly
	return sale
}

// Layout returns where the sale is in Redis.
func (s Sale) Layout() Layout { return LayoutOf(s.ID, s.Partitions, s.Shards) }

// StateAt returns the state of the sale for a buyer at that time.
func (s Sale) StateAt(now time.Time) State {
	switch {
	case s.State == StateEnded, !s.ClosesAt.IsZero() && !now.Before(s.ClosesAt):
		return StateEnded
	case s.State == StateOpen && now.Before(s.OpensAt):
		return StateScheduled
	}
	return s.State
}

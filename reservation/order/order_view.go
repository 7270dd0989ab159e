package order

import (
	"encoding/json"
	"time"

	"github.com/google/uuid"
)

// View is an order in JSON, with the members of the HTTP API.
type View struct {
	OrderID    uuid.UUID `json:"order_id"`
	SaleID     uuid.UUID `json:"sale_id"`
	UserID     string    `json:"user_id"`
	Quantity   int64     `json:"quantity"`
	Status     Status    `json:"status"`
	Version    int       `json:"version"`
	ReservedAt string    `json:"reserved_at"`
	// UpdatedAt is left out for an order that only its receipt has.
	UpdatedAt string `json:"updated_at,omitempty"`
	// PaidAt is the time of the payment, while the order is paid.
	PaidAt string `json:"paid_at,omitempty"`
	// ExpiresAt is the deadline of the payment, while there is something to pay.
	ExpiresAt        string `json:"expires_at,omitempty"`
	PaymentReference string `json:"payment_reference,omitempty"`
	Reason           string `json:"reason,omitempty"`
}

// View returns the order as its buyer sees it.
func (o Order) View() View {
	v := View{
		OrderID: o.ID, SaleID: o.SaleID, UserID: o.UserID, Quantity: o.Quantity, Status: o.Status, Version: o.Version,
		ReservedAt: timeText(o.ReservedAt), UpdatedAt: timeText(o.UpdatedAt), PaymentReference: o.PaymentReference,
		Reason: o.Reason,
	}
	switch o.Status {
	case StatusConfirmed:
		v.ExpiresAt = timeText(o.ExpiresAt)
	case StatusPaid:
		v.PaidAt = v.UpdatedAt // nothing but a cancellation follows
	}
	return v
}

// PlacedView is an order in JSON, as operators see it.
type PlacedView struct {
	View
	Sequence int64 `json:"sequence,omitzero"`
	Epoch    int64 `json:"epoch,omitzero"`
}

// View returns the order as operators see it.
func (p Placed) View() PlacedView { return PlacedView{p.Order.View(), p.Sequence, p.Epoch} }

// HistoryView is an order in JSON with its events, as operators see it.
type HistoryView struct {
	PlacedView
	Events []LoggedView `json:"events"`
}

// LoggedView is an event of an order in JSON.
type LoggedView struct {
	Version    int             `json:"version"`
	Type       EventType       `json:"type"`
	OccurredAt string          `json:"occurred_at"`
	Data       json.RawMessage `json:"data"`
}

// ViewWith returns the order with its log.
func (p Placed) ViewWith(log []Logged) HistoryView {
	v := HistoryView{p.View(), make([]LoggedView, len(log))}
	for i, e := range log {
		v.Events[i] = LoggedView{e.Version, e.Type, timeText(e.OccurredAt), e.Data}
	}
	return v
}

// timeText returns a time as clients get it in JSON, "" for none.
func timeText(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return string(AppendTime(nil, t))
}

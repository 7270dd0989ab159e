package order

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
)

// PaymentState is what became of money that Stampede was told of.
type PaymentState string

// The states of a payment. Waiting is that of money for an order that Postgres does not have yet.
const (
	PaymentWaiting   PaymentState = "waiting"
	PaymentSettled   PaymentState = "settled"
	PaymentRefundDue PaymentState = "refund_due"
	PaymentRefunded  PaymentState = "refunded"
)

// PaymentStates returns all states.
func PaymentStates() []PaymentState {
	return []PaymentState{PaymentWaiting, PaymentSettled, PaymentRefundDue, PaymentRefunded}
}

// RefundReason says why a payment is due for refund.
type RefundReason string

// The reasons for a refund.
const (
	RefundOrderExpired   RefundReason = "order-expired"
	RefundOrderCancelled RefundReason = "order-cancelled"
	RefundOrderRejected  RefundReason = "order-rejected"
	RefundOrderVoided    RefundReason = "order-voided"
	RefundOrderNotFound  RefundReason = "order-not-found"
	RefundAlreadyPaid    RefundReason = "already-paid"
	RefundAmountMismatch RefundReason = "amount-mismatch"
)

// RefundReasons returns all reasons.
func RefundReasons() []RefundReason {
	return []RefundReason{
		RefundOrderExpired, RefundOrderCancelled, RefundOrderRejected, RefundOrderVoided, RefundOrderNotFound,
		RefundAlreadyPaid, RefundAmountMismatch,
	}
}

// PaymentEvent is the name of an event of a payment.
type PaymentEvent string

// The events of a payment. The first one is PaymentReceived, and at most two follow.
const (
	EventPaymentReceived  PaymentEvent = "PaymentReceived"
	EventPaymentSettled   PaymentEvent = "PaymentSettled"
	EventPaymentRefundDue PaymentEvent = "PaymentRefundDue"
	EventPaymentRefunded  PaymentEvent = "PaymentRefunded"
)

// State returns the state that the event brings a payment to.
func (e PaymentEvent) State() PaymentState {
	switch e {
	case EventPaymentSettled:
		return PaymentSettled
	case EventPaymentRefundDue:
		return PaymentRefundDue
	case EventPaymentRefunded:
		return PaymentRefunded
	default:
		return PaymentWaiting
	}
}

// Money is what a report of a payment says.
type Money struct {
	// Reference is the payment provider's. Another report with it is a repeat.
	Reference string
	// OrderID is zero if the report names no order.
	OrderID uuid.UUID
	// Amount is in minor units of Currency (ISO 4217). Both are optional for an order without a price.
	Amount   int64
	Currency string
	// Unreadable is what the report has in place of an order, an amount or a currency, for people.
	Unreadable string
}

// maxAmount bounds an amount: that of no order is higher, and sums of many fit into 64 bits.
const maxAmount = MaxUnitPrice * MaxPerOrder

// maxUnreadable bounds the text of Money.Unreadable, in bytes.
const maxUnreadable = 500

// Validate returns an *InvalidError for a reference that cannot be kept: the report is none then. Everything else that
// is wrong with it is kept, so that the money is not lost.
func (m *Money) Validate() error {
	m.Unreadable = m.Unreadable[:min(len(m.Unreadable), maxUnreadable)]
	return ValidateReference(m.Reference)
}

// ReadMoney reads the report of a payment: {"order_id", "reference", "amount", "currency"}, of which only the reference
// is required. Other members are ignored. What cannot be read is kept in Unreadable, so that no money is lost. The
// error, an *InvalidError, is for what is no report: not one JSON object, or no valid reference.
func ReadMoney(report []byte) (m Money, err error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(report, &members); err != nil || members == nil {
		return m, &InvalidError{"the report", "must be one JSON object"}
	}
	var unreadable []string
	read := func(name string, isValid func(string) bool) (text string) {
		raw := members[name]
		if err := json.Unmarshal(raw, &text); raw != nil && (err != nil || text != "" && !isValid(text)) {
			unreadable, text = append(unreadable, name+" "+string(raw)), ""
		}
		return text
	}
	m.Reference = read("reference", func(string) bool { return true })
	if err := m.Validate(); err != nil {
		return Money{}, err
	}
	// Other forms of an id, such as urn:uuid:, are longer or shorter.
	id := read("order_id", func(text string) bool { return len(text) == 36 && uuid.Validate(text) == nil })
	m.OrderID, _ = uuid.Parse(id) // none without an id
	m.Currency = read("currency", IsCurrency)
	if raw := string(members["amount"]); raw != "" && raw != "null" {
		if m.Amount, err = strconv.ParseInt(raw, 10, 64); err != nil || m.Amount < 0 || m.Amount > maxAmount {
			m.Amount, unreadable = 0, append(unreadable, "amount "+raw)
		}
	}
	m.Unreadable = strings.Join(unreadable, ", ")
	return m, m.Validate()
}

// Payment is money that Stampede was told of, and what became of it.
type Payment struct {
	Money
	// SaleID is that of the order, zero while the order is not known.
	SaleID uuid.UUID
	State  PaymentState
	// Reason is why a refund is, or was, due.
	Reason RefundReason
	// ReceivedAt is the time of the report, and UpdatedAt that of the latest event, by the clock of Postgres.
	ReceivedAt, UpdatedAt time.Time
	// RefundReference is the payment provider's reference of the refund, and Operator who noted it or cancelled the order.
	RefundReference, Operator string
	// Position is that of the latest event among all events of the relay; Version counts the events from 1.
	Position int64
	Version  int
}

var (
	// ErrPaymentNotFound is returned when no payment has the reference.
	ErrPaymentNotFound = errors.New("payment not found")
	// ErrRefundNotDue is returned for the refund of a payment that waits or is settled.
	ErrRefundNotDue = errors.New("no refund of the payment is due")
)

// RefundedError is returned for the refund of a payment that was refunded with another reference. It wraps
// ErrRefundNotDue.
type RefundedError struct{ RefundReference string }

func (e *RefundedError) Error() string {
	return fmt.Sprintf("%v: it was refunded with reference %q", ErrRefundNotDue, e.RefundReference)
}

// Unwrap returns ErrRefundNotDue.
func (e *RefundedError) Unwrap() error { return ErrRefundNotDue }

// IsCurrency reports whether the text has the form of a code of ISO 4217.
func IsCurrency(text string) bool {
	return len(text) == 3 && isUpper(text[0]) && isUpper(text[1]) && isUpper(text[2])
}

func isUpper(c byte) bool { return 'A' <= c && c <= 'Z' }

// PaymentView is a payment in JSON, with the members of the HTTP API.
type PaymentView struct {
	Reference       string       `json:"reference"`
	State           PaymentState `json:"state"`
	Reason          RefundReason `json:"reason,omitempty"`
	OrderID         uuid.UUID    `json:"order_id,omitzero"`
	SaleID          uuid.UUID    `json:"sale_id,omitzero"`
	Amount          int64        `json:"amount,omitzero"`
	Currency        string       `json:"currency,omitempty"`
	Unreadable      string       `json:"unreadable,omitempty"`
	ReceivedAt      string       `json:"received_at"`
	UpdatedAt       string       `json:"updated_at"`
	RefundReference string       `json:"refund_reference,omitempty"`
	Operator        string       `json:"operator,omitempty"`
}

// View returns the payment as it is shown.
func (p Payment) View() PaymentView {
	return PaymentView{
		Reference: p.Reference, State: p.State, Reason: p.Reason, OrderID: p.OrderID, SaleID: p.SaleID, Amount: p.Amount,
		Currency: p.Currency, Unreadable: p.Unreadable, ReceivedAt: timeText(p.ReceivedAt), UpdatedAt: timeText(p.UpdatedAt),
		RefundReference: p.RefundReference, Operator: p.Operator,
	}
}

// PaymentFilter selects payments. Zero members select all.
type PaymentFilter struct {
	State PaymentState
	Sale  uuid.UUID
	Order uuid.UUID
}

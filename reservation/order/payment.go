package order

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
)

// PaymentState is what became of money that Stampede was told of.
type PaymentState string

// The states of a payment.
const (
	// PaymentWaiting: Postgres does not have its order yet.
	PaymentWaiting PaymentState = "waiting"
	PaymentSettled PaymentState = "settled"
	// PaymentRefundDue: no order keeps the money, which has to go back.
	PaymentRefundDue PaymentState = "refund_due"
	PaymentRefunded  PaymentState = "refunded"
	// PaymentUnclear: what was reported does not fit together, and a person has to look.
	PaymentUnclear PaymentState = "unclear"
	// PaymentDismissed: a person has looked at an unclear payment, and nothing has to go back.
	PaymentDismissed PaymentState = "dismissed"
	// PaymentDisputed: the payer has asked the bank for the money.
	PaymentDisputed PaymentState = "disputed"
	// PaymentClaimed: a buyer says so, and no order has taken it, or the shop has reported it since. It is no money.
	PaymentClaimed PaymentState = "claimed"
)

// PaymentReason says why a payment is due for refund, refunded, unclear, or no more than a claim.
type PaymentReason string

// The reasons why an order cannot take money.
const (
	RefundOrderExpired   PaymentReason = "order-expired"
	RefundOrderCancelled PaymentReason = "order-cancelled"
	RefundOrderRejected  PaymentReason = "order-rejected"
	RefundOrderVoided    PaymentReason = "order-voided"
	RefundOrderNotFound  PaymentReason = "order-not-found"
	RefundAlreadyPaid    PaymentReason = "already-paid"
	RefundAmountMismatch PaymentReason = "amount-mismatch"
	// RefundNothingToPay: the order is an entry of a draw, or a place in a waiting list.
	RefundNothingToPay PaymentReason = "nothing-to-pay"
)

// The other reasons.
const (
	// RefundedOutside: the money went back at the payment provider, and not because an order could not take it.
	RefundedOutside PaymentReason = "refunded-outside"
	// UnclearOtherOrder and UnclearOtherAmount: the reference was reported before with another order or amount, or the
	// buyer paid another amount than the shop has received.
	UnclearOtherOrder  PaymentReason = "other-order"
	UnclearOtherAmount PaymentReason = "other-amount"
	// UnclearOrder: the report does not name an order as Stampede does, and may be of another system.
	UnclearOrder PaymentReason = "unclear-order"
)

// RefundReasons returns the reasons why an order cannot take money.
func RefundReasons() []PaymentReason {
	return []PaymentReason{
		RefundOrderExpired, RefundOrderCancelled, RefundOrderRejected, RefundOrderVoided, RefundOrderNotFound,
		RefundAlreadyPaid, RefundAmountMismatch, RefundNothingToPay,
	}
}

// UnclearReasons returns the reasons why a payment is unclear.
func UnclearReasons() []PaymentReason {
	return []PaymentReason{UnclearOtherOrder, UnclearOtherAmount, UnclearOrder}
}

// PaymentEvent is the name of an event of a payment.
type PaymentEvent string

// The events of a payment. The first one is PaymentReceived.
const (
	EventPaymentReceived  PaymentEvent = "PaymentReceived"
	EventPaymentSettled   PaymentEvent = "PaymentSettled"
	EventPaymentRefundDue PaymentEvent = "PaymentRefundDue"
	EventPaymentRefunded  PaymentEvent = "PaymentRefunded"
	EventPaymentUnclear   PaymentEvent = "PaymentUnclear"
	EventPaymentDismissed PaymentEvent = "PaymentDismissed"
	EventPaymentDisputed  PaymentEvent = "PaymentDisputed"
	EventPaymentClaimed   PaymentEvent = "PaymentClaimed"
)

// paymentEvents has, for each event, the state that it brings a payment to, and the events that may follow.
var paymentEvents = map[PaymentEvent]struct {
	state PaymentState
	next  []PaymentEvent
}{
	EventPaymentReceived: {PaymentWaiting, []PaymentEvent{
		EventPaymentSettled, EventPaymentRefundDue, EventPaymentUnclear, EventPaymentClaimed, EventPaymentRefunded,
		EventPaymentDisputed,
	}},
	// It follows itself if a part of the money went back at the provider (Payment.RefundedAt).
	EventPaymentSettled: {PaymentSettled, []PaymentEvent{
		EventPaymentSettled, EventPaymentRefundDue, EventPaymentRefunded, EventPaymentDisputed, EventPaymentClaimed,
	}},
	// A report that can be read follows one that could not be (Money.Mends).
	EventPaymentRefundDue: {PaymentRefundDue, []PaymentEvent{
		EventPaymentRefunded, EventPaymentDisputed, EventPaymentClaimed, EventPaymentReceived,
	}},
	EventPaymentUnclear: {PaymentUnclear, []PaymentEvent{
		EventPaymentRefunded, EventPaymentDismissed, EventPaymentDisputed, EventPaymentReceived,
	}},
	EventPaymentDisputed: {PaymentDisputed, []PaymentEvent{
		EventPaymentSettled, EventPaymentRefundDue, EventPaymentRefunded, EventPaymentUnclear,
	}},
	EventPaymentRefunded:  {PaymentRefunded, []PaymentEvent{EventPaymentClaimed}},
	EventPaymentDismissed: {PaymentDismissed, nil},
	EventPaymentClaimed:   {PaymentClaimed, []PaymentEvent{EventPaymentSettled}},
}

// PaymentStates returns all states.
func PaymentStates() []PaymentState {
	return []PaymentState{
		PaymentWaiting, PaymentSettled, PaymentRefundDue, PaymentRefunded, PaymentUnclear, PaymentDismissed, PaymentDisputed,
		PaymentClaimed,
	}
}

// State returns the state that the event brings a payment to.
func (e PaymentEvent) State() PaymentState { return paymentEvents[e].state }

// EventOf returns the event that brings a payment to the state.
func (s PaymentState) EventOf() PaymentEvent {
	for event, of := range paymentEvents {
		if of.state == s {
			return event
		}
	}
	return ""
}

// IsOpen is true if somebody, or a worker, has to do something about the payment.
func (s PaymentState) IsOpen() bool {
	return s == PaymentWaiting || s == PaymentRefundDue || s == PaymentUnclear || s == PaymentDisputed
}

// Leads reports whether an event may follow in this state.
func (s PaymentState) Leads(to PaymentEvent) bool {
	return slices.Contains(paymentEvents[s.EventOf()].next, to)
}

// PaymentSteps returns each pair of events of which the second one may follow the first, with a blank between.
func PaymentSteps() (pairs []string) {
	for event, of := range paymentEvents {
		for _, next := range of.next {
			pairs = append(pairs, string(event)+" "+string(next))
		}
	}
	slices.Sort(pairs)
	return pairs
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
	// Unclear is set if a person has to look before anything is decided.
	Unclear PaymentReason
}

// Contradicts returns why a second report with the same reference cannot be a repeat of m; empty if it can be. What a
// report does not say contradicts nothing.
func (m *Money) Contradicts(second *Money) PaymentReason {
	switch {
	case m.OrderID != second.OrderID && m.OrderID != uuid.Nil && second.OrderID != uuid.Nil:
		return UnclearOtherOrder
	case m.Amount != second.Amount && m.Amount != 0 && second.Amount != 0,
		m.Currency != second.Currency && m.Currency != "" && second.Currency != "",
		m.Unreadable != second.Unreadable && second.Unreadable != "":
		return UnclearOtherAmount
	}
	return ""
}

// Mends is true if a second report says what the first one with its reference could not say.
func (m *Money) Mends(first *Payment) bool {
	return (first.State == PaymentRefundDue || first.State == PaymentUnclear) &&
		(first.Unreadable != "" || first.OrderID == uuid.Nil) && m.Unreadable == "" && m.OrderID != uuid.Nil
}

// KeyOfContradiction is the reference under which a report is kept that contradicts the first one with its reference. A
// repeat of it has the same.
func (m *Money) KeyOfContradiction() string {
	said := sha256.Sum256(fmt.Appendf(nil, "%s %d %s %s", m.OrderID, m.Amount, m.Currency, m.Unreadable))
	return fmt.Sprintf("%s~%x", m.Reference, said[:4])
}

// KeyOfClaim is the reference under which a buyer's word is kept: none of them takes one of a payment provider.
func (m *Money) KeyOfClaim() string { return m.OrderID.String() + ":" + m.Reference }

// maxAmount bounds an amount: that of no order is higher, and sums of many fit into 64 bits.
const (
	maxAmount       = MaxUnitPrice * MaxPerOrder
	maxAmountDigits = 16
)

// maxUnreadable bounds the text of Money.Unreadable, in bytes.
const maxUnreadable = 500

// Validate returns an *InvalidError for a reference that cannot be kept: the report is none then. Everything else that
// is wrong with it is kept, so that the money is not lost.
func (m *Money) Validate() error {
	text := strings.ToValidUTF8(m.Unreadable, string(utf8.RuneError))
	m.Unreadable = strings.ToValidUTF8(text[:min(len(text), maxUnreadable)], "") // no half of a character
	return ValidateReference(m.Reference)
}

// Report is what the report of a payment says, each in JSON; nil is absent.
type Report struct{ Reference, OrderID, Amount, Currency json.RawMessage }

// ReadMoney reads the report of a payment: {"order_id", "reference", "amount", "currency"}, of which only the reference
// is required. Other members are ignored. The error, an *InvalidError, is for what is no report: not one JSON object,
// or no valid reference.
func ReadMoney(report []byte) (Money, error) {
	members := ReadMembers(report)
	if members == nil {
		return Money{}, &InvalidError{"the report", "must be one JSON object"}
	}
	return Report{members["reference"], members["order_id"], members["amount"], members["currency"]}.Money()
}

// Money reads the report. What cannot be read is kept in Unreadable, so that no money is lost. The error, an
// *InvalidError, is for a reference that is not valid.
func (r Report) Money() (m Money, err error) {
	if raw := r.Reference; raw != nil && json.Unmarshal(raw, &m.Reference) != nil {
		return Money{}, &InvalidError{"reference", "must be a text in quotation marks"}
	}
	if err := m.Validate(); err != nil {
		return Money{}, err
	}
	var unreadable []string
	read := func(name string, raw json.RawMessage, isValid func(string) bool) (text string) {
		if err := json.Unmarshal(raw, &text); raw != nil && (err != nil || text != "" && !isValid(text)) {
			unreadable, text = append(unreadable, name+" "+string(raw)), ""
		}
		return text
	}
	// Other forms of an id, such as urn:uuid:, are longer or shorter.
	id := read("order_id", r.OrderID, func(text string) bool { return len(text) == 36 && uuid.Validate(text) == nil })
	m.OrderID, _ = uuid.Parse(id) // none without an id
	m.Currency = strings.ToUpper(read("currency", r.Currency, func(text string) bool {
		return len(text) == 3 && IsCurrency(strings.ToUpper(text))
	}))
	if raw := string(r.Amount); raw != "" && raw != "null" {
		var ok bool
		if m.Amount, ok = parseAmount(raw); !ok {
			unreadable = append(unreadable, "amount "+raw)
		}
	}
	m.Unreadable = strings.Join(unreadable, ", ")
	return m, m.Validate()
}

// parseAmount reads a JSON number that is an integer as JSON Schema defines it, however it is spelled: 4900, 4900.0 and
// 49e2 are the same. It computes with digits, because a float would round them.
func parseAmount(number string) (amount int64, ok bool) {
	rest, isNegative := strings.CutPrefix(number, "-")
	mantissa, power, hasPower := strings.Cut(strings.ToLower(rest), "e")
	whole, fraction, _ := strings.Cut(mantissa, ".")
	digits := whole + fraction
	if digits == "" || strings.Trim(digits, "0123456789") != "" {
		return 0, false
	}
	exponent, err := 0, error(nil)
	if hasPower {
		exponent, err = strconv.Atoi(power)
	}
	significant := strings.TrimRight(digits, "0")
	switch zeros := exponent - len(fraction) + len(digits) - len(significant); {
	case significant == "":
		return 0, true
	case isNegative, err != nil, exponent < -len(digits), zeros < 0, zeros > maxAmountDigits:
		return 0, false
	default:
		amount, err = strconv.ParseInt(significant+strings.Repeat("0", zeros), 10, 64)
		if err != nil || amount > maxAmount {
			return 0, false
		}
		return amount, true
	}
}

// ReadMembers returns the members of a JSON object, or nil for what is none. It takes what strict readers refuse, which
// may stand in a part that nobody needs: a byte order mark, a name that is given twice (the last one counts), text that
// is not UTF-8 or has half a surrogate. What JSON does not have, such as NaN or a text with a raw line end, becomes a
// text of its characters.
func ReadMembers(object []byte) (members map[string]json.RawMessage) {
	object = bytes.TrimPrefix(object, []byte("\ufeff"))
	if json.Unmarshal(object, &members) != nil && json.Unmarshal(mendValues(object), &members) != nil {
		return nil
	}
	return members
}

// values finds the texts of a JSON document, and what stands there without quotation marks.
var values = regexp.MustCompile(`(?s)"(?:[^"\\]|\\.)*"|[-+.\w]+`)

func mendValues(document []byte) []byte {
	return values.ReplaceAllFunc(document, func(value []byte) []byte {
		if json.Valid(value) {
			return value
		}
		text, _ := json.Marshal(strings.Trim(string(value), `"`)) // a text always can be
		return text
	})
}

// Payment is money that Stampede was told of, and what became of it.
type Payment struct {
	Money
	// SaleID is that of the order, zero while the order is not known.
	SaleID uuid.UUID
	State  PaymentState
	// Reason is why it is in its state; empty where that needs none.
	Reason PaymentReason
	// ReceivedAt is the time of the report, and UpdatedAt that of the latest event, by the clock of Postgres.
	ReceivedAt, UpdatedAt time.Time
	// RefundReference is the payment provider's reference of the refund, and Operator who noted it or cancelled the order.
	RefundReference, Operator string
	// Note is why an operator has dismissed it, or how much of it went back outside of Stampede.
	Note string
	// Dispute is the payment provider's id of the dispute, also when that is over.
	Dispute string
	// Position is that of the latest event among all events of the relay; Version counts the events from 1.
	Position int64
	Version  int
}

// Contradicted returns the reference of the payment that an unclear one contradicts; empty if it contradicts none.
func (p *Payment) Contradicted() string {
	if p.Reason != UnclearOtherOrder && p.Reason != UnclearOtherAmount {
		return ""
	}
	first := p.Money
	if end := strings.LastIndexByte(p.Reference, '~'); end >= 0 {
		if first.Reference = p.Reference[:end]; first.KeyOfContradiction() == p.Reference {
			return first.Reference
		}
	}
	return p.KeyOfClaim()
}

// ProviderRefund is money that went back at the payment provider.
type ProviderRefund struct {
	// Money is the payment, as a report of it would say.
	Money
	// RefundReference is the payment provider's reference of the refund.
	RefundReference string
	// Refunded is how much of the amount is back by now, in minor units.
	Refunded int64
	// By names the provider.
	By string
}

// RefundedAt returns the payment after a refund at the payment provider; the same if that changes nothing.
func (p Payment) RefundedAt(r ProviderRefund) Payment {
	whole := r.Refunded >= r.Amount
	switch {
	case whole && p.State.Leads(EventPaymentRefunded):
		if p.State != PaymentRefundDue {
			p.Reason = RefundedOutside
		}
		p.State, p.RefundReference, p.Operator, p.Note = PaymentRefunded, r.RefundReference, r.By, ""
	case !whole && p.State == PaymentSettled:
		p.Note = fmt.Sprintf("%d of %d %s went back outside of Stampede", r.Refunded, r.Amount, r.Currency)
		p.RefundReference, p.Operator = r.RefundReference, r.By
	}
	return p
}

// Dispute is a payer's demand to get the money of a payment back from the bank.
type Dispute struct {
	// Reference is that of the payment, and ID the payment provider's of the dispute.
	Reference, ID string
	// State is DisputeOpen, DisputeWon or DisputeLost.
	State DisputeState
}

// DisputeState is how far a dispute has come.
type DisputeState int

// The states of a dispute. Won is won by the shop, which keeps the money.
const (
	DisputeOpen DisputeState = iota
	DisputeWon
	DisputeLost
)

// Disputed returns the payment after the dispute, or after its end; the same if that changes nothing. What its reason
// says of it stays true meanwhile, so that it goes on from there.
func (p Payment) Disputed(d Dispute) Payment {
	isKnown := p.Dispute == d.ID
	switch {
	case d.State == DisputeOpen && !isKnown && p.State != PaymentWaiting && p.State.Leads(EventPaymentDisputed):
		p.State, p.Dispute = PaymentDisputed, d.ID
	case d.State == DisputeLost && p.State != PaymentWaiting && p.State.Leads(EventPaymentRefunded):
		p.State, p.RefundReference, p.Dispute = PaymentRefunded, d.ID, d.ID
		if p.Reason == "" {
			p.Reason = RefundedOutside
		}
	case d.State == DisputeWon && isKnown && p.State == PaymentDisputed:
		switch {
		case p.Reason == "":
			p.State = PaymentSettled
		case slices.Contains(UnclearReasons(), p.Reason):
			p.State = PaymentUnclear
		default:
			p.State = PaymentRefundDue
		}
	}
	return p
}

var (
	// ErrPaymentNotFound is returned when no payment has the reference.
	ErrPaymentNotFound = errors.New("payment not found")
	// ErrNotUnclear is returned for the dismissal of a payment that is not unclear.
	ErrNotUnclear = errors.New("the payment is not unclear")
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
	Reference       string        `json:"reference"`
	State           PaymentState  `json:"state"`
	Reason          PaymentReason `json:"reason,omitempty"`
	OrderID         uuid.UUID     `json:"order_id,omitzero"`
	SaleID          uuid.UUID     `json:"sale_id,omitzero"`
	Amount          int64         `json:"amount,omitzero"`
	Currency        string        `json:"currency,omitempty"`
	Unreadable      string        `json:"unreadable,omitempty"`
	ReceivedAt      string        `json:"received_at"`
	UpdatedAt       string        `json:"updated_at"`
	RefundReference string        `json:"refund_reference,omitempty"`
	Operator        string        `json:"operator,omitempty"`
	Note            string        `json:"note,omitempty"`
	Dispute         string        `json:"dispute,omitempty"`
}

// View returns the payment as it is shown.
func (p Payment) View() PaymentView {
	return PaymentView{
		Reference: p.Reference, State: p.State, Reason: p.Reason, OrderID: p.OrderID, SaleID: p.SaleID, Amount: p.Amount,
		Currency: p.Currency, Unreadable: p.Unreadable, ReceivedAt: TimeText(p.ReceivedAt), UpdatedAt: TimeText(p.UpdatedAt),
		RefundReference: p.RefundReference, Operator: p.Operator, Note: p.Note, Dispute: p.Dispute,
	}
}

// PaymentFilter selects payments. Zero members select all.
type PaymentFilter struct {
	State PaymentState
	Sale  uuid.UUID
	Order uuid.UUID
}

// Package order holds what an order is: its identity, its states and the transitions between them,
// the events that record them, the outcomes that ingresses receive, and the receipt that a
// buyer keeps.
//
// transition.go decides which transition is legal; package ledger writes it. OrderReserved
// (event.go) is the event that lua/reserve.lua appends. The package uses neither Redis nor
// Postgres.
package order

import (
	"database/sql/driver"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"
)

// Status is the state of an order. transition.go holds the transitions.
type Status string

// The statuses of an order. Reserved is the only one that Redis decides; all others are rows in Postgres.
const (
	StatusReserved  Status = "reserved"
	StatusConfirmed Status = "confirmed"
	StatusRejected  Status = "rejected"
	StatusPaid      Status = "paid"
	StatusCancelled Status = "cancelled"
	StatusExpired   Status = "expired"
	// StatusVoided: Redis lost the order before Postgres had it, and the sale was rebuilt without
	// it.
	StatusVoided Status = "voided"
)

// The reasons for which Postgres rejects or voids an order that the script accepted.
const (
	// RejectedAlreadyPurchased: the user has another live order in this sale.
	RejectedAlreadyPurchased = "already-purchased"
	// RejectedSoldOut: all of the sale's stock in Postgres is taken.
	RejectedSoldOut = "sold-out"
	// VoidedSaleRebuilt: the stock of the sale was rebuilt from Postgres, which lacked the order.
	VoidedSaleRebuilt = "sale-rebuilt"
)

// ErrNotFound is returned when no order has the id, or it belongs to another user.
var ErrNotFound = errors.New("order not found")

// ErrArchived is returned for an order of a sale whose orders were archived: the tables no longer have it.
var ErrArchived = errors.New("the orders of the sale are archived")

// maxReferenceBytes bounds a payment reference.
const maxReferenceBytes = 255

// ValidateReference returns an *InvalidError for a payment reference that is not 1 to 255 printable
// ASCII characters, or consists of spaces, or is a dot or two: clients take these out of the path of a refund.
func ValidateReference(reference string) error {
	if reference == "" || len(reference) > maxReferenceBytes {
		return &InvalidError{"reference", fmt.Sprintf("must be 1 to %d characters", maxReferenceBytes)}
	}
	for i := range len(reference) {
		if c := reference[i]; c < ' ' || c > '~' {
			return &InvalidError{"reference", "must be printable ASCII"}
		}
	}
	if strings.Trim(reference, " ") == "" {
		return &InvalidError{"reference", "must not consist of spaces"}
	}
	if reference == "." || reference == ".." {
		return &InvalidError{"reference", "must not be . or .."}
	}
	return nil
}

// ValidateRefundReference is ValidateReference for the reference of a refund, which people write by hand: it begins and
// ends without a space, and not all of it is zeros and signs.
func ValidateRefundReference(reference string) error {
	var invalid *InvalidError
	switch {
	case errors.As(ValidateReference(reference), &invalid):
		return &InvalidError{"refund_reference", invalid.Reason}
	case strings.TrimSpace(reference) != reference:
		return &InvalidError{"refund_reference", "must not begin or end with a space"}
	case !strings.ContainsFunc(reference, func(c rune) bool { return '1' <= c && c <= '9' || unicode.IsLetter(c) }):
		return &InvalidError{"refund_reference", "must name the refund at the payment provider"}
	}
	return nil
}

// Order is an order as its buyer sees it.
type Order struct {
	ID       uuid.UUID
	SaleID   uuid.UUID
	UserID   string
	Quantity int64
	// Lines are the units by item, whose sum is the quantity, and Items the same with the codes of the sale; both are
	// empty in a sale without items.
	Lines      Lines
	Items      Items
	Status     Status
	Version    int
	ReservedAt time.Time
	// UpdatedAt is the time of the last change: by the clock of Postgres, or ReservedAt before Postgres has the order.
	// It is zero for an order of which only a receipt is left.
	UpdatedAt time.Time
	// ExpiresAt is the payment deadline of a confirmed order, by the clock of Postgres. It is zero
	// in every other status and in a sale without a payment window.
	ExpiresAt time.Time
	// PayFrom is the order's turn to pay in a sale with a pace, by the clock of Postgres.
	PayFrom time.Time
	// Amount is what the order costs, in minor units of Currency; 0 and empty if its sale has no price.
	Amount   int64
	Currency string
	// PaymentReference is the payment provider's reference of a paid order, also after an operator has cancelled it; it is
	// empty in every other status.
	PaymentReference string
	// Reason is why the order was rejected or voided; it is empty in every other status. Why an operator cancelled an
	// order is for operators: it is in the event only.
	Reason string
	// Kind is what the order is. It is empty before Postgres has the order.
	Kind Kind
	// EntryFor is the sale of which this order waits for units, if it is an entry of a draw or a place in a waiting list:
	// it is never to be paid. It is zero in every other order, and before Postgres has the order.
	EntryFor uuid.UUID
}

// Kind is what an order is.
type Kind string

// The kinds. Entries and places are no units to ship.
const (
	KindOrder Kind = "order" // units that somebody bought
	KindOffer Kind = "offer" // a unit that was offered by a draw or a waiting list
	KindEntry Kind = "entry" // of a draw
	KindPlace Kind = "place" // in a waiting list
)

// KindOf returns the kind of an order with this fingerprint of its idempotency key. entryFor is the sale whose units
// are offered to those who enter the sale of the order, uuid.Nil if there is none. isList is true if those who enter it
// wait in a list.
func KindOf(entryFor uuid.UUID, isList bool, fingerprint string) Kind {
	switch {
	case entryFor != uuid.Nil && isList:
		return KindPlace
	case entryFor != uuid.Nil:
		return KindEntry
	case isOffer(fingerprint):
		return KindOffer
	}
	return KindOrder
}

// NewOrderID makes a UUIDv7 (RFC 9562) in which two of the random bytes are a tag of the sale. With
// the tag, a reservation can be found by the order's id alone, without a key in Redis per order: it
// matches one sale in 65,536. Ids of the same millisecond differ in 12 bits of finer time, which
// google/uuid adds, and in 46 random bits.
func NewOrderID(sale uuid.UUID) uuid.UUID {
	id := uuid.Must(uuid.NewV7())
	binary.BigEndian.PutUint16(id[14:], saleTag(sale))
	return id
}

// MayBelongTo is false if the order certainly belongs to another sale.
func MayBelongTo(order, sale uuid.UUID) bool {
	return binary.BigEndian.Uint16(order[14:]) == saleTag(sale)
}

func saleTag(sale uuid.UUID) uint16 { return binary.BigEndian.Uint16(sale[14:]) }

// AppendID appends the 36 characters of an id to dst, without the string that id.String allocates.
func AppendID(dst []byte, id uuid.UUID) []byte {
	dst = append(hex.AppendEncode(dst, id[:4]), '-')
	dst = append(hex.AppendEncode(dst, id[4:6]), '-')
	dst = append(hex.AppendEncode(dst, id[6:8]), '-')
	dst = append(hex.AppendEncode(dst, id[8:10]), '-')
	return hex.AppendEncode(dst, id[10:])
}

// AppendTime appends a time as clients get it in JSON: RFC 3339 in UTC, with milliseconds.
func AppendTime(dst []byte, t time.Time) []byte {
	// The layouts that package time knows take a third of the time of others.
	dst = t.UTC().AppendFormat(dst, time.RFC3339)
	ms := t.Nanosecond() / int(time.Millisecond)
	return append(dst[:len(dst)-1], '.', byte('0'+ms/100), byte('0'+ms/10%10), byte('0'+ms%10), 'Z')
}

// TimeText returns a time as AppendTime writes it, "" for none.
func TimeText(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return string(AppendTime(nil, t))
}

// Instant is a time in JSON, as AppendTime writes it, and in a column. The zero one stands for none, which is null in
// the column and left out of JSON by omitzero.
type Instant time.Time

// IsZero is true for none.
func (t Instant) IsZero() bool { return time.Time(t).IsZero() }

// MarshalJSON implements json.Marshaler.
func (t Instant) MarshalJSON() ([]byte, error) {
	return append(AppendTime([]byte{'"'}, time.Time(t)), '"'), nil
}

// UnmarshalJSON implements json.Unmarshaler. The first instant of the year 1, which would stand for none, becomes
// another one of that year.
func (t *Instant) UnmarshalJSON(text []byte) error {
	if string(text) == "null" {
		return nil
	}
	var read time.Time
	if err := read.UnmarshalJSON(text); err != nil {
		return err
	}
	if read.IsZero() {
		read = read.Add(1)
	}
	*t = Instant(read)
	return nil
}

// Scan implements sql.Scanner.
func (t *Instant) Scan(column any) error {
	switch at := column.(type) {
	case nil:
		*t = Instant{}
	case time.Time:
		*t = Instant(at.UTC())
	default:
		return fmt.Errorf("a time is a %T", column)
	}
	return nil
}

// Value implements driver.Valuer.
func (t Instant) Value() (driver.Value, error) {
	if t.IsZero() {
		return nil, nil
	}
	return time.Time(t), nil
}

// Reservation is what a buyer holds in a sale.
type Reservation struct {
	OrderID  uuid.UUID
	Quantity int64
	// Lines are the units by item, whose sum is the quantity; empty in a sale without items.
	Lines      Lines
	ReservedAt time.Time
	// Sequence is the reservation's place in its sale, counted from 1 by the script.
	Sequence int64
	// Epoch is the epoch of the sale's stock in which the reservation was made.
	Epoch int64
}

// InvalidError is returned for invalid input; Reason says what is required.
type InvalidError struct {
	Field  string
	Reason string
}

func (e *InvalidError) Error() string { return e.Field + " " + e.Reason }

// ValidateUser returns an *InvalidError for a user id that is not 1 to 128 visible ASCII characters,
// or that contains a quote, a backslash or a brace. That allows numbers, UUIDs, e-mail addresses and
// the subjects of identity providers ("auth0|5f7c8e"), and needs no escaping in a key, a log line or
// a JSON string.
func ValidateUser(user string) error {
	if user == "" || len(user) > MaxUserBytes {
		return &InvalidError{"user id", fmt.Sprintf("must be 1 to %d characters", MaxUserBytes)}
	}
	for i := range len(user) {
		switch c := user[i]; {
		case c <= ' ' || c > '~', c == '"', c == '\\', c == '{', c == '}':
			return &InvalidError{"user id", `must be visible ASCII without quotes, backslashes and braces`}
		}
	}
	return nil
}

// ValidateIdempotencyKey returns an *InvalidError for a key that is not 1 to 255 visible ASCII characters.
func ValidateIdempotencyKey(key string) error {
	if key == "" || len(key) > maxKeyBytes {
		return &InvalidError{"Idempotency-Key", fmt.Sprintf("must be 1 to %d characters", maxKeyBytes)}
	}
	for i := range len(key) {
		if c := key[i]; c <= ' ' || c > '~' {
			return &InvalidError{"Idempotency-Key", "must be visible ASCII"}
		}
	}
	return nil
}

// Limits of terms and identifiers. Lua's doubles hold all of these numbers exactly.
const (
	MaxStock         = 100_000_000
	MaxPerOrder      = 1_000_000
	MaxPaymentWindow = 30 * 24 * time.Hour
	MaxPaymentGrace  = time.Hour
	MaxUnitPrice     = 1_000_000_000 // minor units; the amount of MaxPerOrder units is an exact number in JSON
	// MaxPaymentsPerSecond is beyond what any payment provider takes.
	MaxPaymentsPerSecond = 10_000
	MaxNameRunes         = 200
	MaxUserBytes         = 128
	maxKeyBytes          = 255 // of an idempotency key
	// MaxPerMessage is how many orders a message of the stream may hold.
	MaxPerMessage = 256
)

// ValidateText returns an *InvalidError for a text for people that is not 1 to most characters of UTF-8 without control
// characters, or has only characters that nobody sees.
func ValidateText(field, text string, most int) error {
	switch {
	case !utf8.ValidString(text):
		return &InvalidError{field, "must be UTF-8"}
	case utf8.RuneCountInString(text) > most || !strings.ContainsFunc(text, isVisible):
		return &InvalidError{field, fmt.Sprintf("must be 1 to %d characters, not only spaces", most)}
	case strings.ContainsFunc(text, unicode.IsControl):
		return &InvalidError{field, "must not contain control characters"}
	}
	return nil
}

// isVisible is false for spaces and for what is shown as nothing, such as U+200B or the Hangul filler.
func isVisible(r rune) bool {
	const brailleBlank = '\u2800'
	return r != brailleBlank && !unicode.In(r, unicode.White_Space, unicode.Cc, unicode.Cf,
		unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector)
}

// This file has what operators see of orders, and do with them.

// maxReasonChars bounds the reason that an operator gives.
const maxReasonChars = 500

// ValidateReason returns an *InvalidError for a reason of an operator's cancellation that is not 1 to 500 characters
// of UTF-8 without control characters, or has only characters that nobody sees.
func ValidateReason(reason string) error { return ValidateText("reason", reason, maxReasonChars) }

// Filter selects orders. Empty members select all.
type Filter struct {
	User   string
	Sale   uuid.UUID
	Status Status
}

// ErrTooWide is returned for a list of the orders of all users in all sales.
var ErrTooWide = errors.New("a list of orders needs a user or a sale")

// Recorded are the statuses that an order can have in Postgres.
func Recorded() []Status {
	return []Status{
		StatusConfirmed, StatusPaid, StatusCancelled, StatusExpired, StatusRejected, StatusVoided,
	}
}

// Placed is an order with its place in its sale, as operators see it.
type Placed struct {
	Order
	// Sequence is the order's place in its sale, and Epoch the epoch of the sale's stock in which it was given out.
	Sequence, Epoch int64
}

// Logged is an event of an order as its log has it.
type Logged struct {
	// Version is the version of the order after the event.
	Version    int
	Type       EventType
	OccurredAt time.Time
	// Data is a JSON object.
	Data []byte
}

// View is an order in JSON, with the members of the HTTP API.
type View struct {
	OrderID    uuid.UUID `json:"order_id"`
	SaleID     uuid.UUID `json:"sale_id"`
	UserID     string    `json:"user_id"`
	Quantity   int64     `json:"quantity"`
	Items      Items     `json:"items,omitzero"`
	Status     Status    `json:"status"`
	Version    int       `json:"version"`
	ReservedAt string    `json:"reserved_at"`
	// UpdatedAt is left out for an order that only its receipt has.
	UpdatedAt string `json:"updated_at,omitempty"`
	// PaidAt is the time of the payment, while the order is paid.
	PaidAt string `json:"paid_at,omitempty"`
	// PayFrom is the order's turn to pay, and ExpiresAt the deadline of the payment, while there is something to pay.
	PayFrom          string `json:"pay_from,omitempty"`
	ExpiresAt        string `json:"expires_at,omitempty"`
	Amount           int64  `json:"amount,omitzero"`
	Currency         string `json:"currency,omitempty"`
	PaymentReference string `json:"payment_reference,omitempty"`
	Reason           string `json:"reason,omitempty"`
	Kind             Kind   `json:"kind,omitempty"`
	// EntryFor is the sale of which an entry of a draw, or a place in a waiting list, waits for units.
	EntryFor uuid.UUID `json:"entry_for,omitzero"`
}

// View returns the order as its buyer sees it.
func (o Order) View() View {
	v := View{
		OrderID: o.ID, SaleID: o.SaleID, UserID: o.UserID, Quantity: o.Quantity, Items: o.Items, Status: o.Status,
		Version: o.Version, ReservedAt: TimeText(o.ReservedAt), UpdatedAt: TimeText(o.UpdatedAt),
		PaymentReference: o.PaymentReference,
		Amount:           o.Amount, Currency: o.Currency, Reason: o.Reason, Kind: o.Kind, EntryFor: o.EntryFor,
	}
	switch o.Status {
	case StatusConfirmed:
		v.PayFrom, v.ExpiresAt = TimeText(o.PayFrom), TimeText(o.ExpiresAt)
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
		v.Events[i] = LoggedView{e.Version, e.Type, TimeText(e.OccurredAt), e.Data}
	}
	return v
}

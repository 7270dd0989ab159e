package order

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
)

// Metadata of an event's message.
const (
	MetaEvent        = "event"
	metaEventVersion = "event_version"
	// The script adds these as fields of the stream entry, MetaKey only for a purchase with an
	// idempotency key. Our subscriber passes them on as metadata; the stock one drops them.
	MetaReservedAt = "reserved_at_ms"
	MetaSequence   = "sequence"
	MetaKey        = "key"
	// MetaEntryID and MetaDeliveries are set by the subscriber: the position of the entry in its
	// stream, and how often it has been delivered, this time included.
	MetaEntryID    = "stampede_entry_id"
	MetaDeliveries = "stampede_deliveries"
)

// ReservedVersion is the version of OrderReserved's payload that this code writes and reads.
const ReservedVersion = "1"

// ErrUndecodable is returned for a message that is not an event of Stampede, or of an unsupported
// version. Retrying does not help: such an entry is a dead letter.
var ErrUndecodable = errors.New("undecodable event")

// OrderReserved records that units of a sale were reserved for a user. It is version 1 of its
// order.
type OrderReserved struct {
	OrderID  uuid.UUID
	SaleID   uuid.UUID
	UserID   string
	Quantity int64
	// Epoch is the epoch of the sale's stock in which the order was accepted.
	Epoch int64
	// RequestedAt is the ingress's clock when the request came in.
	RequestedAt time.Time
	// ReservedAt is Redis's clock at the decision, and Sequence the place of the order in its sale.
	// Through a subscriber that drops the script's fields, ReservedAt is RequestedAt and Sequence
	// 0.
	ReservedAt time.Time
	Sequence   int64
	// KeyFingerprint stands for the idempotency key of the purchase; it is empty if there was none.
	KeyFingerprint string
}

// reservedPayload is OrderReserved on the wire. AppendReservedPayload writes the same JSON without
// encoding/json, and parseReservedPayload reads it.
type reservedPayload struct {
	OrderID     uuid.UUID `json:"order_id"`
	SaleID      uuid.UUID `json:"sale_id"`
	UserID      string    `json:"user_id"`
	Quantity    int64     `json:"quantity"`
	Version     int       `json:"version"`
	Epoch       int64     `json:"epoch"`
	RequestedAt int64     `json:"requested_at_ms"`
}

// AppendReservedPayload appends the JSON of the event to dst. It avoids encoding/json because it
// runs once per accepted order; ValidateUser refuses user ids that need escaping.
func AppendReservedPayload(dst []byte, e OrderReserved) []byte {
	dst = append(dst, `{"order_id":"`...)
	dst = AppendID(dst, e.OrderID)
	dst = append(dst, `","sale_id":"`...)
	dst = AppendID(dst, e.SaleID)
	dst = append(dst, `","user_id":"`...)
	dst = append(dst, e.UserID...)
	dst = append(dst, `","quantity":`...)
	dst = strconv.AppendInt(dst, e.Quantity, 10)
	dst = append(dst, `,"version":1,"epoch":`...)
	dst = strconv.AppendInt(dst, e.Epoch, 10)
	dst = append(dst, `,"requested_at_ms":`...)
	dst = strconv.AppendInt(dst, e.RequestedAt.UnixMilli(), 10)
	return append(dst, '}')
}

// DecodeReserved reads an OrderReserved from a message of the stream. Its errors wrap ErrUndecodable.
func DecodeReserved(msg *message.Message) (OrderReserved, error) {
	if name := msg.Metadata.Get(MetaEvent); name != string(EventReserved) {
		return OrderReserved{}, fmt.Errorf("%w: event %q, want %q", ErrUndecodable, name, EventReserved)
	}
	if v := msg.Metadata.Get(metaEventVersion); v != ReservedVersion {
		return OrderReserved{}, fmt.Errorf(
			"%w: %s of version %q, this worker knows %q", ErrUndecodable, EventReserved, v, ReservedVersion,
		)
	}
	p, ok := parseReservedPayload(msg.Payload)
	if !ok { // other JSON than that of AppendReservedPayload
		if err := json.Unmarshal(msg.Payload, &p); err != nil {
			return OrderReserved{}, fmt.Errorf("%w: payload: %w", ErrUndecodable, err)
		}
	}
	if p.OrderID == uuid.Nil || p.SaleID == uuid.Nil || p.Quantity < 1 || p.Quantity > MaxPerOrder ||
		p.Epoch < 1 || p.Epoch > maxEpoch || p.Version != 1 || p.RequestedAt < 0 || p.RequestedAt > maxMillis {
		return OrderReserved{}, fmt.Errorf("%w: payload lacks an id, or its numbers are out of range", ErrUndecodable)
	}
	if err := ValidateUser(p.UserID); err != nil {
		return OrderReserved{}, fmt.Errorf("%w: payload: %w", ErrUndecodable, err)
	}
	e := OrderReserved{
		OrderID: p.OrderID, SaleID: p.SaleID, UserID: p.UserID, Quantity: p.Quantity, Epoch: p.Epoch,
		RequestedAt: time.UnixMilli(p.RequestedAt).UTC(),
	}
	reservedAt, err := metaInt(msg, MetaReservedAt, p.RequestedAt, maxMillis)
	if err != nil {
		return OrderReserved{}, err
	}
	e.ReservedAt = time.UnixMilli(reservedAt).UTC()
	if e.Sequence, err = metaInt(msg, MetaSequence, 0, maxSequence); err != nil {
		return OrderReserved{}, err
	}
	if key := msg.Metadata.Get(MetaKey); key != "" && key != NoKey {
		if e.KeyFingerprint = key; !IsFingerprint(key) {
			return OrderReserved{}, fmt.Errorf("%w: %s is no fingerprint of an idempotency key", ErrUndecodable, MetaKey)
		}
	}
	return e, nil
}

// Limits of every event. A larger number is forged or damaged, and does not fit Postgres, the audit
// and JSON.
const (
	maxMillis   = 253_402_300_799_999 // the end of the year 9999
	maxEpoch    = 1 << 31
	maxSequence = 1 << 40
)

// CanBeOf reports whether the user can have got the reservation, which means that its event is
// readable. Otherwise it was written manually.
func (r Reservation) CanBeOf(user string) bool {
	return ValidateUser(user) == nil && r.OrderID != uuid.Nil && r.Quantity >= 1 && r.Quantity <= MaxPerOrder &&
		r.Sequence >= 0 && r.Sequence <= maxSequence && r.Epoch >= 0 && r.Epoch <= maxEpoch &&
		r.ReservedAt.UnixMilli() >= 0 && r.ReservedAt.UnixMilli() <= maxMillis
}

func metaInt(msg *message.Message, key string, absent, most int64) (int64, error) {
	text := msg.Metadata.Get(key)
	if text == "" {
		return absent, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 || n > most {
		return 0, fmt.Errorf("%w: %s is %q, want a whole number up to %d", ErrUndecodable, key, text, most)
	}
	return n, nil
}

const (
	// NoKey is the fingerprint of a purchase without an idempotency key.
	NoKey = "-"
	// FingerprintBytes is how much is kept of an idempotency key's hash.
	FingerprintBytes = 16
	// FingerprintChars is the length of a fingerprint, which is base64url without padding.
	FingerprintChars = (FingerprintBytes*8 + 5) / 6
)

func IsFingerprint(text string) bool {
	raw, err := base64.RawURLEncoding.DecodeString(text)
	return err == nil && len(raw) == FingerprintBytes
}

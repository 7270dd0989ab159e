package reservation

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
)

// Status is where an order stands. transition.go says which may follow which.
type Status string

// The statuses of an order. Reserved is the only one that Redis decides; all others are rows in Postgres.
const (
	StatusReserved  Status = "reserved"
	StatusConfirmed Status = "confirmed"
	StatusRejected  Status = "rejected"
	StatusPaid      Status = "paid"
	StatusCancelled Status = "cancelled"
	StatusExpired   Status = "expired"
	// StatusVoided: Redis lost the order before it was in Postgres, and the sale went on without it.
	StatusVoided Status = "voided"
)

// Why Postgres refused or voided what the script had admitted.
const (
	// RejectedAlreadyPurchased: the user has another live order in this sale.
	RejectedAlreadyPurchased = "already-purchased"
	// RejectedSoldOut: the sale's stock in Postgres is taken.
	RejectedSoldOut = "sold-out"
	// VoidedSaleRebuilt: the stock of the sale was made anew from Postgres, which did not have the order then.
	VoidedSaleRebuilt = "sale-rebuilt"
)

// ErrOrderNotFound is returned when no order has the id, or it belongs to another user.
var ErrOrderNotFound = errors.New("order not found")

// MaxReferenceBytes bounds a payment reference.
const MaxReferenceBytes = 255

// ValidateReference, of a payment, returns an *InvalidError for a reference that is not 1 to 255 printable
// ASCII characters, or nothing but spaces.
func ValidateReference(reference string) error {
	if reference == "" || len(reference) > MaxReferenceBytes {
		return &InvalidError{"reference", fmt.Sprintf("must be 1 to %d characters", MaxReferenceBytes)}
	}
	for i := range len(reference) {
		if c := reference[i]; c < ' ' || c > '~' {
			return &InvalidError{"reference", "must be printable ASCII"}
		}
	}
	if strings.Trim(reference, " ") == "" {
		return &InvalidError{"reference", "must hold more than spaces"}
	}
	return nil
}

// Order is an order as its buyer sees it.
type Order struct {
	ID         uuid.UUID
	SaleID     uuid.UUID
	UserID     string
	Quantity   int64
	Status     Status
	Version    int
	ReservedAt time.Time
	// ExpiresAt is until when a confirmed order has to be paid, by the clock of Postgres. It is zero where
	// there is nothing to pay in time: in every other status, and in a sale without a payment window.
	ExpiresAt time.Time
	// PaymentReference is the payment provider's name for the payment; it is empty unless the order is paid.
	PaymentReference string
	// Reason tells why the order was rejected or voided; it is empty in every other status.
	Reason string
}

// NewOrderID makes a UUIDv7 (RFC 9562) of which two of the random bytes are a tag of the sale. With
// it, a reservation can be found from the order's id alone, without a key in Redis per order: the
// tag leaves one sale to ask in 65,536. What keeps ids apart within a millisecond is the 12 bits of
// finer time that google/uuid puts behind it, and 46 random bits.
func NewOrderID(sale uuid.UUID) uuid.UUID {
	id := uuid.Must(uuid.NewV7())
	binary.BigEndian.PutUint16(id[14:], saleTag(sale))
	return id
}

// mayBelongTo is false if the order is certainly not one of this sale.
func mayBelongTo(order, sale uuid.UUID) bool {
	return binary.BigEndian.Uint16(order[14:]) == saleTag(sale)
}

func saleTag(sale uuid.UUID) uint16 { return binary.BigEndian.Uint16(sale[14:]) }

// AppendID appends the 36 characters of an id to dst. It does what id.String does without making a
// string, because every accepted order is written several times.
func AppendID(dst []byte, id uuid.UUID) []byte {
	dst = append(hex.AppendEncode(dst, id[:4]), '-')
	dst = append(hex.AppendEncode(dst, id[4:6]), '-')
	dst = append(hex.AppendEncode(dst, id[6:8]), '-')
	dst = append(hex.AppendEncode(dst, id[8:10]), '-')
	return hex.AppendEncode(dst, id[10:])
}

package reservation

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"stampede/reservation/order"
)

// The hash Keys.Buyers holds reservations as lua/reserve.lua writes them:
//
//	<order id> <quantity> <sequence> <reserved_at_ms>[:<key>][@<epoch>]
//
// The order id is a CompactID, the time hexadecimal, the key a fingerprint. The epoch is present if
// it differs from the sale's current one. Every order of the sale keeps its entry, so an entry's size
// is the cost of an order in Redis.

// compactIDChars is the length of a CompactID.
const compactIDChars = 22

// compactID is strict so that an id has only one form: scripts compare ids as text.
var compactID = base64.RawURLEncoding.Strict()

// CompactID is an order's id as the scripts and Redis have it: its 16 bytes in base64url
// (RFC 4648), without padding.
func CompactID(id uuid.UUID) string {
	var text [compactIDChars]byte
	compactID.Encode(text[:], id[:])
	return string(text[:])
}

// ParseCompactID reads exactly what CompactID writes.
func ParseCompactID(text string) (uuid.UUID, error) {
	var id uuid.UUID
	if len(text) != compactIDChars {
		return uuid.Nil, fmt.Errorf("an order id has %d characters, this one %d", compactIDChars, len(text))
	}
	// The decoder skips line breaks, which leaves too few bytes.
	if n, err := compactID.Decode(id[:], []byte(text)); err != nil || n != len(id) {
		return uuid.Nil, errors.New("an order id is base64url of 16 bytes")
	}
	return id, nil
}

// ParseReservation reads a reservation. Without an epoch the reservation's Epoch is 0.
func ParseReservation(text string) (order.Reservation, error) {
	text, epoch, dated := strings.Cut(text, "@")
	text, key, keyed := strings.Cut(text, ":")
	if keyed && !order.IsFingerprint(key) {
		return order.Reservation{}, errors.New("the key of a reservation is not a fingerprint")
	}
	fields := strings.Split(text, " ")
	if len(fields) != 4 {
		return order.Reservation{}, fmt.Errorf("a reservation has 4 fields, this one %d", len(fields))
	}
	id, err := ParseCompactID(fields[0])
	if err != nil {
		return order.Reservation{}, err
	}
	r := order.Reservation{OrderID: id}
	var reservedAt int64
	for _, n := range []struct {
		into *int64
		text string
		base int
	}{{&r.Quantity, fields[1], 10}, {&r.Sequence, fields[2], 10}, {&reservedAt, fields[3], 16}} {
		if *n.into, err = parseNatural(n.text, n.base); err != nil {
			return order.Reservation{}, err
		}
	}
	r.ReservedAt = time.UnixMilli(reservedAt).UTC()
	if dated {
		if r.Epoch, err = parseNatural(epoch, 10); err != nil {
			return order.Reservation{}, err
		}
	}
	return r, nil
}

// parseNatural reads a number without a sign.
func parseNatural(text string, base int) (int64, error) {
	const bits = 63 // of a non-negative int64
	n, err := strconv.ParseUint(text, base, bits)
	return int64(n), err
}

// heldMax is the size of a reservation with a key and an epoch.
const heldMax = 96

// appendHeld appends the reservation as text, for a sale of that epoch.
func appendHeld(dst []byte, h *Holder, epoch int64) []byte {
	r := &h.Reservation
	dst = compactID.AppendEncode(dst, r.OrderID[:])
	dst = strconv.AppendInt(append(dst, ' '), r.Quantity, 10)
	dst = strconv.AppendInt(append(dst, ' '), r.Sequence, 10)
	dst = strconv.AppendInt(append(dst, ' '), r.ReservedAt.UnixMilli(), 16)
	if h.KeyFingerprint != "" {
		dst = append(append(dst, ':'), h.KeyFingerprint...)
	}
	if h.Epoch != epoch {
		dst = strconv.AppendInt(append(dst, '@'), h.Epoch, 10)
	}
	return dst
}

package order

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
)

// The text of a reservation, as lua/reserve.lua writes it into the hash of a sale's buyers and into
// the stream:
//
//	<order id> <quantity> <sequence> <reserved_at_ms>[:<key>][@<epoch>]
//
// In a sale with items the Lines stand in the place of the quantity.
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

// ParseReservation reads a reservation and the fingerprint of its idempotency key, which is empty
// if there was none. Without an epoch the reservation's Epoch is 0.
func ParseReservation(text string) (r Reservation, key string, err error) {
	text, epoch, dated := strings.Cut(text, "@")
	text, key, keyed := strings.Cut(text, ":")
	if keyed && !isFingerprint(key) {
		return Reservation{}, "", errors.New("the key of a reservation is not a fingerprint")
	}
	id, rest, _ := strings.Cut(text, " ")
	quantity, rest, _ := strings.Cut(rest, " ")
	sequence, reservedAt, complete := strings.Cut(rest, " ")
	if !complete {
		return Reservation{}, "", errors.New("a reservation has an order id, a quantity, a sequence and a time")
	}
	if r.OrderID, err = ParseCompactID(id); err != nil {
		return Reservation{}, "", err
	}
	if r.Quantity, r.Lines, err = ParseUnits(quantity); err != nil {
		return Reservation{}, "", err
	}
	if r.Sequence, err = parseNatural(sequence, 10); err != nil {
		return Reservation{}, "", err
	}
	ms, err := parseNatural(reservedAt, 16)
	if err != nil {
		return Reservation{}, "", err
	}
	r.ReservedAt = time.UnixMilli(ms).UTC()
	if dated {
		if r.Epoch, err = parseNatural(epoch, 10); err != nil {
			return Reservation{}, "", err
		}
	}
	return r, key, nil
}

// ParseUnits reads a quantity, or the lines that stand in its place and the sum of their units.
func ParseUnits(text string) (quantity int64, lines Lines, err error) {
	if text == "" || text[0] <= '9' {
		quantity, err = parseNatural(text, 10)
		return quantity, "", err
	}
	lines, err = ParseLines(text)
	return lines.Units(), lines, err
}

// AppendUnits appends what ParseUnits reads.
func AppendUnits(dst []byte, quantity int64, lines Lines) []byte {
	if lines != "" {
		return append(dst, lines...)
	}
	return strconv.AppendInt(dst, quantity, 10)
}

// parseNatural reads a number without a sign.
func parseNatural(text string, base int) (int64, error) {
	const bits = 63 // of a non-negative int64
	n, err := strconv.ParseUint(text, base, bits)
	return int64(n), err
}

// ReservationTextMax is the size of a reservation with a key and an epoch, of a few lines at most.
const ReservationTextMax = 96

// AppendReservation appends the reservation, with the fingerprint of its key or "", in a sale of that epoch.
func AppendReservation(dst []byte, r Reservation, key string, epoch int64) []byte {
	dst = compactID.AppendEncode(dst, r.OrderID[:])
	dst = AppendUnits(append(dst, ' '), r.Quantity, r.Lines)
	dst = strconv.AppendInt(append(dst, ' '), r.Sequence, 10)
	dst = strconv.AppendInt(append(dst, ' '), r.ReservedAt.UnixMilli(), 16)
	if key != "" {
		dst = append(append(dst, ':'), key...)
	}
	if r.Epoch != epoch {
		dst = strconv.AppendInt(append(dst, '@'), r.Epoch, 10)
	}
	return dst
}

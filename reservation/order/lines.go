package order

import (
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
)

// MaxItems is the most items of a sale: each has a letter.
const MaxItems = len(itemLetters)

// itemLetters are the letters of the items of a sale, in their order.
const itemLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

// ItemLetter is the letter of an item of a sale, by its place from 0.
func ItemLetter(item int) string { return itemLetters[item : item+1] }

// ItemLetters are the letters of so many items.
func ItemLetters(items int) string { return itemLetters[:items] }

// Lines are what an order of a sale with items holds: the letter and the units of each of its items, in the order of
// the sale, as in "a2c1". They are empty in other sales. Equal lines are equal texts.
type Lines string

var errNoLines = errors.New("lines are letters in their order, each with its units, as in a2c1")

// ParseLines reads the only form that lines have.
func ParseLines(text string) (Lines, error) {
	last, sum := -1, int64(0)
	for rest := text; rest != ""; {
		item := strings.IndexByte(itemLetters, rest[0])
		digits := 1
		for digits < len(rest) && '0' <= rest[digits] && rest[digits] <= '9' {
			digits++
		}
		units, err := strconv.ParseInt(rest[1:digits], 10, 64)
		if item <= last || err != nil || rest[1] == '0' || units > MaxPerOrder {
			return "", errNoLines
		}
		last, sum, rest = item, sum+units, rest[digits:]
	}
	if last < 0 || sum > MaxPerOrder {
		return "", errNoLines
	}
	return Lines(text), nil
}

// MakeLines returns the lines of an order with so many units of each item, by its place from 0.
func MakeLines(units []int64) Lines {
	var text []byte
	for item, n := range units {
		if n > 0 {
			text = strconv.AppendInt(append(text, itemLetters[item]), n, 10)
		}
	}
	return Lines(text)
}

// linesMax is no less than the length of the longest lines: 52 letters with five or six digits each, because the sum of
// all is at most MaxPerOrder.
const linesMax = 320

// Each returns the places of the items, from 0, with their units. The lines must be valid.
func (l Lines) Each() iter.Seq2[int, int64] {
	return func(yield func(int, int64) bool) {
		for rest := string(l); rest != ""; {
			item, units := strings.IndexByte(itemLetters, rest[0]), int64(0)
			for rest = rest[1:]; rest != "" && rest[0] <= '9'; rest = rest[1:] {
				units = units*10 + int64(rest[0]-'0')
			}
			if !yield(item, units) {
				return
			}
		}
	}
}

// Units is the sum of the units.
func (l Lines) Units() (sum int64) {
	for _, units := range l.Each() {
		sum += units
	}
	return sum
}

// Items are the units of an order by the code of the item, as an object in JSON: {"m":2}. They are empty in sales
// without items.
type Items string

// MarshalJSON implements json.Marshaler.
func (i Items) MarshalJSON() ([]byte, error) { return []byte(cmp.Or(i, "null")), nil }

// UnmarshalJSON implements json.Unmarshaler.
func (i *Items) UnmarshalJSON(text []byte) error {
	*i = Items(text)
	return nil
}

// Text is for people: 2 × m, 1 × l.
func (i Items) Text() string {
	lines := strings.Split(strings.Trim(string(i), "{}"), ",") // codes have neither
	for at, line := range lines {
		code, units, _ := strings.Cut(line, ":")
		lines[at] = strings.TrimSpace(units) + " × " + strings.Trim(code, ` "`)
	}
	return strings.Join(lines, ", ")
}

// Named returns the lines with the codes of the sale's items, which need no escaping. An item without one has its
// letter.
func (l Lines) Named(codes []string) Items {
	if l == "" {
		return ""
	}
	text := []byte{'{'}
	for item, units := range l.Each() {
		code := ItemLetter(item)
		if item < len(codes) {
			code = codes[item]
		}
		if len(text) > 1 {
			text = append(text, ',')
		}
		text = append(append(append(text, '"'), code...), '"', ':')
		text = strconv.AppendInt(text, units, 10)
	}
	return Items(append(text, '}'))
}

// maxCodeBytes bounds the code of an item.
const maxCodeBytes = 32

// IsItemCode reports whether the text can be the code of an item.
func IsItemCode(text string) bool {
	return text != "" && len(text) <= maxCodeBytes && strings.Trim(text, "abcdefghijklmnopqrstuvwxyz0123456789._-") == ""
}

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

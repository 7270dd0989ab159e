package order

import (
	"bytes"
	"encoding/hex"

	"github.com/google/uuid"
)

// parseReservedPayload reads the JSON that AppendReservedPayload writes, byte for byte:
// encoding/json would take a fifth of a worker's time. ok is false for any other text, valid JSON
// included.
func parseReservedPayload(payload []byte) (p reservedPayload, ok bool) {
	r := payloadReader{rest: payload}
	r.skip(`{"order_id":"`)
	p.OrderID = r.id()
	r.skip(`","sale_id":"`)
	p.SaleID = r.id()
	r.skip(`","user_id":"`)
	p.UserID = r.plain()
	r.skip(`","quantity":`)
	p.Quantity = r.whole()
	r.skip(`,"version":`)
	p.Version = int(r.whole())
	r.skip(`,"epoch":`)
	p.Epoch = r.whole()
	r.skip(`,"requested_at_ms":`)
	p.RequestedAt = r.whole()
	r.skip(`}`)
	return p, !r.failed && len(r.rest) == 0
}

// payloadReader takes values from the front of a payload until one does not match.
type payloadReader struct {
	rest   []byte
	failed bool
}

func (r *payloadReader) fail() { r.rest, r.failed = nil, true }

func (r *payloadReader) skip(text string) {
	if len(r.rest) < len(text) || string(r.rest[:len(text)]) != text {
		r.fail()
		return
	}
	r.rest = r.rest[len(text):]
}

// id takes a UUID as AppendID writes it.
func (r *payloadReader) id() (id uuid.UUID) {
	const length = 36
	if len(r.rest) < length {
		r.fail()
		return id
	}
	text := r.rest[:length]
	var digits [32]byte
	copy(digits[:8], text[:8])
	copy(digits[8:12], text[9:13])
	copy(digits[12:16], text[14:18])
	copy(digits[16:20], text[19:23])
	copy(digits[20:], text[24:])
	_, err := hex.Decode(id[:], digits[:])
	if err != nil || text[8] != '-' || text[13] != '-' || text[18] != '-' || text[23] != '-' {
		r.fail()
		return uuid.Nil
	}
	r.rest = r.rest[length:]
	return id
}

// plain takes the rest of a string of visible ASCII without escapes.
func (r *payloadReader) plain() string {
	end := bytes.IndexByte(r.rest, '"')
	if end < 0 {
		r.fail()
		return ""
	}
	for _, c := range r.rest[:end] {
		if c < ' ' || c > '~' || c == '\\' {
			r.fail()
			return ""
		}
	}
	text := string(r.rest[:end])
	r.rest = r.rest[end:]
	return text
}

// whole takes a number of at most 18 digits, which fits int64, without leading zeros, which JSON forbids.
func (r *payloadReader) whole() (n int64) {
	const most = 18
	digits := 0
	for digits < len(r.rest) && digits <= most && r.rest[digits] >= '0' && r.rest[digits] <= '9' {
		n = 10*n + int64(r.rest[digits]-'0')
		digits++
	}
	if digits == 0 || digits > most || digits > 1 && r.rest[0] == '0' {
		r.fail()
		return 0
	}
	r.rest = r.rest[digits:]
	return n
}

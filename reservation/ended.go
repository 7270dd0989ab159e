package reservation

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/google/uuid"

	"stampede/reservation/order"
)

// Orders that were made with an idempotency key and have ended stand in the hash Keys.Ended, as lua/release.lua and
// a rebuild write them, so that the request that made an order never makes another one:
//
//	<key><user> -> <order id> <quantity> <status>
//
// The key is a fingerprint, the order id a CompactID, and the status one letter. Entries stay as
// long as the sale is in Redis.

// endingLetters are the ends that a retried request is answered with. Voided is not among them:
// such an order was lost with Redis, so the same request buys again.
var endingLetters = map[order.Status]string{
	order.StatusCancelled: "c", order.StatusExpired: "e",
	order.StatusRejected: "r",
}

// EndedOrder is an ended order, with what identifies its request.
type EndedOrder struct {
	User           string
	KeyFingerprint string
	OrderID        uuid.UUID
	Quantity       int64
	Status         order.Status
}

// field is that of the order in Keys.Ended.
func (e *EndedOrder) field() string { return e.KeyFingerprint + e.User }

// ending is the value behind the order's id, or notKnown for an order that its request does not
// find.
func ending(quantity int64, status order.Status) string {
	letter, known := endingLetters[status]
	if !known {
		return notKnown
	}
	return strconv.FormatInt(quantity, 10) + " " + letter
}

const notKnown = "-"

// ParseEnded reads a value of Keys.Ended.
func ParseEnded(text string) (order uuid.UUID, quantity int64, status order.Status, err error) {
	fields := strings.Split(text, " ")
	if len(fields) != 3 {
		return uuid.Nil, 0, "", fmt.Errorf("an ended order has 3 fields, this one %d", len(fields))
	}
	if order, err = ParseCompactID(fields[0]); err != nil {
		return uuid.Nil, 0, "", err
	}
	if quantity, err = parseNatural(fields[1], 10); err != nil {
		return uuid.Nil, 0, "", err
	}
	for status, letter := range endingLetters {
		if letter == fields[2] {
			return order, quantity, status, nil
		}
	}
	return uuid.Nil, 0, "", fmt.Errorf("an order does not end by %q", fields[2])
}

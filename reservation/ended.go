package reservation

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/google/uuid"

	"stampede/reservation/order"
)

// The hash Keys.Ended holds the ended orders that were made with an idempotency key, so that the
// request that made an order never makes another one. lua/release.lua and a rebuild write it:
//
//	<key><user> -> <order id> <quantity> <status>
//
// The key is a fingerprint, the order id a CompactID, and the status one letter. Entries stay as
// long as the sale is in Redis.

// endingLetters are the final statuses that a retried request gets. Voided is not among them: such
// an order was lost with Redis, so the same request buys again.
var endingLetters = map[order.Status]string{
	order.StatusCancelled: "c", order.StatusExpired: "e", order.StatusRejected: "r",
}

// EndedOrder is an ended order, with the user and the key that identify its request.
type EndedOrder struct {
	User           string
	KeyFingerprint string
	OrderID        uuid.UUID
	Quantity       int64
	Status         order.Status
}

// field is the field of the order in Keys.Ended.
func (e *EndedOrder) field() string { return e.KeyFingerprint + e.User }

// ending is the value after the order's id, or notRecorded for an order that must not be found by
// its request.
func ending(quantity int64, status order.Status) string {
	letter, known := endingLetters[status]
	if !known {
		return notRecorded
	}
	return strconv.FormatInt(quantity, 10) + " " + letter
}

const notRecorded = "-"

// ParseEnded reads a value of Keys.Ended.
func ParseEnded(text string) (id uuid.UUID, quantity int64, status order.Status, err error) {
	fields := strings.Split(text, " ")
	if len(fields) != 3 {
		return uuid.Nil, 0, "", fmt.Errorf("an ended order has 3 fields, this one %d", len(fields))
	}
	if id, err = order.ParseCompactID(fields[0]); err != nil {
		return uuid.Nil, 0, "", err
	}
	if quantity, err = strconv.ParseInt(fields[1], 10, 64); err != nil || quantity < 0 {
		return uuid.Nil, 0, "", fmt.Errorf("the quantity of an ended order is %q", fields[1])
	}
	for status, letter := range endingLetters {
		if letter == fields[2] {
			return id, quantity, status, nil
		}
	}
	return uuid.Nil, 0, "", fmt.Errorf("%q is not the status of an ended order", fields[2])
}

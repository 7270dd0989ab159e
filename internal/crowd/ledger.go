package crowd

import (
	"strconv"

	"github.com/google/uuid"
)

// clickOutcome is the last word on a click.
type clickOutcome uint8

// The outcomes of a click. It is zero if the crowd was stopped before the buyer came, or there was no second click.
const (
	// accepted: 202, or 201; the order is the buyer's.
	accepted clickOutcome = iota + 1
	// replayed: the same, and the ingress said that it had accepted this key before.
	replayed
	// alreadyPurchased: the buyer holds an order in this sale by another key.
	alreadyPurchased
	// soldOut: there is no unit left.
	soldOut
	// notOnSale: the sale is not open, paused or ended.
	notOnSale
	// failed: an answer that no well-behaved buyer should be given.
	failed
	// unknown: the buyer's patience ended before an answer that says which of these it is.
	unknown
)

// clickRecord is what is remembered of one click.
type clickRecord struct {
	// Order is the order that the answer named, if any.
	Order   uuid.UUID
	Status  uint16 // of HTTP; 0 without an answer
	Outcome clickOutcome
	Tries   uint8 // 255 stands for more as well
}

// Ledger remembers the last answer to each click. Users and keys are not stored: they follow from
// the run's name and the buyer's number.
type Ledger struct {
	run      string
	quantity int64         // units per order
	entries  []clickRecord // two per buyer: the first and the second click
	receipts map[uuid.UUID]string
}

// newLedger names the run by random letters, so that two crowds in one sale are different people.
func newLedger(buyers int, quantity int64) *Ledger {
	return &Ledger{
		run: uuid.NewString()[:8], quantity: quantity, entries: make([]clickRecord, 2*buyers),
		receipts: make(map[uuid.UUID]string),
	}
}

func (l *Ledger) user(buyer int) string { return "buyer-" + l.run + "-" + strconv.Itoa(buyer) }

func (l *Ledger) key(k click) string {
	suffix := "-1"
	if k.second && !k.sameKey {
		suffix = "-2"
	}
	return l.run + "-" + strconv.Itoa(k.buyer) + suffix
}

func (l *Ledger) at(k click) *clickRecord { return &l.entries[2*k.buyer+k.number()] }

// other is the entry of the buyer's other click.
func (l *Ledger) other(k click) *clickRecord { return &l.entries[2*k.buyer+1-k.number()] }

// orders returns every order that the crowd was given, with its buyer. Contradictions counts the answers that gave a
// buyer the order of another one; it must be 0.
func (l *Ledger) orders() (orders map[uuid.UUID]string, contradictions int) {
	orders = make(map[uuid.UUID]string)
	for i, e := range l.entries {
		if e.Order == uuid.Nil {
			continue
		}
		user := l.user(i / 2)
		if other, taken := orders[e.Order]; taken && other != user {
			contradictions++
		}
		orders[e.Order] = user
	}
	return orders, contradictions
}

// pairs returns the two orders of every buyer who was given two. One of them must have come to an end by which
// its buyer held nothing any more.
func (l *Ledger) pairs() [][2]uuid.UUID {
	var pairs [][2]uuid.UUID
	for buyer := range len(l.entries) / 2 {
		first, second := l.entries[2*buyer].Order, l.entries[2*buyer+1].Order
		if first != uuid.Nil && second != uuid.Nil && first != second {
			pairs = append(pairs, [2]uuid.UUID{first, second})
		}
	}
	return pairs
}

// undecided returns the buyers who never learned what came of a click: they may or may not hold an order.
func (l *Ledger) undecided() map[string]bool {
	users := make(map[string]bool)
	for i, e := range l.entries {
		if e.Outcome == unknown {
			users[l.user(i/2)] = true
		}
	}
	return users
}

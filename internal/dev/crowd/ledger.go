package crowd

import (
	"strconv"

	"github.com/google/uuid"
)

// clickOutcome is the final outcome of a click.
type clickOutcome uint8

// The outcomes of a click. Zero means that the click was not sent.
const (
	// accepted: 202 or 201.
	accepted clickOutcome = iota + 1
	// replayed: as accepted, with the header Idempotency-Replayed.
	replayed
	// alreadyPurchased: the buyer holds an order in this sale with another key.
	alreadyPurchased
	// soldOut: no unit is left.
	soldOut
	// notOnSale: the sale is not open, paused or ended.
	notOnSale
	// failed: an answer that a correct request must not get.
	failed
	// unknown: the buyer's patience ended before a definite answer.
	unknown
)

// clickRecord is the final answer to one click.
type clickRecord struct {
	order   uuid.UUID // from the answer, if it has one
	outcome clickOutcome
}

// Ledger holds the final answer to each click. Users and keys are not stored: they are derived from
// the run's name and the buyer's number.
type Ledger struct {
	run      string
	quantity int64         // units per order
	entries  []clickRecord // two per buyer: the first and the second click
	receipts map[uuid.UUID]string
}

// newLedger gives the run a random name, so that two crowds in one sale have different users.
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

// orders returns every order in the answers, with its buyer. Contradictions counts answers with the order of another
// buyer; it must be 0.
func (l *Ledger) orders() (orders map[uuid.UUID]string, contradictions int) {
	orders = make(map[uuid.UUID]string)
	for i, e := range l.entries {
		if e.order == uuid.Nil {
			continue
		}
		user := l.user(i / 2)
		if other, taken := orders[e.order]; taken && other != user {
			contradictions++
		}
		orders[e.order] = user
	}
	return orders, contradictions
}

// pairs returns both orders of every buyer who got two. At least one of them must have ended without units.
func (l *Ledger) pairs() [][2]uuid.UUID {
	var pairs [][2]uuid.UUID
	for buyer := range len(l.entries) / 2 {
		first, second := l.entries[2*buyer].order, l.entries[2*buyer+1].order
		if first != uuid.Nil && second != uuid.Nil && first != second {
			pairs = append(pairs, [2]uuid.UUID{first, second})
		}
	}
	return pairs
}

// undecided returns the buyers with a click of unknown outcome: they may or may not hold an order.
func (l *Ledger) undecided() map[string]bool {
	users := make(map[string]bool)
	for i, e := range l.entries {
		if e.outcome == unknown {
			users[l.user(i/2)] = true
		}
	}
	return users
}

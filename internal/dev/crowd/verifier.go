package crowd

import (
	"context"
	"fmt"

	"github.com/google/uuid"

	"stampede/internal/figure"
)

// Verifier reads how many units of the sale are sold, and which orders hold them.
type Verifier interface {
	// Sold is how many units were confirmed since the verifier was created.
	Sold(ctx context.Context) (int64, error)
	// Compare compares the ledger of a finished crowd with the stored orders, one by one.
	Compare(ctx context.Context, l *Ledger) (Comparison, error)
}

// storedOrder is an order as a verifier reads it.
type storedOrder struct {
	id       uuid.UUID
	user     string
	quantity int64
	status   string
}

// live reports whether the order holds units.
func (o storedOrder) live() bool { return o.status == "confirmed" || o.status == "paid" }

// Comparison is the result of Verifier.Compare.
type Comparison struct {
	// Accepted is how many orders the ledger has. Found of them are stored and live, with the same buyer and quantity.
	// The others ended in a way that their buyers can see: refused after the 202, voided because Redis lost them,
	// cancelled, or expired.
	Accepted  int `json:"accepted"`
	Found     int `json:"found"`
	Refused   int `json:"refused"`
	Voided    int `json:"voided"`
	Cancelled int `json:"cancelled"`
	Expired   int `json:"expired"`
	// Broken promises: accepted orders that are not stored, or are stored with another buyer or quantity; live orders
	// that the crowd does not know; contradictory answers.
	Missing        int `json:"missing"`
	Altered        int `json:"altered"`
	Unexpected     int `json:"unexpected"`
	Contradictions int `json:"contradictions"`
	// Recovered counts live orders of buyers who got no answer.
	Recovered int `json:"recovered"`
	// Examples describe a few of the broken promises.
	Examples []string `json:"examples,omitempty"`
}

// maxExamples bounds Comparison.Examples.
const maxExamples = 5

// Holds reports whether no promise is broken.
func (c Comparison) Holds() bool {
	return c.Missing == 0 && c.Altered == 0 && c.Unexpected == 0 && c.Contradictions == 0
}

// String returns the comparison in one line.
func (c Comparison) String() string {
	line := fmt.Sprintf("%s accepted, %s of them found", figure.Count(c.Accepted), figure.Count(c.Found))
	for _, part := range []struct {
		n    int
		name string
	}{
		{c.Refused, "refused later"},
		{c.Voided, "voided"},
		{c.Cancelled, "cancelled"},
		{c.Expired, "expired"},
		{c.Recovered, "without an answer, found"},
		{c.Missing, "missing"},
		{c.Altered, "altered"},
		{c.Unexpected, "unknown to the crowd"},
		{c.Contradictions, "contradictions"},
	} {
		if part.n > 0 {
			line += fmt.Sprintf(", %s %s", figure.Count(part.n), part.name)
		}
	}
	return line
}

func (c *Comparison) example(format string, a ...any) {
	if len(c.Examples) < maxExamples {
		c.Examples = append(c.Examples, fmt.Sprintf(format, a...))
	}
}

// countOrder counts an order of the ledger by what is stored of it.
func (c *Comparison) countOrder(l *Ledger, o storedOrder, user string) {
	switch {
	case o.user != user || o.quantity != l.quantity:
		c.Altered++
		c.example("order %s is %d units for %s, accepted was %d for %s", o.id, o.quantity, o.user, l.quantity, user)
	case o.live():
		c.Found++
	case o.status == "rejected":
		c.Refused++
	case o.status == "voided":
		c.Voided++
	case o.status == "cancelled":
		c.Cancelled++
	case o.status == "expired":
		c.Expired++
	default:
		c.Altered++
		c.example("order %s is %q", o.id, o.status)
	}
}

// countPairs counts buyers who hold two orders. Ended are orders that no longer hold units.
func (c *Comparison) countPairs(l *Ledger, ended map[uuid.UUID]bool) {
	for _, pair := range l.pairs() {
		if !ended[pair[0]] && !ended[pair[1]] {
			c.Contradictions++
			c.example("one buyer holds the orders %s and %s", pair[0], pair[1])
		}
	}
}

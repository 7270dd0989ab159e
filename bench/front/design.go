// Package front is the HTTP front that every design of the ladder stands behind: the same Echo, the
// same limits and the same answers, in a process of its own that can be killed. What differs between
// two figures is then the design, and nothing around it.
package front

import (
	"context"

	"github.com/google/uuid"
)

// Order is what a buyer asks for.
type Order struct {
	ID       uuid.UUID // made by the front, UUIDv7
	Sale     uuid.UUID
	User     string
	Quantity int64
}

// Verdict is what a buyer is told.
type Verdict int

// The verdicts, and the status that the front answers.
const (
	Reserved         Verdict = iota + 1 // 202: promised, not yet in Postgres
	Confirmed                           // 201: in Postgres
	SoldOut                             // 409
	AlreadyPurchased                    // 409
)

// Design is a way to sell.
type Design interface {
	// Prepare makes the sale ready where it is not yet. It is called before the first Buy, and again
	// after a restart (also after a kill -9), when it must keep what is left; and by every front where
	// there are several. The row of the sale is in Postgres by then: its stock, and sold = 0 at first.
	Prepare(ctx context.Context, sale uuid.UUID, stock int64) error
	// Buy is called by many goroutines at once. An error is answered 500.
	Buy(ctx context.Context, o Order) (Verdict, error)
	// Run does what is to be done in the background until ctx ends, and may then finish what it has
	// begun: no Buy is under way any more. A design without such work waits for ctx.
	Run(ctx context.Context) error
}

// Fixed is a design that answers every request with the same bytes. The front sends them and does
// nothing else: it reads no body, makes no order, and has no middleware.
type Fixed interface {
	Design
	Answer() (status int, contentType string, body []byte)
}

// Backend is what a design may use. How many connections it opens is its own choice.
type Backend struct {
	RedisURL, DatabaseURL string
	Prefix                string            // of its keys in Redis
	Options               map[string]string // what the benchmark asks of this design beyond its name
}

// New makes a design. It may connect at once or later; it is closed by the end of its process.
type New func(ctx context.Context, b Backend) (Design, error)

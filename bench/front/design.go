// Package front is the HTTP front that serves every design of the ladder: the same Echo, the same
// limits and the same answers, in its own process that can be killed. So two figures differ only by
// their designs.
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

// Verdict is the result of a purchase.
type Verdict int

// The verdicts, and the status of their answers.
const (
	Reserved         Verdict = iota + 1 // 202: promised, not yet in Postgres
	Confirmed                           // 201: in Postgres
	SoldOut                             // 409
	AlreadyPurchased                    // 409
)

// Design is a way to sell.
type Design interface {
	// Prepare makes the sale ready if it is not yet. Every front calls it before its first Buy, also
	// after a restart or a kill -9, when it must keep what is left. The row of the sale is in Postgres
	// by then, with its stock and at first sold = 0.
	Prepare(ctx context.Context, sale uuid.UUID, stock int64) error
	// Buy is called concurrently. An error is answered 500.
	Buy(ctx context.Context, o Order) (Verdict, error)
	// Run does background work until ctx is done, and may then finish what it has begun: no Buy is running
	// any more. A design without such work waits for ctx.
	Run(ctx context.Context) error
}

// fixed is a design that answers every request with the same bytes. The front only sends them: it reads
// no body, creates no order, and has no middleware.
type fixed interface {
	Design
	Answer() (status int, contentType string, body []byte)
}

// PlainReader is the option of a Backend with which the front reads plain purchases in front of net/http, by the
// reader of `stampede serve`. Its value is "on".
const PlainReader = "plain-reader"

// Backend is what a design may use. Each design chooses how many connections it opens.
type Backend struct {
	RedisURL, DatabaseURL string
	Prefix                string            // of its keys in Redis
	Options               map[string]string // settings from the benchmark
}

// New creates a design. It may connect now or later. The end of its process closes it.
type New func(ctx context.Context, b Backend) (Design, error)

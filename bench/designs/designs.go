// Package designs holds the designs that tutorials show before they reach one like ours: one file each,
// in the best form of its idea, with what it gets right and how it fails.
package designs

import (
	"context"
	_ "embed"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"

	"stampede/bench/front"
)

// Entry is a design of the ladder.
type Entry struct {
	// Title is its name in tables and plots.
	Title string
	New   front.New
	// Guarded designs keep their stock in Postgres, protected by the CHECK on sales.sold and the unique
	// index of live orders. For all others the benchmark drops that index: their tutorials have no
	// second guard, and ours would hide their faults.
	Guarded bool
	// Fronts is the number of processes that share the buyers; 0 means one.
	Fronts int
	// NoOrders marks designs that sell nothing: the orders that they accept never reach Postgres.
	NoOrders bool
	// RowPerUnit marks designs that insert a row for each unit before the sale: benchmarks give them no
	// more units than they can sell.
	RowPerUnit bool
	// Options are given to front.Backend: one design can be on the ladder in several forms.
	Options map[string]string
	// Missing, if set, returns what this machine lacks for the design, such as Java, or "". A design
	// that lacks something is left out, and the page says so.
	Missing func() string
	// ClaimDelay is how long after a kill -9 accepted orders may stay unprocessed until another process
	// claims them: only orders that are not in Postgres after that are lost. 0 means no delay.
	ClaimDelay time.Duration
}

// All holds the designs by their short names, which -only matches.
var All = map[string]Entry{
	"nothing":     {Title: "Echo, nothing behind it", New: newNothing, NoOrders: true},
	"nothing-raw": {Title: "Echo, prebuilt bytes", New: newNothingRaw, NoOrders: true},

	"check-set":    {Title: "Redis: check, then write", New: newCheckSet},
	"mutex":        {Title: "Mutex, one process", New: newMutex},
	"mutex-twice":  {Title: "Mutex, two processes", New: newMutex, Fronts: 2},
	"setnx":        {Title: "SET NX lock in Redis", New: newSetNX},
	"memory-queue": {Title: "Lua script, queue in memory", New: newMemoryQueue},
	"evalsha":      {Title: "Lua per buyer, no worker", New: newEvalsha, NoOrders: true},
	"stock-stream": {Title: "Lua per buyer, stock subscriber", New: newStockStream, ClaimDelay: stockClaimDelay},

	"lock-transaction": {Title: "Transaction under our lock", New: newLockTransaction, Guarded: true},
	"lock-transaction-redisson": {
		Title: "Transaction under Redisson's lock", New: newRedissonTransaction, Guarded: true,
		Missing: redissonMissing,
	},

	"postgres-row":     {Title: "Postgres, one row per sale", New: newPostgresRow, Guarded: true},
	"postgres-units":   {Title: "Postgres, one row per unit", New: newPostgresUnits, Guarded: true, RowPerUnit: true},
	"postgres-batched": {Title: "Postgres, batched", New: newPostgresBatched, Guarded: true},
	"postgres-batched-reader": {
		Title: "Postgres, batched, our reader", New: newPostgresBatched, Guarded: true,
		Options: map[string]string{front.PlainReader: "on"},
	},
}

// idle is a part of designs without background work.
type idle struct{}

// Run implements front.Design.
func (idle) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Find is for front.Main.
func Find(name string) (front.New, bool) {
	entry, found := All[name]
	return entry.New, found
}

// option is a whole number of at least 1 that the benchmark may set; the default is the best value
// found.
func option(b front.Backend, name string, best int) (int, error) {
	text, given := b.Options[name]
	if !given {
		return best, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("option %s is %q, want a whole number of at least 1", name, text)
	}
	return n, nil
}

// nothing accepts every order and discards it: what Echo can answer on this machine with the usual
// middlewares, a bound body and an answer in JSON. No design behind this front can be faster.
type nothing struct{ idle }

func newNothing(context.Context, front.Backend) (front.Design, error) { return nothing{}, nil }

// Prepare implements front.Design.
func (nothing) Prepare(context.Context, uuid.UUID, int64) error { return nil }

// Buy implements front.Design.
func (nothing) Buy(context.Context, front.Order) (front.Verdict, error) { return front.Reserved, nil }

// nothingRaw sends prebuilt bytes: the cost of Echo's router and net/http alone.
type nothingRaw struct {
	nothing
	status      int
	contentType string
	body        []byte
}

// newNothingRaw sends the status, type and body of the options, or by default a receipt as `stampede
// serve` writes it.
func newNothingRaw(_ context.Context, b front.Backend) (front.Design, error) {
	if b.Options["body"] == "" {
		return nothingRaw{
			status: http.StatusAccepted, contentType: "application/json",
			body: []byte(`{"order_id":"019ab3c0-5b3c-7b3c-8b3c-0b3c5b3c7b3c","sale_id":"019ab3c0-5b3c-7b3c-8b3c-1b3c5b3c7b3c",` +
				`"status":"reserved","quantity":1,"reserved_at":"2026-11-21T12:00:00.000Z","receipt":"` +
				`AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"}`),
		}, nil
	}
	status, err := strconv.Atoi(b.Options["status"])
	if err != nil {
		return nil, fmt.Errorf("option status: %w", err)
	}
	return nothingRaw{status: status, contentType: b.Options["type"], body: []byte(b.Options["body"])}, nil
}

// Answer makes the front send these bytes without calling Buy.
func (n nothingRaw) Answer() (int, string, []byte) { return n.status, n.contentType, n.body }

//go:embed sql/record_order.sql
var recordOrderSQL string

// execer is a pool, a connection or a transaction.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// unnumbered is the sequence of orders in designs that do not number them.
const unnumbered = 0

// recordOrder writes the rows of a confirmed order, as the product's ledger does, in one round trip. A
// repetition changes nothing.
func recordOrder(ctx context.Context, db execer, o front.Order, sequence int64) error {
	_, err := db.Exec(ctx, recordOrderSQL, o.ID, o.Sale, o.User, o.Quantity, reservedAt(o.ID), sequence)
	if err != nil {
		return fmt.Errorf("record order=%s: %w", o.ID, err)
	}
	return nil
}

// reservedAt is the time in the order's UUIDv7.
func reservedAt(order uuid.UUID) time.Time {
	return time.Unix(order.Time().UnixTime()).UTC()
}

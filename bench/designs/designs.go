// Package designs holds the ways to sell that tutorials pass through before they come to ours: one
// file each, in the best form that its idea can have, with what it gets right and how it fails.
package designs

import (
	"time"

	"stampede/bench/front"
)

// Entry is a design of the ladder.
type Entry struct {
	// Title is its name in tables and plots.
	Title string
	New   front.New
	// Guarded designs keep their stock in Postgres, under the CHECK of sales.sold and the unique index
	// of live orders. For all others the benchmark takes that index away: the tutorials that teach them
	// have no second guard, and with ours their faults would be hidden.
	Guarded bool
	// Fronts is how many processes share the buyers; 0 is one.
	Fronts int
	// NoOrders marks designs that sell nothing: what they answer is not to be found in Postgres.
	NoOrders bool
	// RowPerUnit marks designs that make a row for each unit before the sale: no benchmark gives them more
	// units than it can sell.
	RowPerUnit bool
	// Options are those of front.Backend, so that one design can stand on the ladder in several forms.
	Options map[string]string
	// Missing tells what this machine lacks for the design, such as Java; nil or "" if nothing. A
	// design that lacks something is left out, and the page says so.
	Missing func() string
	// TakesOver is how long after a kill -9 accepted orders may lie still until another process goes on
	// with them: only orders that are not in Postgres after that are lost. 0 is at once.
	TakesOver time.Duration
}

// All are the designs by the short names that -only finds.
var All = map[string]Entry{
	"nothing":     {Title: "Echo, nothing behind it", New: newNothing, NoOrders: true},
	"nothing-raw": {Title: "Echo, prebuilt bytes", New: newNothingRaw, NoOrders: true},

	"check-set":    {Title: "Redis: check, then write", New: newCheckSet},
	"mutex":        {Title: "Mutex, one process", New: newMutex},
	"mutex-twice":  {Title: "Mutex, two processes", New: newMutex, Fronts: 2},
	"setnx":        {Title: "SET NX lock in Redis", New: newSetNX},
	"memory-queue": {Title: "Lua script, queue in memory", New: newMemoryQueue},
	"evalsha":      {Title: "Lua per buyer, no worker", New: newEvalsha, NoOrders: true},
	"stock-stream": {Title: "Lua per buyer, stock subscriber", New: newStockStream, TakesOver: stockTakesOver},

	"lock-transaction": {Title: "Transaction under our lock", New: newLockTransaction, Guarded: true},
	"lock-transaction-redisson": {
		Title: "Transaction under Redisson's lock", New: newRedissonTransaction, Guarded: true,
		Missing: redissonMissing,
	},

	"postgres-row":     {Title: "Postgres, one row per sale", New: newPostgresRow, Guarded: true},
	"postgres-units":   {Title: "Postgres, one row per unit", New: newPostgresUnits, Guarded: true, RowPerUnit: true},
	"postgres-batched": {Title: "Postgres, batched", New: newPostgresBatched, Guarded: true},
}

// Find is for front.Main.
func Find(name string) (front.New, bool) {
	entry, found := All[name]
	return entry.New, found
}

// Package designs holds the ways to sell that tutorials pass through before they come to ours: one
// file each, in the best form that its idea can have, with what it gets right and how it fails.
package designs

import (
	"time"

	"stampede/bench/front"
)

// Entry is a design of the ladder.
type Entry struct {
	New front.New
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

// All are the designs by name.
var All = map[string]Entry{
	"nothing":     {New: newNothing, NoOrders: true},
	"nothing-raw": {New: newNothingRaw, NoOrders: true},

	"check-set":    {New: newCheckSet},
	"mutex":        {New: newMutex},
	"mutex-twice":  {New: newMutex, Fronts: 2},
	"setnx":        {New: newSetNX},
	"memory-queue": {New: newMemoryQueue},
	"evalsha":      {New: newEvalsha, NoOrders: true},
	"stock-stream": {New: newStockStream, TakesOver: stockTakesOver},

	"lock-transaction":          {New: newLockTransaction, Guarded: true},
	"lock-transaction-redisson": {New: newRedissonTransaction, Guarded: true, Missing: redissonMissing},

	"postgres-row":     {New: newPostgresRow, Guarded: true},
	"postgres-units":   {New: newPostgresUnits, Guarded: true, RowPerUnit: true},
	"postgres-batched": {New: newPostgresBatched, Guarded: true},
}

// Find is for front.Main.
func Find(name string) (front.New, bool) {
	entry, found := All[name]
	return entry.New, found
}

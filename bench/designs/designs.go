// Package designs holds the ways to sell that tutorials pass through before they come to ours: one
// file each, in the best form that its idea can have, with what it gets right and how it fails.
package designs

import "stampede/bench/front"

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
}

// All are the designs by name.
var All = map[string]Entry{
	"nothing":     {New: newNothing, NoOrders: true},
	"nothing-raw": {New: newNothingRaw, NoOrders: true},
}

// Find is for front.Main.
func Find(name string) (front.New, bool) {
	entry, found := All[name]
	return entry.New, found
}

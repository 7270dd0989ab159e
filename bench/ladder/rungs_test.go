package ladder

import (
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"

	"stampede/bench/designs"
	"stampede/bench/rig"
)

// rung is one that is compared: a design, or the product.
type rung struct {
	name   string
	design string // of package designs; "" is the product
	// alone is the product without its worker, as an ingress runs that has a machine for itself. It
	// accepts orders, and nobody writes them to Postgres.
	alone bool
}

const (
	nothing    = "nothing"
	nothingRaw = "nothing-raw"
	evalsha    = "evalsha"
	lockedTx   = "lock-transaction"
	row        = "postgres-row"
	batched    = "postgres-batched"
	ours       = "Stampede"
	ingress    = "Stampede, ingress alone"
)

// smokeOptions are for designs that take their time to start, or to take over from the dead.
var smokeOptions = map[string]string{"warm-up": "64", "max-idle-ms": "500"}

// smokeTakesOver is how many times sooner a design takes over with these options.
const smokeTakesOver = 10

// order is that of the tables: from what nothing costs, through what tutorials teach, to ours.
var order = []string{
	nothing, nothingRaw,
	"check-set", "mutex", "mutex-twice", "setnx", lockedTx, "lock-transaction-redisson", "memory-queue",
	row, "postgres-units", batched,
	evalsha, "stock-stream",
}

func TestEveryDesignHasAPlaceOnTheLadder(t *testing.T) {
	t.Parallel()
	assert.ElementsMatch(t, slices.Collect(maps.Keys(designs.All)), order)
}

// rungs are all that this machine has what they need, and a sentence about those that are left out.
func rungs() (all []rung, leftOut string) {
	for _, name := range order {
		entry := designs.All[name]
		if entry.Missing != nil {
			if what := entry.Missing(); what != "" {
				leftOut += " " + name + " is left out: " + what + "."
				continue
			}
		}
		all = append(all, rung{name: name, design: name})
	}
	return append(all, rung{name: ingress, alone: true}, rung{name: ours}), leftOut
}

// isOurs tells whether the rung is the product.
func (r rung) isOurs() bool { return r.design == "" }

// writes tells whether the rung brings its orders to Postgres.
func (r rung) writes() bool {
	return !r.alone && (r.isOurs() || !designs.All[r.design].NoOrders)
}

// start starts the rung on a shop of its own with so many units for sale.
func (r rung) start(b *testing.B, stock int64) *rig.System {
	b.Helper()
	if !r.isOurs() {
		return rig.StartDesign(b, r.design, rig.Scale(b, nil, smokeOptions), stock)
	}
	s := rig.Stampede{}.Start(b, stock)
	if r.alone {
		s.StopWorkers()
	}
	return s
}

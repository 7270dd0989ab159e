package ladder

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"stampede/bench/designs"
	"stampede/bench/rig"
)

// rung is one that is compared: a design, or the product.
type rung struct {
	name   string // the one that -only finds
	title  string // the one on the page
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

// smokeOptions and smokeEnv are for those that take their time to start, or to take over from the dead.
var (
	smokeOptions = map[string]string{"warm-up": "64", "max-idle-ms": "500"}
	smokeEnv     = []string{"STAMPEDE_MIN_IDLE=1s"}
)

// smokeTakesOver is how many times sooner they take over then.
const smokeTakesOver = 10

// oursTakesOver is how long the product may leave an order of a dead worker: as long as its users are locked
// by default, and until it looks again.
const oursTakesOver = 14 * time.Second

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
				leftOut += " " + entry.Title + " is left out: " + what + "."
				continue
			}
		}
		all = append(all, rung{name: name, title: entry.Title, design: name})
	}
	return append(all, rung{name: ingress, title: ingress, alone: true}, rung{name: ours, title: ours}), leftOut
}

// isOurs tells whether the rung is the product.
func (r rung) isOurs() bool { return r.design == "" }

// writes tells whether the rung brings its orders to Postgres.
func (r rung) writes() bool {
	return !r.alone && (r.isOurs() || !designs.All[r.design].NoOrders)
}

// takesOver is how long orders may lie still after a kill -9 until somebody goes on with them.
func (r rung) takesOver(b *testing.B) time.Duration {
	full := oursTakesOver
	if !r.isOurs() {
		full = designs.All[r.design].TakesOver
	}
	return rig.Scale(b, full, full/smokeTakesOver)
}

// start starts the rung on a shop of its own with so many units for sale.
func (r rung) start(b *testing.B, stock int64) *rig.System {
	b.Helper()
	if !r.isOurs() {
		return rig.StartDesign(b, r.design, rig.Scale(b, nil, smokeOptions), stock)
	}
	s := rig.Stampede{Env: rig.Scale(b, nil, smokeEnv)}.Start(b, stock)
	if r.alone {
		s.StopWorkers()
	}
	return s
}

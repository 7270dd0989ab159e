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

func TestMain(m *testing.M) {
	rig.Main(m, "ladder", "labstack/echo", "redis/go-redis", "jackc/pgx", "watermill-redisstream")
}

// rung is a compared design, or Stampede.
type rung struct {
	name   string // for -only
	title  string // on the page
	design string // of package designs; "" means Stampede
	// alone is Stampede without its worker, like an ingress on its own machine. It accepts orders, and
	// they are not written to Postgres.
	alone bool
}

const (
	nothing         = "nothing"
	nothingRaw      = "nothing-raw"
	evalsha         = "evalsha"
	postgresBatched = "postgres-batched"
	ours            = "Stampede"
	// postgresBatchedReader is the rival with the reader of `stampede serve`.
	postgresBatchedReader = "postgres-batched-reader"
	ingress               = "Stampede, ingress alone"
)

// smokeOptions and smokeEnv shorten long starts and claim delays in smoke runs.
var (
	smokeOptions = map[string]string{"warm-up": "64", "max-idle-ms": "500"}
	smokeEnv     = []string{"STAMPEDE_MIN_IDLE=1s"}
)

// smokeSpeedup divides claim delays in smoke runs.
const smokeSpeedup = 10

// oursClaimDelay is how long Stampede may leave the orders of a dead worker: the default lock time of
// their users, and the time until the next look.
const oursClaimDelay = 14 * time.Second

// rungOrder is the order of the tables: from Echo alone, through the tutorials' designs, to ours.
var rungOrder = []string{
	nothing, nothingRaw,
	"check-set", "mutex", "mutex-twice", "setnx", "lock-transaction", "lock-transaction-redisson", "memory-queue",
	"postgres-row", "postgres-units", postgresBatched, postgresBatchedReader,
	evalsha, "stock-stream",
}

func TestEveryDesignIsOnLadder(t *testing.T) {
	t.Parallel()
	assert.ElementsMatch(t, slices.Collect(maps.Keys(designs.All)), rungOrder)
}

// rungs returns the rungs that can run on this machine, and sentences about those that are left out.
func rungs() (all []rung, leftOut string) {
	for _, name := range rungOrder {
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

// pick returns the rungs with these names that can run here, in the order of the tables.
func pick(names ...string) []rung {
	all, _ := rungs()
	return slices.DeleteFunc(all, func(r rung) bool { return !slices.Contains(names, r.name) })
}

// compare gives each rung its turns.
func compare(
	b *testing.B, all []rung, turn func(r rung, b *testing.B, round int) rig.Values,
) *rig.Results {
	b.Helper()
	var candidates []rig.Candidate
	for _, r := range all {
		candidates = append(candidates, rig.Candidate{Name: r.name, Turn: func(b *testing.B, round int) rig.Values {
			return turn(r, b, round)
		}})
	}
	return rig.Compare(b, candidates...)
}

// isOurs reports whether the rung is Stampede.
func (r rung) isOurs() bool { return r.design == "" }

// writes reports whether the orders of the rung reach Postgres.
func (r rung) writes() bool {
	return !r.alone && (r.isOurs() || !designs.All[r.design].NoOrders)
}

// claimDelay is how long orders may stay unprocessed after a kill -9 until another process claims them.
func (r rung) claimDelay(b *testing.B) time.Duration {
	full := oursClaimDelay
	if !r.isOurs() {
		full = designs.All[r.design].ClaimDelay
	}
	return rig.Scale(b, full, full/smokeSpeedup)
}

// start starts the rung on its own shop with so many units for sale.
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

package growth

import (
	"math"
	"time"
)

// plan is one sale to be run, or several at once.
type plan struct {
	// stock is the units of all sales together, of which a buyer takes one, and buyers how many come,
	// each of them once. Where both are 0 there is enough for everybody who can be served within the time.
	stock, buyers int
	within        time.Duration
	connections   int
	workers       int // processes of `stampede work`
	partitions    int
	sales         int
	longIDs       bool // buyers have UUIDs as names, instead of a word and a number
}

// usual is what a plan is like but for what grows.
func usual() plan { return plan{connections: 256, workers: 1, partitions: 1, sales: 1} }

// series is what grows, and where it is looked at.
type series struct {
	name  string // of the benchmark, and of its plots
	grows string
	note  string
	at    []int
	plan  func(at int) plan
}

// straightness is how much more something costs in the dearest place of a series than in the cheapest:
// 1 where the line is straight.
type straightness struct {
	least, most     float64
	leastAt, mostAt int
}

func straightnessOf(at []int, cost []float64) straightness {
	s := straightness{least: math.Inf(1), most: math.Inf(-1)}
	for i, c := range cost {
		if c < s.least {
			s.least, s.leastAt = c, at[i]
		}
		if c > s.most {
			s.most, s.mostAt = c, at[i]
		}
	}
	return s
}

func (s straightness) ratio() float64 { return s.most / s.least }

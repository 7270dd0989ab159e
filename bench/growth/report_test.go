package growth

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"stampede/bench/page"
	"stampede/bench/rig"
)

// grow runs the sales of a series in turns and puts the results on the page.
func grow(b *testing.B, s series) {
	b.Helper()
	var candidates []rig.Candidate
	for _, at := range s.at {
		p := s.plan(at)
		candidates = append(candidates, rig.Candidate{
			Name: strconv.Itoa(at),
			Turn: func(b *testing.B, _ int) rig.Values { return run(b, p) },
		})
	}
	results := rig.Compare(b, candidates...)
	r := report{b, s, results}
	r.put("rates", "orders a second", fmt.Sprintf("%s Medians of %d rounds, with the least and the greatest. ", s.note,
		b.N)+"“Durable” is the whole pipeline: until the last order is in Postgres.",
		column{accepted, "accepted/s", rig.Count, true}, column{soldOut, "sold out/s", rig.Count, true},
		column{durable, "durable/s", rig.Count, true})
	r.put("latency", "milliseconds", "Of accepted requests, in a closed loop.",
		column{p50, "p50", rig.Millis, true}, column{p99, "p99", rig.Millis, true})
	r.put("costs", "microseconds",
		"CPU time of all processes but the load. Memory: the most that the processes of a kind held together (VmHWM), "+
			"and how much more than before the sale that was for each buyer.",
		column{cpu, "CPU for a buyer, µs", rig.Ratio, true},
		column{serveMemory, "`serve`", megabytes, false}, column{servePer, "for a buyer, bytes", rig.Count, false},
		column{workMemory, "`work`", megabytes, false}, column{workPer, "for a buyer, bytes", rig.Count, false})
	r.put("Redis", "bytes for an order",
		"used_memory, in bytes for an order: when it was highest, and when every order was in Postgres, the streams "+
			"trimmed and the processes ended, without the buffers of connections. “Of it” are the keys that hold most of that "+
			"(MEMORY USAGE): the buyers of the sales, the last outcomes, what is left of the streams.",
		column{redisMost, "at most", rig.Count, true}, column{redisAfter, "after it", rig.Count, true},
		column{buyersAfter, "of it buyers", rig.Count, false}, column{outcomesAfter, "outcomes", rig.Count, false},
		column{streamAfter, "streams", rig.Count, false})
	r.putStraightness()
	for _, at := range s.at {
		results.Report(b, strconv.Itoa(at), accepted, "accepted/s")
		results.Report(b, strconv.Itoa(at), durable, "durable/s")
		results.Report(b, strconv.Itoa(at), redisAfter, "Redis-bytes")
	}
}

// report is the results of a series.
type report struct {
	b       *testing.B
	series  series
	results *rig.Results
}

// column is a figure in a table. If drawn, it is also in the plot of the table.
type column struct {
	figure, head string
	write        func(float64) string
	drawn        bool
}

// put adds a table with a plot. Figures that the series does not have are left out.
func (r report) put(what, unit, note string, columns ...column) {
	r.b.Helper()
	table := page.Table{
		Title: fmt.Sprintf("Growth in %s: %s", r.series.grows, what), Note: note,
		Head: []string{r.series.grows},
	}
	for _, at := range r.series.at {
		table.Rows = append(table.Rows, []string{rig.Count(float64(at))})
	}
	var drawn []string
	for _, c := range columns {
		var cells []string
		measured := false
		for _, at := range r.series.at {
			spread := r.results.Of(strconv.Itoa(at), c.figure)
			cells = append(cells, spread.Format(c.write))
			measured = measured || spread.N > 0
		}
		if !measured {
			continue
		}
		table.Head = append(table.Head, c.head)
		for i, cell := range cells {
			table.Rows[i] = append(table.Rows[i], cell)
		}
		if c.drawn {
			drawn = append(drawn, c.head)
		}
	}
	table.Plot = fmt.Sprintf("growth-%s-%s.svg", r.series.name, strings.ToLower(what))
	table.Chart = &page.Chart{Kind: page.Lines, X: r.series.grows, Columns: drawn, Unit: unit}
	rig.Put(table)
}

// costs are expected to be the same for each order anywhere in a series.
var costs = []struct {
	name string
	of   func(*rig.Results, string) rig.Spread
}{
	{"time for an accepted order, µs", rateCost(accepted)},
	{"time for a sold-out answer, µs", rateCost(soldOut)},
	{"time for a durable order, µs", rateCost(durable)},
	{"CPU for a buyer, µs", func(r *rig.Results, at string) rig.Spread { return r.Of(at, cpu) }},
	{"Redis after it, bytes an order", func(r *rig.Results, at string) rig.Spread { return r.Of(at, redisAfter) }},
}

// rateCost converts a rate per second to the time of one order.
func rateCost(rate string) func(*rig.Results, string) rig.Spread {
	return func(r *rig.Results, at string) rig.Spread {
		s := r.Of(at, rate)
		if s.N > 0 {
			s.Median = 1e6 / s.Median
		}
		return s
	}
}

// putStraightness adds a table with the range of each cost over the series.
func (r report) putStraightness() {
	table := page.Table{
		Title: fmt.Sprintf("Growth in %s: how straight", r.series.grows),
		Note:  "The cost of one, medians, where it is least and where it is greatest. A ratio of 1 is a straight line.",
		Head:  []string{"cost", "least", "at", "greatest", "at", "ratio"},
	}
	for _, c := range costs {
		var at []int
		var cost []float64
		for _, x := range r.series.at {
			if s := c.of(r.results, strconv.Itoa(x)); s.N > 0 {
				at, cost = append(at, x), append(cost, s.Median)
			}
		}
		if len(cost) < 2 {
			continue
		}
		s := straightnessOf(at, cost)
		if s.least <= 0 { // too short to measure, as CPU time in a smoke run can be
			continue
		}
		table.Rows = append(table.Rows, []string{
			c.name, rig.Ratio(s.least), rig.Count(float64(s.leastAt)), rig.Ratio(s.most), rig.Count(float64(s.mostAt)),
			rig.Ratio(s.ratio()),
		})
	}
	rig.Put(table)
}

func megabytes(v float64) string { return rig.Count(v/(1<<20)) + " MiB" }

package arrivals

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"stampede/bench/designs"
	"stampede/bench/httpload"
	"stampede/bench/page"
	"stampede/bench/rig"
)

// system is one of the compared systems.
type system struct {
	name  string // for -only
	title string // on the page
	start func(b *testing.B) *rig.System
	// records means that orders are written to Postgres, and async that this happens after the answer.
	records, async bool
}

// plenty is more units than a turn can sell.
const plenty = 50_000_000

// systems are the cost of a request alone, the strongest rival, and Stampede.
var systems = []system{
	design("nothing", false),
	design("postgres-batched", true),
	{"Stampede", "Stampede", func(b *testing.B) *rig.System { return rig.Stampede{}.Start(b, plenty) }, true, true},
}

func design(name string, records bool) system {
	return system{
		name, designs.All[name].Title,
		func(b *testing.B) *rig.System { return rig.StartDesign(b, name, nil, plenty) }, records, false,
	}
}

const (
	// connections carry an open loop. At these rates some are always free.
	connections = 512
	// recordTimeout bounds how long after the last answer orders may reach Postgres.
	recordTimeout = 10 * time.Second
)

// The figures of each rate: times in milliseconds, and CPU time per order in microseconds, by role and
// in total.
const (
	answered50, answered99   = "answered, p50", "answered, p99"
	committed50, committed99 = "committed, p50", "committed, p99"
	cpuOfAll                 = "all"
)

// figureAt is the name of a figure at a rate.
func figureAt(figure string, perSecond int) string {
	return fmt.Sprintf("%s at %d/s", figure, perSecond)
}

// BenchmarkArrivals sends buyers in an open loop, from few to nearly as many as the pipeline can serve.
func BenchmarkArrivals(b *testing.B) {
	rates := rig.Scale(b, []int{1000, 2500, 5000, 7500}, []int{1000, 2500})
	var candidates []rig.Candidate
	for _, s := range systems {
		candidates = append(candidates, rig.Candidate{Name: s.name, Turn: func(b *testing.B, round int) rig.Values {
			return s.turn(b, rates, round)
		}})
	}
	results := rig.Compare(b, candidates...)
	putCostTable(b, results, rates)
	putDelayTable(b, results, rates)
	for _, s := range systems {
		results.Report(b, s.name, figureAt(cpuOfAll, rates[0]), "µs-of-few")
	}
}

// turn measures all rates. Each round begins with another rate.
func (s system) turn(b *testing.B, rates []int, round int) rig.Values {
	running := s.start(b)
	defer running.Close()
	var orders int64
	sell := func(perSecond int, duration time.Duration) httpload.Answers {
		load := running.Crowd(1)
		load.Connections, load.For, load.Rate = connections, duration, float64(perSecond)
		answers := running.Measure(load)
		// Other answers mean that the system is overloaded. A smoke run shares its machine with other
		// tests.
		if answers.Wanted == 0 || rig.Scale(b, answers.Others() > 0, false) {
			b.Fatalf("%s at %d buyers a second: %s", s.name, perSecond, answers)
		}
		orders += answers.Wanted
		if s.records {
			if have := running.Await(orders, recordTimeout); have < orders {
				b.Fatalf("%s at %d buyers a second: %d orders in Postgres after %v, want %d", s.name, perSecond, have,
					recordTimeout, orders)
			}
		}
		return answers
	}
	sell(slices.Max(rates), rig.Scale(b, 500*time.Millisecond, 30*time.Millisecond)) // opens connections, grows heaps
	values := rig.Values{}
	for i := range rates {
		perSecond := rates[(i+round)%len(rates)]
		began, before := time.Now(), running.CPU()
		answers := sell(perSecond, rig.Scale(b, 2*time.Second, 100*time.Millisecond))
		for role, each := range running.CPU().Since(before).PerOrder(answers.Wanted) {
			values[figureAt(role, perSecond)] = each
			values[figureAt(cpuOfAll, perSecond)] += each
		}
		values[figureAt(answered50, perSecond)] = rig.InMillis(answers.Percentile(50))
		values[figureAt(answered99, perSecond)] = rig.InMillis(answers.Percentile(99))
		if s.async {
			delays := running.Shop.CommitDelays(began)
			values[figureAt(committed50, perSecond)], values[figureAt(committed99, perSecond)] = delays.P50, delays.P99
		}
	}
	return values
}

func putCostTable(b *testing.B, results *rig.Results, rates []int) {
	b.Helper()
	t := page.Table{
		Title: "CPU time for an order, µs",
		Note: fmt.Sprintf("Open loop over %d connections. Echo has the usual middlewares, and no order behind it. "+
			"Cores busy: all of it, the load included, times the rate. Medians of %d rounds; of the sum with the least and "+
			"the greatest.", connections, b.N),
		Head: append(append([]string{"", "buyers/s"}, rig.Roles...), "all", "cores busy"),
		Plot: "arrivals-cpu.svg", Chart: &page.Chart{
			Kind: page.Lines, Title: "CPU time for an order", X: "buyers/s", Columns: []string{"all"}, Unit: "microseconds",
		},
	}
	for _, s := range systems {
		for _, perSecond := range rates {
			row := []string{s.title, rig.Count(float64(perSecond))}
			for _, role := range rig.Roles {
				row = append(row, results.Of(s.name, figureAt(role, perSecond)).FormatMedian(rig.Ratio))
			}
			all := results.Of(s.name, figureAt(cpuOfAll, perSecond))
			busy := all
			busy.Median *= float64(perSecond) / 1e6
			t.Rows = append(t.Rows, append(row, all.Format(rig.Count), busy.FormatMedian(rig.Ratio)))
		}
	}
	rig.Put(t)
}

func putDelayTable(b *testing.B, results *rig.Results, rates []int) {
	b.Helper()
	t := page.Table{
		Title: "How long it takes",
		Note: "The same turns. Answered: from the moment at which the buyer was due. Committed: from the decision in Redis " +
			"until the order is committed in Postgres, where that is after the answer.",
		Head: []string{"", "buyers/s", "answered, p50", "p99", "committed, p50", "p99"},
	}
	for _, s := range systems {
		for _, perSecond := range rates {
			row := []string{s.title, rig.Count(float64(perSecond))}
			for _, figure := range []string{answered50, answered99, committed50, committed99} {
				row = append(row, results.Of(s.name, figureAt(figure, perSecond)).Format(rig.Millis))
			}
			t.Rows = append(t.Rows, row)
		}
	}
	rig.Put(t)
}

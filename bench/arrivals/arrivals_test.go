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

// system is one that buyers come to.
type system struct {
	name  string // the one that -only finds
	title string // the one on the page
	start func(b *testing.B) *rig.System
	// records is whether its orders come to Postgres, and behind whether that is after the answer.
	records, behind bool
}

// plenty is more units than a turn can sell.
const plenty = 50_000_000

// systems are what a request costs by itself, what the strongest rival adds, and what Stampede adds.
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
	// connections carry an open loop, and are never all taken at these rates.
	connections = 512
	// recordedWithin bounds how long orders may be on their way after the last answer.
	recordedWithin = 10 * time.Second
)

// What is measured at each rate: times in milliseconds, and CPU time in microseconds for an order, by role and of all.
const (
	answered50, answered99   = "answered, p50", "answered, p99"
	committed50, committed99 = "committed, p50", "committed, p99"
	cpuOfAll                 = "all"
)

// at is the name of a figure at a rate.
func at(figure string, perSecond int) string { return fmt.Sprintf("%s at %d/s", figure, perSecond) }

// BenchmarkArrivals lets buyers come in an open loop, from few to nearly as many as the whole pipeline can take.
func BenchmarkArrivals(b *testing.B) {
	rates := rig.Scale(b, []int{1000, 2500, 5000, 7500}, []int{1000, 2500})
	var candidates []rig.Candidate
	for _, s := range systems {
		candidates = append(candidates, rig.Candidate{Name: s.name, Turn: func(b *testing.B, round int) rig.Values {
			return s.turn(b, rates, round)
		}})
	}
	results := rig.Compare(b, candidates...)
	tellCosts(b, results, rates)
	tellDelays(b, results, rates)
	for _, s := range systems {
		results.Report(b, s.name, at(cpuOfAll, rates[0]), "µs-of-few")
	}
}

// turn is a turn of a system: all rates, each round from another one on.
func (s system) turn(b *testing.B, rates []int, round int) rig.Values {
	running := s.start(b)
	defer running.Close()
	var orders int64
	come := func(perSecond int, within time.Duration) httpload.Answers {
		load := running.Crowd(1)
		load.Connections, load.For, load.Rate = connections, within, float64(perSecond)
		answers := running.Measure(load)
		// Where buyers are turned away, more came than could be served; a smoke shares its machine with other tests.
		if answers.Wanted == 0 || rig.Scale(b, answers.Others() > 0, false) {
			b.Fatalf("%s at %d buyers a second: %s", s.name, perSecond, answers)
		}
		orders += answers.Wanted
		if s.records {
			if have := running.Await(orders, recordedWithin); have < orders {
				b.Fatalf("%s at %d buyers a second: %d orders are in Postgres after %v, of %d", s.name, perSecond, have,
					recordedWithin, orders)
			}
		}
		return answers
	}
	come(slices.Max(rates), rig.Scale(b, 500*time.Millisecond, 30*time.Millisecond)) // connections are opened, heaps grow
	values := rig.Values{}
	for i := range rates {
		perSecond := rates[(i+round)%len(rates)]
		began, before := time.Now(), running.CPU()
		answers := come(perSecond, rig.Scale(b, 2*time.Second, 100*time.Millisecond))
		for role, each := range running.CPU().Since(before).PerOrder(answers.Wanted) {
			values[at(role, perSecond)] = each
			values[at(cpuOfAll, perSecond)] += each
		}
		values[at(answered50, perSecond)], values[at(answered99, perSecond)] = rig.InMillis(answers.Percentile(50)),
			rig.InMillis(answers.Percentile(99))
		if s.behind {
			delays := running.Shop.CommitDelays(began)
			values[at(committed50, perSecond)], values[at(committed99, perSecond)] = delays.P50, delays.P99
		}
	}
	return values
}

func tellCosts(b *testing.B, results *rig.Results, rates []int) {
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
				row = append(row, results.Of(s.name, at(role, perSecond)).Middle(rig.Ratio))
			}
			all := results.Of(s.name, at(cpuOfAll, perSecond))
			busy := all
			busy.Median *= float64(perSecond) / 1e6
			t.Rows = append(t.Rows, append(row, all.With(rig.Count), busy.Middle(rig.Ratio)))
		}
	}
	rig.Put(t)
}

func tellDelays(b *testing.B, results *rig.Results, rates []int) {
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
				row = append(row, results.Of(s.name, at(figure, perSecond)).With(rig.Millis))
			}
			t.Rows = append(t.Rows, row)
		}
	}
	rig.Put(t)
}

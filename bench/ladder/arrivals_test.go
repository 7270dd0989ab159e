package ladder

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"stampede/bench/httpload"
	"stampede/bench/rig"
)

// writeTimeout bounds how long after the last answer orders may reach Postgres.
const writeTimeout = 10 * time.Second

const (
	answered = "answered, "
	// cpuOfAll is the CPU time of an order in all processes, the load included.
	cpuOfAll = cpu + "all"
)

// BenchmarkArrivals measures what an order costs, and how long it takes, when buyers arrive at a rate
// well below the maximum: without an order behind it, with the strongest rival, and with Stampede.
func BenchmarkArrivals(b *testing.B) {
	rates := rig.Scale(b, []int{1000, 2500, 5000, 7500}, []int{1000, 2500})
	all := pick(nothing, postgresBatched, ours)
	results := compare(b, all, func(r rung, b *testing.B, round int) rig.Values { return r.arrivals(b, rates, round) })
	t := rig.Table{
		Title: "Below full load",
		Note: fmt.Sprintf("Open loop over %d connections for %v at each rate; CPU time for an order in µs, with the least "+
			"and the greatest sum. The next rate begins when all orders of the last one are in Postgres. Committed: from "+
			"the decision in Redis until the commit in Postgres, where that is after the answer. Medians of %d rounds.",
			openConnections, turnDuration(b), b.N),
		Head: append(append([]string{"design", "buyers/s"}, rig.Roles...),
			"all", "answered, ms: p50", "p99", "committed, ms: p50", "p99"),
	}
	for _, r := range all {
		for _, perSecond := range rates {
			row := append([]string{r.title, rig.Count(float64(perSecond))},
				results.Medians(rig.Ratio, r.name, figuresAt(perSecond, cpuFigures...)...)...)
			row = append(row, results.Ranges(rig.Count, r.name, figuresAt(perSecond, cpuOfAll)...)...)
			t.Rows = append(t.Rows, append(row, results.Medians(rig.Ratio, r.name,
				figuresAt(perSecond, answered+p50, answered+p99, committed+p50, committed+p99)...)...))
		}
		results.Report(b, r.name, figuresAt(rates[0], cpuOfAll)[0], "µs-of-few")
	}
	rig.Put(t)
}

// figuresAt names figures at a rate.
func figuresAt(perSecond int, figures ...string) (names []string) {
	for _, figure := range figures {
		names = append(names, fmt.Sprintf("%s at %d/s", figure, perSecond))
	}
	return names
}

// arrivals measures all rates. Each round begins with another one.
func (r rung) arrivals(b *testing.B, rates []int, round int) rig.Values {
	s := r.start(b, r.plenty(b))
	defer s.Close()
	var orders int64
	sell := func(perSecond int, duration time.Duration) httpload.Answers {
		load := s.Crowd(1)
		load.Connections, load.For, load.Rate = openConnections, duration, float64(perSecond)
		answers := s.Measure(load)
		// Other answers mean that the system is overloaded. A smoke run shares its machine with other
		// tests.
		if answers.Wanted == 0 || rig.Scale(b, answers.Others() > 0, false) {
			b.Fatalf("%s at %d buyers a second: %s", r.name, perSecond, answers)
		}
		orders += answers.Wanted
		if r.writes() {
			if have := s.Await(orders, writeTimeout); have < orders {
				b.Fatalf("%s at %d buyers a second: %d orders in Postgres, want %d", r.name, perSecond, have, orders)
			}
		}
		return answers
	}
	sell(slices.Max(rates), rig.Scale(b, 500*time.Millisecond, 30*time.Millisecond)) // opens connections, grows heaps
	v := rig.Values{}
	for i := range rates {
		perSecond := rates[(i+round)%len(rates)]
		began, before := time.Now(), s.CPU()
		answers := sell(perSecond, turnDuration(b))
		now := rig.Values{}
		for role, each := range s.CPU().Since(before).PerOrder(answers.Wanted) {
			now[cpu+role] = each
			now[cpuOfAll] += each
		}
		recordLatencies(now, answered, answers)
		if r.isOurs() {
			now[committed+p50], now[committed+p99] = s.Shop.CommitDelays(began)
		}
		for figure, value := range now {
			v[figuresAt(perSecond, figure)[0]] = value
		}
	}
	return v
}

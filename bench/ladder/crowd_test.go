package ladder

import (
	"fmt"
	"testing"

	"stampede/bench/rig"
)

// BenchmarkCrowd compares Stampede with its strongest rivals at four times as many connections.
func BenchmarkCrowd(b *testing.B) {
	connections := rig.Scale(b, 1024, 64)
	all := pick(nothing, evalsha, postgresBatched, postgresBatchedReader, ingress, ours)
	results := compare(b, all, func(r rung, b *testing.B, _ int) rig.Values {
		v := rig.Values{}
		s := r.start(b, r.plenty(b))
		defer s.Close()
		r.closedLoop(b, s, v, connections)
		return v
	})
	t := rig.Table{
		Title: "With more connections",
		Note: fmt.Sprintf("The closed loop again, with %s connections; %d rounds of %v. The last column compares orders in "+
			"Postgres, or, where none get there, the orders that the ingress alone accepts.",
			rig.Count(float64(connections)), b.N, turnDuration(b)),
		Head: []string{"design", "accepted/s", "p99, ms", "in Postgres/s", "Stampede ÷ it"},
	}
	for _, r := range all {
		cell := ratioTo(results, ingress, r, accepted)
		if r.writes() {
			cell = ratioTo(results, ours, r, durable)
		}
		t.Rows = append(t.Rows, []string{
			r.title, results.Of(r.name, accepted).Format(rig.Count),
			results.Of(r.name, closedLoop+p99).FormatMedian(rig.Ratio), results.Of(r.name, durable).Format(rig.Count), cell,
		})
	}
	rig.Put(t)
}

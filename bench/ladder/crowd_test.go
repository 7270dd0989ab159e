package ladder

import (
	"fmt"
	"slices"
	"testing"

	"stampede/bench/page"
	"stampede/bench/rig"
)

// crowdGoals are ratios for BenchmarkCrowd to reach.
var crowdGoals = []goal{
	{nothing, "", accepted, 0},
	{evalsha, "", accepted, 0},
	{postgresBatched, "", durable, 1.3},
	{postgresBatchedReader, "", durable, 1},
}

// BenchmarkCrowd compares Stampede with its strongest rivals at four times as many connections.
func BenchmarkCrowd(b *testing.B) {
	connections := rig.Scale(b, 1024, 64)
	selected := []string{nothing, evalsha, postgresBatched, postgresBatchedReader, ingress, ours}
	all, _ := rungs()
	all = slices.DeleteFunc(all, func(r rung) bool { return !slices.Contains(selected, r.name) })
	var candidates []rig.Candidate
	for _, r := range all {
		candidates = append(candidates, rig.Candidate{Name: r.name, Turn: func(b *testing.B, _ int) rig.Values {
			v := rig.Values{}
			s := r.start(b, r.plenty(b))
			defer s.Close()
			r.closedLoop(b, s, v, connections)
			return v
		}})
	}
	results := rig.Compare(b, candidates...)
	t := page.Table{
		Title: "With more connections",
		Note: fmt.Sprintf("The closed loop again, with %s connections; %d rounds of %v.",
			rig.Count(float64(connections)), b.N, turnDuration(b)),
		Head: []string{"design", "accepted/s", "p50", "p99", "p99.9", "orders in Postgres/s"},
	}
	for _, r := range all {
		rate := results.Of(r.name, accepted).Format(rig.Count)
		row := append([]string{r.title, rate}, latencies(results, r.name, closedLoop)...)
		inPostgres := ""
		if s := results.Of(r.name, durable); s.N > 0 {
			inPostgres = s.Format(rig.Count)
		}
		t.Rows = append(t.Rows, append(row, inPostgres))
	}
	rig.Put(t)
	putGoalTable(b, results, crowdGoals, page.Table{
		Title: "What is to be reached with more connections",
		Note:  fmt.Sprintf("Ratios of the table above, %d rounds.", b.N),
	})
}

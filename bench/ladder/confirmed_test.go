package ladder

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"stampede/bench/rig"
	"stampede/internal/benchkit"
)

const (
	waiting = "waiting buyers, "
	// confirmedGoalMillis bounds the p99 from the request until the order is in Postgres.
	confirmedGoalMillis = 50
	// confirmedConnections: each buyer holds one until the order is confirmed.
	confirmedConnections = 2048
)

// BenchmarkConfirmed measures how long it takes until a buyer's order is in Postgres: each one prefers to
// wait, and is answered 201 when it is there. They come at half the rate at which orders reach
// Postgres when as many come as can.
func BenchmarkConfirmed(b *testing.B) {
	product := rung{name: ours}
	results := rig.Compare(b, rig.Candidate{Name: ours, Turn: func(b *testing.B, _ int) rig.Values {
		v := rig.Values{}
		highest := product.start(b, product.plenty(b))
		product.closedLoop(b, highest, v)
		highest.Close()
		s := product.start(b, product.plenty(b))
		defer s.Close()
		await(b, s, v, v[durable]/2)
		return v
	}})
	wait := results.Of(ours, waiting+p99)
	b.ReportMetric(wait.Median, "p99_ms")
	t := benchkit.Table{
		Title: "From the request to the order in Postgres",
		Note: fmt.Sprintf("Buyers send `Prefer: wait=10` and are answered 201 when their order is confirmed. Open loop at half of the orders that reached Postgres "+
			"in a closed loop of the same round; the time counts from the moment at which the buyer was due. %d rounds of %v.", b.N, turn(b)),
		Head: []string{"orders in Postgres/s at most", "buyers/s", "confirmed/s", "p50", "p99", "p99.9", fmt.Sprintf("p99 at most %d ms", confirmedGoalMillis)},
		Rows: [][]string{{
			results.Of(ours, durable).With(rig.Count),
			results.Of(ours, waiting+"due").With(rig.Count),
			results.Of(ours, waiting+rate).With(rig.Count),
			results.Of(ours, waiting+p50).With(rig.Millis),
			wait.With(rig.Millis),
			results.Of(ours, waiting+p999).With(rig.Millis),
			verdict(wait.Median <= confirmedGoalMillis),
		}},
	}
	rig.Put(t)
}

// await measures how long buyers wait for a 201.
func await(b *testing.B, s *rig.System, v rig.Values, perSecond float64) {
	warm(b, s)
	load := s.Crowd(1, "Prefer: wait=10")
	load.Connections, load.For, load.Rate, load.Status = confirmedConnections, turn(b), perSecond, http.StatusCreated
	answers := s.Measure(load)
	v[waiting+"due"] = perSecond
	v[waiting+rate] = answers.PerSecond()
	putLatencies(v, waiting, answers)
	if unconfirmed := answers.ByStatus[http.StatusAccepted]; unconfirmed > 0 {
		b.Fatalf("%d orders were not confirmed within %v: %s", unconfirmed, 10*time.Second, answers)
	}
}

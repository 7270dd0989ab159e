package ladder

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/rig"
)

const (
	waiting   = "waiting buyers, "
	committed = "committed, "
	// confirmedConnections: each buyer occupies one until the order is confirmed.
	confirmedConnections = 2048
)

// BenchmarkConfirmed measures the time until a buyer's order is in Postgres. Buyers arrive at half the
// rate at which orders reach Postgres in a closed loop. First they do not wait after their 202, and
// Postgres reports when each order was committed; then each one prefers to wait, and gets a 201 when
// the order is there.
func BenchmarkConfirmed(b *testing.B) {
	product := rung{name: ours}
	results := rig.Compare(b, rig.Candidate{Name: ours, Turn: func(b *testing.B, _ int) rig.Values {
		v := rig.Values{}
		highest := product.start(b, product.plenty(b))
		product.closedLoop(b, highest, v, usualConnections(b))
		highest.Close()
		unattended := product.start(b, product.plenty(b))
		measureCommits(b, unattended, v, v[durable]/2)
		unattended.Close()
		s := product.start(b, product.plenty(b))
		defer s.Close()
		measureWaits(b, s, v, v[durable]/2)
		return v
	}})
	results.Report(b, ours, committed+p99, "committed_p99_ms")
	results.Report(b, ours, waiting+p99, "waiting_p99_ms")
	rig.Put(rig.Table{
		Title: "From the request to the order in Postgres",
		Note: fmt.Sprintf("Open loop at half of the orders that reached Postgres in a closed loop of the same round. "+
			"Committed: from the decision in Redis to the commit in Postgres, for every order. "+
			"Answered 201: all buyers send `Prefer: wait=10`. %d rounds of %v.", b.N, turnDuration(b)),
		Head: []string{"", "orders/s", "p50, ms", "p99, ms"},
		Rows: [][]string{
			append([]string{"committed", results.Of(ours, waiting+"due").Format(rig.Count)},
				results.Ranges(rig.Ratio, ours, committed+p50, committed+p99)...),
			append([]string{"answered 201", results.Of(ours, waiting+rate).Format(rig.Count)},
				results.Ranges(rig.Ratio, ours, waiting+p50, waiting+p99)...),
		},
	})
}

// measureCommits measures the time from the decision to the commit of the order.
func measureCommits(b *testing.B, s *rig.System, v rig.Values, perSecond float64) {
	warmed := s.Warm(usualConnections(b))
	s.Await(warmed, turnDuration(b))
	load := s.Crowd(1)
	load.Connections, load.For, load.Rate = openConnections, turnDuration(b), perSecond
	began := time.Now()
	answers := s.Measure(load)
	all := warmed + answers.Wanted
	require.Equal(b, all, s.Await(all, writeTimeout), "orders in Postgres")
	v[committed+p50], v[committed+p99] = s.Shop.CommitDelays(began)
}

// measureWaits measures how long buyers wait for a 201.
func measureWaits(b *testing.B, s *rig.System, v rig.Values, perSecond float64) {
	s.Warm(usualConnections(b))
	load := s.Crowd(1, "Prefer: wait=10")
	load.Connections, load.For, load.Rate = confirmedConnections, turnDuration(b), perSecond
	load.Status = http.StatusCreated
	answers := s.Measure(load)
	v[waiting+"due"] = perSecond
	v[waiting+rate] = answers.PerSecond()
	recordLatencies(v, waiting, answers)
	if unconfirmed := answers.ByStatus[http.StatusAccepted]; unconfirmed > 0 {
		b.Fatalf("%d orders were not confirmed within %v: %s", unconfirmed, 10*time.Second, answers)
	}
}

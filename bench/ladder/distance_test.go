package ladder

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/rig"
)

// BenchmarkDistance compares Stampede with its strongest rivals where disks and networks are as slow as in real shops:
// on disks that sync a millisecond later, and at a distance from Redis and Postgres. Its page is distance.md.
func BenchmarkDistance(b *testing.B) {
	disks := []time.Duration{0, time.Millisecond}
	leftOut := ""
	canSync := rig.CanSlowSyncs()
	if canSync != nil {
		disks, leftOut = disks[:1], " Slow disks and counts of fsync are left out: "+canSync.Error()+"."
	}
	all := pick(postgresBatched, postgresBatchedReader, ours)
	speed := rig.Table{
		Page: "distance", Title: "Orders a second",
		Note: fmt.Sprintf("Closed loop of %d connections, %d rounds of %v in each row: medians, with the least and the "+
			"greatest. Syncs: calls of fsync and fdatasync for 1,000 orders. CPU: of front, worker, Redis and Postgres, for "+
			"each order; proxy: what the distance takes beside it.%s", usualConnections(b), b.N, turnDuration(b), leftOut),
		Head: []string{
			"round trip", "fsync", "design", "accepted/s", "in Postgres/s", "Stampede ÷ it", "CPU, µs", "Stampede ÷ it",
			"proxy, µs", "syncs: Redis", "Postgres",
		},
	}
	wait := rig.Table{
		Page: "distance", Title: "How long a buyer waits",
		Note: fmt.Sprintf("Milliseconds in an open loop over %d connections, at half of what the design accepted in the closed "+
			"loop of the same round. Committed: from the decision in Redis until the commit in Postgres. Medians of %d rounds.",
			openConnections, b.N),
		Head: []string{
			"round trip", "fsync", "design", "buyers/s", "answered: p50", "p99", "committed: p50", "p99",
		},
	}
	for _, sync := range disks {
		for _, roundTrip := range []time.Duration{0, 500 * time.Microsecond, 2 * time.Millisecond} {
			restore := rig.Under(rig.Conditions{Sync: sync, RoundTrip: roundTrip, CountSyncs: canSync == nil})
			results := compare(b, all, rung.atDistance)
			restore()
			for _, r := range all {
				under := []string{extra(roundTrip), extra(sync), r.title}
				row := append(under, results.Medians(rig.Count, r.name, accepted)...)
				row = append(row, results.Ranges(rig.Count, r.name, durable)...)
				row = append(row, ratioTo(results, ours, r, durable))
				row = append(row, results.Medians(rig.Ratio, r.name, cpuOfShop)...)
				row = append(row, ratioTo(results, ours, r, cpuOfShop))
				speed.Rows = append(speed.Rows, append(row,
					results.Medians(rig.Ratio, r.name, cpu+rig.Proxy, syncs+rig.Redis, syncs+rig.Postgres)...))
				wait.Rows = append(wait.Rows, append(append(under, results.Medians(rig.Count, r.name, halfLoad+rate)...),
					results.Medians(rig.Ratio, r.name, halfLoad+p50, halfLoad+p99, committed+p50, committed+p99)...))
			}
			results.Report(b, ours, durable, fmt.Sprintf("durable/s-%v-%v", roundTrip, sync))
		}
	}
	rig.Put(speed)
	rig.Put(wait)
}

// extra is what a row adds to the machine.
func extra(d time.Duration) string {
	if d == 0 {
		return "as it is"
	}
	return "+" + d.String()
}

// atDistance is a turn of BenchmarkDistance.
func (r rung) atDistance(b *testing.B, _ int) rig.Values {
	v := rig.Values{}
	s := r.start(b, r.plenty(b))
	r.closedLoop(b, s, v, usualConnections(b))
	s.Close()

	s = r.start(b, r.plenty(b))
	defer s.Close()
	s.Warm(usualConnections(b))
	load := s.Crowd(1)
	load.Connections, load.For, load.Rate = openConnections, turnDuration(b), v[accepted]/2
	began := time.Now()
	answers := s.Measure(load)
	v[halfLoad+rate] = answers.PerSecond()
	recordLatencies(v, halfLoad, answers)
	if r.isOurs() {
		require.Eventually(b, func() bool { return s.Shop.Units() >= answers.Wanted }, writeTimeout, 100*time.Millisecond)
		v[committed+p50], v[committed+p99] = s.Shop.CommitDelays(began)
	}
	return v
}

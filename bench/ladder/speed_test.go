package ladder

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/designs"
	"stampede/bench/httpload"
	"stampede/bench/rig"
)

const (
	// openConnections carry an open loop: enough for a design at half of its capacity, and a bound for
	// one that falls behind.
	openConnections = 512
	// commonRate is a rate that most of the ladder can serve.
	commonRate = 500
)

// Figures of a turn. Times are in milliseconds.
const (
	accepted = "accepted/s"
	durable  = "durable/s"
	failed   = "failed, %"
	rate     = "rate/s"

	closedLoop = "closed loop, "
	halfLoad   = "half load, "
	commonLoad = "common load, "
	p50        = "p50"
	p99        = "p99"

	cpu = "CPU, µs, " // and a role
)

// cpuFigures are in the order of rig.Roles.
var cpuFigures = []string{cpu + rig.Load, cpu + rig.Front, cpu + rig.Redis, cpu + rig.Worker, cpu + rig.Postgres}

// BenchmarkLadder compares how fast the rungs sell and how long a buyer waits.
func BenchmarkLadder(b *testing.B) {
	all, leftOut := rungs()
	results := compare(b, all, rung.speed)
	for _, r := range all {
		results.Report(b, r.name, accepted, "accepted/s")
		results.Report(b, r.name, durable, "durable/s")
	}
	putRateTables(b, results, all, leftOut)
	putLatencyTable(b, results, all)
	putCPUTable(b, results, all)
}

// speed is a turn of BenchmarkLadder. Each load has its own shop, so that none is affected by the
// others; a smoke run uses one shop for all, which saves time.
func (r rung) speed(b *testing.B, _ int) rig.Values {
	v := rig.Values{}
	loads := []func(*rig.System){
		func(s *rig.System) { r.closedLoop(b, s, v, usualConnections(b)) },
		func(s *rig.System) { openLoop(b, s, v, halfLoad, v[accepted]/2) },
		func(s *rig.System) { openLoop(b, s, v, commonLoad, commonRate) },
	}
	var s *rig.System
	for i, load := range loads {
		if i == 0 || b.N > 1 {
			s = r.start(b, r.plenty(b))
		}
		load(s)
		if i == len(loads)-1 || b.N > 1 {
			s.Close()
		}
	}
	return v
}

// usualConnections is the number of connections of a closed loop.
func usualConnections(b *testing.B) int { return rig.Scale(b, 256, 32) }

func turnDuration(b *testing.B) time.Duration {
	return rig.Scale(b, 2*time.Second, 100*time.Millisecond)
}

// plenty is more units than a turn can sell.
func (r rung) plenty(b *testing.B) int64 {
	if designs.All[r.design].RowPerUnit {
		return rig.Scale[int64](b, 100_000, 10_000)
	}
	return 50_000_000
}

// closedLoop measures the rate at which orders are accepted, and the rate at which they reach Postgres,
// from the first request until the last accepted order is there. A design that falls behind gets the
// same time again, and counts with what it has written by then. So it does after the warm-up; a design
// that keeps up has nothing left to write after it.
func (r rung) closedLoop(b *testing.B, s *rig.System, v rig.Values, connections int) {
	warmed := s.Warm(connections)
	if r.writes() {
		s.Await(warmed, turnDuration(b))
	}
	began, unitsBefore, cpuBefore := time.Now(), s.Shop.Units(), s.CPU()
	load := s.Crowd(1)
	load.Connections, load.For = connections, turnDuration(b)
	answers := s.Measure(load)
	require.NotZero(b, answers.Wanted, "%s accepted nothing: %s", r.name, answers)
	v[accepted] = answers.PerSecond()
	v[failed] = 100 * float64(answers.Others()) / float64(answers.Others()+answers.Wanted)
	recordLatencies(v, closedLoop, answers)

	written := int64(0)
	if r.writes() {
		written = s.Await(warmed+answers.Wanted, turnDuration(b)) - unitsBefore
		v[durable] = float64(written) / time.Since(began).Seconds()
	}
	used := s.CPU().Since(cpuBefore)
	for _, role := range rig.Roles {
		orders := answers.Wanted
		if role == rig.Worker || role == rig.Postgres {
			orders = written
		}
		if spent, found := used.PerOrder(orders)[role]; found && orders > 0 {
			v[cpu+role] = spent
		}
	}
}

// openLoop measures the latency at a rate.
func openLoop(b *testing.B, s *rig.System, v rig.Values, name string, perSecond float64) {
	s.Warm(usualConnections(b))
	load := s.Crowd(1)
	load.Connections, load.For, load.Rate = openConnections, turnDuration(b), perSecond
	answers := s.Measure(load)
	v[name+rate] = answers.PerSecond()
	recordLatencies(v, name, answers)
}

func recordLatencies(v rig.Values, load string, answers httpload.Answers) {
	if answers.Wanted == 0 {
		return
	}
	v[load+p50], v[load+p99] = rig.InMillis(answers.Percentile(50)), rig.InMillis(answers.Percentile(99))
}

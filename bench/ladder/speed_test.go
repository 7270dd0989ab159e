package ladder

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
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

	cpu   = "CPU, µs, "                // and a role
	syncs = "syncs for 1,000 orders, " // and a server

	// cpuOfShop is the CPU time of an order in all processes but the load and the proxy.
	cpuOfShop = cpu + "of the shop"
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
	began, unitsBefore, cpuBefore, syncsBefore := time.Now(), s.Shop.Units(), s.CPU(), s.Shop.Syncs()
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
	for role, n := range s.Shop.Syncs().Since(syncsBefore) {
		v[syncs+role] = 1000 * float64(n) / float64(answers.Wanted)
	}
	used := s.CPU().Since(cpuBefore)
	for role := range used {
		orders := answers.Wanted
		if role == rig.Worker || role == rig.Postgres {
			orders = written
		}
		if orders > 0 {
			v[cpu+role] = used.PerOrder(orders)[role]
		}
		if role != rig.Load && role != rig.Proxy {
			v[cpuOfShop] += v[cpu+role]
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
			if role != rig.Proxy {
				now[cpuOfAll] += each
			}
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

const soldOutRate = "sold out/s"

// BenchmarkSoldOut compares the answer that most of a crowd gets with an Echo handler that only sends
// the same bytes. Both run all the time, and are idle outside their turns.
func BenchmarkSoldOut(b *testing.B) {
	stampede := rig.Stampede{}.Start(b, 1)
	body := sellOut(b, stampede)
	echo := rig.StartDesign(b, nothingRaw, map[string]string{
		"status": strconv.Itoa(http.StatusConflict), "type": "application/problem+json", "body": body,
	}, 1)

	const echoName = "Echo, the same bytes"
	results := rig.Compare(b,
		rig.Candidate{Name: ours, Turn: refuse(stampede)},
		rig.Candidate{Name: echoName, Turn: refuse(echo)},
	)
	results.Report(b, ours, soldOutRate, "sold-out/s")
	results.Report(b, echoName, soldOutRate, "sold-out/s")
	ratio := results.Ratio(ours, soldOutRate, echoName, soldOutRate)
	t := rig.Table{
		Title: "Answers “sold out” a second",
		Note: fmt.Sprintf("`stampede serve` beside an Echo handler that sends the same bytes and does nothing else, "+
			"without any middleware. Closed loop of %d connections, %d rounds of %v. The ratio is %s.",
			usualConnections(b), b.N, turnDuration(b), ratio.Format(rig.Ratio)),
		Head: []string{"", "answers/s", "p50, ms", "p99, ms", "CPU of the front, µs each"},
	}
	for _, name := range []string{ours, echoName} {
		row := append([]string{name, results.Of(name, soldOutRate).Format(rig.Count)},
			results.Medians(rig.Ratio, name, closedLoop+p50, closedLoop+p99)...)
		t.Rows = append(t.Rows, append(row, results.Of(name, cpu+rig.Front).Format(rig.Ratio)))
	}
	rig.Put(t)
}

// sellOut buys the only unit, and returns the body of all answers from then on.
func sellOut(b *testing.B, s *rig.System) (body string) {
	b.Helper()
	load := s.Crowd(1)
	load.Connections, load.For, load.Most = 1, time.Minute, 2
	load.OnAnswer = func(_ uint64, status int, text []byte) {
		if status == http.StatusConflict {
			body = string(text)
		}
	}
	answers := s.Measure(load)
	require.Equal(b, map[int]int64{http.StatusAccepted: 1, http.StatusConflict: 1}, answers.ByStatus)
	return body
}

// refuse measures the rate of "sold out" answers.
func refuse(s *rig.System) func(*testing.B, int) rig.Values {
	return func(b *testing.B, _ int) rig.Values {
		load := s.Crowd(1)
		load.Connections, load.For, load.Status = usualConnections(b), turnDuration(b), http.StatusConflict
		before := s.CPU()
		answers := s.Measure(load)
		require.Zero(b, answers.Others(), answers)
		v := rig.Values{
			soldOutRate:     answers.PerSecond(),
			cpu + rig.Front: s.CPU().Since(before).PerOrder(answers.Wanted)[rig.Front],
		}
		recordLatencies(v, closedLoop, answers)
		return v
	}
}

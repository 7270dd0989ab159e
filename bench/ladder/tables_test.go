package ladder

import (
	"fmt"
	"testing"

	"stampede/bench/page"
	"stampede/bench/rig"
)

// tell puts what BenchmarkLadder has found on the page.
func tell(b *testing.B, results *rig.Results, all []rung, leftOut string) {
	b.Helper()
	tellRates(b, results, all, leftOut)
	tellDurable(b, results, all)
	tellRatios(b, results, all)
	tellGoals(b, results)
	tellLatencies(b, results, all)
	tellCPU(b, results, all)
}

func tellRates(b *testing.B, results *rig.Results, all []rung, leftOut string) {
	b.Helper()
	t := page.Table{
		Title: "Orders accepted a second",
		Note: fmt.Sprintf("Closed loop of %d connections, %d rounds of %v; medians, with the least and the greatest. Only answers of "+
			"acceptance count: 201, which says that the order is in Postgres, or 202.%s", connections(b), b.N, turn(b), leftOut),
		Head: []string{"design", "accepted/s", "p50", "p99", "p99.9", "other answers"},
	}
	var bars []rig.Bar
	for _, r := range all {
		row := []string{r.name, results.Of(r.name, accepted).With(rig.Count)}
		row = append(row, latencies(results, r.name, closedLoop)...)
		row = append(row, results.Of(r.name, failed).Middle(percent))
		t.Rows = append(t.Rows, row)
		bars = append(bars, rig.Bar{Name: r.name, Spread: results.Of(r.name, accepted), Ours: r.isOurs()})
	}
	rig.PutWithPlot(t, "ladder-accepted.svg", rig.Bars(b, t.Title, "orders/s", rig.Count, bars))
}

func tellDurable(b *testing.B, results *rig.Results, all []rung) {
	b.Helper()
	t := page.Table{
		Title: "Orders in Postgres a second",
		Note: fmt.Sprintf("The same loads, %d rounds, from the first request until the last accepted order is in Postgres. A design that is behind when the load ends "+
			"gets the same time again, and counts with what it has written by then. Front, Redis, worker, Postgres and the load share the cores.", b.N),
		Head: []string{"design", "orders in Postgres/s"},
	}
	var bars []rig.Bar
	for _, r := range all {
		if s := results.Of(r.name, durable); s.N > 0 {
			t.Rows = append(t.Rows, []string{r.name, s.With(rig.Count)})
			bars = append(bars, rig.Bar{Name: r.name, Spread: s, Ours: r.isOurs()})
		}
	}
	rig.PutWithPlot(t, "ladder-durable.svg", rig.Bars(b, t.Title, "orders/s", rig.Count, bars))
}

func tellRatios(b *testing.B, results *rig.Results, all []rung) {
	b.Helper()
	t := page.Table{
		Title: "Stampede ÷ each of them",
		Note:  fmt.Sprintf("Medians of the ratios of %d rounds, with the least and the greatest.", b.N),
		Head:  []string{"design", "accepted: ingress alone ÷", "accepted: with the worker on the same cores ÷", "in Postgres ÷"},
	}
	for _, r := range all {
		if r.isOurs() {
			continue
		}
		t.Rows = append(t.Rows, []string{
			r.name,
			results.Ratio(ingress, accepted, r.name, accepted).With(rig.Ratio),
			results.Ratio(ours, accepted, r.name, accepted).With(rig.Ratio),
			results.Ratio(ours, durable, r.name, durable).With(rig.Ratio),
		})
	}
	rig.Put(t)
}

// goals are what is to be reached, by the ratios of BenchmarkLadder.
var goals = []struct {
	what, figure string
	other        string
	least        float64 // 0 where nothing is to be reached
}{
	{"accepted ÷ Echo doing nothing: Recover, RequestID, a bound body, an answer in JSON (`nothing`)", accepted, nothing, 0.75},
	{"accepted ÷ Echo doing even less: prebuilt bytes, no middleware, the body not read (`nothing-raw`)", accepted, nothingRaw, 0},
	{"accepted ÷ one EVALSHA for each buyer, of the tutorials' script with XADD (`evalsha`)", accepted, evalsha, 1.8},
	{"accepted ÷ Postgres, one transaction for each buyer (`postgres-row`)", accepted, row, 10},
	{"accepted ÷ Postgres, batched as we batch (`postgres-batched`)", accepted, batched, 1.3},
	{"accepted ÷ a lock around a transaction (`lock-transaction`)", accepted, lockedTx, 20},
	{"in Postgres ÷ Postgres, one transaction for each buyer (`postgres-row`)", durable, row, 10},
	{"in Postgres ÷ Postgres, batched as we batch (`postgres-batched`)", durable, batched, 1.1},
}

func tellGoals(b *testing.B, results *rig.Results) {
	b.Helper()
	t := page.Table{
		Title: "What is to be reached",
		Note: fmt.Sprintf("Ratios of the tables above, %d rounds. “Accepted” is to be reached by the ingress without a worker running: its orders wait in "+
			"the stream. Beside it stands what it accepts while a worker writes them to Postgres on the same cores. “In Postgres” is "+
			"the whole pipeline on these cores.", b.N),
		Head: []string{"ratio", "at least", "ingress alone", "with a worker", ""},
	}
	for _, g := range goals {
		alone := results.Ratio(ingress, g.figure, g.other, g.figure)
		whole := results.Ratio(ours, g.figure, g.other, g.figure)
		reached := alone
		if g.figure == durable {
			reached = whole
		}
		line := []string{g.what, "", alone.With(rig.Ratio), whole.With(rig.Ratio), ""}
		if g.least > 0 {
			line[1] = rig.Ratio(g.least)
		}
		if g.least > 0 && reached.N > 0 {
			line[4] = verdict(reached.Median >= g.least)
		}
		t.Rows = append(t.Rows, line)
	}
	rig.Put(t)
}

func tellLatencies(b *testing.B, results *rig.Results, all []rung) {
	b.Helper()
	t := page.Table{
		Title: "How long a buyer waits",
		Note: fmt.Sprintf("Open loop over %d connections: arrivals keep to their schedule, and the time counts from the moment at which the buyer was due. "+
			"At half of what the design accepted in a closed loop of the same round, and at %d buyers a second for all; %d rounds of %v. "+
			"Who was due and never got a connection counts with the time waited so far.", openConnections, commonRate, b.N, turn(b)),
		Head: []string{
			"design", "half load: answers/s", "p50", "p99", "p99.9",
			fmt.Sprintf("%d due/s: answers/s", commonRate), "p50", "p99", "p99.9",
		},
	}
	var bars []rig.Bar
	for _, r := range all {
		row := []string{r.name}
		for _, load := range []string{halfLoad, commonLoad} {
			row = append(row, results.Of(r.name, load+rate).Middle(rig.Count))
			row = append(row, latencies(results, r.name, load)...)
		}
		t.Rows = append(t.Rows, row)
		bars = append(bars, rig.Bar{Name: r.name, Spread: results.Of(r.name, halfLoad+p99), Ours: r.isOurs()})
	}
	rig.PutWithPlot(t, "ladder-latency.svg", rig.Bars(b, "p99 at half load", "ms", rig.Ratio, bars))
}

func tellCPU(b *testing.B, results *rig.Results, all []rung) {
	b.Helper()
	t := page.Table{
		Title: "CPU time for each order",
		Note: fmt.Sprintf("Microseconds, user and system, in the closed loop, medians of %d rounds. Load, front and Redis for each order that was accepted; the worker and Postgres, with all "+
			"its processes, for each that was written. What a design does in the background of its front is in the front's time.", b.N),
		Head: []string{"design"},
	}
	t.Head = append(t.Head, rig.Roles...)
	for _, r := range all {
		row := []string{r.name}
		for _, role := range rig.Roles {
			row = append(row, results.Of(r.name, cpu+role).Middle(rig.Ratio))
		}
		t.Rows = append(t.Rows, row)
	}
	rig.Put(t)
}

func latencies(results *rig.Results, name, load string) []string {
	var cells []string
	for _, percentile := range []string{p50, p99, p999} {
		cells = append(cells, results.Of(name, load+percentile).Middle(rig.Millis))
	}
	return cells
}

func percent(v float64) string { return rig.Ratio(v) + " %" }

func verdict(reached bool) string {
	if reached {
		return "reached"
	}
	return "**not reached**"
}

package ladder

import (
	"fmt"
	"testing"

	"stampede/bench/designs"
	"stampede/bench/page"
	"stampede/bench/rig"
)

// putTables puts the results of BenchmarkLadder on the page.
func putTables(b *testing.B, results *rig.Results, all []rung, leftOut string) {
	b.Helper()
	putRateTable(b, results, all, leftOut)
	putDurableTable(b, results, all)
	putRatioTable(b, results, all)
	putGoalTable(b, results, goals, page.Table{
		Title: "What is to be reached",
		Note: fmt.Sprintf("Ratios of the tables above, %d rounds. “Accepted” is measured for the ingress without a "+
			"worker: its orders wait in the stream. Beside it is what it accepts while a worker writes them to "+
			"Postgres on the same cores. “In Postgres” is the whole pipeline on these cores.", b.N),
	})
	putLatencyTable(b, results, all)
	putCPUTable(b, results, all)
}

func putRateTable(b *testing.B, results *rig.Results, all []rung, leftOut string) {
	b.Helper()
	t := page.Table{
		Title: "Orders accepted a second",
		Note: fmt.Sprintf("Closed loop of %d connections, %d rounds of %v; medians, with the least and the greatest. Only "+
			"answers of acceptance count: 201, which says that the order is in Postgres, or "+
			"202.%s", usualConnections(b), b.N, turnDuration(b), leftOut),
		Head: []string{"design", "accepted/s", "p50", "p99", "p99.9", "other answers"},
		Plot: "ladder-accepted.svg", Chart: &page.Chart{Kind: page.Bars, Columns: []string{"accepted/s"}, Unit: "orders/s"},
	}
	for _, r := range all {
		row := []string{r.title, results.Of(r.name, accepted).Format(rig.Count)}
		row = append(row, latencies(results, r.name, closedLoop)...)
		row = append(row, results.Of(r.name, failed).FormatMedian(formatPercent))
		t.Rows = append(t.Rows, row)
	}
	rig.Put(t)
}

func putDurableTable(b *testing.B, results *rig.Results, all []rung) {
	b.Helper()
	t := page.Table{
		Title: "Orders in Postgres a second",
		Note: fmt.Sprintf("The same loads, %d rounds, from the first request until the last accepted order is in Postgres. "+
			"A design that is behind when the load ends gets the same time again, and counts with what it has written by "+
			"then. Front, Redis, worker, Postgres and the load share the cores.", b.N),
		Head: []string{"design", "orders in Postgres/s"},
		Plot: "ladder-durable.svg", Chart: &page.Chart{
			Kind: page.Bars, Columns: []string{"orders in Postgres/s"},
			Unit: "orders/s",
		},
	}
	for _, r := range all {
		if s := results.Of(r.name, durable); s.N > 0 {
			t.Rows = append(t.Rows, []string{r.title, s.Format(rig.Count)})
		}
	}
	rig.Put(t)
}

func putRatioTable(b *testing.B, results *rig.Results, all []rung) {
	b.Helper()
	t := page.Table{
		Title: "Stampede ÷ each of them",
		Note:  fmt.Sprintf("Medians of the ratios of %d rounds, with the least and the greatest.", b.N),
		Head: []string{
			"design", "accepted: ingress alone ÷", "accepted: with the worker on the same cores ÷",
			"in Postgres ÷",
		},
	}
	for _, r := range all {
		if r.isOurs() {
			continue
		}
		t.Rows = append(t.Rows, []string{
			r.title,
			results.Ratio(ingress, accepted, r.name, accepted).Format(rig.Ratio),
			results.Ratio(ours, accepted, r.name, accepted).Format(rig.Ratio),
			results.Ratio(ours, durable, r.name, durable).Format(rig.Ratio),
		})
	}
	rig.Put(t)
}

// goal is a ratio to reach.
type goal struct {
	other, detail string
	figure        string
	least         float64 // 0 means no goal
}

var goals = []goal{
	{nothing, " (Recover, RequestID, a bound body, an answer in JSON)", accepted, 1.1},
	{nothingRaw, " (no middleware, the body is not read)", accepted, 0},
	{evalsha, " (one EVALSHA of the tutorials' script with XADD)", accepted, 3},
	{postgresRow, " (one transaction for each buyer)", accepted, 10},
	{postgresBatched, " (as we batch)", accepted, 1.3},
	{lockedTx, "", accepted, 20},
	{postgresRow, " (one transaction for each buyer)", durable, 12},
	{postgresBatched, " (as we batch)", durable, 1.3},
	{postgresBatchedReader, " (as we read and batch)", durable, 1},
}

func putGoalTable(b *testing.B, results *rig.Results, goals []goal, t page.Table) {
	b.Helper()
	t.Head = []string{"ratio", "at least", "ingress alone", "with a worker", ""}
	for _, g := range goals {
		alone := results.Ratio(ingress, g.figure, g.other, g.figure)
		whole := results.Ratio(ours, g.figure, g.other, g.figure)
		reached := alone
		if g.figure == durable {
			reached = whole
		}
		what := "accepted"
		if g.figure == durable {
			what = "in Postgres"
		}
		what += " ÷ " + designs.All[g.other].Title + g.detail
		line := []string{what, "", alone.Format(rig.Ratio), whole.Format(rig.Ratio), ""}
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

func putLatencyTable(b *testing.B, results *rig.Results, all []rung) {
	b.Helper()
	t := page.Table{
		Title: "How long a buyer waits",
		Note: fmt.Sprintf("Open loop over %d connections: arrivals keep to their schedule, and the time counts from the "+
			"moment at which the buyer was due. At half of what the design accepted in a closed loop of the same round, and "+
			"at %d buyers a second for all; %d rounds of %v. A buyer who was due and never got a connection counts with the "+
			"time waited so far.", openConnections, commonRate, b.N, turnDuration(b)),
		Head: []string{
			"design", "half load: answers/s", "p50", "p99", "p99.9",
			fmt.Sprintf("%d due/s: answers/s", commonRate), "p50", "p99", "p99.9",
		},
		// The first p99 is that of half load.
		Plot: "ladder-latency.svg", Chart: &page.Chart{
			Kind: page.Bars, Title: "p99 at half load", Columns: []string{"p99"},
			Unit: "milliseconds",
		},
	}
	for _, r := range all {
		row := []string{r.title}
		for _, load := range []string{halfLoad, commonLoad} {
			row = append(row, results.Of(r.name, load+rate).FormatMedian(rig.Count))
			row = append(row, latencies(results, r.name, load)...)
		}
		t.Rows = append(t.Rows, row)
	}
	rig.Put(t)
}

func putCPUTable(b *testing.B, results *rig.Results, all []rung) {
	b.Helper()
	t := page.Table{
		Title: "CPU time for each order",
		Note: fmt.Sprintf("Microseconds, user and system, in the closed loop, medians of %d rounds. Load, front and Redis "+
			"for each order that was accepted; the worker and Postgres, with all its processes, for each that was written. "+
			"What a design does in the background of its front is in the front's time.", b.N),
		Head: []string{"design"},
	}
	t.Head = append(t.Head, rig.Roles...)
	for _, r := range all {
		row := []string{r.title}
		for _, role := range rig.Roles {
			row = append(row, results.Of(r.name, cpu+role).FormatMedian(rig.Ratio))
		}
		t.Rows = append(t.Rows, row)
	}
	rig.Put(t)
}

func latencies(results *rig.Results, name, load string) []string {
	var cells []string
	for _, percentile := range []string{p50, p99, p999} {
		cells = append(cells, results.Of(name, load+percentile).FormatMedian(rig.Millis))
	}
	return cells
}

func formatPercent(v float64) string { return rig.Ratio(v) + " %" }

func verdict(reached bool) string {
	if reached {
		return "reached"
	}
	return "**not reached**"
}

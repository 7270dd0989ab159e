package ladder

import (
	"fmt"
	"strings"
	"testing"

	"stampede/bench/rig"
)

func putRateTables(b *testing.B, results *rig.Results, all []rung, leftOut string) {
	b.Helper()
	acceptedOrders := rig.Table{
		Title: "Orders accepted a second",
		Note: fmt.Sprintf("Closed loop of %d connections, %d rounds of %v; medians, with the least and the greatest. Only "+
			"201 and 202 count. Other answers: %s. The last column compares the ingress without a worker: its orders wait in "+
			"the stream.%s", usualConnections(b), b.N, turnDuration(b), otherAnswers(results, all), leftOut),
		Head: []string{"design", "accepted/s", "p99, ms", "ingress alone ÷ it"}, Bars: 1,
	}
	durableOrders := rig.Table{
		Title: "Orders in Postgres a second",
		Note: "The same loads, from the first request until the last accepted order is in Postgres. A design that is behind " +
			"when the load ends gets the same time again, and counts with what it has written by then. Front, Redis, worker, " +
			"Postgres and the load share the cores.",
		Head: []string{"design", "in Postgres/s", "Stampede ÷ it"}, Bars: 1,
	}
	for _, r := range all {
		acceptedOrders.Rows = append(acceptedOrders.Rows, []string{
			r.title, results.Of(r.name, accepted).Format(rig.Count),
			results.Of(r.name, closedLoop+p99).FormatMedian(rig.Ratio), ratioTo(results, ingress, r, accepted),
		})
		if s := results.Of(r.name, durable); s.N > 0 {
			durableOrders.Rows = append(durableOrders.Rows,
				[]string{r.title, s.Format(rig.Count), ratioTo(results, ours, r, durable)})
		}
	}
	rig.Put(acceptedOrders)
	rig.Put(durableOrders)
}

// ratioTo is the cell that divides our figure by the figure of a rung; it is empty for our own rungs.
func ratioTo(results *rig.Results, system string, r rung, figure string) string {
	if r.isOurs() {
		return ""
	}
	return results.Ratio(system, figure, r.name, figure).Format(rig.Ratio)
}

// otherAnswers names the designs that did not accept every buyer.
func otherAnswers(results *rig.Results, all []rung) string {
	var others []string
	for _, r := range all {
		if s := results.Of(r.name, failed); s.Median > 0 {
			others = append(others, fmt.Sprintf("%s %s %%", r.title, rig.Ratio(s.Median)))
		}
	}
	if len(others) == 0 {
		return "none"
	}
	return strings.Join(others, ", ")
}

func putLatencyTable(b *testing.B, results *rig.Results, all []rung) {
	b.Helper()
	t := rig.Table{
		Title: "How long a buyer waits",
		Note: fmt.Sprintf("Open loop over %d connections, at half of what the design accepted in a closed loop of the same "+
			"round, and at %d buyers a second for all. A buyer who was due and never got a connection counts with the "+
			"time waited so far.", openConnections, commonRate),
		Head: []string{
			"design", "half load: answers/s", "p50, ms", "p99, ms", fmt.Sprintf("%d/s: p50, ms", commonRate), "p99, ms",
		},
		Bars: 3,
	}
	for _, r := range all {
		row := append([]string{r.title}, results.Medians(rig.Count, r.name, halfLoad+rate)...)
		t.Rows = append(t.Rows, append(row, results.Medians(rig.Ratio, r.name,
			halfLoad+p50, halfLoad+p99, commonLoad+p50, commonLoad+p99)...))
	}
	rig.Put(t)
}

func putCPUTable(b *testing.B, results *rig.Results, all []rung) {
	b.Helper()
	t := rig.Table{
		Title: "CPU time for each order",
		Note: "Microseconds, user and system, in the closed loop. Load, front and Redis for each order that was accepted; " +
			"the worker and Postgres, with all its processes, for each that was written. What a design does in the " +
			"background of its front is in the front's time.",
		Head: append([]string{"design"}, rig.Roles...),
	}
	for _, r := range all {
		t.Rows = append(t.Rows, append([]string{r.title}, results.Medians(rig.Ratio, r.name, cpuFigures...)...))
	}
	rig.Put(t)
}

package limits

import (
	"fmt"
	"math"
	"testing"

	"stampede/bench/page"
	"stampede/bench/rig"
)

// The candidates that the tables refer to by name.
const (
	oursAccept  = "`stampede serve`"
	oursRecord  = "`stampede work`, one process"
	echoNothing = "Echo, nothing behind it"
	echoRaw     = "Echo, prebuilt bytes"
	scriptSame  = "reserve script, as many in a call as `serve` has, 1 connection"
	insertOne   = "unnest inserts, 500 orders a transaction, 1 connection"
	insertTwo   = "unnest inserts, 500 orders a transaction, 2 connections"
	copyOne     = "COPY, 500 orders a transaction, 1 connection"
	readAck     = "XREADGROUP COUNT 500 and one XACK, 1 connection"
)

// BenchmarkLimits compares each stage with its limit, in one run.
func BenchmarkLimits(b *testing.B) {
	// In the first round the ingress has the first turn, which measures how many buyers share a call.
	inCall := 0
	candidates := []rig.Candidate{
		{Name: oursAccept, Turn: func(b *testing.B, _ int) rig.Values {
			values := serve(b, rig.Stampede{})
			inCall = int(math.Round(values[perCall]))
			return values
		}},
		{Name: echoNothing, Turn: nothing("nothing")},
		{Name: echoRaw, Turn: nothing("nothing-raw")},
		{Name: scriptSame, Turn: script(func() int { return inCall }, 1)},
	}
	for _, connections := range []int{1, 4} {
		for _, batch := range rig.Scale(b, []int{1, 16, 64, 256}, []int{1, 256}) {
			candidates = append(candidates, rig.Candidate{
				Name: fmt.Sprintf("reserve script, %d in a call, %s", batch, plural(connections)),
				Turn: script(func() int { return batch }, connections),
			})
		}
	}
	candidates = append(candidates,
		rig.Candidate{Name: oursRecord, Turn: work},
		rig.Candidate{Name: insertOne, Turn: insert(insertUnnest, 1)},
		rig.Candidate{Name: insertTwo, Turn: insert(insertUnnest, 2)},
		rig.Candidate{Name: copyOne, Turn: insert(insertCopy, 1)},
		rig.Candidate{Name: readAck, Turn: read},
	)
	results := rig.Compare(b, candidates...)

	rig.Put(stageTable(b, results))
	rig.Put(candidateTable(b, results, candidates))
	results.Report(b, oursAccept, perSecond, "accepted/s")
	results.Report(b, oursRecord, perSecond, "durable/s")
}

// stageTable compares our figures with each limit.
func stageTable(b *testing.B, results *rig.Results) page.Table {
	b.Helper()
	table := page.Table{
		Title: "Each stage and its limit",
		Note: fmt.Sprintf("Medians of %d rounds, in brackets the least and the greatest; a share is the median of the "+
			"shares of the rounds. Script calls of `serve` had %s "+
			"buyers.", b.N, results.Of(oursAccept, perCall).Format(rig.Count)),
		Head: []string{"stage", "its limit", "limit, orders/s", "ours", "orders/s", "share", "at least"},
	}
	for _, s := range []struct{ stage, ours, limit, target string }{
		{"HTTP", oursAccept, echoNothing, "1.1"},
		{"HTTP", oursAccept, echoRaw, ""},
		{"decision", oursAccept, scriptSame, ""},
		{"stream", oursRecord, readAck, ""},
		{"Postgres", oursRecord, insertOne, "0.85"},
		{"Postgres", oursRecord, insertTwo, ""},
		{"Postgres", oursRecord, copyOne, ""},
	} {
		share := results.Ratio(s.ours, perSecond, s.limit, perSecond)
		table.Rows = append(table.Rows, []string{
			s.stage, s.limit, results.Of(s.limit, perSecond).Format(rig.Count),
			s.ours, results.Of(s.ours, perSecond).Format(rig.Count), share.Format(rig.Ratio), s.target,
		})
	}
	for _, s := range []struct{ limit, ours, unit string }{
		{echoNothing, oursAccept, "accepted÷Echo-doing-nothing"},
		{insertOne, oursRecord, "durable÷raw-batch-insert"},
	} {
		b.ReportMetric(results.Ratio(s.ours, perSecond, s.limit, perSecond).Median, s.unit)
	}
	return table
}

// candidateTable shows the cost of an order for every candidate, by process.
func candidateTable(b *testing.B, results *rig.Results, candidates []rig.Candidate) page.Table {
	b.Helper()
	table := page.Table{
		Title: "What an order costs",
		Note: "CPU time in microseconds for each order, by process, beside the rate. “load” is the benchmark: " +
			"the buyers, " +
			"or, where there is no ingress and no worker, the client that makes the calls.",
		Head: append([]string{"", "orders/s"}, rig.Roles...),
	}
	for _, c := range candidates {
		row := []string{c.Name, results.Of(c.Name, perSecond).Format(rig.Count)}
		for _, role := range rig.Roles {
			row = append(row, results.Of(c.Name, role).FormatMedian(rig.Ratio))
		}
		table.Rows = append(table.Rows, row)
	}
	return table
}

func plural(connections int) string {
	if connections == 1 {
		return "1 connection"
	}
	return fmt.Sprint(connections, " connections")
}

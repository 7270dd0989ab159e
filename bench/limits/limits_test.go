package limits

import (
	"fmt"
	"math"
	"slices"
	"testing"

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
		rig.Candidate{Name: oursRecord, Turn: func(b *testing.B, _ int) rig.Values {
			return stampede.work(b, backlogOrders(b))
		}},
		rig.Candidate{Name: insertOne, Turn: insert(insertUnnest, 1)},
		rig.Candidate{Name: insertTwo, Turn: insert(insertUnnest, 2)},
		rig.Candidate{Name: copyOne, Turn: insert(insertCopy, 1)},
		rig.Candidate{Name: readAck, Turn: read},
	)
	results := rig.Compare(b, candidates...)

	table := rig.Table{
		Title: "Each stage and its limit",
		Note: fmt.Sprintf("Orders a second, what ours reach of it, and the CPU time of an order by process in µs. “load” is "+
			"the benchmark: the buyers, or, where there is no ingress and no worker, the client that makes the calls. Script "+
			"calls of `serve` had %s buyers. Medians of %d rounds, with the least and the greatest.",
			results.Of(oursAccept, perCall).Format(rig.Count), b.N),
		Head: append([]string{"", "orders/s", "ours ÷ it"}, rig.Roles...),
	}
	comparedWith := map[string]string{
		echoNothing: oursAccept, echoRaw: oursAccept, scriptSame: oursAccept,
		insertOne: oursRecord, insertTwo: oursRecord, copyOne: oursRecord, readAck: oursRecord,
	}
	for _, c := range candidates {
		share := ""
		if ours, found := comparedWith[c.Name]; found {
			share = results.Ratio(ours, perSecond, c.Name, perSecond).Format(rig.Ratio)
		}
		table.Rows = append(table.Rows, slices.Concat(
			[]string{c.Name, results.Of(c.Name, perSecond).Format(rig.Count), share},
			results.Medians(rig.Ratio, c.Name, rig.Roles...)))
	}
	rig.Put(table)
	results.Report(b, oursAccept, perSecond, "accepted/s")
	results.Report(b, oursRecord, perSecond, "durable/s")
	for limit, unit := range map[string]string{
		echoNothing: "accepted÷Echo-doing-nothing", insertOne: "durable÷raw-batch-insert",
	} {
		b.ReportMetric(results.Ratio(comparedWith[limit], perSecond, limit, perSecond).Median, unit)
	}
}

func plural(connections int) string {
	if connections == 1 {
		return "1 connection"
	}
	return fmt.Sprint(connections, " connections")
}

const (
	withReader    = "`stampede serve`, plain purchases in front of net/http"
	withoutReader = "`stampede serve --plain-reader=off`"
)

// BenchmarkPlainReader compares an ingress that reads plain purchases in front of net/http with one that does not.
func BenchmarkPlainReader(b *testing.B) {
	mode := func(reader string) turn {
		return func(b *testing.B, _ int) rig.Values {
			return serve(b, rig.Stampede{Env: []string{"STAMPEDE_PLAIN_READER=" + reader}})
		}
	}
	results := rig.Compare(b, rig.Candidate{Name: withReader, Turn: mode("on")},
		rig.Candidate{Name: withoutReader, Turn: mode("off")})
	ratio := results.Ratio(withReader, perSecond, withoutReader, perSecond)
	table := rig.Table{
		Title: "Plain purchases in front of net/http",
		Note: fmt.Sprintf("Accepted orders, and CPU time for each in µs; medians of %d rounds. An ingress with the reader "+
			"accepts %s times as many.", b.N, ratio.Format(rig.Ratio)),
		Head: append([]string{"", "orders/s"}, rig.Roles...),
	}
	for _, name := range []string{withReader, withoutReader} {
		table.Rows = append(table.Rows, append([]string{name, results.Of(name, perSecond).Format(rig.Count)},
			results.Medians(rig.Ratio, name, rig.Roles...)...))
	}
	rig.Put(table)
	b.ReportMetric(ratio.Median, "on÷off")
}

package growth

import (
	"fmt"
	"strconv"
	"testing"

	"stampede/bench/rig"
)

// columns are the figures of a series, in the order of its table.
var columns = []struct {
	figure, head string
	write        func(float64) string
	spread       bool // with the least and the greatest
}{
	{accepted, "accepted/s", rig.Count, true},
	{soldOut, "sold out/s", rig.Count, false},
	{durable, "durable/s", rig.Count, true},
	{p99, "p99, ms", rig.Ratio, false},
	{cpu, "CPU, µs", rig.Ratio, false},
	{serveMemory, "`serve`, MiB", megabytes, false},
	{workMemory, "`work`, MiB", megabytes, false},
	{redisMost, "Redis at most, B", rig.Count, false},
	{redisAfter, "after, B", rig.Count, false},
}

// grow runs the sales of a series in turns and puts the results on the page. Figures that the series
// does not have are left out.
func grow(b *testing.B, s series) {
	b.Helper()
	var candidates []rig.Candidate
	for _, at := range s.at {
		p := s.plan(at)
		candidates = append(candidates, rig.Candidate{
			Name: strconv.Itoa(at),
			Turn: func(b *testing.B, _ int) rig.Values { return run(b, p) },
		})
	}
	results := rig.Compare(b, candidates...)
	table := rig.Table{
		Title: "Growth in " + s.grows, Note: fmt.Sprintf("%s Medians of %d rounds.", s.note, b.N), Head: []string{s.grows},
	}
	for _, at := range s.at {
		table.Rows = append(table.Rows, []string{rig.Count(float64(at))})
	}
	for _, c := range columns {
		measured := false
		for _, at := range s.at {
			measured = measured || results.Of(strconv.Itoa(at), c.figure).N > 0
		}
		if !measured {
			continue
		}
		if c.figure == durable {
			table.Bars = len(table.Head)
		}
		table.Head = append(table.Head, c.head)
		for i, at := range s.at {
			cell := results.Of(strconv.Itoa(at), c.figure)
			if !c.spread {
				table.Rows[i] = append(table.Rows[i], cell.FormatMedian(c.write))
				continue
			}
			table.Rows[i] = append(table.Rows[i], cell.Format(c.write))
		}
	}
	rig.Put(table)
	for _, at := range s.at {
		for _, figure := range []string{accepted, durable, redisAfter} {
			results.Report(b, strconv.Itoa(at), figure, figure)
		}
	}
}

func megabytes(v float64) string { return rig.Count(v / (1 << 20)) }

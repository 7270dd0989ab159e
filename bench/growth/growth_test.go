package growth

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"stampede/bench/rig"
)

func TestMain(m *testing.M) { rig.Main(m, "growth") }

// plan is one sale, or several at the same time.
type plan struct {
	// stock is the units of all sales together, and buyers the number of buyers, who each buy one unit
	// once. If both are 0, stock and buyers are unlimited within the duration.
	stock, buyers int
	duration      time.Duration
	connections   int
	workers       int // processes of `stampede work`
	partitions    int
	sales         int
	longIDs       bool // user ids are UUIDs, instead of a word and a number
}

// defaultPlan holds the settings that a series does not vary.
func defaultPlan() plan { return plan{connections: 256, workers: 1, partitions: 1, sales: 1} }

// series varies one setting.
type series struct {
	grows string
	note  string
	at    []int
	vary  func(p *plan, at int)
}

// crowdDuration is how long an unlimited crowd sends requests.
func crowdDuration(b *testing.B) time.Duration {
	return rig.Scale(b, 2*time.Second, 150*time.Millisecond)
}

// BenchmarkGrowthStock sells stocks of growing size until they are sold out.
func BenchmarkGrowthStock(b *testing.B) {
	grow(b, series{
		grows: "units",
		note:  "As many buyers as units, 256 connections, one worker.",
		at:    rig.Scale(b, []int{1000, 10_000, 100_000, 1_000_000}, []int{500, 2000}),
		vary:  func(p *plan, at int) { p.stock, p.buyers = at, at },
	})
}

// BenchmarkGrowthBuyers sends crowds of growing size to the same stock: most buyers find it sold out.
func BenchmarkGrowthBuyers(b *testing.B) {
	stock := rig.Scale(b, 10_000, 500)
	grow(b, series{
		grows: "buyers",
		note: fmt.Sprintf("A stock of %s units, 256 connections, one worker. Costs are for each buyer, winner or loser.",
			rig.Count(float64(stock))),
		at:   rig.Scale(b, []int{10_000, 100_000, 1_000_000}, []int{500, 5000}),
		vary: func(p *plan, at int) { p.stock, p.buyers = stock, at },
	})
}

// BenchmarkGrowthConnections sends requests over a growing number of connections.
func BenchmarkGrowthConnections(b *testing.B) {
	grow(b, series{
		grows: "connections",
		note:  fmt.Sprintf("A closed loop for %v, one worker.", crowdDuration(b)),
		at:    rig.Scale(b, []int{1, 4, 16, 64, 256}, []int{1, 256}),
		vary:  func(p *plan, at int) { p.duration, p.connections = crowdDuration(b), at },
	})
}

// BenchmarkGrowthWorkers shares the orders of one sale among a growing number of processes.
func BenchmarkGrowthWorkers(b *testing.B) {
	grow(b, series{
		grows: "workers",
		note:  fmt.Sprintf("A crowd on 256 connections for %v, on the same cores as the workers.", crowdDuration(b)),
		at:    rig.Scale(b, []int{1, 2, 3, 4}, []int{1, 4}),
		vary:  func(p *plan, at int) { p.duration, p.workers = crowdDuration(b), at },
	})
}

// BenchmarkGrowthPartitions spreads several sales over a growing number of partitions.
func BenchmarkGrowthPartitions(b *testing.B) {
	const sales = 16
	grow(b, series{
		grows: "partitions",
		note: fmt.Sprintf("%d sales at the same time, evenly spread over the partitions; a crowd on 256 connections for %v, "+
			"one worker.", sales, crowdDuration(b)),
		at:   rig.Scale(b, []int{1, 4, 16}, []int{1, 16}),
		vary: func(p *plan, at int) { p.duration, p.sales, p.partitions = crowdDuration(b), sales, at },
	})
}

// BenchmarkGrowthUserIDs sells to buyers with short ids and with UUIDs, which Redis stores with each
// order.
func BenchmarkGrowthUserIDs(b *testing.B) {
	const short, long = 12, 36
	stock := rig.Scale(b, 100_000, 1000)
	grow(b, series{
		grows: "characters of a user id",
		note: fmt.Sprintf("A stock of %s units for as many buyers: `buyer-1`, `buyer-2` and so on with up to %d "+
			"characters, as in all other series, and UUIDs with %d.", rig.Count(float64(stock)), short, long),
		at:   []int{short, long},
		vary: func(p *plan, at int) { p.stock, p.buyers, p.longIDs = stock, stock, at == long },
	})
}

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
		p := defaultPlan()
		s.vary(&p, at)
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

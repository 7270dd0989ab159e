package growth

import (
	"fmt"
	"testing"
	"time"

	"stampede/bench/rig"
)

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
		plan: func(at int) plan {
			p := defaultPlan()
			p.stock, p.buyers = at, at
			return p
		},
	})
}

// BenchmarkGrowthBuyers sends crowds of growing size to the same stock: most buyers find it sold out.
func BenchmarkGrowthBuyers(b *testing.B) {
	stock := rig.Scale(b, 10_000, 500)
	grow(b, series{
		grows: "buyers",
		note: fmt.Sprintf("A stock of %s units, 256 connections, one worker. Costs are for each buyer, winner or loser.",
			rig.Count(float64(stock))),
		at: rig.Scale(b, []int{10_000, 100_000, 1_000_000}, []int{500, 5000}),
		plan: func(at int) plan {
			p := defaultPlan()
			p.stock, p.buyers = stock, at
			return p
		},
	})
}

// BenchmarkGrowthConnections sends requests over a growing number of connections.
func BenchmarkGrowthConnections(b *testing.B) {
	grow(b, series{
		grows: "connections",
		note:  fmt.Sprintf("A closed loop for %v, one worker.", crowdDuration(b)),
		at:    rig.Scale(b, []int{1, 4, 16, 64, 256}, []int{1, 256}),
		plan: func(at int) plan {
			p := defaultPlan()
			p.duration, p.connections = crowdDuration(b), at
			return p
		},
	})
}

// BenchmarkGrowthWorkers shares the orders of one sale among a growing number of processes.
func BenchmarkGrowthWorkers(b *testing.B) {
	grow(b, series{
		grows: "workers",
		note:  fmt.Sprintf("A crowd on 256 connections for %v, on the same cores as the workers.", crowdDuration(b)),
		at:    rig.Scale(b, []int{1, 2, 3, 4}, []int{1, 4}),
		plan: func(at int) plan {
			p := defaultPlan()
			p.duration, p.workers = crowdDuration(b), at
			return p
		},
	})
}

// BenchmarkGrowthPartitions spreads several sales over a growing number of partitions.
func BenchmarkGrowthPartitions(b *testing.B) {
	const sales = 16
	grow(b, series{
		grows: "partitions",
		note: fmt.Sprintf("%d sales at the same time, evenly spread over the partitions; a crowd on 256 connections for %v, "+
			"one worker.", sales, crowdDuration(b)),
		at: rig.Scale(b, []int{1, 4, 16}, []int{1, 16}),
		plan: func(at int) plan {
			p := defaultPlan()
			p.duration, p.sales, p.partitions = crowdDuration(b), sales, at
			return p
		},
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
		at: []int{short, long},
		plan: func(at int) plan {
			p := defaultPlan()
			p.stock, p.buyers, p.longIDs = stock, stock, at == long
			return p
		},
	})
}

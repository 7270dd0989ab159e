package doctor

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/reservation"
	"stampede/sql"
)

// Speed is how fast a server answers: medians, in milliseconds.
type Speed struct {
	RoundTrip float64 `json:"round_trip_ms"`
	// Sync is what a write that survives a crash takes beyond the round trip.
	Sync float64 `json:"sync_ms"`
}

// From these times on, in milliseconds, a server is slow.
const (
	slowPurchase = 20
	slowBatch    = 50
)

// Speeds measures Redis, or each master of a cluster, and Postgres, about a second each. A server that does not answer,
// or refuses writes, is left out: the other checks report it.
func Speeds(ctx context.Context, rdb redis.UniversalClient, pool *pgxpool.Pool) (found []Finding) {
	if client, isCluster := rdb.(*redis.ClusterClient); !isCluster {
		found = redisSpeed(ctx, rdb, "", 0)
	} else if seen, err := lookAt(ctx, client); err == nil {
		var mu sync.Mutex
		partitions := partitionsByMaster(ctx, client)
		seen.each(ctx, func(ctx context.Context, addr string, node *redis.Client) {
			if len(partitions[addr]) == 0 {
				return
			}
			speed := redisSpeed(ctx, node, addr, partitions[addr][0])
			mu.Lock()
			defer mu.Unlock()
			found = append(found, speed...)
		})
		slices.SortFunc(found, func(a, b Finding) int { return cmp.Compare(a.Node, b.Node) })
	}
	return append(found, postgresSpeed(ctx, pool)...)
}

func redisSpeed(ctx context.Context, rdb redis.UniversalClient, node string, partition int) []Finding {
	write := func(logged bool) func(context.Context) error {
		return func(ctx context.Context) error {
			return reservation.ProbeWrite(ctx, rdb, doctorKeys, partition, logged)
		}
	}
	s, ok := measure(ctx, write(false), write(true))
	if !ok {
		return nil
	}
	return []Finding{s.finding(Finding{
		Severity: Measured, Server: "redis", Node: node,
		What: fmt.Sprintf("a round trip takes %s, and a write to the append-only file %s more",
			millis(s.RoundTrip), millis(s.Sync)),
		Why: fmt.Sprintf("a purchase waits at least %s, and twice that if it comes during the call of others",
			millis(s.RoundTrip+s.Sync)),
		Mend: "run the ingresses nearer to Redis, or put the append-only file on a disk that syncs faster",
	}, slowPurchase)}
}

func postgresSpeed(ctx context.Context, pool *pgxpool.Pool) []Finding {
	run := func(query string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := pool.Exec(ctx, query)
			return err
		}
	}
	s, ok := measure(ctx, run("SELECT 1"), run(sql.DoctorCommit))
	if !ok {
		return nil
	}
	return []Finding{s.finding(Finding{
		Severity: Measured, Server: "postgres",
		What: fmt.Sprintf("a round trip takes %s, and a commit %s more", millis(s.RoundTrip), millis(s.Sync)),
		Why: fmt.Sprintf("no purchase waits for it, and a batch of orders takes at least %s to be recorded",
			millis(s.RoundTrip+s.Sync)),
		Mend: "run the workers nearer to Postgres, or put its log on a disk that syncs faster",
	}, slowBatch)}
}

// finding adds the speed to a finding, which is a warning if the server is slow.
func (s Speed) finding(f Finding, slow float64) Finding {
	if f.Speed = &s; s.RoundTrip+s.Sync >= slow {
		f.Severity = Warning
	}
	return f
}

// A measurement ends after so many samples, or after so long.
const (
	samplesMax = 25
	measureFor = 700 * time.Millisecond // less than nodeTimeout
)

// measure returns the medians of a call and of what another one takes beyond it, which take turns. It is not ok if one
// fails.
func measure(ctx context.Context, call, sync func(context.Context) error) (s Speed, ok bool) {
	var took [2][]int64 // µs
	until := time.Now().Add(measureFor)
	for n := 0; n <= samplesMax && (n < 2 || time.Now().Before(until)); n++ {
		for i, do := range []func(context.Context) error{call, sync} {
			began := time.Now()
			if do(ctx) != nil {
				return s, false
			}
			if n > 0 { // the first one may connect
				took[i] = append(took[i], time.Since(began).Microseconds())
			}
		}
	}
	median := func(of []int64) int64 {
		slices.Sort(of)
		return of[len(of)/2]
	}
	roundTrip := median(took[0])
	return Speed{float64(roundTrip) / 1000, float64(max(0, median(took[1])-roundTrip)) / 1000}, true
}

func millis(ms float64) string { return fmt.Sprintf("%.2f ms", ms) }

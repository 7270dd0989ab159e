//go:build system

package fleet

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
)

// A look more would be a look a second for each of the operators who watch.
func TestWatchersAddNoLooks(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	s.Open(t, 10)
	looksOf := func(watchers int) (perSnapshot float64) {
		pool, count := countedPool(t)
		f := fleetOf(t, pool, s)
		running(t, f)
		const snapshots = 8
		var watching sync.WaitGroup
		for range watchers {
			watching.Go(func() {
				for seen := uint64(0); seen < snapshots; {
					next, err := f.Next(context.Background(), seen)
					if err != nil || next.Number <= seen {
						t.Error("a watcher got no newer snapshot", err)
						return
					}
					seen = next.Number
					_ = f.History()
				}
			})
		}
		watching.Wait()
		return float64(count.statements.Load()) / float64(f.Snapshot().Number+1)
	}
	one, fifty := looksOf(1), looksOf(50)
	require.Positive(t, one)
	require.LessOrEqual(t, one, 3.0)
	require.LessOrEqual(t, fifty, 3.0)
}

func TestPostgresGoneAndBack(t *testing.T) {
	t.Parallel()
	s, own := testshop.OnOwnPostgres(t)
	sale := s.Open(t, 10)
	f := fleetOf(t, s.Pool, s)
	known := func(x *Snapshot) bool { return saleIn(x, sale).UnitsKnown }
	f.play(t, "the sale is counted", known)

	for _, isReadOnly := range []bool{true, false} {
		for _, statement := range []string{
			fmt.Sprintf("ALTER SYSTEM SET default_transaction_read_only = %t", isReadOnly), "SELECT pg_reload_conf()",
		} {
			require.NoError(t, s.Exec(t, statement))
		}
		f.play(t, "it is shown whether Postgres takes writes", func(x *Snapshot) bool {
			return x.Postgres.Reachable && slices.Contains(troubleNames(x), postgresGone.name) == isReadOnly
		})
	}

	own.StopImmediate()
	snapshot := f.play(t, "Postgres is gone", func(x *Snapshot) bool {
		return !x.Postgres.Reachable && x.Redis.Reachable
	})
	since := snapshot.Postgres.Since
	require.NotEmpty(t, snapshot.Postgres.Error)
	shown := saleIn(snapshot, sale)
	require.Equal(t, int64(10), shown.Stock, "as it was last read")
	require.False(t, shown.UnitsKnown)
	require.Equal(t, postgresGone.name, snapshot.Troubles[0].Name)
	require.Equal(t, Critical, snapshot.Troubles[0].Severity)
	f.round(t.Context())
	require.Equal(t, since, f.Snapshot().Postgres.Since)
	points := f.History()
	require.False(t, points[len(points)-1].Sales[sale].Known)

	require.NoError(t, own.Restart(t.Context()))
	snapshot = f.play(t, "Postgres is back", known)
	require.True(t, snapshot.Postgres.Since.After(since))
	require.NotContains(t, troubleNames(snapshot), postgresGone.name)
}

func TestRedisGoneAndBack(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := testshop.NewShopOn(t, testshop.Options{RedisURL: own.URL})
	sale := s.Open(t, 10)
	f := fleetOf(t, s.Pool, s)
	known := func(x *Snapshot) bool { return saleIn(x, sale).UnitsKnown }
	f.play(t, "the sale is counted", known)
	require.NotEmpty(t, f.nodes)

	own.Kill()
	snapshot := f.play(t, "Redis is gone", func(x *Snapshot) bool {
		return !x.Redis.Reachable && x.Postgres.Reachable
	})
	require.True(t, snapshot.SalesRead)
	require.False(t, saleIn(snapshot, sale).UnitsKnown)
	require.Contains(t, troubleNames(snapshot), redisGone.name)

	// It is back with all of its data, and sells nothing until a worker has verified it.
	require.Equal(t, "not selling", saleIn(snapshot, sale).Status())
	require.NoError(t, own.Restart(t.Context()))
	f.play(t, "the sale is shut", func(x *Snapshot) bool {
		return strings.Contains(saleIn(x, sale).Shut, "not verified")
	})
	f.play(t, "that is a trouble", func(x *Snapshot) bool {
		for _, trouble := range x.Troubles {
			if trouble.Name == saleShut.name && trouble.Severity == Critical {
				return true
			}
		}
		return false
	})
	testkit.VerifyServer(t, s.Pool, s.Store, 0)
	f.play(t, "the sale sells", func(x *Snapshot) bool { return saleIn(x, sale).Shut == "" && known(x) })
}

func TestFrozenRedisDelaysNoSnapshot(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := testshop.NewShopOn(t, testshop.Options{RedisURL: own.URL})
	s.Open(t, 10)
	f := fleetOf(t, s.Pool, s)
	f.play(t, "Redis answers", func(x *Snapshot) bool { return x.Redis.Reachable })
	own.Freeze()
	t.Cleanup(own.Thaw)
	snapshot := f.play(t, "Redis is gone", func(x *Snapshot) bool {
		return !x.Redis.Reachable && x.Postgres.Reachable
	})
	require.Contains(t, snapshot.Redis.Error, "in time")
	requireNoDelay(t, f)
	own.Thaw()
	f.play(t, "Redis is back", func(x *Snapshot) bool { return x.Redis.Reachable })
}

// Processes come and go behind one name: one that is gone is shown as gone, and not as one that does nothing.
func TestAddressesOfNameAreProcesses(t *testing.T) {
	t.Parallel()
	first := newPageAt(t, "127.0.0.1:0", ingressPage(1, 100, 0, 0, 0))
	_, port, err := net.SplitHostPort(first.Listener.Addr().String())
	require.NoError(t, err)
	second := newPageAt(t, "127.0.0.2:"+port, ingressPage(1, 100, 0, 0, 0))
	names.set("ingress.test.", "127.0.0.2", "127.0.0.1")
	f, _ := newFleet(t, "dns+http://ingress.test:"+port)
	// up are the addresses that answer and those that do not, in their order.
	up := func(s *Snapshot) (up, gone []string) {
		for _, p := range s.Processes {
			host := strings.TrimSuffix(strings.TrimPrefix(p.Target, "http://"), ":"+port+"/metrics")
			if p.Up {
				up = append(up, host)
			} else {
				gone = append(gone, host)
			}
		}
		return up, gone
	}
	are := func(wantUp, wantGone []string) func(*Snapshot) bool {
		return func(s *Snapshot) bool {
			nowUp, gone := up(s)
			return slices.Equal(nowUp, wantUp) && slices.Equal(gone, wantGone)
		}
	}
	f.play(t, "both addresses are processes", are([]string{"127.0.0.1", "127.0.0.2"}, nil))
	sold := 100
	f.play(t, "their purchases are added", func(s *Snapshot) bool {
		sold += 50
		first.set(ingressPage(1, sold, 0, 0, 0))
		second.set(ingressPage(1, sold, 0, 0, 0))
		p := s.Processes
		return p[0].PerSecond > 0 && p[1].PerSecond > 0 && s.Rates.Accepted == p[0].PerSecond+p[1].PerSecond
	})

	second.CloseClientConnections()
	second.Close()
	s := f.play(t, "one is gone", are([]string{"127.0.0.1"}, []string{"127.0.0.2"}))
	require.NotEmpty(t, s.Processes[1].Error)
	require.False(t, s.Processes[1].LastSeen.IsZero())
	require.Equal(t, []string{targetGone.name}, troubleNames(s))
	require.Contains(t, s.Troubles[0].Text, "127.0.0.2")

	newPageAt(t, "127.0.0.3:"+port, ingressPage(1, 7, 0, 0, 0))
	names.set("ingress.test.", "127.0.0.3", "127.0.0.1")
	f.play(t, "a new one is there, and the lost one is not forgotten yet",
		are([]string{"127.0.0.1", "127.0.0.3"}, []string{"127.0.0.2"}))
	f.mu.Lock()
	for _, p := range f.processes {
		p.listedAt = p.listedAt.Add(-forgetAfter)
	}
	f.mu.Unlock()
	s = f.play(t, "what the name has lost is forgotten", are([]string{"127.0.0.1", "127.0.0.3"}, nil))
	require.Empty(t, troubleNames(s))

	// A name server that fails says nothing about the processes.
	names.set("ingress.test.")
	s = f.play(t, "the name has no address", func(s *Snapshot) bool { return len(s.Processes) == 3 })
	require.True(t, s.Processes[0].Up)
	require.True(t, s.Processes[1].Up)
	require.NotEmpty(t, s.Processes[2].Error)
	require.WithinDuration(t, time.Now(), s.Processes[2].Since, time.Minute)
}

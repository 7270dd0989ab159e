//go:build system

package relay_test

import (
	"context"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
	"stampede/relay"
	"stampede/relay/target"
	"stampede/sql/migrate"
)

// Two processes, of which one after the other is killed or frozen at a random instant, while random transactions write
// events: the receivers miss none, and get each order's in order.
func TestKilledRelaysLoseNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	shop, other := newReceiver(t), newReceiver(t)
	slow := func(http.ResponseWriter, string) int {
		<-time.After(time.Duration(rand.IntN(5)) * time.Millisecond)
		if rand.IntN(50) == 0 {
			return http.StatusBadGateway
		}
		return http.StatusNoContent
	}
	shop.respond(slow)
	b.add(t, "shop", shop.url)
	b.add(t, "other", other.url)

	var mu sync.Mutex
	var events []string
	writing, stopWriting := context.WithCancel(t.Context())
	defer stopWriting()
	var writers errgroup.Group
	for range 3 {
		writers.Go(func() error {
			for writing.Err() == nil {
				ids, err := writeTogether(context.Background(), b.pool, 1+rand.IntN(5),
					time.Duration(rand.IntN(20))*time.Millisecond, rand.IntN(5) > 0)
				if err != nil {
					return err
				}
				mu.Lock()
				events = append(events, ids...)
				mu.Unlock()
			}
			return nil
		})
	}
	processes := []*testkit.Cmd{b.process(t), b.process(t)}
	for _, p := range processes {
		p.Start()
	}
	var frozen *testkit.Cmd
	for round := range 8 {
		seen := len(shop.got())
		testkit.Eventually(t, within, "progress", func() bool { return len(shop.got()) > seen+20 })
		<-time.After(time.Duration(random.IntN(300)) * time.Millisecond)
		i := random.IntN(2)
		if frozen != nil {
			frozen.Thaw()
			frozen = nil
		}
		if round%3 == 2 {
			frozen = processes[i]
			frozen.Freeze()
			continue
		}
		processes[i].Kill()
		processes[i] = b.process(t)
		processes[i].Start()
	}
	if frozen != nil {
		frozen.Thaw()
	}
	stopWriting()
	require.NoError(t, writers.Wait())
	shop.respond(nil)
	for name, r := range map[string]*receiver{"shop": shop, "other": other} {
		r.await(t, events)
		b.rest(t, name)
		t.Logf("%s: %d events, %d repeats", name, len(events), r.repeats())
	}
}

func TestCrashAroundMoveOfPosition(t *testing.T) {
	t.Parallel()
	for _, point := range []string{crashpoint.BeforeRelayMove, crashpoint.AfterRelayMove} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			r := newReceiver(t)
			b.add(t, "shop", r.url)
			events := b.write(t, 10)
			p := b.process(t)
			p.Setenv(crashpoint.Env, point)
			p.Start()
			p.WaitKilled(within)
			moved := b.standing(t, "shop").Position > 0
			require.Equal(t, point == crashpoint.AfterRelayMove, moved)
			more := b.write(t, 2)
			next := b.process(t)
			next.Start()
			r.await(t, slices.Concat(events, more))
			if !moved {
				require.Positive(t, r.repeats())
			}
		})
	}
}

// A frozen process loses its targets, and cannot move their positions when it continues.
func TestFrozenRelayIsReplaced(t *testing.T) {
	t.Parallel()
	b := setup(t)
	r := newReceiver(t)
	b.add(t, "shop", r.url)
	events := b.write(t, 5)
	old := b.process(t)
	old.Setenv(crashpoint.FreezeEnv, crashpoint.BeforeRelayMove)
	old.Start()
	old.WaitOutput(within, "frozen at")
	require.Zero(t, b.standing(t, "shop").Position)
	next := b.process(t)
	next.Start()
	b.rest(t, "shop")
	_, err := b.targets.SetPosition(t.Context(), "shop", 0)
	require.NoError(t, err)
	require.NoError(t, b.targets.SetState(t.Context(), "shop", target.Paused))
	old.Thaw()
	old.WaitOutput(within, "was changed")
	require.Zero(t, b.standing(t, "shop").Position, "the old process delivered these events once, and recorded nothing")
	r.await(t, events)
}

// A process that was frozen while its target was removed and added again, for another receiver, knows the name only.
func TestFrozenRelayLeavesTargetThatWasAddedAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	removed, added := newReceiver(t), newReceiver(t)
	b.add(t, "shop", removed.url)
	events := b.write(t, 5)
	old := b.process(t)
	old.Setenv(crashpoint.FreezeEnv, crashpoint.BeforeRelayMove)
	old.Start()
	old.WaitOutput(within, "frozen at")
	require.NoError(t, b.targets.Remove(t.Context(), "shop"))
	added.respond(func(http.ResponseWriter, string) int { return http.StatusServiceUnavailable })
	b.add(t, "shop", added.url)
	next := b.process(t)
	next.Start()
	testkit.Eventually(t, within, "a failure", func() bool { return b.standing(t, "shop").Failures > 0 })
	old.Thaw()
	old.WaitOutput(within, "was changed")
	require.Zero(t, b.standing(t, "shop").Position, "the new receiver has taken nothing")
	next.Kill()
	added.respond(nil)
	b.process(t).Start()
	added.await(t, events)
}

func TestRelayOutlivesOutagesOfItsServers(t *testing.T) {
	t.Parallel()
	postgres, rdb := testkit.OwnPostgres(t), testkit.OwnRedis(t)
	require.NoError(t, migrate.Up(t.Context(), postgres.URL))
	pool, err := pgxpool.New(t.Context(), postgres.URL)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	control := testkit.Control(t, rdb.URL)
	b := &bundle{pool, control, testkit.Keys(t), target.NewStore(pool)}
	r := newReceiver(t)
	b.add(t, "shop", r.url)
	b.run(t, func(c *relay.Config) { c.Lease = time.Second })
	events := b.write(t, 10)
	r.await(t, events)

	postgres.StopImmediate()
	require.NoError(t, postgres.Restart(t.Context()))
	pool.Reset()
	events = append(events, b.write(t, 10)...)
	r.await(t, events)

	// A process that has a target keeps it without Redis: the lock only decides who begins.
	rdb.Kill()
	events = append(events, b.write(t, 10)...)
	r.await(t, events)
	b.rest(t, "shop")

	require.NoError(t, rdb.Restart(t.Context()))
	events = append(events, b.write(t, 10)...)
	r.await(t, events)
	b.rest(t, "shop")
}

//go:build system

package lock_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
)

// holdElsewhere starts a process that holds the lock of a key, and returns it with its token; see
// command.
func holdElsewhere(t *testing.T, key string, lease time.Duration) (*testkit.Cmd, int64) {
	t.Helper()
	holder := testkit.Command(t, "hold", key)
	holder.Input()
	holder.Setenv("REDIS_URL", testkit.RedisURL(t))
	holder.Setenv("LOCK_LEASE", lease.String())
	holder.Start()
	var token int64
	_, err := fmt.Sscanf(holder.WaitOutput(startsWithin, "held token="), "held token=%d", &token)
	require.NoError(t, err)
	return holder, token
}

// All times are Redis's: leases end by its clock, and tokens are its time in microseconds.
func TestSuccessorsOfAKilledHolderWaitForTheEndOfItsLease(t *testing.T) {
	b := setup(t)
	key := b.key("ann")
	const lease = 6 * time.Second
	holder, token := holdElsewhere(t, key, lease)
	acquired := b.expiry(key)

	// One waiter knows when the lease ends, the others poll.
	var waiting []<-chan *lock.Lease
	for _, poll := range []time.Duration{never, 10 * time.Millisecond, 10 * time.Millisecond} {
		waiting = append(waiting, acquiring(t, newLocker(t, b.rdb, lock.WithPoll(poll)), key))
	}
	b.waitListening(key, int64(len(waiting)))
	b.waitRenewed(key, acquired)
	for _, leases := range waiting {
		require.Empty(t, leases, "the watchdog renews the lock")
	}

	holder.Kill()
	ends, killed := b.expiry(key), b.now()
	require.LessOrEqual(t, ends.Sub(killed), lease)
	var tokens []int64
	for range waiting {
		var first *lock.Lease
		testkit.Eventually(t, lease+startsWithin, "a successor", func() bool {
			for _, leases := range waiting {
				if len(leases) > 0 {
					first = <-leases
					return true
				}
			}
			return false
		})
		tokens = append(tokens, first.Token(key))
		require.NoError(t, first.Release(t.Context()))
	}
	require.True(t, slices.IsSorted(tokens), "%d", tokens)
	assert.Greater(t, tokens[0], token)
	assert.Greater(t, tokens[0], ends.UnixMicro(), "the first successor came before the end of the lease")
	assert.Less(t, tokens[0], ends.Add(startsWithin).UnixMicro(), "the first successor came late")
}

func TestFrozenHolderLearnsOfItsLossBeforeItWrites(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	key := b.key("ann")
	const lease = 2 * time.Second
	victim, token := holdElsewhere(t, key, lease)
	victim.WriteLine("look")
	victim.WaitOutput(startsWithin, "look: <nil>")
	successors := acquiring(t, newLocker(t, b.rdb, lock.WithPoll(never)), key, lock.For(time.Minute))
	b.waitListening(key, 1)
	victim.Freeze()
	ends := b.expiry(key)
	successor := await(t, successors, lease+startsWithin, "the lock of a frozen holder")
	assert.Greater(t, successor.Token(key), ends.UnixMicro(), "the successor came before the end of the lease")
	require.Greater(t, successor.Token(key), token)

	// The victim runs these commands as soon as it continues.
	victim.WriteLine("look again")
	victim.WriteLine("release")
	victim.Thaw()
	for _, line := range []string{"look again", "ended", "release"} {
		require.Equal(t, line+": lock lost: "+key, victim.WaitOutput(startsWithin, line+": "))
	}
	require.Equal(t, 1, b.depth(key), "the victim's release leaves the successor's lock alone")
	require.NoError(t, successor.Err())
	require.NoError(t, successor.Release(ctx))
}

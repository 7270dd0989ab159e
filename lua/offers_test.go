package lua_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// offer is reserve by the worker that offers units.
func (b *bench) offer(requests ...request) []string {
	b.t.Helper()
	b.epoch += "+"
	defer func() { b.epoch = b.epoch[:len(b.epoch)-1] }()
	return b.reserve(requests...)
}

func TestOffersAreGivenByRankAndOnlyToEntrants(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.stock = 2
	b.open()
	b.set("state", "offers")
	ann, bob, cid, dan := request{"ann", "o-ann", "k1", "1"}, request{"bob", "o-bob", "k2", "1"},
		request{"cid", "o-cid", "k3", "1"}, request{"dan", "o-dan", "k4", "1"}
	require.Equal(t, []string{"offers-only"}, b.reserve(b.buy("eve")))
	require.Equal(t, []string{"reserved 1", "reserved 2", "sold-out", "sold-out"}, b.offer(ann, bob, cid, dan))
	require.Equal(t, []string{"replayed o-ann 1 1:k1", "replayed o-bob 1 2:k2", "sold-out", "sold-out"},
		b.offer(ann, bob, cid, dan), "a repeat takes nothing")
	require.Equal(t, []string{"already-purchased o-ann 1 1:k1"}, b.reserve(b.buy("ann")), "a holder learns of it")

	require.Equal(t, "released", b.end("ann", "o-ann", "k1", "1 e"))
	require.Equal(t, []string{"order-ended o-ann 1 e", "replayed o-bob 1 2:k2", "sold-out"}, b.offer(ann, bob, cid),
		"an offer that expired is not made again")
	testkit.Eventually(t, 30*time.Second, "the unit that returned is offered to the next one", func() bool {
		return b.offer(cid, dan)[0] == "reserved 3"
	})
	require.Equal(t, []string{"replayed o-cid 1 3:k3", "sold-out"}, b.offer(cid, dan))
	require.Equal(t, []string{"offers-only"}, b.reserve(b.buy("eve")))
}

func TestOffersFollowStateOfSale(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.open()
	require.Equal(t, []string{"reserved 1"}, b.offer(b.buy("ann")), "an open sale sells to all")
	b.set("state", "paused")
	require.Equal(t, []string{"paused"}, b.offer(b.buy("bob")))
	b.set("state", "offers")
	b.set("opens_at_ms", "99999999999999")
	require.Equal(t, []string{"offers-only"}, b.reserve(b.buy("bob")))
	require.Equal(t, []string{"not-open 99999999999999"}, b.offer(b.buy("bob")))
	b.set("opens_at_ms", "0")
	b.set("closes_at_ms", "1")
	require.Equal(t, []string{"ended"}, b.offer(b.buy("bob")))
	b.set("closes_at_ms", "0")
	b.set("epoch", "2")
	require.Equal(t, []string{"stale-epoch"}, b.offer(b.buy("bob")))
	b.set("epoch", "0")
	b.epoch = "0"
	require.Equal(t, []string{"stale-epoch"}, b.offer(b.buy("bob")), "closed for a rebuild")
}

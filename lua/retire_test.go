package lua_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/lua"
)

func (b *bench) retire(revision int) string {
	b.t.Helper()
	answer, err := lua.Retire.Run(b.t.Context(), b.rdb, []string{b.saleKey, b.buyers, b.ended}, b.epoch, revision).Text()
	require.NoError(b.t, err)
	return b.collect("retire", answer)
}

func TestRetireGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.shard = "0 2 8"
	require.Equal(t, "unknown-sale", b.retire(2))
	b.open()
	ann, bob := request{"ann", "order-ann", "key-1", "1"}, request{"bob", "order-bob", "key-2", "1"}
	b.reserve(ann, bob)
	require.Equal(t, "released", b.end("bob", "order-bob", "key-2", "1 c"))
	require.Equal(t, "gap 1", b.retire(3))
	b.epoch = "2"
	require.Equal(t, "stale-epoch", b.retire(2))
	b.epoch = "1"
	require.Equal(t, "illegal open", b.retire(2))
	require.Equal(t, "changed", b.nextChange("pause"))
	before := b.state()
	require.Equal(t, "illegal paused", b.retire(b.nextRevision), "it can be resumed")
	require.Equal(t, before, b.state())
	require.Equal(t, "changed", b.nextChange("end"))
	generation := b.field("generation")

	require.Equal(t, "retired", b.retire(b.nextRevision))
	require.Equal(t, "unchanged", b.retire(b.nextRevision))
	require.Zero(t, b.rdb.Exists(t.Context(), b.buyers, b.ended).Val())
	require.NotEqual(t, generation, b.field("generation"), "ingresses that remember the sale as sold out look again")
	require.Equal(t, "0 2 8", b.field("shard"))
	require.Equal(t, "retired", b.field("state"))
	b.requireAllAnswers("retire")

	before = b.state()
	require.Equal(t, []string{"retired", "retired"}, b.reserve(ann, b.buy("eve")), "whoever asks, Postgres has the answer")
	require.Equal(t, "not-held", b.end("ann", "order-ann", "key-1", "1 c"), "an order that is cancelled later")
	require.Equal(t, "unchanged", b.open(), "a late publisher does not open it again")
	require.Equal(t, "unchanged", b.take(1, 5), "nor do late units that another shard has given")
	require.Equal(t, "told 0", b.give(1, 0, 1))
	require.Equal(t, before, b.state())
}

// A sale is over at its closing time, whatever its state is.
func TestRetireAcceptsSaleThatHasClosed(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.closesAt = 1
	b.open()
	require.Equal(t, "retired", b.retire(2))
	require.Equal(t, []string{"retired"}, b.reserve(b.buy("ann")))
}

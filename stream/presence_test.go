package stream_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/stream"
)

func (b *streamBench) presence(consumer string, silentMax time.Duration) *stream.Presence {
	return &stream.Presence{Control: b.rdb, Group: reservation.Group, Consumer: consumer, SilentMax: silentMax}
}

func othersIn(t *testing.T, found stream.Present) []string {
	t.Helper()
	require.NoError(t, found.Err)
	return slices.Sorted(maps.Keys(found.Others))
}

func TestPresentWorkersSeeEachOtherUntilTheyWithdraw(t *testing.T) {
	t.Parallel()
	b, without := newStreamBench(t), newStreamBench(t)
	require.NoError(t, stream.CreateGroup(t.Context(), b.rdb, b.stream, reservation.Group))
	b.publish(1)
	b.takeAway("drained", 1) // a consumer that is no present worker
	streams := []string{without.stream, b.stream}
	ann, bob := b.presence("ann", time.Minute), b.presence("bob", time.Minute)

	found := ann.Announce(t.Context(), streams)
	require.Empty(t, othersIn(t, found[0]), "a stream without a group is no error")
	require.Empty(t, othersIn(t, found[1]))
	require.Equal(t, []string{"ann"}, othersIn(t, bob.Announce(t.Context(), streams)[1]))
	require.Equal(t, []string{"bob"}, othersIn(t, ann.Look(t.Context(), streams)[1]))
	require.Len(t, b.pending(), 1, "no entry is given to a presence")

	ann.Withdraw(t.Context(), streams)
	require.Empty(t, othersIn(t, bob.Look(t.Context(), streams)[1]))
	require.Empty(t, othersIn(t, bob.Look(t.Context(), streams)[0]))
}

func TestSilentWorkerIsNotPresent(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	require.NoError(t, stream.CreateGroup(t.Context(), b.rdb, b.stream, reservation.Group))
	streams := []string{b.stream}
	silent := b.presence("silent", time.Minute)
	silent.Announce(t.Context(), streams)
	testkit.Eventually(t, testshop.Soon, "it has been silent for too long", func() bool {
		found := b.presence("other", 50*time.Millisecond).Announce(t.Context(), streams)
		return len(othersIn(t, found[0])) == 0
	})
	silent.Announce(t.Context(), streams)
	require.Equal(t, []string{"silent"}, othersIn(t, b.presence("other", time.Minute).Look(t.Context(), streams)[0]))
}

func TestTwinIsProcessOfSameName(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	require.NoError(t, stream.CreateGroup(t.Context(), b.rdb, b.stream, reservation.Group))
	streams := []string{b.stream}
	ann, bob, twin := b.presence("ann", time.Minute), b.presence("bob", time.Minute), b.presence("ann", time.Minute)
	for range 5 {
		require.False(t, ann.Announce(t.Context(), streams)[0].Twin)
		<-time.After(30 * time.Millisecond)
		bob.Announce(t.Context(), streams)
	}
	testkit.Eventually(t, testshop.Soon, "both see each other", func() bool {
		<-time.After(30 * time.Millisecond)
		theirs := twin.Announce(t.Context(), streams)[0].Twin
		<-time.After(30 * time.Millisecond)
		return ann.Announce(t.Context(), streams)[0].Twin && theirs
	})
	require.False(t, b.presence("ann", time.Minute).Announce(t.Context(), streams)[0].Twin, "a restarted process")
}

func TestPresenceReportsStreamThatCannotBeRead(t *testing.T) {
	t.Parallel()
	b, wrong := newStreamBench(t), newStreamBench(t)
	require.NoError(t, stream.CreateGroup(t.Context(), b.rdb, b.stream, reservation.Group))
	require.NoError(t, b.rdb.Set(t.Context(), wrong.stream, "", 0).Err())
	b.presence("ann", time.Minute).Announce(t.Context(), []string{b.stream})
	found := b.presence("bob", time.Minute).Announce(t.Context(), []string{wrong.stream, b.stream})
	require.ErrorContains(t, found[0].Err, "WRONGTYPE")
	require.Equal(t, []string{"ann"}, othersIn(t, found[1]), "other streams have their own result")
}

func TestFirstSpreadsStreamsAndMovesOnlyThoseOfOneWorker(t *testing.T) {
	t.Parallel()
	keys := reservation.Keys{Prefix: "stampede", Partitions: 64}
	var workers []string
	for i := range 8 {
		workers = append(workers, fmt.Sprintf("host-%d", i))
	}
	reads := map[string]int{}
	for p := range keys.Partitions {
		first := stream.First(keys.Orders(p), workers)
		reads[first]++
		rest := slices.DeleteFunc(slices.Clone(workers), func(w string) bool { return w == workers[3] })
		if moved := stream.First(keys.Orders(p), rest) != first; moved {
			require.Equal(t, workers[3], first, "only streams of the worker that has gone have another reader")
		}
		slices.Reverse(rest)
		require.Equal(t, stream.First(keys.Orders(p), rest), stream.First(keys.Orders(p), slices.Sorted(slices.Values(rest))))
	}
	for _, worker := range workers {
		require.Positive(t, reads[worker], "%v", reads)
		require.LessOrEqual(t, reads[worker], 16, "%v", reads)
	}
}

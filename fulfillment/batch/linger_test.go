package batch_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/fulfillment/batch"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
	"stampede/internal/testwork"
)

func TestPaceWaitsOnlyAtHighRates(t *testing.T) {
	t.Parallel()
	at := func(ms int) time.Time {
		return time.UnixMilli(1_790_000_000_000).Add(time.Duration(ms) * time.Millisecond)
	}
	var p batch.Pace
	require.Zero(t, p.Wait(at(0)))
	p.Start(500, at(0)) // the first one tells nothing: those may have waited for an hour
	p.End(at(5))
	require.Zero(t, p.Wait(at(5)))

	p.Start(50, at(5)) // in 5 ms: 10,000 in a second
	p.End(at(8))
	require.Equal(t, batch.LingerMax, p.Wait(at(8)))
	require.Equal(t, batch.LingerMax-3*time.Millisecond, p.Wait(at(11)))
	require.LessOrEqual(t, p.Wait(at(18)), time.Duration(0), "no longer than that after the last one was over")

	p.Start(49, at(10))
	p.End(at(11))
	require.Zero(t, p.Wait(at(11)), "fewer than that")
	p.Start(500, at(1010))
	require.Zero(t, p.Wait(at(1010)), "a batch that took a second to come")
}

func TestBatcherLingersAtHighRates(t *testing.T) {
	t.Parallel()
	b := testwork.Batcher(testshop.NewShop(t, testkit.Pool(t)), t, nil)
	d := b.NewDispatch()
	want, atLatest := d.Wanted()
	require.Equal(t, 1, want)
	require.Zero(t, atLatest)

	d.Pace = batch.Pace{PerSecond: 50_000, Ended: time.Now().Add(time.Hour)}
	want, atLatest = d.Wanted()
	require.Equal(t, b.BatchMax, want)
	require.Positive(t, atLatest)
	d.Deferred = make([]*batch.Submission, 1)
	want, _ = d.Wanted()
	require.Equal(t, b.BatchMax, want, "also with some that were deferred")

	b.Drain()
	want, _ = d.Wanted()
	require.Equal(t, 1, want, "who is to stop waits for nobody")
}

package batch

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/fulfillment/metrics"
	"stampede/internal/testkit"
)

func TestPaceWaitsOnlyAtHighRates(t *testing.T) {
	t.Parallel()
	at := func(ms int) time.Time {
		return time.UnixMilli(1_790_000_000_000).Add(time.Duration(ms) * time.Millisecond)
	}
	var p pace
	require.Zero(t, p.wait(at(0)))
	p.start(500, at(0)) // the first batch gives no rate: its messages may have waited for an hour
	p.end(at(5))
	require.Zero(t, p.wait(at(5)))

	p.start(50, at(5)) // in 5 ms: 10,000 a second
	p.end(at(8))
	require.Equal(t, lingerMax, p.wait(at(8)))
	require.Equal(t, lingerMax-3*time.Millisecond, p.wait(at(11)))
	require.LessOrEqual(t, p.wait(at(18)), time.Duration(0), "lingerMax after the end of the last batch")

	p.start(49, at(10))
	p.end(at(11))
	require.Zero(t, p.wait(at(11)), "below 10,000 a second")
	p.start(500, at(1010))
	require.Zero(t, p.wait(at(1010)), "a batch that took a second to arrive")
}

func TestBatcherLingersAtHighRates(t *testing.T) {
	t.Parallel()
	m, err := metrics.New(nil)
	require.NoError(t, err)
	b := New(Config{BatchMax: 500, Logger: testkit.Logger(t), Metrics: m})
	d := b.newDispatch()
	want, atLatest := d.wanted()
	require.Equal(t, 1, want)
	require.Zero(t, atLatest)

	d.pace = pace{perSecond: 50_000, ended: time.Now().Add(time.Hour)}
	want, atLatest = d.wanted()
	require.Equal(t, b.BatchMax, want)
	require.Positive(t, atLatest)
	d.deferred = make([]*submission, 1)
	want, _ = d.wanted()
	require.Equal(t, b.BatchMax, want, "with a deferred message")

	b.Drain()
	want, _ = d.wanted()
	require.Equal(t, 1, want, "a draining batcher does not linger")
}

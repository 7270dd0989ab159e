package dashboard

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/dashboard/fleet"
	"stampede/internal/test/testkit"
	"stampede/reservation"
)

// BenchmarkWatchers is what a snapshot of 50 sales that all sell costs, until every open page has it.
func BenchmarkWatchers(b *testing.B) {
	for _, watchers := range []int{1, 50} {
		b.Run(fmt.Sprint(watchers), func(b *testing.B) {
			d := openDesk(b)
			sales := make([]fleet.Sale, 50)
			for i := range sales {
				sales[i] = fleet.Sale{
					ID: uuid.New(), Terms: reservation.Terms{Name: fmt.Sprint("sale ", i)}, State: reservation.StateOpen, Stock: 1e6, UnitsKnown: true,
				}
			}
			change := func(s *fleet.Snapshot) {
				next := make([]fleet.Sale, len(sales))
				for i, sale := range sales {
					sale.Sold, sale.Available = int64(s.Number), 1e6-int64(s.Number)
					next[i] = sale
				}
				s.Sales = next
			}
			d.fleet.publish(change)
			seen := make(chan struct{}, watchers)
			var following sync.WaitGroup
			var streams []*follower
			browsers := []*browser{d.as("vic"), d.as("ann"), d.as("ada")}
			for i := range watchers {
				f := browsers[i%len(browsers)].follow("")
				streams = append(streams, f)
				following.Go(func() {
					for {
						if _, ok := f.next(); !ok {
							return
						}
						seen <- struct{}{}
					}
				})
			}
			for range watchers {
				<-seen
			}
			b.ReportAllocs()
			b.ResetTimer()
			for b.Loop() {
				d.fleet.publish(change)
				for range watchers {
					<-seen
				}
			}
			b.StopTimer()
			for _, f := range streams {
				_ = f.answer.Body.Close()
			}
			following.Wait()
		})
	}
}

// The work for a snapshot is done once, whoever watches; without a watcher it is not done.
func TestSnapshotIsRenderedOnce(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	b := d.as("vic")
	rendered := func() bool {
		d.boards.mu.Lock()
		defer d.boards.mu.Unlock()
		return d.boards.newest != nil && d.boards.newest.Number == d.fleet.Snapshot().Number
	}
	d.fleet.publish(func(*fleet.Snapshot) {})
	select {
	case <-time.After(200 * time.Millisecond):
	case <-t.Context().Done():
	}
	require.False(t, rendered(), "nobody watches")
	one, two := b.follow(""), b.follow("")
	_, ok := one.next()
	require.True(t, ok)
	_, ok = two.next()
	require.True(t, ok)
	testkit.Eventually(t, within, "both watchers", func() bool { return testutil.ToFloat64(d.metrics.watchers) == 2 })
	d.fleet.publish(func(s *fleet.Snapshot) { s.DeadLetters = 7 })
	first, ok := one.next()
	require.True(t, ok)
	second, ok := two.next()
	require.True(t, ok)
	require.Equal(t, first, second)
	before := d.boards.newest
	_, _ = b.get("/")
	require.Same(t, before, d.boards.newest, "a page takes what is rendered")
}

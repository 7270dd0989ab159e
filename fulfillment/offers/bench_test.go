package offers_test

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/draws"
)

// BenchmarkNextTurn measures the time from the end of an order to the offer of its unit to the next one, with the
// intervals of a real worker, and the CPU time that the worker takes when nothing happens: alone, and beside 10,000
// waiting lists and 1,000 draws.
func BenchmarkNextTurn(b *testing.B) {
	ends := map[string]func(*testing.B, *list, uuid.UUID, string){
		"expiry": func(b *testing.B, l *list, id uuid.UUID, _ string) { testwork.EndWindow(b, l.Pool, id) },
		"cancel": func(b *testing.B, l *list, id uuid.UUID, user string) {
			_, err := ledger.New(l.Pool).Cancel(b.Context(), id, user)
			require.NoError(b, err)
		},
	}
	for _, others := range []int{0, 1000} {
		for name, end := range ends {
			b.Run(fmt.Sprintf("%s/%d", name, 11*others), func(b *testing.B) { nextTurn(b, others, end) })
		}
	}
}

func nextTurn(b *testing.B, others int, end func(*testing.B, *list, uuid.UUID, string)) {
	b.StopTimer()
	s := testshop.OnOwnRedis(b, 1)
	l := newList(b, s, "user-0")
	for i := range b.N {
		l.join(b, fmt.Sprint("user-", i+1))
	}
	if others > 0 {
		l.addIdle(b, 10*others, draws.ByPlace)
		l.addIdle(b, others, draws.ByHash)
	}
	config := testwork.Config(b, s)
	config.SweepInterval, config.GuardInterval = 0, 0
	testwork.Work(b, config)
	s.AwaitConfirmed(b, 1+b.N)
	before := cpuTime(b)
	<-time.After(idleFor)
	idle := cpuTime(b) - before
	var longest time.Duration
	for i := range b.N {
		s.AwaitConfirmed(b, 1+b.N)
		user := fmt.Sprint("user-", i)
		id := l.orderOf(b, l.sale.ID, user)
		b.StartTimer()
		began := time.Now()
		end(b, l, id, user)
		testkit.Eventually(b, time.Minute, "the next turn", func() bool { return len(l.turns(b)) == i+1 })
		b.StopTimer()
		longest = max(longest, time.Since(began))
	}
	b.ReportMetric(longest.Seconds(), "s-longest")
	b.ReportMetric(float64(idle.Milliseconds())/idleFor.Seconds(), "idle-ms/s")
}

// idleFor has a survey of all lists, which is made once a minute.
const idleFor = 65 * time.Second

// cpuTime is that of this process.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var used syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

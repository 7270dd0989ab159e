package offers_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
)

// BenchmarkNextTurn measures the time from the end of an order to the offer of its unit to the next one, with the
// intervals of a real worker.
func BenchmarkNextTurn(b *testing.B) {
	for name, end := range map[string]func(*testing.B, *list, uuid.UUID, string){
		"expiry": func(b *testing.B, l *list, id uuid.UUID, _ string) { testwork.EndWindow(b, l.Pool, id) },
		"cancel": func(b *testing.B, l *list, id uuid.UUID, user string) {
			_, err := ledger.New(l.Pool).Cancel(b.Context(), id, user)
			require.NoError(b, err)
		},
	} {
		b.Run(name, func(b *testing.B) {
			b.StopTimer()
			s := testshop.OnOwnRedis(b, 1)
			l := newList(b, s, "user-0")
			for i := range b.N {
				l.join(b, fmt.Sprint("user-", i+1))
			}
			config := testwork.Config(b, s)
			config.SweepInterval = 0
			testwork.Work(b, config)
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
		})
	}
}

package rebuild_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/upkeep/rebuild"
)

// BenchmarkRebuildOfAMillionOrders measures how long a sale with a million buyers is closed when Redis has lost it, and
// how much more memory Redis uses after a second rebuild. -benchtime=1x.
func BenchmarkRebuildOfAMillionOrders(b *testing.B) {
	const orders = 1_000_000
	s := testshop.OnOwnRedis(b, 1)
	sale := s.Open(b, 3*orders)
	fill(b, s, sale, orders)
	_, err := s.Pool.Exec(b.Context(), "VACUUM ANALYZE orders")
	require.NoError(b, err)
	s.Flush(b)
	testwork.Rebuild(b, s) // the base of the memory figure
	before := usedMemory(b, s)
	testwork.Rebuild(b, s)
	after := usedMemory(b, s)

	var seconds float64
	for b.Loop() {
		b.StopTimer()
		s.Flush(b)
		b.StartTimer()
		report := testwork.Rebuild(b, s)
		require.EqualValues(b, orders, report.Sales[0].Orders)
		seconds += report.Seconds
	}
	b.ReportMetric(seconds/float64(b.N), "s/rebuild")
	b.ReportMetric(float64(before)/orders, "B/order")
	b.ReportMetric(float64(after-before)/orders, "B/order-more")
}

// usedMemory returns the memory of Redis after all lazy frees.
func usedMemory(t testing.TB, s *testshop.Shop) int64 {
	t.Helper()
	var used int64
	testkit.Eventually(t, 60*time.Second, "lazy frees are done", func() bool {
		info := s.Rdb.InfoMap(t.Context(), "memory")
		used = rebuild.NumberOf(info.Item("Memory", "used_memory"))
		return info.Item("Memory", "lazyfree_pending_objects") == "0"
	})
	return used
}

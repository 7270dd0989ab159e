package relay_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/relay"
)

// BenchmarkRelay sends a backlog of events, two for each order, to one target of each kind.
func BenchmarkRelay(b *testing.B) {
	const events = 100_000
	for _, kind := range []string{"webhook", "redis-stream", "stdout"} {
		b.Run(kind, func(b *testing.B) {
			s := setup(b)
			_, err := s.pool.Exec(b.Context(), `INSERT INTO order_events
				(order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at)
				SELECT md5('order' || n)::uuid, v, CASE v WHEN 2 THEN 'OrderConfirmed' ELSE 'OrderPaid' END,
					'01a208e6-6891-78b5-8281-31785abb8356', 'user-' || n, 1, now(), CASE v WHEN 2 THEN now() END
				FROM generate_series(1, $1::int / 2) AS n, generate_series(2, 3) AS v`, events)
			require.NoError(b, err)
			_, err = s.pool.Exec(b.Context(), "VACUUM ANALYZE order_events")
			require.NoError(b, err)
			var got atomic.Int64
			url := "stdout"
			switch kind {
			case "webhook":
				server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					_, _ = io.Copy(io.Discard, r.Body)
					got.Add(1)
					w.WriteHeader(http.StatusNoContent)
				}))
				b.Cleanup(server.Close)
				url = server.URL
			case "redis-stream":
				redisURL := testkit.RedisURL(b)
				url = strings.Replace(redisURL, "redis:", "redis-stream:", 1) + "?stream=" + s.keys.Prefix + ":events"
			}
			s.add(b, "target", url)
			run := func() (took time.Duration) {
				begun := time.Now()
				stop := s.run(b, func(c *relay.Config) { c.Stdout = io.Discard })
				testkit.Eventually(b, 10*time.Minute, "no lag", func() bool { t := s.standing(b, "target"); return t.Lag() == 0 })
				took = time.Since(begun)
				stop()
				return took
			}
			var all time.Duration
			for b.Loop() {
				all += run()
				_, err := s.targets.SetPosition(b.Context(), "target", 0)
				require.NoError(b, err)
			}
			b.ReportMetric(float64(b.N)*events/all.Seconds(), "events/s")
			b.ReportMetric(0, "ns/op")
		})
	}
}

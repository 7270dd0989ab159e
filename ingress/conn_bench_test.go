package ingress

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
	"stampede/reservation"
)

// BenchmarkConnection measures the CPU time of a purchase on plain connections, on those of conn.go with put-off
// deadlines only, and with skipped background reads as well. Ingress, Redis client and buyers count together. The
// candidates take short turns, and the saving is the median of the differences between neighbouring turns, because
// on a busy machine the CPU time of the same work changes from second to second.
//
//	go test -run '^$' -bench BenchmarkConnection -benchtime 400x ./ingress
func BenchmarkConnection(b *testing.B) {
	tune(b)
	s := openBench(b)
	for _, outcome := range []struct {
		name          string
		stock, status int64
	}{{"accepted", 10_000_000, http.StatusAccepted}, {"sold-out", 1, http.StatusConflict}} {
		b.Run(outcome.name, func(b *testing.B) {
			sale := s.sale(reservation.Terms{Stock: outcome.stock})
			defer s.clear(sale)
			_, err := s.store.Reserve(b.Context(), reservation.Request{Sale: sale, User: "first", Quantity: 1})
			require.NoError(b, err)
			handler := s.server.Handler().ServeHTTP
			unknown := func(server *http.Server) { server.ConnContext = nil } // without it no background read is skipped
			sides := []*benchSide{
				openSide(b, "plain", func(l net.Listener) net.Listener { return l }, handler),
				openSide(b, "put-off", wrapped, handler, unknown),
				openSide(b, "put-off-skipped", wrapped, handler),
			}
			b.ResetTimer()
			for round := range b.N {
				for turn := range sides {
					sides[(round+turn)%len(sides)].turn(b, sale, outcome.status)
				}
			}
			b.ReportMetric(0, "ns/op") // a round is not an operation
			for _, side := range sides {
				saved := make([]float64, b.N)
				for round := range saved {
					saved[round] = sides[0].micros[round] - side.micros[round]
				}
				b.ReportMetric(middle(side.micros), side.name+"_µs")
				if side != sides[0] {
					b.ReportMetric(middle(saved), side.name+"_saves-µs")
				}
			}
		})
	}
}

func middle(values []float64) float64 {
	return slices.Sorted(slices.Values(values))[len(values)/2]
}

// benchSide is a server and its buyers, which send their requests together.
type benchSide struct {
	name    string
	conns   []net.Conn
	answers []*bufio.Reader
	asked   uint64
	micros  []float64 // CPU time of a request, by turn
}

const (
	sideConnections = 64
	sideRequests    = 5 // of each connection in a turn
)

func openSide(
	b *testing.B, name string, wrap func(net.Listener) net.Listener, h http.HandlerFunc, change ...func(*http.Server),
) *benchSide {
	b.Helper()
	_, addr := webServer(b, wrap, h, change...)
	s := &benchSide{name: name}
	for range sideConnections {
		conn, err := new(net.Dialer).DialContext(b.Context(), "tcp", addr)
		require.NoError(b, err)
		b.Cleanup(func() { _ = conn.Close() })
		s.conns, s.answers = append(s.conns, conn), append(s.answers, bufio.NewReader(conn))
	}
	return s
}

func (s *benchSide) turn(b *testing.B, sale uuid.UUID, status int64) {
	b.Helper()
	before := cpuTime(b)
	for range sideRequests {
		for _, conn := range s.conns {
			s.asked++
			buyer := "X-User-ID: " + s.name + strconv.FormatUint(s.asked, 10) + "\r\n"
			_, err := io.WriteString(conn, posted(ordersOf(sale), `{"quantity":1}`, "Content-Type: application/json\r\n", buyer))
			require.NoError(b, err)
		}
		for _, answers := range s.answers {
			answer, err := http.ReadResponse(answers, nil)
			require.NoError(b, err)
			require.EqualValues(b, status, answer.StatusCode)
			_, err = io.Copy(io.Discard, answer.Body)
			require.NoError(b, err)
		}
	}
	spent := cpuTime(b) - before
	s.micros = append(s.micros, float64(spent.Nanoseconds())/1000/(sideConnections*sideRequests))
}

func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var used syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// tune applies the settings of `stampede serve`.
func tune(b *testing.B) {
	b.Helper()
	before := debug.SetGCPercent(400)
	b.Cleanup(func() { debug.SetGCPercent(before) })
}

func openBench(b *testing.B) *shop {
	b.Helper()
	s := prepareShop(b, servers{testkit.RedisURL(b), testkit.DatabaseURL(b), testkit.Keys(b)})
	// A rewrite of the append-only file during a round would be measured as well.
	require.NoError(b, s.rdb.ConfigSet(b.Context(), "auto-aof-rewrite-percentage", "0").Err())
	return s
}

// clear deletes the keys of a round from Redis.
func (s *shop) clear(sale uuid.UUID) {
	s.t.Helper()
	require.NoError(s.t, s.rdb.Unlink(s.t.Context(), s.keys.Sale(0, sale), s.keys.Buyers(0, sale), s.keys.Orders(0)).Err())
}

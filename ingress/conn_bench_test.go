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

// BenchmarkConnection has the CPU time of a purchase on connections as they come, on those of conn.go with deadlines put off
// only, and on them unwatched as well: that of the ingress, its Redis client and its buyers together. The candidates
// have short turns, and what is saved is the median of the differences between turns beside each other, because the CPU time
// of the same work changes from second to second on a machine that has other things to do.
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
			unknown := func(server *http.Server) { server.ConnContext = nil } // so nobody can leave anything unwatched
			sides := []*benchSide{
				openSide(b, "plain", func(l net.Listener) net.Listener { return l }, handler),
				openSide(b, "put-off", wrapped, handler, unknown),
				openSide(b, "put-off-unwatched", wrapped, handler),
			}
			b.ResetTimer()
			for round := range b.N {
				for turn := range sides {
					sides[(round+turn)%len(sides)].turn(b, sale, outcome.status)
				}
			}
			b.ReportMetric(0, "ns/op") // a round has no meaning as an operation
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

// side is a server and its buyers, who ask all together.
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

func openSide(b *testing.B, name string, wrap func(net.Listener) net.Listener, h http.HandlerFunc, change ...func(*http.Server)) *benchSide {
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

// tune gives the process what `stampede serve` gives itself.
func tune(b *testing.B) {
	b.Helper()
	before := debug.SetGCPercent(400)
	b.Cleanup(func() { debug.SetGCPercent(before) })
}

func openBench(b *testing.B) *shop {
	b.Helper()
	s := prepareShop(b, servers{testkit.RedisURL(b), testkit.DatabaseURL(b), testkit.Keys(b)})
	// A rewrite of the append-only file in the middle of a round would be measured as well.
	require.NoError(b, s.rdb.ConfigSet(b.Context(), "auto-aof-rewrite-percentage", "0").Err())
	return s
}

// clear frees what a round has left in Redis.
func (s *shop) clear(sale uuid.UUID) {
	s.t.Helper()
	require.NoError(s.t, s.rdb.Unlink(s.t.Context(), s.keys.Sale(0, sale), s.keys.Buyers(0, sale), s.keys.Orders(0)).Err())
}

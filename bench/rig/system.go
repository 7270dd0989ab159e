package rig

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"stampede/bench/httpload"
	"stampede/internal/dev/crowd"
	"stampede/internal/retry"
	"stampede/reservation"
)

// System is a running candidate: its processes, and a sale in its own shop.
type System struct {
	Shop *Shop
	Sale uuid.UUID
	// Fronts take the orders. Workers write them to Postgres if the fronts do not.
	Fronts, Workers []*Process

	b testing.TB
	// launch starts the processes, also after they were killed.
	launch func()
	crowds int // number of crowds created so far
}

// Close kills the processes and closes the shop. It may be called more than once.
func (s *System) Close() {
	s.Kill()
	s.Shop.Close()
}

// Kill ends all processes by SIGKILL.
func (s *System) Kill() {
	for _, p := range s.processes() {
		p.Kill()
	}
}

// Restart starts the processes again after Kill. Their addresses may change.
func (s *System) Restart() {
	s.b.Helper()
	s.Fronts, s.Workers = nil, nil
	s.launch()
}

// StopWorkers stops the workers gracefully, which leaves the CPU to the fronts.
func (s *System) StopWorkers() {
	for _, p := range s.Workers {
		p.stop()
	}
	s.Workers = nil
}

func (s *System) processes() []*Process {
	return append(append([]*Process(nil), s.Fronts...), s.Workers...)
}

// CPU is the CPU time of all roles so far. It fails the benchmark if a process has ended.
func (s *System) CPU() Usage {
	s.b.Helper()
	usage := s.Shop.CPU()
	for role, processes := range map[string][]*Process{Front: s.Fronts, Worker: s.Workers} {
		for _, p := range processes {
			p.requireRunning()
			usage[role] += ProcessCPU(s.b, p.Pid())
		}
	}
	return usage
}

// Crowd prepares buyers who have bought nothing yet. Each sends so many concurrent requests. The caller
// sets duration, connections and rate. Headers are additional header lines of each request.
func (s *System) Crowd(clicks uint64, headers ...string) httpload.Load {
	s.crowds++
	head := PurchaseHead(s.Sale, headers...) + "buyer-" + strconv.Itoa(s.crowds) + "-"
	var addrs []string
	for _, p := range s.Fronts {
		addrs = append(addrs, p.Addr)
	}
	return httpload.Load{
		Addrs: addrs,
		Request: func(dst []byte, n uint64) []byte {
			dst = append(dst, head...)
			dst = strconv.AppendUint(dst, (n-1)/clicks, 10)
			return append(dst, PurchaseEnd...)
		},
	}
}

// PurchaseHead is the beginning of a request for one unit, and PurchaseEnd its end; the user's id is between them.
func PurchaseHead(sale uuid.UUID, headers ...string) string {
	head := "POST /v1/sales/" + sale.String() + "/orders HTTP/1.1\r\nHost: localhost\r\n"
	for _, line := range append(headers, "Content-Type: application/json", "Content-Length: 14") {
		head += line + "\r\n"
	}
	return head + "X-User-ID: "
}

// PurchaseEnd ends the request that PurchaseHead begins.
const PurchaseEnd = "\r\n\r\n{\"quantity\":1}"

// Warm lets the processes open their connections and grow their heaps, and returns the number of
// accepted orders.
func (s *System) Warm(connections int) int64 {
	s.b.Helper()
	load := s.Crowd(1)
	load.Connections, load.For = connections, Scale(s.b, 500*time.Millisecond, 30*time.Millisecond)
	return s.Measure(load).Wanted
}

// Payments prepares reports of payments for so many confirmed orders of another sale, one each.
func (s *System) Payments(number int) httpload.Load {
	s.b.Helper()
	front := s.Fronts[0].Addr
	sale, err := crowd.CreateSale(s.b.Context(), "http://"+front, adminToken,
		reservation.Terms{Name: "bench of payments", Stock: int64(number), PaymentWindow: time.Hour})
	require.NoError(s.b, err)
	head := PurchaseHead(sale) + "payer-"
	bought := s.Measure(httpload.Load{
		Addrs: []string{front}, Connections: 64, For: time.Minute, Most: uint64(number),
		Request: func(dst []byte, n uint64) []byte {
			return append(strconv.AppendUint(append(dst, head...), n, 10), PurchaseEnd...)
		},
	})
	require.EqualValues(s.b, number, bought.Wanted, "answers: %s", bought)
	sold, err := s.Shop.AwaitSold(s.b.Context(), int64(number), time.Minute)
	require.NoError(s.b, err)
	require.EqualValues(s.b, number, sold)
	// The rows carry the error.
	rows, _ := s.Shop.Pool.Query(s.b.Context(), "SELECT id::text FROM orders WHERE sale_id = $1", sale)
	orders, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(s.b, err)
	return httpload.Load{
		Addrs: []string{front}, Most: uint64(number), Status: http.StatusOK,
		Request: func(dst []byte, n uint64) []byte {
			body := `{"order_id":"` + orders[n-1] + `","reference":"ch_` + orders[n-1] + `"}`
			return fmt.Appendf(dst, "POST /v1/payments HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n"+
				"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", adminToken, len(body), body)
		},
	}
}

// Settled is the number of payments that have paid an order.
func (s *System) Settled() (settled int64) {
	s.b.Helper()
	require.NoError(s.b, s.Shop.Pool.QueryRow(s.b.Context(),
		"SELECT count(*) FROM payments WHERE state = 'settled'").Scan(&settled))
	return settled
}

// Measure runs a load to its end.
func (s *System) Measure(load httpload.Load) httpload.Answers {
	s.b.Helper()
	answers, err := load.Measure(s.b.Context())
	require.NoError(s.b, err)
	return answers
}

// Bounds of the interval at which Postgres is asked for progress.
const (
	pollMin = 20 * time.Millisecond
	pollMax = 200 * time.Millisecond
)

// Await waits until so many units are in Postgres, at most for the given time, and returns how many
// are.
func (s *System) Await(units int64, within time.Duration) int64 {
	s.b.Helper()
	ctx, cancel := context.WithTimeout(s.b.Context(), within)
	defer cancel()
	began, first := time.Now(), s.Shop.Units()
	for have := first; ; have = s.Shop.Units() {
		if have >= units || !retry.Pause(nextPoll(have-first, units-have, time.Since(began)), ctx.Done()) {
			return have
		}
	}
}

// nextPoll is the time until the next look at Postgres, given how many units were written in the time
// taken and how many are left: until half of the rest is expected. A look counts all orders on the
// cores of the candidates. Looking too often would slow down designs that write after the answer, but
// not those that write before it.
func nextPoll(written, left int64, took time.Duration) time.Duration {
	if written <= 0 {
		return pollMin
	}
	half := time.Duration(float64(took) * float64(left) / float64(written) / 2)
	return min(max(half, pollMin), pollMax)
}

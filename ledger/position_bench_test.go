package ledger

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation/order"
	"stampede/sql"
)

// BenchmarkPositionIndex compares what Postgres does for an order with and without the index that the relay reads by
// (docs/decisions/0026-relay-horizon.md): batches of 500 orders, in turns.
func BenchmarkPositionIndex(b *testing.B) {
	const size, batches, rounds = 500, 40, 6
	server := testkit.OwnPostgres(b)
	require.NoError(b, sql.Up(b.Context(), server.URL))
	pool, err := pgxpool.New(b.Context(), server.URL)
	require.NoError(b, err)
	b.Cleanup(pool.Close)
	ledger := New(pool)
	sale := testshop.NewSale(b, pool, order.MaxStock)
	exec := func(statement string) {
		_, err := pool.Exec(b.Context(), statement)
		require.NoError(b, err)
	}
	next := 0
	measure := func() (cpu time.Duration, wal int64) {
		exec("CHECKPOINT")
		began := testshop.QueryInt(b, pool, "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
		cpu = -cpuOf(b, server.Pid())
		for range batches {
			events := testshop.ReservedCrowd(sale, size)
			for j := range events {
				events[j].UserID = fmt.Sprintf("user-%d-%d", next, j)
			}
			next++
			_, err := ledger.Record(context.Background(), events)
			require.NoError(b, err)
		}
		cpu += cpuOf(b, server.Pid())
		return cpu, testshop.QueryInt(b, pool, "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn") - began
	}
	var cpu [2]time.Duration
	var wal [2]int64
	measure() // the server is warm
	for b.Loop() {
		for range rounds {
			for with, statement := range []string{
				"DROP INDEX order_events_position", "CREATE INDEX order_events_position ON order_events (position)",
			} {
				exec(statement)
				c, w := measure()
				cpu[with] += c
				wal[with] += w
			}
		}
	}
	orders := float64(b.N * rounds * batches * size)
	for with, name := range []string{"without", "with"} {
		b.ReportMetric(float64(cpu[with].Nanoseconds())/1000/orders, "µs/order-"+name)
		b.ReportMetric(float64(wal[with])/orders, "WAL-bytes/order-"+name)
	}
	b.ReportMetric(float64(cpu[1])/float64(cpu[0]), "CPU-ratio")
	b.ReportMetric(float64(wal[1])/float64(wal[0]), "WAL-ratio")
	b.ReportMetric(0, "ns/op")
}

// cpuOf is the CPU time of a server and its children, in hundredths of a second.
func cpuOf(b *testing.B, server int) (total time.Duration) {
	b.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	require.NoError(b, err)
	const ticks = 10 * time.Millisecond
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		pid, rest, _ := strings.Cut(string(text), " ")
		fields := strings.Fields(rest[strings.LastIndex(rest, ")")+1:])
		used := fields[11:13] // its own
		switch strconv.Itoa(server) {
		case pid:
			used = fields[11:15] // and that of children that have ended
		case fields[1]:
		default:
			continue
		}
		for _, field := range used {
			n, err := strconv.Atoi(field)
			require.NoError(b, err)
			total += time.Duration(n) * ticks
		}
	}
	return total
}

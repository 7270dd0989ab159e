package limits

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"runtime"
	"runtime/debug"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/bench/httpload"
	"stampede/bench/rig"
	"stampede/ingress"
	"stampede/internal/connect"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

// BenchmarkAllocations counts the allocations of an accepted purchase in a whole ingress, including the
// call of Redis, in excess of those in an Echo that answers with prebuilt bytes.
//
// The servers run in the process of the benchmark, because only a process itself knows its allocations.
// Those of the client are the same on both sides and cancel out.
func BenchmarkAllocations(b *testing.B) {
	before := debug.SetGCPercent(400) // as `stampede serve` does
	b.Cleanup(func() { debug.SetGCPercent(before) })

	table := rig.Table{
		Title: "Allocations of an accepted purchase",
		Note: "In the whole process, client included. Echo's own are those of a route that answers with prebuilt bytes: " +
			"net/http, the router, the answer. Over one connection every purchase is its own script call.",
		Head: []string{"connections", "Echo's own", "ingress", "beyond Echo's own", "bytes beyond Echo's own"},
	}
	for _, connections := range []int{1, crowdConnections} {
		var own, total, beyond, bytesBeyond []float64
		for range b.N {
			echoes, ours := allocations(b, echoAlone(), uuid.New(), connections), ingressAllocations(b, connections)
			own, total = append(own, echoes.objects), append(total, ours.objects)
			beyond, bytesBeyond = append(beyond, ours.objects-echoes.objects), append(bytesBeyond, ours.bytes-echoes.bytes)
		}
		table.Rows = append(table.Rows, []string{
			strconv.Itoa(connections), rig.Summarize(own).Format(rig.Ratio), rig.Summarize(total).Format(rig.Ratio),
			rig.Summarize(beyond).Format(rig.Ratio), rig.Summarize(bytesBeyond).Format(rig.Count),
		})
		b.ReportMetric(rig.Summarize(beyond).Median, "allocations-beyond-Echo_"+strconv.Itoa(connections)+"-connections")
	}
	b.ReportMetric(0, "ns/op") // a round has no meaning as an operation
	rig.Put(table)
}

func echoAlone() http.Handler {
	e := echo.New()
	answer := []byte(`{"order_id":"019ab3c0-5b3c-7b3c-8b3c-0b3c5b3c7b3c","status":"reserved"}`)
	e.POST("/v1/sales/:sale/orders", func(c echo.Context) error {
		return c.Blob(http.StatusAccepted, "application/json", answer)
	})
	return e
}

// ingressAllocations measures an ingress that is wired as the serve command does.
func ingressAllocations(b *testing.B, connections int) allocation {
	b.Helper()
	s := openShop(b)
	defer s.Close()
	rdb, err := connect.Ingress(s.RedisURL)
	require.NoError(b, err)
	defer func() { _ = rdb.Close() }()
	store := reservation.NewStore(rdb, s.keys, reservation.StoreOptions{})
	defer store.Close()
	server, err := ingress.New(ingress.Config{
		Reservations: store, Sales: catalog.New(s.Pool, store), Orders: ledger.New(s.Pool),
		Postgres: s.Pool,
		Auth:     ingress.AuthHeader, Logger: slog.New(slog.DiscardHandler), OutcomesStreams: s.keys.AllOutcomes(),
		Outcomes: func() (redis.UniversalClient, error) { return connect.Blocking(s.RedisURL) },
	})
	require.NoError(b, err)
	defer server.Close()
	return allocations(b, server.Handler(), s.sale, connections)
}

// allocation is the average of a request.
type allocation struct{ objects, bytes float64 }

// allocations lets a crowd buy from a handler. The cost of opening connections is excluded: the result
// is the slope between a small and a large crowd.
func allocations(b *testing.B, h http.Handler, sale uuid.UUID, connections int) allocation {
	b.Helper()
	server := httptest.NewServer(h)
	defer server.Close()
	head := rig.PurchaseHead(sale) + "buyer-"
	crowd := func(most uint64) (requests int64, objects, bytes uint64) {
		load := httpload.Load{
			Addrs: []string{server.Listener.Addr().String()}, Connections: connections, For: time.Minute, Most: most,
			Request: func(dst []byte, _ uint64) []byte {
				dst = strconv.AppendUint(append(dst, head...), buyerSerial.Add(1), 10)
				return append(dst, rig.PurchaseEnd...)
			},
			Status: http.StatusAccepted,
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		answers, err := load.Measure(b.Context())
		runtime.ReadMemStats(&after)
		require.NoError(b, err)
		require.Zero(b, answers.Others(), "answers: %s", answers)
		return answers.Wanted, after.Mallocs - before.Mallocs, after.TotalAlloc - before.TotalAlloc
	}
	few := uint64(rig.Scale(b, 20, 1)*connections + 200)
	crowd(few) // fills the pools
	requestsFew, objectsFew, bytesFew := crowd(few)
	requestsMany, objectsMany, bytesMany := crowd(5 * few)
	n := float64(requestsMany - requestsFew)
	return allocation{(float64(objectsMany) - float64(objectsFew)) / n, (float64(bytesMany) - float64(bytesFew)) / n}
}

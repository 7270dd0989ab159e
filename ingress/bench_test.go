package ingress

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/benchkit"
	"stampede/internal/testkit"
	"stampede/lua"
	"stampede/reservation"
)

const (
	benchConnections = 256
	benchRound       = 2 * time.Second
)

// BenchmarkAccepted compares purchases that are accepted: one script call for all that arrived
// meanwhile, against the same server with one EVALSHA per request. Redis runs with appendfsync
// always, as the private servers do.
func BenchmarkAccepted(b *testing.B) {
	tune(b)
	s := openBench(b)
	single := s.serve(b, func(c *Config) { c.Reservations = oneByOne{s.store, s.rdb, s.keys} })
	batched := s.serve(b)
	round := func(addr string) func(int) float64 {
		return func(int) float64 {
			sale := s.sale(reservation.Terms{Stock: 10_000_000})
			defer s.clear(sale)
			return purchases(addr, sale, http.StatusAccepted).Run(b)
		}
	}
	benchkit.Compare(b, "accepted/s",
		benchkit.Candidate{Name: "batched", Round: round(batched)},
		benchkit.Candidate{Name: "evalsha-per-request", Round: round(single)},
	)
}

// oneByOne is a store as one would write it without batches: each request runs the script by itself.
type oneByOne struct {
	*reservation.Store
	rdb  *redis.Client
	keys reservation.Keys
}

func (o oneByOne) Reserve(ctx context.Context, r reservation.Request) (reservation.Answer, error) {
	order := reservation.NewOrderID(r.Sale)
	quantity := strconv.FormatInt(r.Quantity, 10)
	payload := `{"order_id":"` + order.String() + `","sale_id":"` + r.Sale.String() + `","user_id":"` + r.User + `","quantity":` + quantity + `,"version":1,"epoch":1,"requested_at_ms":` + strconv.FormatInt(time.Now().UnixMilli(), 10) + `}`
	keys := []string{o.keys.Sale(0, r.Sale), o.keys.Buyers(0, r.Sale), o.keys.Orders(0)}
	reply, err := lua.Reserve.Run(ctx, o.rdb, keys, "1", "0", "\x82\xa5event\xadOrderReserved\xadevent_version\xa11", r.User, reservation.CompactID(order), "-", quantity, payload).Slice()
	if err != nil {
		return reservation.Answer{}, err
	}
	word, _, _ := strings.Cut(reply[3].(string), " ")
	return reservation.Answer{
		Verdict:     reservation.Verdict(word),
		Reservation: reservation.Reservation{OrderID: order, Quantity: r.Quantity, ReservedAt: time.UnixMilli(reply[0].(int64))},
	}, nil
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

// serve runs a server on the stores of the shop, as the serve command does, and returns its address.
func (s *shop) serve(b *testing.B, change ...func(*Config)) string {
	b.Helper()
	var lc net.ListenConfig
	listener, err := lc.Listen(b.Context(), "tcp", "127.0.0.1:0")
	require.NoError(b, err)
	config := s.server.config
	config.Listener = listener
	config.Metrics = nil
	config.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	for _, c := range change {
		c(&config)
	}
	server, err := New(config)
	require.NoError(b, err)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	b.Cleanup(func() {
		stop()
		require.NoError(b, <-done)
	})
	return server.Addr()
}

func purchases(addr string, sale uuid.UUID, status int) benchkit.HTTPLoad {
	head := "POST /v1/sales/" + sale.String() + "/orders HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 14\r\nX-User-ID: buyer-"
	return benchkit.HTTPLoad{
		Addrs: []string{addr}, Connections: benchConnections, For: benchRound, Status: status,
		Request: func(dst []byte, n uint64) []byte {
			dst = append(dst, head...)
			dst = strconv.AppendUint(dst, n, 10)
			return append(dst, "\r\n\r\n{\"quantity\":1}"...)
		},
	}
}

// clear frees what a round has left in Redis.
func (s *shop) clear(sale uuid.UUID) {
	s.t.Helper()
	require.NoError(s.t, s.rdb.Unlink(s.t.Context(), s.keys.Sale(0, sale), s.keys.Buyers(0, sale), s.keys.Orders(0)).Err())
}

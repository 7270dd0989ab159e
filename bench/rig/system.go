package rig

import (
	"context"
	_ "embed"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/bench/httpload"
	"stampede/internal/connect"
	"stampede/internal/dev/loadgen"
	"stampede/internal/dev/localserver"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/sql/migrate"
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
	for _, p := range s.Shop.proxies {
		usage[Proxy] += ProcessCPU(s.b, p.Pid())
	}
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
	sale, err := loadgen.CreateSale(s.b.Context(), "http://"+front, adminToken,
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

// Shop is one turn's own database, migrated and empty, and its own keys in Redis.
type Shop struct {
	RedisURL, DatabaseURL string
	prefix                string
	// Pool and Redis are for the benchmark's queries and setup; no candidate uses them.
	Pool  *pgxpool.Pool
	Redis redis.UniversalClient

	b          testing.TB
	servers    *servers
	conditions Conditions
	proxies    []*Process // between the candidates and the servers
	database   string
	closed     bool
}

var shopSerial atomic.Uint64

// Open creates a shop, which is closed at the latest when the benchmark ends. A checkpoint before it
// keeps Postgres from writing earlier changes during the turn; a smoke run, whose figures do not count,
// does without.
func Open(b testing.TB) *Shop {
	b.Helper()
	on := start(b, conditions)
	name := "bench" + strconv.FormatUint(shopSerial.Add(1), 10)
	on.administer(b, "CREATE DATABASE "+name+" TEMPLATE "+templateDatabase)
	if !isSmoke(b) {
		on.administer(b, "CHECKPOINT")
	}
	s := &Shop{
		prefix: name, Redis: on.control, b: b, servers: on, conditions: conditions, database: name,
	}
	b.Cleanup(s.Close)
	var err error
	s.Pool, err = connect.Postgres(b.Context(), databaseURL(on.postgres.URL, name), 2)
	require.NoError(b, err)
	s.RedisURL, s.DatabaseURL = s.through(on.redis.URL), s.through(databaseURL(on.postgres.URL, name))
	return s
}

// Keys are Stampede's keys in this shop.
func (s *Shop) Keys(partitions int) reservation.Keys {
	return reservation.Keys{Prefix: s.prefix, Partitions: partitions}
}

// Close drops the database and deletes the keys. All processes that used them must have ended. It may
// be called more than once.
func (s *Shop) Close() {
	if s.closed {
		return
	}
	s.closed = true
	for _, p := range s.proxies {
		p.Kill()
	}
	if s.Pool != nil {
		s.Pool.Close()
	}
	// Postgres makes a checkpoint before it drops a database. A smoke run leaves its few databases to
	// the end of the server.
	if !isSmoke(s.b) {
		s.servers.administer(s.b, "DROP DATABASE "+s.database+" WITH (FORCE)")
	}
	ctx := context.Background()
	found := s.Redis.Scan(ctx, 0, s.prefix+":*", 1000).Iterator()
	for found.Next(ctx) {
		// DEL, not UNLINK: no memory is to be freed during the next turn.
		require.NoError(s.b, s.Redis.Del(ctx, found.Val()).Err())
	}
	require.NoError(s.b, found.Err())
	s.rewriteAOF(ctx)
}

// aofMaxBytes is the size from which Redis's append-only file is rewritten between two turns.
const aofMaxBytes = 256 << 20

func (s *Shop) rewriteAOF(ctx context.Context) {
	persistence := func(name string) int64 {
		n, err := InfoNumber(ctx, s.Redis, "Persistence", name)
		require.NoError(s.b, err)
		return n
	}
	if persistence("aof_current_size") < aofMaxBytes {
		return
	}
	require.NoError(s.b, s.Redis.BgRewriteAOF(ctx).Err())
	for persistence("aof_rewrite_in_progress") != 0 {
		retry.Pause(10*time.Millisecond, nil)
	}
}

// InfoNumber reads a whole number of Redis's INFO. The section is written as in its answer: "Memory".
func InfoNumber(ctx context.Context, rdb redis.UniversalClient, section, name string) (int64, error) {
	info := rdb.InfoMap(ctx, section)
	if err := info.Err(); err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(info.Item(section, name), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("INFO %s: %s: %w", section, name, err)
	}
	return n, nil
}

var (
	//go:embed sql/insert_sale.sql
	insertSaleSQL string
	//go:embed sql/live_units.sql
	liveUnitsSQL string
	//go:embed sql/commit_delays.sql
	commitDelaysSQL string
)

// InsertSale inserts the row of a sale for candidates other than Stampede, and returns its id.
func (s *Shop) InsertSale(stock int64) uuid.UUID {
	s.b.Helper()
	sale, err := uuid.NewV7()
	require.NoError(s.b, err)
	_, err = s.Pool.Exec(s.b.Context(), insertSaleSQL, sale, stock)
	require.NoError(s.b, err)
	return sale
}

// dropGuard drops the unique index of live orders: Postgres then accepts several orders of a user.
func (s *Shop) dropGuard() {
	s.b.Helper()
	_, err := s.Pool.Exec(s.b.Context(), "DROP INDEX orders_one_live_per_user")
	require.NoError(s.b, err)
}

// Units is the number of units of live orders in Postgres; if every order has one unit it is also the
// number of orders.
func (s *Shop) Units() int64 {
	s.b.Helper()
	var units int64
	require.NoError(s.b, s.Pool.QueryRow(s.b.Context(), liveUnitsSQL).Scan(&units))
	return units
}

// soldPoll is the pause between two looks at the counters. Each look costs CPU time as well.
const soldPoll = 10 * time.Millisecond

// AwaitSold waits until at least so many units are sold, at most for the given time, and returns how many are. It reads
// the counters of the sales, because counting orders would load Postgres.
func (s *Shop) AwaitSold(ctx context.Context, units int64, within time.Duration) (sold int64, err error) {
	for deadline := time.Now().Add(within); ; retry.Pause(soldPoll, ctx.Done()) {
		if err := s.Pool.QueryRow(ctx, "SELECT sum(sold)::bigint FROM sales").Scan(&sold); err != nil {
			return 0, fmt.Errorf("look for %d sold units: %w", units, err)
		}
		if sold >= units || time.Now().After(deadline) {
			return sold, nil
		}
	}
}

// CommitDelays are percentiles of how long orders took from the decision in Redis until the commit in
// Postgres, in milliseconds, for all orders decided since the given time.
func (s *Shop) CommitDelays(since time.Time) (p50, p99 float64) {
	s.b.Helper()
	require.NoError(s.b, s.Pool.QueryRow(s.b.Context(), commitDelaysSQL, since).Scan(&p50, &p99))
	return p50, p99
}

// databaseURL is the URL of a server with the name of another database.
func databaseURL(server, name string) string {
	u, err := url.Parse(server)
	if err != nil || !strings.HasPrefix(u.Scheme, "postgres") {
		panic("rig: unexpected URL of the private Postgres: " + server)
	}
	u.Path = "/" + name
	return u.String()
}

// templateDatabase is migrated and empty; each shop gets a copy.
const templateDatabase = "stampede_bench_template"

// servers are a Redis and a Postgres of this process, shared by all its benchmarks with the same Conditions.
type servers struct {
	redis    *localserver.Redis
	postgres *localserver.Postgres
	control  redis.UniversalClient // for cleanup and queries; no candidate uses it
	syncs    map[string]string     // the files with the counts of Shop.Syncs, by server
}

// running are the started servers by their conditions, which have no distance.
var running = map[Conditions]*servers{}

// start starts the servers on first use.
func start(b testing.TB, c Conditions) *servers {
	b.Helper()
	c.RoundTrip = 0
	if running[c] != nil {
		return running[c]
	}
	ctx := context.Background() // the servers outlive the benchmark
	s := &servers{syncs: make(map[string]string)}
	var err error
	s.redis, err = localserver.StartRedis(ctx, localserver.RedisOptions{Settings: map[string]string{
		// A rewrite of the append-only file during a turn would be measured as well: see Shop.Close.
		"auto-aof-rewrite-percentage": "0",
	}, Env: s.preload(b, c, Redis)})
	require.NoError(b, err)
	first := len(running) == 0
	running[c] = s
	AtExit(s.stop)
	s.postgres, err = localserver.StartPostgres(ctx, localserver.PostgresOptions{Settings: map[string]string{
		// So would a timed checkpoint: Open makes one before each turn.
		"checkpoint_timeout": "1h",
		// Records when each order was committed.
		"track_commit_timestamp": "on",
	}, Env: s.preload(b, c, Postgres)})
	require.NoError(b, err)
	s.control, err = connect.Control(s.redis.URL)
	require.NoError(b, err)
	s.administer(b, "CREATE DATABASE "+templateDatabase)
	require.NoError(b, migrate.Up(ctx, databaseURL(s.postgres.URL, templateDatabase)))
	if first {
		MeasuredWith(s.versions(b))
	}
	return s
}

func (s *servers) stop() {
	if s.control != nil {
		_ = s.control.Close()
	}
	(&localserver.Pair{Redis: s.redis, Postgres: s.postgres}).Stop()
}

// administer runs a statement outside of the databases of the shops.
func (s *servers) administer(b testing.TB, statement string) {
	b.Helper()
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, s.postgres.URL)
	require.NoError(b, err)
	_, err = conn.Exec(ctx, statement)
	require.NoError(b, err, statement)
	require.NoError(b, conn.Close(ctx))
}

func (s *servers) versions(b testing.TB) string {
	b.Helper()
	ctx := context.Background()
	info, err := s.control.InfoMap(ctx, "server").Result()
	require.NoError(b, err)
	conn, err := pgx.Connect(ctx, s.postgres.URL)
	require.NoError(b, err)
	var postgres string
	require.NoError(b, conn.QueryRow(ctx, "SHOW server_version").Scan(&postgres))
	require.NoError(b, conn.Close(ctx))
	postgres, _, _ = strings.Cut(postgres, " ") // distributions append their own version
	return "Redis " + info["Server"]["redis_version"] + " (appendfsync always), PostgreSQL " + postgres +
		" (fsync and synchronous_commit on)"
}

// versions lists what was named by MeasuredWith, and the versions of the modules. It reads go.mod,
// because a test binary does not know its modules.
func versions(modules []string) string {
	names := slices.Clone(measuredWith)
	mod, _ := os.ReadFile("../go.mod")
	for _, found := range regexp.MustCompile(`(?m)^\s+(\S+) (v\S+)`).FindAllStringSubmatch(string(mod), -1) {
		path, version := found[1], found[2]
		for _, module := range modules {
			if strings.Contains(path, module) {
				names = append(names, module+" "+version)
			}
		}
	}
	return strings.Join(names, ", ")
}

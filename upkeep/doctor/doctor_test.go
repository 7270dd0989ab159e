package doctor_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/sql"
	"stampede/upkeep/doctor"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// summaries returns severity and text of each finding.
func summaries(findings []doctor.Finding) []string {
	var all []string
	for _, f := range findings {
		all = append(all, string(f.Severity)+": "+f.What)
	}
	return all
}

func TestRedisDefaultsAreSafe(t *testing.T) {
	t.Parallel()
	findings, err := doctor.Redis(t.Context(), ownRedis(t), reservation.OperatorRights)
	require.NoError(t, err)
	assert.Empty(t, findings)
}

func TestRedisFindsUnsafeSettings(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		set  map[string]string
		want string
	}{
		"eviction": {
			map[string]string{"maxmemory-policy": "allkeys-lru"},
			"unsafe: maxmemory-policy is allkeys-lru",
		},
		"no AOF":             {map[string]string{"appendonly": "no"}, "unsafe: appendonly is no"},
		"fsync every second": {map[string]string{"appendfsync": "everysec"}, "warning: appendfsync is everysec"},
		"no fsync":           {map[string]string{"appendfsync": "no"}, "unsafe: appendfsync is no"},
		"no fsync during a rewrite": {
			map[string]string{"no-appendfsync-on-rewrite": "yes"},
			"unsafe: no-appendfsync-on-rewrite is yes",
		},
		"no memory limit": {map[string]string{"maxmemory": "0"}, "warning: maxmemory is not set"},
		"short timeout":   {map[string]string{"timeout": "5"}, "warning: timeout is 5 s"},
		"replica":         {map[string]string{"replicaof": "127.0.0.1 1"}, "unsafe: the server is a replica"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rdb := ownRedis(t)
			for setting, value := range c.set {
				if setting == "replicaof" {
					require.NoError(t, rdb.ReplicaOf(t.Context(), "127.0.0.1", "1").Err())
					continue
				}
				require.NoError(t, rdb.ConfigSet(t.Context(), setting, value).Err())
			}
			findings, err := doctor.Redis(t.Context(), rdb, reservation.OperatorRights)
			require.NoError(t, err)
			assert.Equal(t, []string{c.want}, summaries(findings))
			assert.NotEmpty(t, findings[0].Why)
			assert.NotEmpty(t, findings[0].Mend)
		})
	}
}

// A managed Redis forbids CONFIG; the values in INFO are still checked.
func TestRedisReportsForbiddenCommands(t *testing.T) {
	t.Parallel()
	rdb := ownRedis(t)
	require.NoError(t, rdb.ConfigSet(t.Context(), "maxmemory-policy", "volatile-ttl").Err())
	require.NoError(t, rdb.ConfigSet(t.Context(), "maxmemory", "0").Err())
	require.NoError(t, rdb.ACLSetUser(t.Context(), "tenant", "on", "nopass", "~*", "&*", "+@all", "-config",
		"-hset").Err())
	options := *rdb.Options()
	options.Username, options.Password = "tenant", "any"
	tenant := redis.NewClient(&options)
	t.Cleanup(func() { _ = tenant.Close() })

	findings, err := doctor.Redis(t.Context(), tenant, reservation.OperatorRights)
	require.NoError(t, err)
	assert.Equal(t, []string{
		"unsafe: the user is not allowed, or the server lacks, HSET",
		"unsafe: maxmemory-policy is volatile-ttl",
		"warning: maxmemory is not set",
		"unchecked: appendfsync could not be read (CONFIG GET is refused)",
	}, summaries(findings))
}

func TestRedisFailsWithoutServer(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	rdb := testkit.Control(t, server.URL)
	server.Kill()
	_, err := doctor.Redis(t.Context(), rdb, reservation.OperatorRights)
	assert.ErrorContains(t, err, "read INFO of Redis")
}

func TestPostgresDefaultsAreSafe(t *testing.T) {
	t.Parallel()
	findings, err := doctor.Postgres(t.Context(), testkit.Pool(t))
	require.NoError(t, err)
	assert.Empty(t, findings)
}

func TestPostgresFindsUnsafeSettings(t *testing.T) {
	t.Parallel()
	server, err := localserver.StartPostgres(t.Context(), localserver.PostgresOptions{Settings: map[string]string{
		"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "statement_timeout": "2s",
		"lock_timeout": "1s", "idle_session_timeout": "3s", "default_transaction_read_only": "on",
		"session_replication_role": "replica",
	}})
	require.NoError(t, err)
	t.Cleanup(server.Stop)
	pool := testkit.PoolAt(t, server.URL, 2)
	_, err = pool.Exec(t.Context(), "BEGIN READ WRITE; GRANT CREATE ON SCHEMA public TO PUBLIC; COMMIT", // as before PostgreSQL 15
		pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)

	findings, err := doctor.Postgres(t.Context(), pool)
	require.NoError(t, err)
	got := summaries(findings)
	require.Len(t, got, 10)
	assert.Equal(t, []string{
		"unsafe: the server takes no writes: default_transaction_read_only is on (command line)",
		"unsafe: session_replication_role is replica",
		"unsafe: fsync is off", "unsafe: full_page_writes is off", "unsafe: synchronous_commit is off",
		"warning: every role may create objects in the schema of Stampede",
		"warning: statement_timeout is 2000 ms", "warning: lock_timeout is 1000 ms",
		"warning: idle_session_timeout is 3000 ms",
	}, got[:9])
	assert.Contains(t, got[9], "stampede migrate up")
	for _, f := range findings {
		if strings.Contains(f.Mend, "ALTER SYSTEM") {
			assert.Contains(t, f.Mend, "SELECT pg_reload_conf()", "without it the setting stays as it is")
		}
	}
}

func TestWriteText(t *testing.T) {
	t.Parallel()
	text := func(findings ...doctor.Finding) string {
		var out bytes.Buffer
		require.NoError(t, doctor.WriteText(&out, findings))
		return out.String()
	}
	wrong := doctor.Finding{
		Severity: doctor.Unsafe, Server: "redis", Node: "10.0.0.1:6379", What: "appendonly is no", Why: "because",
		Mend: "do this",
	}
	measured := doctor.Finding{
		Severity: doctor.Measured, Server: "postgres", What: "a round trip takes long", Why: "an hour", Mend: "so what",
	}
	const (
		shownWrong    = "unsafe     redis 10.0.0.1:6379: appendonly is no\n           why:  because\n           mend: do this\n"
		shownMeasured = "measured   postgres: a round trip takes long\n           cost: an hour\n"
		kept          = "The settings of Redis and Postgres keep every promise.\n"
	)
	assert.Equal(t, kept, text())
	assert.Equal(t, kept+shownMeasured, text(measured))
	assert.Equal(t, shownWrong+shownMeasured, text(wrong, measured))
}

func ownRedis(t *testing.T) *redis.Client {
	t.Helper()
	rdb := testkit.Control(t, testkit.OwnRedis(t).URL)
	return rdb.(*redis.Client)
}

func TestServersReturnsVersions(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	require.Regexp(t, `^(Redis|Valkey) \d+\.\d+\.\d+, PostgreSQL \d+(\.\d+)*$`,
		doctor.Servers(t.Context(), ownRedis(t), pool))

	away := testkit.Control(t, "redis://127.0.0.1:1")
	require.Regexp(t, `^Redis, PostgreSQL \d`, doctor.Servers(t.Context(), away, pool))
}

func TestKeySetIsChecked(t *testing.T) {
	t.Parallel()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	point, err := private.PublicKey.Bytes()
	require.NoError(t, err)
	good := fmt.Sprintf(`{"kty":"EC","crv":"P-256","x":"%s","y":"%s"}`,
		base64.RawURLEncoding.EncodeToString(point[1:33]), base64.RawURLEncoding.EncodeToString(point[33:]))
	const odd = `{"kty":"RSA","kid":"tls-1","use":"tls"}`
	for keys, want := range map[string][]string{
		good:             nil,
		good + "," + odd: {`warning: 1 of 2 keys cannot be used: key 2 (kid "tls-1"): its use is "tls", not sig`},
		odd:              {`none of its keys can be used: key 1 (kid "tls-1"): its use is "tls", not sig`},
		"":               {"away: GET ", "the answer has no keys"},
		good + strings.Repeat(","+odd, 12): {
			`warning: 12 of 13 keys cannot be used: key 2`, `key 11 (kid "tls-1"): its use is "tls", not sig; and 2 more`,
		},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"keys":[`+keys+`]}`)
		}))
		found := summaries(doctor.KeySet(t.Context(), server.URL))
		server.Close()
		require.Len(t, found, min(len(want), 1))
		for _, part := range want {
			require.Contains(t, found[0], part)
		}
		away := doctor.KeySet(t.Context(), strings.Replace(server.URL, "http://", "http://ann:password@", 1))
		require.Equal(t, doctor.Away, away[0].Severity)
		require.NotContains(t, away[0].What, "password")
	}
}

func TestClocksThatAreApartAreFound(t *testing.T) {
	t.Parallel()
	server, set := testkit.ClockedPostgres(t)
	pool, rdb := testkit.PoolAt(t, server.URL, 1), testkit.Redis(t)
	look := func() []doctor.Finding {
		findings, err := doctor.Clocks(t.Context(), rdb, pool)
		require.NoError(t, err)
		return findings
	}
	assert.Empty(t, look())
	for ahead, want := range map[time.Duration]string{
		time.Hour:  `^the clock of (this server|this machine) is (1h0m0s|59m59\.\d+s) behind that of Postgres$`,
		-time.Hour: `^the clock of (this server|this machine) is (1h0m0s|59m59\.\d+s) ahead of that of Postgres$`,
	} {
		set(ahead)
		findings := look()
		require.Len(t, findings, 2)
		for n, server := range []string{"redis", "postgres"} {
			assert.Equal(t, server, findings[n].Server)
			assert.Equal(t, doctor.Warning, findings[n].Severity)
			assert.Regexp(t, want, findings[n].What)
		}
	}
}

// withDefaults adds DEFAULT partitions, as operators and pg_partman do to be safe.
func withDefaults(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := testkit.Pool(t)
	execute(t, pool, "CREATE TABLE orders_else PARTITION OF orders DEFAULT; "+
		"CREATE TABLE order_events_else PARTITION OF order_events DEFAULT")
	return pool
}

func execute(t *testing.T, pool *pgxpool.Pool, statements string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), statements, append([]any{pgx.QueryExecModeSimpleProtocol}, args...)...)
	require.NoError(t, err)
}

// saleOf makes a sale of March 2037 with an order, if it has a user, and returns the tables of that order and its
// event.
func saleOf(t *testing.T, pool *pgxpool.Pool, user string) (tables string) {
	t.Helper()
	sale := fmt.Sprintf("01edb000-0000-7000-8000-%012d", len(user))
	execute(t, pool, "INSERT INTO sales (id, name, stock) VALUES ($1::uuid, 'in 2037-03', 1)", sale)
	if user == "" {
		return ""
	}
	execute(t, pool, `INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
		VALUES ($1::uuid, $1::uuid, $2, 1, 'voided', 2, 1, 1, now(), now())`, sale, user)
	execute(t, pool, `INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
		VALUES ($1::uuid, 2, 'OrderVoided', $1::uuid, $2, 1, now())`, sale, user)
	return tablesOf(t, pool, sale)
}

func tablesOf(t *testing.T, pool *pgxpool.Pool, sale string) (tables string) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT concat_ws(' ', (SELECT tableoid::regclass FROM orders WHERE sale_id = $1),
		(SELECT tableoid::regclass FROM order_events WHERE sale_id = $1))`, uuid.MustParse(sale)).Scan(&tables))
	return tables
}

func TestMonthsGoOnBesideDefaultPartitions(t *testing.T) {
	t.Parallel()
	pool := withDefaults(t)
	require.Equal(t, "orders_2037_03 order_events_2037_03", saleOf(t, pool, "ann"))
	var taken *string
	require.NoError(t, pool.QueryRow(t.Context(), sql.WorkerMonthsInDefault).Scan(&taken))
	require.Nil(t, taken)
	findings, err := doctor.Postgres(t.Context(), pool)
	require.NoError(t, err)
	assert.Equal(t, []string{
		"warning: order_events_else is a DEFAULT partition of order_events", "warning: orders_else is a DEFAULT partition of orders",
	}, summaries(findings))
}

// Sales of a month whose orders are in a DEFAULT partition go on there, until an operator moves them.
func TestMonthInDefaultPartitionIsMovedByMend(t *testing.T) {
	t.Parallel()
	pool := withDefaults(t)
	execute(t, pool, "ALTER TABLE sales DISABLE TRIGGER make_month")
	require.Equal(t, "orders_else order_events_else", saleOf(t, pool, "ann"))
	execute(t, pool, "ALTER TABLE sales ENABLE TRIGGER make_month")
	require.Equal(t, "orders_else order_events_else", saleOf(t, pool, "bo"), "a sale of the same month")

	for range 2 {
		findings, err := doctor.Postgres(t.Context(), pool)
		require.NoError(t, err)
		require.Contains(t, findings[0].What, "is a DEFAULT partition")
		_, mend, _ := strings.Cut(findings[0].Mend, ": ")
		execute(t, pool, mend)
	}
	findings, err := doctor.Postgres(t.Context(), pool)
	require.NoError(t, err)
	assert.Empty(t, findings)
	for _, sale := range []string{"01edb000-0000-7000-8000-000000000003", "01edb000-0000-7000-8000-000000000002"} {
		assert.Equal(t, "orders_2037_03 order_events_2037_03", tablesOf(t, pool, sale))
	}
}

// A large DEFAULT partition would be locked for as long as it takes to read it.
func TestLargeDefaultPartitionIsNotLocked(t *testing.T) {
	t.Parallel()
	pool := withDefaults(t)
	execute(t, pool, `INSERT INTO orders_else (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
		SELECT gen_random_uuid(), '01f00000-0000-7000-8000-000000000000', repeat('x', 1000), 1, 'voided', 2, n, 1, now(), now()
		FROM generate_series(1, 20000) AS n`)
	require.Equal(t, "orders_else order_events_2037_03", saleOf(t, pool, "ann"))
}

// Only one kind of the writes gets into the log, and nothing stays of them. A slow server is a warning.
func TestSpeedIsMeasured(t *testing.T) {
	t.Parallel()
	rdb, pool := ownRedis(t), testkit.Pool(t)
	probe := func(logged bool) (bytes int64) {
		before := testkit.Logged(t, rdb)
		keys := reservation.Keys{Prefix: "stampede", Partitions: 1}
		require.NoError(t, reservation.ProbeWrite(t.Context(), rdb, keys, 0, logged))
		return testkit.Logged(t, rdb) - before
	}
	require.Zero(t, probe(false))
	require.Positive(t, probe(true))

	found := doctor.Speeds(t.Context(), rdb, pool)
	require.Len(t, found, 2)
	for _, f := range found {
		assert.Contains(t, f.What, fmt.Sprintf("a round trip takes %.2f ms, and a ", f.Speed.RoundTrip))
		assert.Positive(t, f.Speed.RoundTrip, f.Server)
	}
	testkit.Eventually(t, 10*time.Second, "the mark of Redis vanishes", func() bool {
		return rdb.DBSize(t.Context()).Val() == 0
	})

	rdb.AddHook(farAway{})
	slow := doctor.Speeds(t.Context(), rdb, pool)[0]
	assert.Equal(t, doctor.Warning, slow.Severity)
	assert.GreaterOrEqual(t, slow.Speed.RoundTrip, 25.0)

	away := testkit.Control(t, "redis://127.0.0.1:1")
	found = doctor.Speeds(t.Context(), away, pool)
	require.Len(t, found, 1)
	assert.Equal(t, "postgres", found[0].Server)
}

// farAway is a hook that makes each round trip 25 ms longer.
type farAway struct{}

func (farAway) DialHook(next redis.DialHook) redis.DialHook { return next }

func (farAway) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (farAway) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		<-time.After(25 * time.Millisecond)
		return next(ctx, cmd)
	}
}

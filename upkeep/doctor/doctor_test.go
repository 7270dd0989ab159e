package doctor_test

import (
	"bytes"
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

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/reservation"
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
	var out bytes.Buffer
	require.NoError(t,
		doctor.WriteText(&out, []doctor.Finding{
			{doctor.Unsafe, "redis", "10.0.0.1:6379", "appendonly is no", "because", "do this"},
		}))
	assert.Equal(t, "unsafe     redis 10.0.0.1:6379: appendonly is no\n           why:  because\n           mend: do this\n",
		out.String())
	out.Reset()
	require.NoError(t, doctor.WriteText(&out, nil))
	assert.Contains(t, out.String(), "every promise")
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

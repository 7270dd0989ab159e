package connect_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/sql"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var redisClients = map[string]func(string) (redis.UniversalClient, error){
	"stampede-ingress":  connect.Ingress,
	"stampede-control":  connect.Control,
	"stampede-blocking": connect.Blocking,
}

func TestRedisGetsNoUnknownCommands(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	for name, newClient := range redisClients {
		client := open(t, newClient, server.URL)
		require.Equal(t, name, client.ClientGetName(t.Context()).Val())
	}
	info := open(t, connect.Control, server.URL).InfoMap(t.Context(), "stats").Item("Stats", "total_error_replies")
	require.Equal(t, "0", info)
}

// The server freezes with an open connection: the slowest kind of outage to detect.
func TestIngressTimesOut(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	client := open(t, connect.Ingress, server.URL)
	require.NoError(t, client.Ping(t.Context()).Err())
	require.NoError(t, syscall.Kill(server.Pid(), syscall.SIGSTOP))

	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	begun := time.Now()
	require.ErrorIs(t, client.Ping(ctx).Err(), context.DeadlineExceeded)
	require.Less(t, time.Since(begun), time.Second, "the call must respect its context")

	begun = time.Now()
	err := client.Ping(t.Context()).Err()
	var timeout net.Error
	require.ErrorAs(t, err, &timeout)
	require.True(t, timeout.Timeout())
	require.Less(t, time.Since(begun), 5*time.Second)
}

func TestBlockingDoesNotRetry(t *testing.T) {
	t.Parallel()
	client, err := connect.Blocking("redis://localhost")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	options := client.(*redis.Client).Options()
	require.Zero(t, options.MaxRetries)
	require.Greater(t, options.ReadTimeout, connect.MaxBlock)
}

// Not parallel: the default logger is that of the process.
func TestLogOfGoRedisGoesToSlog(t *testing.T) {
	var log bytes.Buffer
	before := slog.Default()
	t.Cleanup(func() { slog.SetDefault(before) })
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})))

	server := testkit.OwnRedis(t)
	server.Kill()
	require.Error(t, open(t, connect.Ingress, server.URL).Ping(t.Context()).Err())
	require.Contains(t, log.String(), "go-redis: ")
}

func TestPostgresURLOverridesSettings(t *testing.T) {
	t.Parallel()
	for query, want := range map[string][3]string{
		"": {"stampede work", "10s", "UTC"},
		"&application_name=mine&idle_in_transaction_session_timeout=7000&options=-c%20timezone%3DAsia/Tokyo": {
			"mine", "7s", "Asia/Tokyo",
		},
	} {
		pool := testkit.PoolAt(t, testkit.DatabaseURL(t)+query, 3, connect.Service("work"))
		got := settings(t, pool, "application_name", "idle_in_transaction_session_timeout", "timezone")
		require.Equal(t, want[:], got)
		require.EqualValues(t, 3, pool.Config().MaxConns)
	}
}

// Servers without the setting must still accept connections.
func TestServiceLimitsTransactions(t *testing.T) {
	t.Parallel()
	service := testkit.PoolAt(t, testkit.DatabaseURL(t), 1, connect.Service("work"))
	var major int
	require.NoError(t, service.QueryRow(t.Context(),
		"SELECT current_setting('server_version_num')::int / 10000").Scan(&major))
	want, wantOther := "12s", "0"
	if major < 17 {
		want, wantOther = "", ""
	}
	require.Equal(t, []string{want}, settings(t, service, "transaction_timeout"))
	require.Equal(t, []string{wantOther}, settings(t, testkit.Pool(t), "transaction_timeout"),
		"no limit for other pools")
}

// Commands read all orders: a limit that the server, the database or the role prescribes would end an audit. A client's
// own limit stays. Services have short statements.
func TestCommandsInheritNoLimit(t *testing.T) {
	t.Parallel()
	url := testkit.DatabaseURL(t)
	limits := []string{
		"statement_timeout", "lock_timeout", "transaction_timeout", "idle_session_timeout",
		"idle_in_transaction_session_timeout",
	}
	_, err := testkit.PoolAt(t, url, 1).Exec(t.Context(), `DO $$ DECLARE name text; BEGIN
		FOR name IN SELECT s.name FROM pg_settings AS s WHERE s.name = ANY ('{`+strings.Join(limits, ",")+`}') LOOP
			EXECUTE format('ALTER DATABASE %I SET %I = 500', current_database(), name);
		END LOOP; END $$`)
	require.NoError(t, err)
	command, client := testkit.PoolAt(t, url, 1), testkit.PoolAt(t, url+"&statement_timeout=7000", 1)
	service := testkit.PoolAt(t, url, 1, connect.Service("work"))
	unlimited, bounded := "0", "12s" // since PostgreSQL 17
	if settings(t, command, "transaction_timeout")[0] == "" {
		unlimited, bounded = "", ""
	}
	require.Equal(t, []string{"0", "0", unlimited, "0", "10s"}, settings(t, command, limits...))
	require.Equal(t, []string{"7s", "0", unlimited, "0", "10s"}, settings(t, client, limits...))
	require.Equal(t, []string{"500ms", "500ms", bounded, "0", "10s"}, settings(t, service, limits...))
}

// settings returns settings of a session, "" for those that the server does not have.
func settings(t *testing.T, pool *pgxpool.Pool, names ...string) []string {
	t.Helper()
	var values []string
	require.NoError(t, pool.QueryRow(t.Context(),
		"SELECT array_agg(coalesce(current_setting(name, true), '') ORDER BY place) FROM unnest($1::text[]) WITH "+
			"ORDINALITY AS wanted (name, place)",
		names).Scan(&values))
	return values
}

func TestInvalidURLErrorHidesPassword(t *testing.T) {
	t.Parallel()
	const password = "hunter2"
	for _, bad := range []string{
		"", password, "host:6379", "http://host:6379", password + ":x@host:6379",
		"redis://user:" + password + "/x@host:6379", "redis://user:12/" + password + "@host:6379",
		"redis://user:%" + password + "@host:6379", "redis://host:6379/0?" + password + "=1", "redis://host:6379/" + password,
	} {
		for name, newClient := range redisClients {
			_, err := newClient(bad)
			require.ErrorIs(t, err, connect.ErrRedisURL, "%s %s", name, bad)
			require.NotContains(t, err.Error(), password)
		}
	}
	require.ErrorContains(t, connect.ErrRedisURL, "REDIS_URL must look like redis://")

	for _, bad := range []string{
		"", password, "redis://host:6379",
		"postgres://user:" + password + "/x@host:5432/db", "postgres://user:%" + password + "@host/db",
		"postgres://host/db?sslmode=" + password, "host=x port=" + password,
	} {
		_, err := connect.Postgres(t.Context(), bad, 1)
		require.ErrorIs(t, err, sql.ErrDatabaseURL, bad)
		require.NotContains(t, err.Error(), password)
	}
	require.ErrorContains(t, sql.ErrDatabaseURL, "DATABASE_URL must look like postgres://")
	require.False(t, strings.Contains(sql.ErrDatabaseURL.Error(), password))
}

func open(t *testing.T, newClient func(string) (redis.UniversalClient, error), url string) redis.UniversalClient {
	t.Helper()
	client, err := newClient(url)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	return client
}

// TestTLSAcceptsHostsOfURL: the nodes of a cluster name each other by an address that the certificate does not have.
func TestTLSAcceptsHostsOfURL(t *testing.T) {
	folder := t.TempDir()
	certificate, key := selfSigned(t, folder, "localhost")
	t.Setenv("SSL_CERT_FILE", certificate) // the trusted ones of this process, which are read once
	cluster, err := localserver.StartCluster(t.Context(), localserver.ClusterOptions{
		Masters: 3, Certificate: certificate, Key: key,
	})
	require.NoError(t, err)
	t.Cleanup(cluster.Stop)
	client := open(t, connect.Ingress, strings.ReplaceAll(cluster.URL, "127.0.0.1", "localhost"))
	for _, key := range []string{"a", "b", "c", "d", "e", "f"} { // on all nodes
		require.NoError(t, client.Set(t.Context(), key, "x", 0).Err())
	}
	client = open(t, connect.Ingress, cluster.URL)
	require.ErrorContains(t, client.Get(t.Context(), "a").Err(), "certificate")
}

func TestPostgresTLSVerifiesHost(t *testing.T) {
	t.Parallel()
	certificate, key := selfSigned(t, t.TempDir(), "localhost")
	own := testkit.OwnPostgres(t)
	admin, err := pgx.Connect(t.Context(), own.URL)
	require.NoError(t, err)
	for _, statement := range []string{
		"COPY (SELECT) TO PROGRAM 'umask 077; cat > /dev/null; cat " + certificate + " > server.crt; cat " + key +
			" > server.key'",
		"ALTER SYSTEM SET ssl = on", "SELECT pg_reload_conf()",
	} {
		_, err := admin.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	require.NoError(t, admin.Close(t.Context()))
	encrypted := func(host string) (is bool, err error) {
		url := strings.Replace(own.URL, "sslmode=disable", "sslmode=verify-full&sslrootcert="+certificate, 1)
		pool, err := connect.Postgres(t.Context(), strings.Replace(url, "127.0.0.1", host, 1), 1)
		require.NoError(t, err)
		defer pool.Close()
		err = pool.QueryRow(t.Context(), "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").Scan(&is)
		return is, err
	}
	testkit.Eventually(t, 30*time.Second, "the session is encrypted", func() bool {
		is, err := encrypted("localhost")
		return err == nil && is
	})
	_, err = encrypted("127.0.0.1")
	require.ErrorContains(t, err, "certificate")
}

func TestRedisSocket(t *testing.T) {
	t.Parallel()
	folder, err := os.MkdirTemp("", "socket") // that of the test is too deep for the path of a socket
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	require.NoError(t, os.Chmod(folder, 0o777)) //nolint:gosec // the server runs as another user
	path := filepath.Join(folder, "redis")
	own, err := localserver.StartRedis(t.Context(), localserver.RedisOptions{
		Settings: map[string]string{"unixsocket": path, "unixsocketperm": "777"},
	})
	require.NoError(t, err)
	t.Cleanup(own.Stop)
	for name, newClient := range redisClients {
		require.Equal(t, name, open(t, newClient, "unix://"+path).ClientGetName(t.Context()).Val())
	}
}

// selfSigned writes a certificate for the host, and its key.
func selfSigned(t *testing.T, folder, host string) (certificate, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: host}, DNSNames: []string{host},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	signed, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	require.NoError(t, err)
	encoded, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(t, err)
	write := func(name, kind string, bytes []byte) string {
		path := filepath.Join(folder, name)
		text := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: bytes})
		require.NoError(t, os.WriteFile(path, text, 0o644)) //nolint:gosec // the server runs as another user
		return path
	}
	for dir := folder; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		require.NoError(t, os.Chmod(dir, 0o755)) //nolint:gosec // as above
	}
	return write("certificate.pem", "CERTIFICATE", signed), write("key.pem", "PRIVATE KEY", encoded)
}

func TestClusterAndSentinelURLs(t *testing.T) {
	t.Parallel()
	const password = "hunter2"
	for bad, why := range map[string]string{
		"redis+cluster://":                                    "must be host:port",
		"redis+cluster://host:port":                           "must be host:port",
		"redis+cluster://host:6379,,other:6379":               "must be host:port",
		"redis+cluster://host:70000":                          "must be host:port",
		"redis+cluster://:" + password + "@host:6379/3":       "database 0",
		"redis+cluster://host:6379?" + password + "=1":        "parameters",
		"redis+cluster://a:%" + password + "@host:6379":       "must look like",
		"redis+cluster://a:" + password + "@host:6379#frag":   "must look like",
		"redis+clutser://a:" + password + "@host:6379":        "must look like",
		"redis+sentinel://a:" + password + "@host:26379":      "master",
		"redis+sentinel://a:" + password + "@host:26379//0":   "master",
		"redis+sentinel://host:26379/mymaster/x":              "number of the database",
		"redis+sentinel://host:26379/mymaster/0?password=abc": "sentinel_password",
	} {
		for name, newClient := range redisClients {
			_, err := newClient(bad)
			require.ErrorIs(t, err, connect.ErrRedisURL, "%s %s", name, bad)
			require.ErrorContains(t, err, why, bad)
			require.NotContains(t, err.Error(), password)
		}
	}
	for _, good := range []string{
		"redis+cluster://host", "rediss+cluster://user:p%40ss@host:6379,other/", "redis+cluster://[::1]:6379,[::2]:6380/0",
		"redis+sentinel://a,b:26380/mymaster", "rediss+sentinel://:pw@a:26379/mymaster/3?sentinel_password=x",
	} {
		for _, newClient := range redisClients {
			client, err := newClient(good)
			require.NoError(t, err, good)
			require.NoError(t, client.Close())
		}
	}
}

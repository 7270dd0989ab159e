package connect_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
)

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

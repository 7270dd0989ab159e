package testkit

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/connect"
	"stampede/sql"
	"stampede/sql/migrate"
)

// poolConnections is small because tests in parallel share the server's 200 connections.
const poolConnections = 8

// templateLock is the advisory lock for creating the template, for test processes that share a server.
const templateLock = 5_077_217_433

var (
	databases sync.Map // testing.TB → func() string, the URL of the test's database
	// templated holds the names of existing templates by the server's URL.
	templated struct {
		sync.Mutex
		name map[string]string
	}
)

// Pool returns a pool on the test's own database, which is migrated. It is closed when the test ends.
func Pool(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return PoolAt(t, DatabaseURL(t), poolConnections)
}

// PoolAt returns a pool of so many connections to the database at the URL. It is closed when the test ends.
func PoolAt(t testing.TB, url string, connections int32, options ...connect.PostgresOption) *pgxpool.Pool {
	t.Helper()
	pool, err := connect.Postgres(t.Context(), url, connections, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// DatabaseURL returns the URL of the test's own database. All calls of a test return the same one. The database
// is dropped when the test ends.
func DatabaseURL(t testing.TB) string {
	t.Helper()
	made, _ := databases.LoadOrStore(t, sync.OnceValues(func() (string, error) { return newDatabase(t) }))
	databaseURL, err := made.(func() (string, error))()
	if err != nil {
		t.Fatalf("create the database of the test: %v", err)
	}
	return databaseURL
}

func newDatabase(t testing.TB) (string, error) {
	t.Cleanup(func() { databases.Delete(t) })
	server := postgresURL(t)
	ctx := context.Background() // the test's own context ends before its cleanups
	template, err := template(ctx, server)
	if err != nil {
		return "", err
	}
	name := "stampede_test_" + strings.ToLower(rand.Text())
	if err := administer(ctx, server, "CREATE DATABASE "+name+" TEMPLATE "+template); err != nil {
		return "", err
	}
	t.Cleanup(func() {
		if err := administer(ctx, server, "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
			t.Errorf("drop the database of the test: %v", err)
		}
	})
	return inDatabase(server, name)
}

// template returns the name of a migrated database to copy. Each server has one per schema, named after
// the schema, so that checkouts with different schemas can share a server.
func template(ctx context.Context, server string) (string, error) {
	templated.Lock()
	defer templated.Unlock()
	if name := templated.name[server]; name != "" {
		return name, nil
	}
	fingerprint, err := sql.Fingerprint()
	if err != nil {
		return "", err
	}
	name := "stampede_template_" + fingerprint
	if err := createTemplate(ctx, server, name); err != nil {
		return "", fmt.Errorf("create the template: %w", err)
	}
	if templated.name == nil {
		templated.name = make(map[string]string)
	}
	templated.name[server] = name
	return name, nil
}

// createTemplate creates the template unless it exists. It is renamed once it is complete, so an unfinished
// one of a killed process is created again.
func createTemplate(ctx context.Context, server, name string) (err error) {
	conn, err := pgx.Connect(ctx, server)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(ctx)) }() // also unlocks
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock($1)", templateLock); err != nil {
		return err
	}
	var exists bool
	if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)",
		name).Scan(&exists); err != nil || exists {
		return err
	}
	unfinished := name + "_unfinished"
	for _, statement := range []string{
		"DROP DATABASE IF EXISTS " + unfinished + " WITH (FORCE)",
		"CREATE DATABASE " + unfinished,
	} {
		if _, err := conn.Exec(ctx, statement); err != nil {
			return err
		}
	}
	unfinishedURL, err := inDatabase(server, unfinished)
	if err != nil {
		return err
	}
	if err := migrate.Up(ctx, unfinishedURL); err != nil {
		return err
	}
	for _, statement := range []string{
		// A template cannot be copied while it has connections.
		"ALTER DATABASE " + unfinished + " WITH ALLOW_CONNECTIONS false",
		"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '" + unfinished + "'",
		"ALTER DATABASE " + unfinished + " RENAME TO " + name,
	} {
		if _, err := conn.Exec(ctx, statement); err != nil {
			return err
		}
	}
	return nil
}

func administer(ctx context.Context, server, statement string) (err error) {
	conn, err := pgx.Connect(ctx, server)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(ctx)) }()
	_, err = conn.Exec(ctx, statement)
	return err
}

// inDatabase returns the URL with the name of another database.
func inDatabase(server, name string) (string, error) {
	u, err := url.Parse(server)
	if err != nil || u.Host == "" {
		return "", sql.ErrDatabaseURL
	}
	u.Path = "/" + name
	return u.String(), nil
}

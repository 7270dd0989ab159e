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
)

// poolConnections bounds the pool of a test: many tests share the server's 200 connections.
const poolConnections = 8

// templateLock is the advisory lock under which test processes that share a server make the template.
const templateLock = 5_077_217_433

var (
	databases sync.Map // testing.TB → func() string, the URL of the test's database
	// templated remembers, by the server's URL, that the template is there.
	templated struct {
		sync.Mutex
		name map[string]string
	}
)

// Pool returns a pool on the test's own database, which is migrated. It is closed when the test ends.
func Pool(t testing.TB) *pgxpool.Pool {
	t.Helper()
	pool, err := connect.Postgres(t.Context(), DatabaseURL(t), poolConnections)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// DatabaseURL is the URL of the test's own database: the same one however often a test asks. It is
// dropped when the test ends.
func DatabaseURL(t testing.TB) string {
	t.Helper()
	made, _ := databases.LoadOrStore(t, sync.OnceValues(func() (string, error) { return newDatabase(t) }))
	databaseURL, err := made.(func() (string, error))()
	if err != nil {
		t.Fatalf("make a database for the test: %v", err)
	}
	return databaseURL
}

func newDatabase(t testing.TB) (string, error) {
	t.Cleanup(func() { databases.Delete(t) })
	server := postgresURL(t)
	ctx := context.Background() // the test's own context ends before its cleanups
	template, err := templateOf(ctx, server)
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

// templateOf returns the name of a migrated database to copy. It is made once for each schema and
// server, and named after the schema, so that checkouts with different ones can share a server.
func templateOf(ctx context.Context, server string) (string, error) {
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
	if err := makeTemplate(ctx, server, name); err != nil {
		return "", fmt.Errorf("make the template: %w", err)
	}
	if templated.name == nil {
		templated.name = make(map[string]string)
	}
	templated.name[server] = name
	return name, nil
}

// makeTemplate makes the template unless it is there. It gets its name when it is whole: one
// that a dying process left half made is made again.
func makeTemplate(ctx context.Context, server, name string) (err error) {
	conn, err := pgx.Connect(ctx, server)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(ctx)) }() // which gives the lock back, too
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock($1)", templateLock); err != nil {
		return err
	}
	var there bool
	if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)",
		name).Scan(&there); err != nil || there {
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
	if err := sql.Up(ctx, unfinishedURL); err != nil {
		return err
	}
	for _, statement := range []string{
		// A template with a connection cannot be copied, so nobody may have one.
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

// inDatabase is the URL with the name of another database.
func inDatabase(server, name string) (string, error) {
	u, err := url.Parse(server)
	if err != nil || u.Host == "" {
		return "", sql.ErrDatabaseURL
	}
	u.Path = "/" + name
	return u.String(), nil
}

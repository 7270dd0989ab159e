package main

import (
	"os"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/crowd"
	"stampede/internal/testkit"
	"stampede/reservation"
)

func TestMain(m *testing.M) {
	testkit.Main(m, testkit.WithCommand(func() int { return run(os.Args[1:], os.Stdout, os.Stderr) }))
}

// within bounds each wait of a test; it is long because many tests share the machine.
const within = 60 * time.Second

const adminToken = "token-of-the-operators"

// shop is one test's keys and database, with the processes that work on them.
type shop struct {
	t    *testing.T
	keys reservation.Keys
	pool *pgxpool.Pool
	// redisURL is that of a Redis of its own, "" for the one that tests share.
	redisURL string
}

func newShop(t *testing.T) *shop {
	t.Helper()
	return &shop{t: t, keys: testkit.Keys(t), pool: testkit.Pool(t)}
}

// command prepares a command on the shop's servers.
func (s *shop) command(args ...string) *testkit.Cmd {
	s.t.Helper()
	c := testkit.Command(s.t, args...)
	c.UseServers(s.keys)
	if s.redisURL != "" {
		c.Setenv("REDIS_URL", s.redisURL)
	}
	return c
}

// run runs a command to its end and returns its exit status.
func (s *shop) run(args ...string) (status int, output string) {
	s.t.Helper()
	c := s.command(args...)
	c.Start()
	return c.Wait(within).ExitCode(), c.Output()
}

// serve starts an ingress and returns it with its URL. No load balancer has to notice its end.
func (s *shop) serve(flags ...string) (*testkit.Cmd, string) {
	s.t.Helper()
	c := s.command(append([]string{"serve"}, flags...)...)
	c.Setenv("STAMPEDE_STOP_DELAY", "0s")
	c.Setenv("STAMPEDE_USER_RATE", "0") // a test looks at an order again and again
	c.Setenv("STAMPEDE_AUTH", "header")
	c.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
	c.Setenv("STAMPEDE_HTTP_ADDR", "127.0.0.1:0")
	c.Start()
	return c, "http://" + loggedAddr(c, "ingress listens")
}

// worker prepares a worker that soon takes over from others, with batches so small that there are many.
func (s *shop) worker(name string) *testkit.Cmd {
	s.t.Helper()
	c := s.command("work")
	c.Setenv("STAMPEDE_CONSUMER", name)
	c.Setenv("STAMPEDE_METRICS_ADDR", "127.0.0.1:0")
	c.Setenv("STAMPEDE_BATCH_MAX", "20")
	c.Setenv("STAMPEDE_MIN_IDLE", "500ms")
	return c
}

// sale creates a sale through an ingress.
func (s *shop) sale(url string, stock int64) uuid.UUID {
	s.t.Helper()
	sale, err := crowd.CreateSale(s.t.Context(), url, adminToken, "test", stock, 1)
	require.NoError(s.t, err)
	return sale
}

// crowd prepares buyers, and the books that they are held against.
func (s *shop) crowd(config crowd.Config) (*crowd.Crowd, *crowd.PostgresBooks) {
	s.t.Helper()
	config.Patience = within
	books, err := crowd.OpenPostgresBooks(s.t.Context(), s.pool, config.Sale)
	require.NoError(s.t, err)
	buyers, err := crowd.New(config)
	require.NoError(s.t, err)
	return buyers, books
}

// requireKept waits until all that the crowd was promised is in Postgres, and checks every promise: by
// the crowd's own ledger, and by the audit.
func (s *shop) requireKept(buyers *crowd.Crowd, books *crowd.PostgresBooks, sale uuid.UUID, sold int) {
	s.t.Helper()
	durable, err := buyers.WatchDurable(s.t.Context(), books, within)
	require.NoError(s.t, err)
	assert.Equal(s.t, sold, durable.Orders, "orders that reached Postgres")

	comparison, err := books.Compare(s.t.Context(), buyers.Ledger())
	require.NoError(s.t, err)
	assert.True(s.t, comparison.Holds(), "%s: %v", comparison, comparison.Examples)
	assert.Equal(s.t, sold, comparison.Accepted)
	assert.Equal(s.t, sold, comparison.Found)
	assert.Empty(s.t, buyers.Report().Failures)

	status, output := s.run("audit", "--wait=30s", "--sale="+sale.String())
	assert.Equal(s.t, exitOK, status, output)
}

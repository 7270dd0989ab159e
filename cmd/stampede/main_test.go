package main

import (
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/crowd"
	"stampede/internal/test/testkit"
	"stampede/reservation"
)

func TestMain(m *testing.M) {
	testkit.Main(m, testkit.WithCommand(func() int {
		if program := os.Getenv(otherProgram); program != "" {
			_ = os.Unsetenv(otherProgram)
			err := syscall.Exec(program, append([]string{program}, os.Args[1:]...), os.Environ())
			fmt.Fprintln(os.Stderr, err)
			return exitFailed
		}
		return run(os.Args[1:], os.Stdout, os.Stderr)
	}))
}

// otherProgram is a variable with the path of a program that a command runs in place of the test binary.
const otherProgram = "STAMPEDE_TEST_OTHER_PROGRAM"

// within bounds each wait of a test; it is long because many tests run in parallel.
const within = 60 * time.Second

const adminToken = "token-of-the-operators"

// shop holds the keys and the database of one test, and runs commands on them.
type shop struct {
	t    *testing.T
	keys reservation.Keys
	pool *pgxpool.Pool
	// redisURL and databaseURL are those of the test's own servers, "" for the shared ones.
	redisURL, databaseURL string
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
	c.Setenv("STAMPEDE_YES", "true")
	c.Setenv("STAMPEDE_PARTITIONS", strconv.Itoa(s.keys.Partitions))
	if s.redisURL != "" {
		c.Setenv("REDIS_URL", s.redisURL)
	}
	if s.databaseURL != "" {
		c.Setenv("DATABASE_URL", s.databaseURL)
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

// serve starts an ingress without a stop delay, and returns it with its URL.
func (s *shop) serve(flags ...string) (*testkit.Cmd, string) {
	s.t.Helper()
	c := s.ingress(flags...)
	c.Start()
	return c, "http://" + loggedAddr(c, "ingress listens")
}

// ingress prepares an ingress.
func (s *shop) ingress(flags ...string) *testkit.Cmd {
	s.t.Helper()
	c := s.command(append([]string{"serve"}, flags...)...)
	c.Setenv("STAMPEDE_STOP_DELAY", "0s")
	c.Setenv("STAMPEDE_USER_RATE", "0") // tests poll their orders
	c.Setenv("STAMPEDE_AUTH", "header")
	c.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
	c.Setenv("STAMPEDE_HTTP_ADDR", "127.0.0.1:0")
	return c
}

// worker prepares a worker with small batches that takes over pending orders after a short time.
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
	return s.saleOf(url, crowd.SaleTerms{Name: "test", Stock: stock})
}

func (s *shop) saleOf(url string, terms crowd.SaleTerms) uuid.UUID {
	s.t.Helper()
	sale, err := crowd.CreateSale(s.t.Context(), url, adminToken, terms)
	require.NoError(s.t, err)
	return sale
}

// buy buys a unit.
func (s *shop) buy(url string, sale uuid.UUID, user string) {
	s.t.Helper()
	require.NoError(s.t, s.tryBuy(url, sale, user))
}

func (s *shop) tryBuy(url string, sale uuid.UUID, user string) error {
	r, err := http.NewRequestWithContext(s.t.Context(), http.MethodPost, url+"/v1/sales/"+sale.String()+"/orders",
		strings.NewReader(`{"quantity":1}`))
	if err != nil {
		return err
	}
	r.Header.Set("X-User-ID", user)
	r.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	_ = answer.Body.Close()
	if answer.StatusCode != http.StatusAccepted {
		return fmt.Errorf("bought: %s", answer.Status)
	}
	return nil
}

// crowd prepares buyers and the verifier of their orders.
func (s *shop) crowd(config crowd.Config) (*crowd.Crowd, *crowd.PostgresVerifier) {
	s.t.Helper()
	config.Patience = within
	verifier, err := crowd.NewPostgresVerifier(s.t.Context(), s.pool, config.Sale)
	require.NoError(s.t, err)
	buyers, err := crowd.New(config)
	require.NoError(s.t, err)
	return buyers, verifier
}

// requireKept waits until all accepted orders are in Postgres, and checks the promises: by the ledger of the crowd and
// by the audit.
func (s *shop) requireKept(buyers *crowd.Crowd, verifier *crowd.PostgresVerifier, sale uuid.UUID, sold int) {
	s.t.Helper()
	durable, err := buyers.WatchDurable(s.t.Context(), verifier, within)
	require.NoError(s.t, err)
	assert.Equal(s.t, sold, durable.Orders, "orders that reached Postgres")

	comparison, err := verifier.Compare(s.t.Context(), buyers.Ledger())
	require.NoError(s.t, err)
	assert.True(s.t, comparison.Holds(), "%s: %v", comparison, comparison.Examples)
	assert.Equal(s.t, sold, comparison.Accepted)
	assert.Equal(s.t, sold, comparison.Found)
	assert.Empty(s.t, buyers.Report().Failures)

	status, output := s.run("audit", "--wait=30s", "--sale="+sale.String())
	assert.Equal(s.t, exitOK, status, output)
}

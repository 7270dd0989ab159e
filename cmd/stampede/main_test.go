package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"stampede/internal/connect"
	"stampede/internal/dev/loadgen"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
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
const within = 2 * time.Minute

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

// ends runs a command that must end with the exit status, and returns its output.
func (s *shop) ends(status int, args ...string) (output string) {
	s.t.Helper()
	got, output := s.run(args...)
	require.Equal(s.t, status, got, "%v: %s", args, output)
	return output
}

// count runs a query that returns a number.
func (s *shop) count(query string, args ...any) (n int) {
	s.t.Helper()
	require.NoError(s.t, s.pool.QueryRow(s.t.Context(), query, args...).Scan(&n))
	return n
}

// control returns a client of a Redis.
func control(t *testing.T, url string) redis.UniversalClient {
	t.Helper()
	rdb, err := connect.Control(url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// store returns the shop's reservations in a Redis.
func (s *shop) store(rdb redis.UniversalClient) *reservation.Store {
	store := reservation.NewStore(rdb, s.keys, reservation.StoreOptions{})
	s.t.Cleanup(store.Close)
	return store
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
	return s.createSale(url, reservation.Terms{Name: "test", Stock: stock})
}

func (s *shop) createSale(url string, terms reservation.Terms) uuid.UUID {
	s.t.Helper()
	sale, err := loadgen.CreateSale(s.t.Context(), url, adminToken, terms)
	require.NoError(s.t, err)
	return sale
}

// buy buys a unit.
func (s *shop) buy(url string, sale uuid.UUID, user string) {
	s.t.Helper()
	require.NoError(s.t, s.tryBuy(url, sale, user))
}

func (s *shop) tryBuy(url string, sale uuid.UUID, user string) error {
	orders := url + "/v1/sales/" + sale.String() + "/orders"
	status, text := call(s.t, http.MethodPost, orders, `{"quantity":1}`, "X-User-ID", user)
	if status != http.StatusAccepted {
		return fmt.Errorf("bought: %d %s", status, text)
	}
	return nil
}

// call makes a request with headers, given as names and values, on a connection of its own. It returns the status and
// the body of the answer; 0 and the error without an answer.
func call(t testing.TB, method, url, body string, headers ...string) (status int, text string) {
	r, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		return 0, err.Error()
	}
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Do(r)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = answer.Body.Close() }()
	read, err := io.ReadAll(answer.Body)
	if err != nil {
		return 0, err.Error()
	}
	return answer.StatusCode, string(read)
}

// crowd prepares buyers and the verifier of their orders.
func (s *shop) crowd(config loadgen.Config) (*loadgen.Crowd, *loadgen.PostgresVerifier) {
	s.t.Helper()
	config.Patience = within
	verifier, err := loadgen.NewPostgresVerifier(s.t.Context(), s.pool, config.Sale)
	require.NoError(s.t, err)
	buyers, err := loadgen.New(config)
	require.NoError(s.t, err)
	return buyers, verifier
}

// requireKept waits until all accepted orders are in Postgres, and checks the promises: by the ledger of the crowd and
// by the audit.
func (s *shop) requireKept(buyers *loadgen.Crowd, verifier *loadgen.PostgresVerifier, sale uuid.UUID, sold int) {
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

	s.ends(exitOK, "audit", "--wait=30s", "--sale="+sale.String())
}

// apiAnswer holds the parts of an answer that these tests read.
type apiAnswer struct {
	HTTP      int
	OrderID   string `json:"order_id"`
	Status    any
	ExpiresAt time.Time `json:"expires_at"`
	Available int
}

func ask(t *testing.T, method, url, user, body string) apiAnswer {
	t.Helper()
	status, text := call(t, method, url, body, "X-User-ID", user)
	a := apiAnswer{HTTP: status}
	require.NoError(t, json.Unmarshal([]byte(text), &a), text)
	return a
}

// recorded creates a sale with a payment window and records an order for each user.
func (s *shop) recorded(users ...string) (sale uuid.UUID, orders map[string]uuid.UUID) {
	s.t.Helper()
	store := s.store(testkit.Redis(s.t))
	created, err := catalog.New(s.pool, store).Create(s.t.Context(), reservation.Terms{
		Name: "a sale", Stock: 100, PerOrderLimit: 1, PaymentWindow: time.Hour,
	})
	require.NoError(s.t, err)
	testwork.Heartbeat(s.t, s.pool)
	orders = map[string]uuid.UUID{}
	var events []order.OrderReserved
	for i, user := range users {
		event := testshop.Reserved(created.ID, user, int64(i+1))
		events, orders[user] = append(events, event), event.OrderID
	}
	_, err = ledger.New(s.pool).Record(s.t.Context(), events)
	require.NoError(s.t, err)
	return created.ID, orders
}

func file(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

// loggedAddr returns the address in the first log line that contains text.
func loggedAddr(c *testkit.Cmd, text string) string {
	_, addr, _ := strings.Cut(c.WaitOutput(within, text), "addr=")
	addr, _, _ = strings.Cut(addr, " ")
	return addr
}

// client is the span of a client that buys, which is in no process of Stampede.
type client struct{ trace, span string }

const deployed = "../../deploy"

// rule is an alert of deploy/prometheus/alerts.yml.
type rule struct {
	Alert, Expr, For string
	Labels           map[string]string
}

func alerts(t *testing.T) (rules []rule) {
	t.Helper()
	text, err := os.ReadFile(deployed + "/prometheus/alerts.yml")
	require.NoError(t, err)
	var file struct{ Groups []struct{ Rules []rule } }
	require.NoError(t, yaml.Unmarshal(text, &file))
	for _, group := range file.Groups {
		rules = append(rules, group.Rules...)
	}
	require.NotEmpty(t, rules)
	return rules
}

// panel is a panel of a dashboard.
type panel struct {
	ID          int
	Type, Title string
	Datasource  struct{ UID string }
	FieldConfig struct{ Defaults struct{ Unit string } }
	Targets     []struct{ Expr string }
}

func dashboards(t *testing.T) map[string][]panel {
	t.Helper()
	paths, err := filepath.Glob(deployed + "/grafana/*.json")
	require.NoError(t, err)
	require.Len(t, paths, 2)
	boards := map[string][]panel{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		var board struct {
			UID, Title string
			Panels     []panel
		}
		require.NoError(t, json.Unmarshal(text, &board), path)
		require.NotEmpty(t, board.UID)
		boards[board.Title] = board.Panels
	}
	return boards
}

func TestPanelsAreComplete(t *testing.T) {
	t.Parallel()
	for title, panels := range dashboards(t) {
		ids := map[int]bool{}
		for _, p := range panels {
			assert.False(t, ids[p.ID], "%s: two panels have the id %d", title, p.ID)
			ids[p.ID] = true
			if p.Type == "row" {
				continue
			}
			assert.NotEmpty(t, p.Targets, "%s: %s", title, p.Title)
			assert.NotEmpty(t, p.FieldConfig.Defaults.Unit, "%s: %s", title, p.Title)
			assert.Equal(t, "${datasource}", p.Datasource.UID, "%s: %s", title, p.Title)
		}
	}
}

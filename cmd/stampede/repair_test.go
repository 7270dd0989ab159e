//go:build system

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/crashpoint"
	"stampede/internal/dev/localserver"
	"stampede/internal/format"
	"stampede/internal/retry"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/sql/migrate"
	"stampede/upkeep/audit"
	"stampede/upkeep/projection"
)

func TestReconcileReportsActionsAndExitsWithOne(t *testing.T) {
	t.Parallel()
	keys, pool := testkit.Keys(t), testkit.Pool(t)
	reconcile := func(flags ...string) (status int, out string) {
		t.Helper()
		process := testkit.Command(t, append([]string{"reconcile", "--yes", "--log-level=error"}, flags...)...)
		process.UseServers(keys)
		process.Start()
		state := process.Wait(within)
		return state.ExitCode(), process.Output()
	}
	status, out := reconcile()
	require.Equal(t, exitOK, status, out)
	require.Equal(t, "no difference between Redis and Postgres\n", out)

	store := reservation.NewStore(testkit.Redis(t), keys, reservation.StoreOptions{Logger: testkit.Logger(t)})
	t.Cleanup(store.Close)
	sale, err := catalog.New(pool, store).Create(t.Context(),
		reservation.Terms{Name: "x", Stock: 10, PerOrderLimit: 1})
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), "UPDATE sales SET sold = 4")
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(),
		"INSERT INTO dead_letters (stream, entry_id, fields, reason, deliveries) VALUES ($1, '1-1', '[]', 'rubbish', 1)",
		keys.Orders(0))
	require.NoError(t, err)

	status, out = reconcile("--dry-run", "--explain")
	require.Equal(t, exitFailed, status, out)
	for _, line := range []string{
		"sale " + sale.ID.String() +
			": sold is 4, the live orders hold 0 units, and the events come to 0 (last event: SaleCreated at revision 1)\n    " +
			"→ recount the units of the sale's live orders\n",
		"waits for a decision: rubbish\n    → for you: run `stampede dlq show`, then replay or discard the dead letter\n",
		"recount      1 found, nothing done: ",
		"dlq          1 found, nothing done: ",
		"2 remain\n",
	} {
		require.Contains(t, out, line)
	}

	status, out = reconcile("--explain", "--output=json")
	require.Equal(t, exitFailed, status, out)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	require.Len(t, lines, 3)
	var report audit.ReconcileReport
	require.NoError(t, json.Unmarshal([]byte(lines[2]), &report))
	require.EqualValues(t, 1, report.Remaining)
	var sold int64
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT sold FROM sales").Scan(&sold))
	require.Zero(t, sold)

	_, err = pool.Exec(t.Context(), "UPDATE dead_letters SET status = 'discarded'; UPDATE sales SET sold = 4")
	require.NoError(t, err)
	status, out = reconcile("--sale=" + sale.ID.String())
	require.Equal(t, exitOK, status, out)
	require.Contains(t, out, "recount      1 found, 1 mended: ")
	require.Contains(t, out, "0 remain\n")
	status, out = reconcile("--sale=" + uuid.NewString())
	require.Equal(t, exitFailed, status, out)
	require.Contains(t, out, "sale not found")
}

func TestWholeAuditIsRecorded(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	latest := func() *audit.Recorded {
		recorded, err := audit.Latest(t.Context(), s.pool)
		require.NoError(t, err)
		if recorded != nil {
			recorded.At = time.Time{}
		}
		return recorded
	}
	sale, _ := s.recorded()
	s.ends(exitOK, "audit", "--sale="+sale.String(), "--operator=ann")
	require.Nil(t, latest(), "an audit of one sale says nothing about the others")

	s.ends(exitOK, "audit", "--operator=ann")
	require.Equal(t, &audit.Recorded{Operator: "ann", Broken: []string{}, Unchecked: []string{}}, latest())

	_, err := s.pool.Exec(t.Context(), "ALTER TABLE sales RENAME CONSTRAINT sales_not_oversold TO aside")
	require.NoError(t, err)
	s.ends(exitFailed, "audit", "--operator=bob", "--output=json")
	require.Equal(t, &audit.Recorded{Operator: "bob", Broken: []string{"DB"}, Unchecked: []string{}}, latest())

	// Without a record of it the verdict is the same.
	_, err = s.pool.Exec(t.Context(), "ALTER TABLE sales RENAME CONSTRAINT aside TO sales_not_oversold; "+
		"ALTER TABLE audits ADD CONSTRAINT audits_full CHECK (operator <> 'eve')")
	require.NoError(t, err)
	output := s.ends(exitOK, "audit", "--operator=eve")
	assert.Contains(t, output, "the verdict is not recorded")
	assert.Contains(t, output, "S1  nothing is oversold                kept")
	require.Equal(t, "bob", latest().Operator)
}

// A rebuild that is killed at any of these points has changed nothing, and the next one succeeds.
func TestKilledProjectionRebuildChangesNothing(t *testing.T) {
	t.Parallel()
	for _, point := range []string{
		crashpoint.ProjectionsWithdrawn, crashpoint.ProjectionsReplaced,
	} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			pool := testkit.Pool(t)
			texts := func(query string) []string {
				rows, err := pool.Query(t.Context(), query)
				require.NoError(t, err)
				found, err := pgx.CollectRows(rows, pgx.RowTo[string])
				require.NoError(t, err)
				return found
			}
			orders := func() []string { return texts("SELECT row_to_json(o)::text FROM orders AS o ORDER BY id") }
			_, err := pool.Exec(t.Context(), `
				INSERT INTO sales (id, name, stock, sold, last_sequence) VALUES ('00000000-0000-7000-8000-000000000001', 'x', 100,
				100, 100);
				INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at,
				key_fingerprint)
					SELECT (left(gen_random_uuid()::text, 32) || '0001')::uuid, sales.id, n, 1, 'confirmed', 2, n, 1, now(), now(),
					NULL FROM sales, generate_series(1, 100) AS n;
				INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at, sequence,
				epoch) SELECT id, 2, 'OrderConfirmed', sale_id, user_id, quantity, updated_at, reserved_at, sequence, epoch FROM orders`)
			require.NoError(t, err)
			whole := orders()
			_, err = pool.Exec(t.Context(), "DELETE FROM orders WHERE sequence > 50; UPDATE sales SET sold = 50")
			require.NoError(t, err)
			damaged := orders()

			rebuild := func() *testkit.Cmd {
				process := testkit.Command(t, "projections", "rebuild", "--output=json")
				process.Setenv("DATABASE_URL", testkit.DatabaseURL(t))
				return process
			}
			victim := rebuild()
			victim.Setenv(crashpoint.Env, point)
			victim.Start()
			victim.WaitKilled(within)
			require.Equal(t, damaged, orders())
			_, err = pool.Exec(t.Context(),
				"UPDATE orders SET reason = 'x' WHERE sequence = 1; UPDATE orders SET reason = NULL WHERE sequence = 1")
			require.NoError(t, err, "orders can be changed")

			var report projection.Report
			testkit.Eventually(t, within, "Postgres has ended the session of the killed rebuild", func() bool {
				successor := rebuild()
				successor.Start()
				return successor.Wait(within).Success() && json.Unmarshal([]byte(successor.Output()), &report) == nil
			})
			require.EqualValues(t, 100, report.Orders)
			require.EqualValues(t, 50, report.Replaced)
			require.Equal(t, whole, orders())
			require.Equal(t, []string{"100"}, texts("SELECT sold::text FROM sales"))
		})
	}
}

// Redis is as it was, so it knows the orders that Postgres has forgotten.
func TestReconcileAfterRestoreOfPostgresLosesNoOrder(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		since func(*restoredShop, *testing.T)
		left  string // by reconcile, for the rebuild
	}{
		"the same epoch": {func(*restoredShop, *testing.T) {}, ""},
		// Postgres names the server before.
		"Redis was restarted since then": {(*restoredShop).rebuilt, "the whole partition has to be rebuilt"},
		// The epoch of Redis is above that of Postgres.
		"the sale was rebuilt since then": {(*restoredShop).rebuiltSale, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newRestoredShop(t)
			s.point(t)
			test.since(s, t)
			for _, worker := range s.workers {
				require.True(t, worker.Stop().Success())
			}
			s.restore(t)
			status, output := s.run("reconcile", "--yes")
			t.Log(output)
			appended := regexp.MustCompile(`append +(\d+) found, (\d+) mended`).FindStringSubmatch(output)
			require.NotNil(t, appended, output)
			require.Equal(t, appended[1], appended[2], "all that only Redis has")
			if test.left != "" {
				require.Equal(t, exitFailed, status)
				require.Contains(t, output, test.left)
			}
			s.ends(exitOK, "rebuild", "--yes")
			s.work()
			s.sell(t, 50, "the sale continues")
			assert.Zero(t, s.requireEnds(restoredStock), "voided")
		})
	}
}

// Only the payment provider knows the payments that Postgres has forgotten.
func TestImportAfterRestoreOfPostgresLosesNoMoney(t *testing.T) {
	t.Parallel()
	s := newRestoredShop(t)
	endPayments := s.payEach(t)
	s.point(t)
	settled := func() int { return s.count("SELECT count(*) FROM payments WHERE state = 'settled'") }
	testkit.Eventually(t, within, "money comes after the point", func() bool { return settled() > 250 })
	for _, worker := range s.workers {
		require.True(t, worker.Stop().Success())
	}
	s.restore(t)
	s.ends(exitOK, "reconcile", "--yes")
	s.ends(exitOK, "rebuild", "--yes")
	s.work()
	s.sell(t, 50, "the sale continues")
	s.pause()
	list := endPayments()
	require.Less(t, s.count("SELECT count(*) FROM payments"), len(list), "payments that Postgres has forgotten")

	provider := file(t, strings.Join(list, "\n"))
	t.Log(s.ends(exitOK, "payment", "import", provider))
	testkit.Eventually(t, within, "all money has settled its order", func() bool { return settled() == len(list) })
	require.Contains(t, s.ends(exitOK, "payment", "import", provider),
		fmt.Sprintf("0 settled, 0 due for refund, 0 waiting, 0 unclear, 0 refunded, %s reported before, ", format.Count(int64(len(list)))))
	require.Equal(t, len(list), s.count("SELECT count(*) FROM orders WHERE status = 'paid'"))
	s.ends(exitOK, "audit", "--wait=60s")
}

// payEach reports a payment for each accepted order. end does so for the last one, and returns all reports.
func (s *rush) payEach(t *testing.T) (end func() (reports []string)) {
	t.Helper()
	var reports []string
	var paying sync.WaitGroup
	stop := make(chan struct{})
	end = sync.OnceValue(func() []string {
		close(stop)
		paying.Wait()
		return reports
	})
	next := func() (acceptedOrder, bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(reports) == len(s.accepted) {
			return acceptedOrder{}, false
		}
		return s.accepted[len(reports)], true
	}
	paying.Go(func() {
		for t.Context().Err() == nil {
			o, found := next()
			if !found {
				select {
				case <-stop:
					return
				case <-time.After(10 * time.Millisecond):
				}
				continue
			}
			reports = append(reports, fmt.Sprintf(`{"order_id":%q,"reference":"pi_%d"}`, o.Order, len(reports)))
			for t.Context().Err() == nil {
				status, _ := call(t, http.MethodPost, s.url+"/v1/payments", reports[len(reports)-1],
					"Authorization", "Bearer "+adminToken)
				if status == http.StatusOK {
					break
				}
				retry.Pause(100*time.Millisecond, t.Context().Done())
			}
		}
	})
	return end
}

// Redis was lost or replaced as well: workers rebuild it, and what Postgres has forgotten is void.
func TestRestoreOfPostgresWithOlderOrEmptyRedisVoidsForgottenOrders(t *testing.T) {
	t.Parallel()
	for name, older := range map[string]bool{"an older Redis": true, "an empty Redis": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newRestoredShop(t)
			copied := ""
			if older {
				var err error
				copied, err = s.redis.CopyData()
				require.NoError(t, err)
			}
			s.point(t)
			// The restored Postgres knows nothing of this epoch, and must not begin it a second time.
			s.rebuilt(t)
			s.restore(t)
			require.NoError(t, s.redis.ReplaceData(t.Context(), copied))
			s.sell(t, 50, "the sale continues")
			s.requireBuyersCanBuyAgain(t)
			assert.GreaterOrEqual(t, s.requireEnds(restoredStock), 100, "voided")
		})
	}
}

// restoredShop is a shop whose Postgres has a backup and an archive of its log.
type restoredShop struct {
	*rush
	redis    *localserver.Redis
	postgres *localserver.Postgres
	backup   string
	workers  []*testkit.Cmd
}

const restoredStock = 1200

func newRestoredShop(t *testing.T) *restoredShop {
	t.Helper()
	postgres, err := localserver.StartPostgres(t.Context(), localserver.PostgresOptions{Archive: true})
	require.NoError(t, err)
	t.Cleanup(postgres.Stop)
	require.NoError(t, migrate.Up(t.Context(), postgres.URL))
	pool, err := connect.Postgres(t.Context(), postgres.URL, 4)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	redis := testkit.OwnRedis(t)
	s := &shop{t: t, keys: testkit.Keys(t), pool: pool, redisURL: redis.URL, databaseURL: postgres.URL}
	_, url := s.serve()
	r := &restoredShop{rush: newRush(s, url, s.sale(url, restoredStock)), redis: redis, postgres: postgres}
	r.work()
	r.open(t)
	r.sell(t, 100, "orders are accepted before the backup")
	r.backup, err = postgres.Backup(t.Context())
	require.NoError(t, err)
	return r
}

const restorePoint = "before-the-mistake"

// point makes the restore point, and sells orders that Postgres forgets.
func (s *restoredShop) point(t *testing.T) {
	t.Helper()
	s.sell(t, 50, "orders are accepted since the backup")
	_, err := s.pool.Exec(t.Context(), "SELECT pg_create_restore_point($1)", restorePoint)
	require.NoError(t, err)
	s.sell(t, 100, "orders are accepted after the point")
}

// rebuilt loses no data of Redis, and makes a worker rebuild.
func (s *restoredShop) rebuilt(t *testing.T) {
	t.Helper()
	epoch := s.epoch()
	s.redis.Kill()
	require.NoError(t, s.redis.Restart(t.Context()))
	s.sell(t, 50, "orders are accepted in another epoch")
	require.Equal(t, epoch+1, s.epoch())
}

func (s *restoredShop) rebuiltSale(t *testing.T) {
	t.Helper()
	s.ends(exitOK, "rebuild", "--yes", "--sale="+s.sale.String())
	s.sell(t, 50, "orders are accepted in another epoch")
}

// restore restores Postgres to the point while the crowd buys.
func (s *restoredShop) restore(t *testing.T) {
	t.Helper()
	var last string
	require.NoError(t, s.pool.QueryRow(t.Context(), "SELECT pg_walfile_name(pg_switch_wal())").Scan(&last))
	testkit.Eventually(t, within, "the log is in the archive", func() bool {
		return s.count("SELECT count(*) FROM pg_stat_archiver WHERE last_archived_wal >= $1", last) == 1
	})
	before := s.orders(t)
	s.allow(200)
	require.NoError(t, s.postgres.Restore(t.Context(), s.backup, restorePoint))
	s.pool.Reset()
	require.NotZero(t, s.count("SELECT count(*) FROM unnest($1::uuid[]) AS o (id) WHERE id NOT IN (SELECT id FROM orders)",
		before), "orders that Postgres has forgotten")
}

func (s *restoredShop) orders(t *testing.T) []string {
	t.Helper()
	rows, err := s.pool.Query(t.Context(), "SELECT id::text FROM orders")
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return ids
}

// work starts the workers.
func (s *restoredShop) work() {
	for _, name := range []string{"first", "second"} {
		worker := s.worker(name)
		worker.Start()
		s.workers = append(s.workers, worker)
	}
}

// requireBuyersCanBuyAgain buys for the holder of a receipt whose order is void.
func (s *restoredShop) requireBuyersCanBuyAgain(t *testing.T) {
	t.Helper()
	s.mu.Lock()
	accepted := append([]acceptedOrder(nil), s.accepted...)
	s.mu.Unlock()
	for _, o := range accepted {
		if s.count("SELECT count(*) FROM orders WHERE id = $1", o.Order) == 0 {
			again := ask(t, http.MethodPost, s.url+"/v1/sales/"+s.sale.String()+"/orders", o.user, "")
			require.Equal(t, http.StatusAccepted, again.HTTP)
			require.NotEqual(t, o.Order, again.OrderID)
			return
		}
	}
	require.Fail(t, "no order was forgotten")
}

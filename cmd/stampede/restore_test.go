//go:build system

package main

import (
	"net/http"
	"regexp"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/sql"
)

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
	require.NoError(t, sql.Up(t.Context(), postgres.URL))
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

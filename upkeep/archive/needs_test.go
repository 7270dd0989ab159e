package archive_test

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/ledger/deadletter"
	"stampede/reservation/catalog"
	"stampede/stream"
	"stampede/upkeep/archive"
)

// march is a sale of March 2026.
var march = uuid.MustParse("019cc59e-c400-7000-8000-00000000abcd")

// restingShop is a shop with a paid order of that sale, which nothing needs any more.
func restingShop(t *testing.T) *testshop.Shop {
	t.Helper()
	s := testshop.NewShop(t)
	for _, statement := range []string{
		`INSERT INTO sales (id, name, stock, sold, state, revision, published_revision, retired_at)
			VALUES ($1, 'march', 5, 1, 'ended', 2, 2, now())`,
		`INSERT INTO sale_events (sale_id, revision, type) VALUES ($1, 1, 'SaleCreated'), ($1, 2, 'SaleEnded')`,
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
			VALUES ($1, $1, 'ann', 1, 'confirmed', 2, 1, 1, now(), now())`,
		`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at,
				sequence, epoch) VALUES ($1, 2, 'OrderConfirmed', $1, 'ann', 1, now(), now(), 1, 1)`,
	} {
		require.NoError(t, s.Exec(t, statement, march))
	}
	return s
}

// wayOut is a way by which the orders of a sale leave Postgres, or the sale leaves Redis.
type wayOut struct {
	// onlyOpen is set if only what may still change keeps the sale.
	onlyOpen bool
	// leave returns why the sale stays.
	leave func(t *testing.T, s *testshop.Shop) error
}

var waysOut = map[string]wayOut{
	"archive/mark": {leave: func(t *testing.T, s *testshop.Shop) error {
		_, err := archiveSale(t, s, t.TempDir(), march)
		return err
	}},
	"catalog/retire_sale": {onlyOpen: true, leave: func(t *testing.T, s *testshop.Shop) error {
		require.NoError(t, s.Exec(t, "UPDATE sales SET retired_at = NULL"))
		err := s.Catalog.Retire(t.Context(), march, 1, 2)
		if errors.Is(err, catalog.ErrNotRetired) {
			require.Zero(t, retireAll(t, s), "a worker finds out as well")
			return err
		}
		require.ErrorIs(t, err, catalog.ErrNotInForce, "Redis does not have the sale")
		return nil
	}},
}

// needs are what keeps a sale: the first ones because it may still change, the others because its orders are needed.
var needs = []struct {
	reason   string
	onlyRows bool
	make     func(t *testing.T, s *testshop.Shop) error
}{
	{"it is not over", false, statement("UPDATE sales SET state = 'open', closes_at = now() + interval '1 hour'")},
	{"Redis does not have its last change yet", false, statement("UPDATE sales SET published_revision = 1")},
	{"the order " + march.String() + " awaits payment", false, statement("UPDATE orders SET due = now()")},
	{
		"the units of the order " + march.String() + " are not released", false,
		statement("INSERT INTO releases (order_id, sale_id, user_id, quantity) SELECT id, sale_id, user_id, 1 FROM orders"),
	},
	{"dead letter 1 waits for a decision", false, func(t *testing.T, s *testshop.Shop) error {
		values := stream.Values(testshop.Reserved(march, "zoe", 9))
		return deadletter.NewStore(s.Pool, s.Rdb, s.Store).Park(t.Context(), stream.Entry{
			Stream: s.Keys.Orders(0), ID: "1-1", Fields: stream.FieldsOf(values), Deliveries: 1,
		}, errors.New("damaged"))
	}},
	{"its buyers are still in Redis", true, statement("UPDATE sales SET retired_at = NULL")},
	{
		"the payment pi_1 is due for refund", true,
		statement("INSERT INTO payment_events (reference, version, type, sale_id, reason) " +
			"SELECT 'pi_1', 1, 'PaymentRefundDue', id, 'already-paid' FROM sales"),
	},
	{
		"the target shop of the relay has not read it: it is at position 0, and the last event of the sale at 3", true,
		statement("INSERT INTO relay_targets (name, url, state, position) VALUES ('shop', 'https://shop', 'paused', 0)"),
	},
}

func statement(text string) func(*testing.T, *testshop.Shop) error {
	return func(t *testing.T, s *testshop.Shop) error { return s.Exec(t, text) }
}

// Whatever still needs a sale keeps it, whichever way it would leave.
func TestSaleInUseStaysEachWay(t *testing.T) {
	t.Parallel()
	for _, need := range needs {
		t.Run(need.reason, func(t *testing.T) {
			t.Parallel()
			s := restingShop(t)
			require.NoError(t, need.make(t, s))
			for name, way := range waysOut {
				if way.onlyOpen && need.onlyRows {
					continue
				}
				err := way.leave(t, s)
				require.Error(t, err, name)
				if !way.onlyOpen {
					require.ErrorContains(t, err, need.reason, name)
				}
				require.Zero(t, s.Count(t, "SELECT count(*) FROM sales WHERE archived_at IS NOT NULL"), name)
				require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM orders"), name)
			}
		})
	}
	for name, way := range waysOut {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.NoError(t, way.leave(t, restingShop(t)), "nothing needs it")
		})
	}
}

// Each condition of the list, and each statement by which a sale leaves, is in the test above.
func TestEachNeedAndWayOutIsTried(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	texts := map[string]string{}
	rows, _ := pool.Query(t.Context(), "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'public'::regnamespace")
	var name, text string
	_, err := pgx.ForEachRow(rows, []any{&name, &text}, func() error { texts[name] = text; return nil })
	require.NoError(t, err)
	// The second list begins with the first.
	require.Len(t, needs, 1+strings.Count(texts["open_sale"]+texts["sale_in_use"], "UNION ALL"))

	const folder = "../../sql/queries/"
	files, err := filepath.Glob(folder + "*/*.sql")
	require.NoError(t, err)
	for _, file := range files {
		content, err := os.ReadFile(file)
		require.NoError(t, err)
		texts[strings.TrimSuffix(strings.TrimPrefix(file, folder), ".sql")] = string(content)
	}
	leaves := regexp.MustCompile(`(?m)^[^-]*((archived|retired)_at = now\(\)|(DELETE FROM|TRUNCATE|DROP TABLE) (orders|order_events)\b|DETACH)`)
	maps.DeleteFunc(texts, func(_, text string) bool { return !leaves.MatchString(text) })
	require.ElementsMatch(t, append(slices.Collect(maps.Keys(waysOut)),
		"archive/delete_some", "archive/delete_rest", // only of sales that archive/mark marked
		"projection/withdraw", // rows without a log
	), slices.Collect(maps.Keys(texts)))
}

// The orders of entries stay while units are offered to the entrants.
func TestEntriesOfDrawAreNotArchived(t *testing.T) {
	t.Parallel()
	s := restingShop(t)
	goods := testshop.NewSale(t, s.Pool, 5)
	require.NoError(t, s.Exec(t, `WITH drawn AS (UPDATE sales SET offers_only = true WHERE id = $1)
		INSERT INTO draws (sale_id, entries_id, kind) VALUES ($1, $2, 'draw')`, goods, march))
	_, err := archiveSale(t, s, t.TempDir(), march)
	require.ErrorContains(t, err, "its orders are the entries of the sale "+goods.String())
	require.NoError(t, s.Exec(t, "UPDATE sales SET state = 'ended' WHERE id = $1", goods))
	_, err = archiveSale(t, s, t.TempDir(), march)
	require.NoError(t, err)
}

// BenchmarkArchiveOfAMillionOrders measures how long a sale with a million paid orders, of two events each, takes to
// archive, to audit in its file, and to bring back; and the memory of the process. -benchtime=1x.
func BenchmarkArchiveOfAMillionOrders(b *testing.B) {
	const orders = 1_000_000
	s := testshop.NewShop(b)
	sale := s.OpenPayable(b, orders)
	for _, statement := range []string{
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at,
				payment_reference, key_fingerprint, due)
			SELECT (left(gen_random_uuid()::text, 32) || right($1::uuid::text, 4))::uuid, $1::uuid, gen_random_uuid()::text,
				1, 'paid', 3, n, 1, now(), now(), 'pi-' || n, left(md5(n::text), 16), now() FROM generate_series(1, 1000000) AS n`,
		`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at,
				sequence, epoch, due, key_fingerprint)
			SELECT id, 2, 'OrderConfirmed', sale_id, user_id, quantity, updated_at, reserved_at, sequence, epoch, due, key_fingerprint
			FROM orders WHERE sale_id = $1`,
		`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, data)
			SELECT id, 3, 'OrderPaid', sale_id, user_id, quantity, updated_at, jsonb_build_object('reference', payment_reference)
			FROM orders WHERE sale_id = $1`,
		`UPDATE sales SET sold = stock, state = 'ended', retired_at = now(), published_revision = revision,
			last_sequence = 1000000 WHERE id = $1`,
	} {
		_, err := s.Pool.Exec(b.Context(), statement, sale)
		require.NoError(b, err)
	}
	_, err := s.Pool.Exec(b.Context(), "VACUUM ANALYZE orders, order_events")
	require.NoError(b, err)
	dir := b.TempDir()
	for b.Loop() {
		done, err := archiveSale(b, s, dir, sale)
		require.NoError(b, err)
		b.ReportMetric(done.Took.Seconds(), "s/archive")
		b.ReportMetric(float64(done.Bytes)/orders, "B/order")
		began := b.Elapsed()
		report, err := archive.Audit(b.Context(), s.Pool, done.Path)
		require.NoError(b, err)
		require.Empty(b, report.Findings)
		b.ReportMetric((b.Elapsed() - began).Seconds(), "s/audit")
		restored, err := archive.Restore(b.Context(), s.Pool, done.Path)
		require.NoError(b, err)
		require.EqualValues(b, orders, restored.Orders)
		b.ReportMetric(restored.Took.Seconds(), "s/restore")
	}
	b.Logf("memory of the process: %s", peakMemory(b))
}

// peakMemory returns the most memory that the process had.
func peakMemory(b *testing.B) string {
	status, err := os.ReadFile("/proc/self/status")
	require.NoError(b, err)
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(line)
}

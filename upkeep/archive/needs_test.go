package archive_test

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"stampede/internal/clocks"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/stream"
	"stampede/upkeep/archive"
)

func TestMain(m *testing.M) { testwork.Main(m) }

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
		`INSERT INTO payment_events (reference, version, type, order_id, sale_id)
			SELECT id || ':' || payment_reference, v, (ARRAY['PaymentReceived', 'PaymentSettled'])[v], id, sale_id
			FROM orders CROSS JOIN generate_series(1, 2) AS v WHERE sale_id = $1`,
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

// A clock of Postgres that is ahead for a moment makes no sale old.
func TestClockAheadArchivesNoSale(t *testing.T) {
	t.Parallel()
	s, set := testshop.OnClockedPostgres(t)
	sale := s.Open(t, 10)
	_, err := s.Catalog.End(t.Context(), sale)
	require.NoError(t, err)
	require.Equal(t, 1, retireAll(t, s))
	a := archiver(t, s, t.TempDir(), time.Hour)
	for _, ahead := range []time.Duration{2 * time.Hour, 0} {
		set(ahead)
		_, err = a.Sale(t.Context(), sale)
		require.ErrorIs(t, err, archive.ErrRefused)
		if ahead > 0 {
			require.ErrorIs(t, err, clocks.ErrApart)
		} else {
			require.ErrorContains(t, err, "its last change was at")
		}
	}
}

// endedBaskets returns a sale with items which has left Redis, and of which ann has two m and one l, and carol one m.
func endedBaskets(t *testing.T, s *testshop.Shop) (sale uuid.UUID, ann reservation.Answer) {
	t.Helper()
	l := ledger.New(s.Pool)
	created, err := s.Create(t.Context(), reservation.Terms{
		Name: "shirt", Stock: 8, PerOrderLimit: 4, PaymentWindow: testshop.PaymentWindow, Currency: "EUR",
		Items: []reservation.Item{
			{Code: "m", Name: "M", Stock: 5, UnitPrice: 1000, PerOrderLimit: 3},
			{Code: "l", Name: "L", Stock: 3, UnitPrice: 3000},
		},
	})
	require.NoError(t, err)
	buy := func(user string, items map[string]int64) reservation.Answer {
		t.Helper()
		a, err := s.Reserve(t.Context(), reservation.Request{Sale: created.ID, User: user, Items: items})
		require.NoError(t, err)
		require.Equal(t, reservation.Reserved, a.Verdict)
		return a
	}
	ann = buy("ann", map[string]int64{"m": 2, "l": 1})
	bob := buy("bob", map[string]int64{"l": 2})
	carol := buy("carol", map[string]int64{"m": 1})
	testwork.Fulfil(t, s)
	testwork.Pay(t, l, carol.Reservation.OrderID, "carol", "pi")
	testwork.Pay(t, l, ann.Reservation.OrderID, "ann", "pi")
	testwork.Cancel(t, l, bob.Reservation.OrderID, "bob")
	testwork.ReleaseUnits(t, s)
	name := "tee"
	_, err = s.Rename(t.Context(), created.ID, catalog.Names{Sale: &name, Items: map[string]string{"m": "Medium"}})
	require.NoError(t, err)
	_, err = s.Catalog.End(t.Context(), created.ID)
	require.NoError(t, err)
	require.Equal(t, 1, retireAll(t, s))
	return created.ID, ann
}

func TestArchivedItemsComeBack(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale, ann := endedBaskets(t, s)
	before, dir := rows(t, s, sale), t.TempDir()
	seen, err := s.Catalog.Show(t.Context(), sale)
	require.NoError(t, err)
	require.Equal(t, []string{"tee", "Medium"}, []string{seen.Name, seen.Items[0].Name})
	_, err = s.Rename(t.Context(), sale, catalog.Names{Items: map[string]string{"m": "M"}})
	require.ErrorAs(t, err, new(*reservation.IllegalTransitionError), "a retired sale keeps its names")

	done, err := archiveSale(t, s, dir, sale)
	require.NoError(t, err)
	header, _, err := archive.Verify(done.Path)
	require.NoError(t, err)
	require.Equal(t, 2, header.Version, "a program that does not know items refuses the file")
	report, err := archive.Audit(t.Context(), s.Pool, done.Path)
	require.NoError(t, err)
	require.Empty(t, report.Findings)
	requireSound(t, s)
	archived, err := s.Catalog.Show(t.Context(), sale)
	require.NoError(t, err)
	require.Equal(t, seen.Items, archived.Items)

	_, err = archive.Restore(t.Context(), s.Pool, done.Path)
	require.NoError(t, err)
	require.Equal(t, before, rows(t, s, sale))
	requireSound(t, s)
	past, err := ledger.New(s.Pool).PastAnswer(t.Context(), reservation.Request{
		Sale: sale, User: "ann", Items: map[string]int64{"m": 1},
	})
	require.NoError(t, err)
	require.Equal(t, []any{reservation.AlreadyPurchased, ann.Reservation, order.Items(`{"m":2,"l":1}`)},
		[]any{past.Verdict, past.Reservation, past.Of.Units})

	done, err = archiveSale(t, s, dir, sale)
	require.NoError(t, err)
	t.Run("in another database", func(t *testing.T) { requireTakenByOther(t, done.Path, sale, before) })
}

func TestArchiveAuditComparesItems(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale, _ := endedBaskets(t, s)
	require.NoError(t, s.Exec(t, "UPDATE sale_items SET sold = 1, stock = 1 WHERE item = 'a'"))
	done, err := archiveSale(t, s, t.TempDir(), sale)
	require.NoError(t, err)
	report, err := archive.Audit(t.Context(), s.Pool, done.Path)
	require.NoError(t, err)
	var found []string
	for _, f := range report.Findings {
		found = append(found, f.Promise+" "+f.What)
	}
	last := " (last event: SaleRetired at revision 4)"
	require.Equal(t, []string{
		"S1 sale " + sale.String() + ": 3 units of the item m are sold of a stock of 1" + last,
		"S4 sale " + sale.String() + ": sold is 4, and that of all items together 2" + last,
		"S4 sale " + sale.String() +
			": sold of the item m is 1, the live orders hold 3 units, and the events come to 3" + last,
		"S7 sale " + sale.String() + ": the sale has invalid terms: stock of all items is 4" + last,
	}, found)
}

// forge writes a file again with another text, and a checksum and counts that fit it.
func forge(t *testing.T, path string, change func(text string) string) string {
	t.Helper()
	packed, err := os.Open(path)
	require.NoError(t, err)
	defer packed.Close()
	unpacked, err := gzip.NewReader(packed)
	require.NoError(t, err)
	whole, err := io.ReadAll(unpacked)
	require.NoError(t, err)
	const endOfEvents = "\n\\.\n"
	end := strings.LastIndex(string(whole), endOfEvents) + len(endOfEvents)
	text := change(string(whole[:end]))
	require.NotEqual(t, string(whole[:end]), text)
	var trailer archive.Trailer
	require.NoError(t, json.Unmarshal(whole[end:], &trailer))
	sections := strings.Split(text, endOfEvents)
	trailer.Events = int64(strings.Count(sections[0], "\n")) // after the header
	trailer.PaymentEvents = int64(strings.Count(sections[1], "\n") + 1)
	trailer.SHA256 = fmt.Sprintf("%x", sha256.Sum256([]byte(text)))
	line, err := json.Marshal(trailer)
	require.NoError(t, err)
	file, err := os.Create(filepath.Join(t.TempDir(), "forged"))
	require.NoError(t, err)
	into := gzip.NewWriter(file)
	_, err = fmt.Fprintf(into, "%s%s\n", text, line)
	require.NoError(t, errors.Join(err, into.Close(), file.Close()))
	return file.Name()
}

// Each lie of a file is found, also those that no table of Postgres would take. Postgres stays as it is.
func TestArchiveAuditFindsEachLie(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, _ := endedSale(t, s, 1)
	done, err := archiveSale(t, s, t.TempDir(), sale)
	require.NoError(t, err)
	// What Postgres has is in no file, also if the session has prepared the statements of the audit for it.
	require.NoError(t, s.Exec(t, `INSERT INTO dead_letters (stream, entry_id, fields, reason, deliveries)
		VALUES ('orders', '1-1', '[]', 'damaged', 1)`))
	require.Equal(t, "S3", testwork.Broken(testwork.Audit(t, s, uuid.Nil)))
	before := s.Everything(t)
	other := uuid.New().String()
	edit := func(pattern, with string) func(string) string {
		return func(text string) string { return regexp.MustCompile(pattern).ReplaceAllString(text, with) }
	}
	for name, lie := range map[string]struct {
		change   func(string) string
		promises string
		what     string
	}{
		"sold": {edit(`"sold":\d+`, `"sold":1001`), "S1 S4", "1001 units are sold of a stock of 1000"},
		"two live orders": {
			edit("\tuser-1\t", "\tuser-2\t"), "S2", "user user-2: the user has 2 live orders in the sale",
		},
		"open sale": {edit(`"state":"ended"`, `"state":"open"`), "S3", "it is not over"},
		"unpaid order": {
			edit("\n[^\n]*\tOrderPaid\t[^\n]*\tuser-1\t[^\n]*", ""), "S3 S8", "awaits payment",
		},
		"last place": {edit(`"last_sequence":\d+`, `"last_sequence":7`), "S4", "the last place of a confirmed order is 7"},
		"doubled line": {
			edit("(\n[^\n]*\tOrderPaid\t[^\n]*\tuser-1\t[^\n]*)", "$1$1"), "S5", "the log of the order has 3 of the",
		},
		"missing line": {
			edit("\n[^\n]*\tOrderConfirmed\t[^\n]*\tuser-1\t[^\n]*", ""), "S4 S5 S8", "the log of the order has 1 of the",
		},
		"other sale": {
			edit("(\tOrder\\w+\t)[^\t]+(\tuser-1\t)", "${1}"+other+"$2"), "S4 S5 S8",
			"the events of the order are in the wrong sale",
		},
		"log of the sale":            {edit(`"revision":2,`, `"revision":7,`), "S5", "its log ends with revision 7"},
		"terms":                      {edit(`"per_order_limit":10`, `"per_order_limit":9000000`), "S7", "limit is 9000000"},
		"no lie of an older version": {edit(`"(offers_only|items|partitions)":\w+,`, ""), "", ""},
		"settled payment": {
			edit("\n[^\n]*:pi[^\n\t]*user-1\t2\t[^\n]*", ""), "S3 S8", "the payment",
		},
		"refund": {
			edit("\n[^\n]*\tPaymentRefunded\t[^\n]*", ""), "S3", "is due for refund",
		},
	} {
		t.Run(name, func(t *testing.T) {
			report, err := archive.Audit(t.Context(), s.Pool, forge(t, done.Path, lie.change))
			require.NoError(t, err)
			var promises, whats []string
			for _, f := range report.Findings {
				promises, whats = append(promises, f.Promise), append(whats, f.What)
			}
			text := strings.Join(whats, "\n")
			require.Equal(t, lie.promises, strings.Join(slices.Compact(promises), " "), text)
			require.Contains(t, text, lie.what)
		})
	}
	require.Equal(t, before, s.Everything(t))
}

// requireRepeats checks that late reports of the payments of an archived sale are answered with what became of them,
// and change nothing.
func requireRepeats(t testing.TB, s *testshop.Shop, sale uuid.UUID) {
	t.Helper()
	l := ledger.New(s.Pool)
	for _, reference := range []string{"pi_early", "pi_second"} {
		p, err := l.Payment(t.Context(), reference)
		require.NoError(t, err)
		for _, id := range []uuid.UUID{uuid.Nil, p.OrderID} {
			require.Equal(t, order.PaymentRefunded, report(t, l, reference, id).State)
		}
		require.Equal(t, []any{sale, "re", "zoe", int64(5)}, []any{p.SaleID, p.RefundReference, p.Operator, p.Amount})
		require.True(t, p.ReceivedAt.Before(p.UpdatedAt))
		_, err = l.Refund(t.Context(), reference, "re", "ann")
		require.NoError(t, err)
		_, err = l.Refund(t.Context(), reference, "re_2", "ann")
		require.ErrorIs(t, err, order.ErrRefundNotDue)
	}
	var buyers string
	require.NoError(t, s.Pool.QueryRow(t.Context(),
		"SELECT reference FROM archived_payments WHERE reference LIKE '%user-1'").Scan(&buyers))
	id, reference, _ := strings.Cut(buyers, ":")
	p := report(t, l, reference, uuid.MustParse(id))
	require.Equal(t, []any{order.PaymentSettled, buyers}, []any{p.State, p.Reference}, "the shop reports it, too")
	require.Zero(t, s.Count(t, "SELECT count(*) FROM payment_events WHERE reference NOT LIKE 'late%'"))
}

// An older version has archived the sale: nobody knows its payments until its file is read.
func TestPaymentsOfOlderArchiveAreReadFromItsFile(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, receipt := endedSale(t, s, 1)
	done, err := archiveSale(t, s, t.TempDir(), sale)
	require.NoError(t, err)
	require.NoError(t, s.Exec(t, "DELETE FROM archived_payments"))
	require.NoError(t, s.Exec(t, "UPDATE sales SET archive = archive - 'remembered_at' WHERE id = $1", sale))
	var isForgotten bool
	require.NoError(t, s.Pool.QueryRow(t.Context(), sql.PaymentIsForgotten, receipt.OrderID).Scan(&isForgotten))
	require.True(t, isForgotten)
	l := ledger.New(s.Pool)
	require.Equal(t, order.PaymentWaiting, report(t, l, "pi_early", receipt.OrderID).State)

	a := archiver(t, s, t.TempDir(), 0)
	due, err := a.Due(t.Context())
	require.NoError(t, err)
	require.Equal(t, []uuid.UUID{sale}, due)
	moved := t.TempDir()
	require.NoError(t, os.Rename(done.Path, filepath.Join(moved, filepath.Base(done.Path))))
	_, err = a.Sale(t.Context(), sale)
	require.ErrorContains(t, err, "it needs the file that Postgres names, here or in --dir: open "+done.Path)
	a.Close()
	_, err = archiveSale(t, s, moved, sale)
	require.NoError(t, err)
	requireRepeats(t, s, sale)
	_, err = archiveSale(t, s, moved, sale)
	require.ErrorIs(t, err, archive.ErrRefused)
	live := testwork.Confirm(t, s.Pool, testshop.NewSale(t, s.Pool, 1), 1)[0]
	require.Equal(t, order.UnclearOtherOrder, report(t, l, "pi_early", live).Reason, "it settles no other order")
}

package archive_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/upkeep/archive"
	"stampede/upkeep/audit"
	"stampede/upkeep/retire"
)

func archiver(t testing.TB, s *testshop.Shop, dir string, keep time.Duration) *archive.Archiver {
	t.Helper()
	var a *archive.Archiver
	testkit.Eventually(t, testshop.Soon, "the session of a killed archiver has ended", func() (ended bool) {
		var err error
		a, err = archive.New(t.Context(), archive.Config{
			Catalog: s.Catalog, Dir: dir, Keep: keep, Logger: testkit.Logger(t),
		})
		if errors.Is(err, archive.ErrRunning) {
			return false
		}
		require.NoError(t, err)
		return true
	})
	t.Cleanup(a.Close)
	return a
}

// archiveSale archives a sale at once.
func archiveSale(t testing.TB, s *testshop.Shop, dir string, sale uuid.UUID) (archive.Archived, error) {
	t.Helper()
	a := archiver(t, s, dir, 0)
	defer a.Close()
	return a.Sale(t.Context(), sale)
}

func retireAll(t testing.TB, s *testshop.Shop) int {
	t.Helper()
	retired, err := retire.New(retire.Config{Catalog: s.Catalog, Logger: testkit.Logger(t)}).Sweep(t.Context())
	require.NoError(t, err)
	return retired
}

// endedSale returns a sale with orders of all kinds, which has left Redis, and one of its receipts. No other sale of
// the shop is over.
func endedSale(t testing.TB, s *testshop.Shop, shards int) (uuid.UUID, order.Receipt) {
	t.Helper()
	l := ledger.New(s.Pool)
	created, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "autumn", Stock: 1000, PerOrderLimit: 10, PaymentWindow: testshop.PaymentWindow, Shards: shards,
	})
	require.NoError(t, err)
	sale := created.ID
	var receipt order.Receipt
	for i := range 60 {
		user := fmt.Sprintf("user-%d", i)
		held := s.Attempt(t, sale, user, int64(i%3+1), "key-"+user).Reservation
		testwork.FulfilAll(t, s)
		if i%3 == 0 {
			_, err = l.Cancel(t.Context(), held.OrderID, user)
		} else {
			_, err = l.Pay(t.Context(), held.OrderID, user, `pi\n"`+user)
		}
		require.NoError(t, err)
		receipt = order.Receipt{SaleID: sale, OrderID: held.OrderID, User: user, Epoch: held.Epoch}
	}
	if shards == 1 { // which has places 1 to 61 at the end
		_, err = l.Refuse(t.Context(), []order.OrderReserved{testshop.Reserved(sale, "refused", 62)}, order.RejectedSoldOut)
		require.NoError(t, err)
	}
	early := s.Attempt(t, sale, "early", 1, "early").Reservation.OrderID
	require.Equal(t, order.PaymentWaiting, report(t, l, "pi_early", early).State)
	testwork.FulfilAll(t, s)
	_, err = l.SweepPayments(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, order.PaymentRefundDue, report(t, l, "pi_second", early).State)
	_, err = l.Withdraw(t.Context(), early, "a mistake", "zoe")
	require.NoError(t, err)
	for _, reference := range []string{"pi_early", "pi_second"} {
		_, err = l.Refund(t.Context(), reference, "re", "zoe")
		require.NoError(t, err)
	}
	_, err = l.SweepReleases(t.Context(), s.Store)
	require.NoError(t, err)
	_, err = s.Catalog.End(t.Context(), sale)
	require.NoError(t, err)
	require.Equal(t, 1, retireAll(t, s))
	return sale, receipt
}

func report(t testing.TB, l *ledger.Ledger, reference string, id uuid.UUID) order.Payment {
	t.Helper()
	p, err := l.Report(t.Context(), order.Money{Reference: reference, OrderID: id, Amount: 5, Currency: "EUR"})
	require.NoError(t, err)
	return p
}

// The events of 40 payments by buyers, and of two that were refunded.
const paymentEvents = 40*2 + 4 + 3

// rows returns everything that Postgres has of a sale, except where its orders are.
func rows(t testing.TB, s *testshop.Shop, sale uuid.UUID) (all []string) {
	t.Helper()
	for _, query := range []string{
		"SELECT (to_jsonb(s) - '{archived_at,archive,idempotency_key}'::text[])::text FROM sales AS s WHERE id = $1",
		"SELECT row_to_json(i)::text FROM sale_items AS i WHERE sale_id = $1 ORDER BY item",
		"SELECT row_to_json(e)::text FROM sale_events AS e WHERE sale_id = $1 ORDER BY revision",
		"SELECT row_to_json(e)::text FROM order_events AS e WHERE sale_id = $1 ORDER BY order_id, version",
		"SELECT row_to_json(o)::text FROM orders AS o WHERE sale_id = $1 ORDER BY id",
		"SELECT row_to_json(p)::text FROM payment_events AS p WHERE reference IN " +
			"(SELECT reference FROM payment_events WHERE sale_id = $1) ORDER BY reference, version",
	} {
		found, _ := s.Pool.Query(t.Context(), query, sale) // its error comes with the rows
		texts, err := pgx.CollectRows(found, pgx.RowTo[string])
		require.NoError(t, err)
		all = append(all, texts...)
	}
	return all
}

const ordersLeft = "SELECT (SELECT count(*) FROM orders WHERE sale_id = $1) + " +
	"(SELECT count(*) FROM order_events WHERE sale_id = $1)"

func requireArchived(t testing.TB, s *testshop.Shop, sale uuid.UUID, receipt order.Receipt) {
	t.Helper()
	l := ledger.New(s.Pool)
	require.Zero(t, s.Count(t, ordersLeft, sale))
	require.Zero(t, s.Count(t, "SELECT count(*) FROM payment_events WHERE reference NOT LIKE 'late%'"))
	late := "late_" + uuid.NewString()
	require.Equal(t, order.PaymentWaiting, report(t, l, late, receipt.OrderID).State)
	testwork.WaitLonger(t, s.Pool, 11*time.Minute, late)
	_, err := l.SweepPayments(t.Context(),
		func(context.Context, uuid.UUID, time.Duration) (bool, error) { return false, nil })
	require.NoError(t, err)
	require.Equal(t, order.RefundOrderNotFound, report(t, l, late, receipt.OrderID).Reason)
	requireRepeats(t, s, sale)
	layout := s.Layout(t, sale)
	for shard := range layout.Shards {
		p := layout.Partition(shard)
		keys := []string{s.Keys.Sale(p, sale), s.Keys.Buyers(p, sale), s.Keys.Ended(p, sale)}
		require.Zero(t, s.Rdb.Exists(t.Context(), keys...).Val())
		require.False(t, s.Rdb.SIsMember(t.Context(), s.Keys.Sales(p), sale.String()).Val())
	}
	_, err = l.FindByReceipt(t.Context(), receipt)
	require.ErrorIs(t, err, order.ErrArchived)
	_, err = l.Order(t.Context(), receipt.OrderID)
	require.ErrorIs(t, err, order.ErrNotFound)
	_, _, err = l.History(t.Context(), receipt.OrderID)
	require.ErrorIs(t, err, order.ErrArchived)
	_, err = l.Withdraw(t.Context(), receipt.OrderID, "too late", "ann")
	require.ErrorIs(t, err, order.ErrArchived)
	listed, _, err := l.ListOrders(t.Context(), order.Filter{User: receipt.User}, uuid.Nil, 20)
	require.NoError(t, err)
	require.Empty(t, listed)
	shown, err := s.Catalog.Show(t.Context(), sale)
	require.NoError(t, err)
	require.Equal(t, "autumn", shown.Name)
	require.EqualValues(t, 1000, shown.Available+shown.Sold)
	require.NotZero(t, shown.Sold)

	past, err := l.PastAnswer(t.Context(), reservation.Request{Sale: sale, User: "user-1", Quantity: 2})
	require.NoError(t, err)
	require.Equal(t, reservation.Ended, past.Verdict)
	outcomes := testwork.Record(t, l, []order.OrderReserved{testshop.Reserved(sale, "late", 70)})
	require.ErrorIs(t, outcomes[0].Err, order.ErrArchived)
	require.Equal(t, ledger.BadData, ledger.FaultOf(outcomes[0].Err), "it becomes a dead letter")
	after := []order.OrderReserved{testshop.Reserved(sale, "late", 70)}
	refused, err := l.Refuse(t.Context(), after, order.RejectedSoldOut)
	require.NoError(t, err)
	require.ErrorIs(t, refused[0].Err, order.ErrArchived)
	var archived bool
	require.NoError(t, s.Pool.QueryRow(t.Context(), sql.LedgerReturnSold, sale, 0).Scan(&archived))
	require.True(t, archived, "an order of it cannot be cancelled any more")
	require.Zero(t, s.Count(t, ordersLeft, sale))

	require.Zero(t, testwork.RebuildProjections(t, s).Replaced)
	_, err = audit.Run(t.Context(), audit.Config{Catalog: s.Catalog, Sale: sale})
	require.ErrorIs(t, err, order.ErrArchived)
	requireSound(t, s)
	_, missing, err := sql.Guards(t.Context(), s.Pool)
	require.NoError(t, err)
	require.Empty(t, missing)
}

func requireSound(t testing.TB, s *testshop.Shop) {
	t.Helper()
	report := testwork.RequireUnbroken(t, s, uuid.Nil)
	require.False(t, report.Unchecked(), testwork.Text(t, report))
}

func requireFile(t testing.TB, s *testshop.Shop, path string, orders, events int) {
	t.Helper()
	report, err := archive.Audit(t.Context(), s.Pool, path)
	require.NoError(t, err)
	require.Empty(t, report.Findings)
	require.Equal(t, []int64{int64(orders), int64(events), paymentEvents},
		[]int64{report.Orders, report.Events, report.PaymentEvents})
}

// A sale that was archived comes back as it was, and can be archived again.
func TestArchivedSaleComesBack(t *testing.T) {
	t.Parallel()
	for name, shards := range map[string]int{"one shard": 1, "four shards": 4} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.OnOwnRedis(t, 8)
			sale, receipt := endedSale(t, s, shards)
			before, dir := rows(t, s, sale), t.TempDir()

			done, err := archiveSale(t, s, dir, sale)
			require.NoError(t, err)
			require.Equal(t, filepath.Join(dir, sale.String()+".stampede"), done.Path)
			requireFile(t, s, done.Path, 62-shards/4, 124-shards/4)
			header, _, err := archive.Verify(done.Path)
			require.NoError(t, err)
			require.Equal(t, 1, header.Version)
			requireArchived(t, s, sale, receipt)
			_, err = archiveSale(t, s, dir, sale)
			require.ErrorIs(t, err, archive.ErrRefused)
			require.ErrorContains(t, err, "it is archived in "+done.Path)

			// A rebuild of Redis does not bring it back.
			for p := range s.Keys.Partitions {
				_, err := testwork.Rebuilder(t, s).Partition(t.Context(), p, "by-hand")
				require.NoError(t, err)
			}
			requireArchived(t, s, sale, receipt)

			restored, err := archive.Restore(t.Context(), s.Pool, done.Path)
			require.NoError(t, err)
			require.Equal(t, done.Figures, restored.Figures)
			require.Equal(t, before, rows(t, s, sale))
			require.Zero(t, s.Count(t, "SELECT count(*) FROM archived_payments"))
			requireSound(t, s)
			_, err = archive.Restore(t.Context(), s.Pool, done.Path)
			require.ErrorIs(t, err, archive.ErrNotArchived)
			require.Equal(t, before, rows(t, s, sale))

			require.NoError(t, s.Exec(t, "UPDATE sales SET idempotency_key = 'key' WHERE id = $1", sale))
			_, err = archiveSale(t, s, dir, sale)
			require.NoError(t, err)
			requireArchived(t, s, sale, receipt)
			t.Run("in another database", func(t *testing.T) { requireTakenByOther(t, done.Path, sale, before) })
		})
	}
}

// requireTakenByOther checks that another database takes a sale as well, and that the numbers which databases give out
// are those of the other one.
func requireTakenByOther(t *testing.T, path string, sale uuid.UUID, before []string) {
	t.Helper()
	other := testshop.OnOwnRedis(t, 1)
	other.Buy(t, other.Open(t, 10), "ann")
	testwork.Fulfil(t, other)
	require.NoError(t, other.Exec(t, "UPDATE sales SET idempotency_key = 'key'"))
	newest := other.Count(t, "SELECT newest_position()")
	_, err := archive.Restore(t.Context(), other.Pool, path)
	require.NoError(t, err)

	position := regexp.MustCompile(`"position":(-?\d+)`)
	after := rows(t, other, sale)
	require.Len(t, after, len(before))
	moved := map[bool]map[int]int{true: {}, false: {}} // the positions of the events of payments, and of orders
	for i := range before {
		require.Equal(t, position.ReplaceAllString(before[i], ""), position.ReplaceAllString(after[i], ""))
		if was := position.FindStringSubmatch(before[i]); was != nil && strings.Contains(before[i], `"order_id"`) {
			from, err := strconv.Atoi(was[1])
			require.NoError(t, err)
			to := position.FindStringSubmatch(after[i])[1]
			moved[strings.HasPrefix(before[i], `{"reference"`)][from], err = strconv.Atoi(to)
			require.NoError(t, err)
		}
	}
	for _, moved := range moved {
		last := math.MinInt
		for _, from := range slices.Sorted(maps.Keys(moved)) {
			require.Greater(t, moved[from], last, "they keep their order")
			last = moved[from]
		}
	}
	const events = "(SELECT position, sale_id FROM order_events UNION ALL SELECT position, sale_id FROM sale_events " +
		"UNION ALL SELECT position, sale_id FROM payment_events) AS e"
	require.Zero(t, other.Count(t, "SELECT count(*) FROM "+events+" WHERE sale_id = $1 AND position >= 0", sale),
		"no target lacks them")
	require.Zero(t, other.Count(t, "SELECT count(*) - count(DISTINCT position) FROM "+events))
	require.EqualValues(t, 1, other.Count(t, sql.RelayPositionOfTime, time.Unix(0, 0)))
	payments, next, err := ledger.New(other.Pool).ListPayments(t.Context(), order.PaymentFilter{Sale: sale}, 0, 1)
	require.NoError(t, err)
	require.Len(t, payments, 1)
	require.Negative(t, payments[0].Position)
	others, _, err := ledger.New(other.Pool).ListPayments(t.Context(), order.PaymentFilter{Sale: sale}, next, 1000)
	require.NoError(t, err)
	require.EqualValues(t, other.Count(t, "SELECT count(*) FROM payments WHERE sale_id = $1", sale), 1+len(others))
	for range 20 {
		other.Open(t, 10)
	}
	require.Greater(t, other.Count(t, "SELECT max(position) FROM "+events), newest)
	requireSound(t, other)
}

// A sale stays while anything of it may change or is to be read.
func TestSaleIsNotArchivedTooEarly(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	dir := t.TempDir()
	refused := func(sale uuid.UUID, keep time.Duration, reason string) {
		t.Helper()
		a := archiver(t, s, dir, keep)
		defer a.Close()
		_, err := a.Sale(t.Context(), sale)
		require.ErrorIs(t, err, archive.ErrRefused)
		require.ErrorContains(t, err, reason)
		require.Zero(t, s.Count(t, "SELECT count(*) FROM sales WHERE archived_at IS NOT NULL"))
	}
	open := s.OpenPayable(t, 10)
	id := s.Buy(t, open, "ann")
	testwork.Fulfil(t, s)
	refused(open, 0, "it is not over")
	_, err := s.Catalog.End(t.Context(), open)
	require.NoError(t, err)
	refused(open, 0, "the order "+id.String()+" awaits payment")
	testwork.Cancel(t, ledger.New(s.Pool), id, "ann")
	require.Equal(t, order.PaymentRefundDue, report(t, ledger.New(s.Pool), "pi_1", id).State)
	refused(open, 0, "the payment pi_1 is due for refund")
	_, err = ledger.New(s.Pool).Refund(t.Context(), "pi_1", "re_1", "zoe")
	require.NoError(t, err)
	refused(open, 0, "the units of the order "+id.String()+" are not released")
	_, err = ledger.New(s.Pool).SweepReleases(t.Context(), s.Store)
	require.NoError(t, err)
	refused(open, 0, "its buyers are still in Redis")
	require.Equal(t, 1, retireAll(t, s))
	refused(open, time.Hour, "its last change was at ")
	last := s.Count(t, `SELECT max(position)
		FROM (SELECT position FROM order_events UNION SELECT position FROM sale_events
			UNION SELECT position FROM payment_events) AS e`)
	require.NoError(t, s.Exec(t,
		"INSERT INTO relay_targets (name, url, state, position) VALUES ('shop', 'https://shop', 'paused', $1)", last-1))
	refused(open, 0, fmt.Sprintf("the target shop of the relay has not read it: it is at position %d, and the "+
		"last event of the sale at %d", last-1, last))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries)
	require.NoError(t, s.Exec(t, "UPDATE relay_targets SET position = $1", last))

	a := archiver(t, s, dir, 0)
	_, err = archive.New(t.Context(), archive.Config{Catalog: s.Catalog, Dir: dir})
	require.ErrorIs(t, err, archive.ErrRunning)
	due, err := a.Due(t.Context())
	require.NoError(t, err)
	require.Equal(t, []uuid.UUID{open}, due)
	_, err = a.Sale(t.Context(), open)
	require.NoError(t, err)
	_, err = a.Sale(t.Context(), uuid.New())
	require.ErrorIs(t, err, reservation.ErrSaleNotFound)
}

// A change after the file was written is not lost with the orders.
func TestSaleThatChangesIsNotArchived(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*testing.T, *testshop.Shop, uuid.UUID){
		"an order is cancelled": func(t *testing.T, s *testshop.Shop, id uuid.UUID) {
			require.NoError(t, s.Exec(t, `
				INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
				SELECT order_id, 4, 'OrderCancelled', sale_id, user_id, quantity, now()
				FROM order_events WHERE order_id = $1 AND version = 3`, id))
		},
		"money is reported and refunded": func(t *testing.T, s *testshop.Shop, id uuid.UUID) {
			report(t, ledger.New(s.Pool), "pi_late", id)
			_, err := ledger.New(s.Pool).Refund(t.Context(), "pi_late", "re", "zoe")
			require.NoError(t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			sale, receipt := endedSale(t, s, 1)
			frozen := s.Process(t, "archive", sale.String(), t.TempDir())
			frozen.Setenv(crashpoint.FreezeEnv, crashpoint.ArchiveNamed)
			frozen.Start()
			frozen.WaitOutput(30*time.Second, "frozen at "+crashpoint.ArchiveNamed)
			before := rows(t, s, sale)
			change(t, s, receipt.OrderID)
			frozen.Thaw()
			require.False(t, frozen.Wait(30*time.Second).Success())
			require.Contains(t, frozen.Output(), "it has changed while its file was written")
			require.Greater(t, len(rows(t, s, sale)), len(before))
		})
	}
}

// Money that is being kept while its sale is archived waits, as if the sale had been archived before.
func TestMoneyForSaleThatIsBeingArchivedWaits(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, receipt := endedSale(t, s, 1)
	l := ledger.New(s.Pool)
	marking, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = marking.Rollback(context.WithoutCancel(t.Context())) }()
	for _, statement := range []string{sql.ArchiveLockSale, "UPDATE sales SET archived_at = now(), archive = '{}' WHERE id = $1"} {
		_, err = marking.Exec(t.Context(), statement, sale)
		require.NoError(t, err)
	}
	kept := make(chan order.Payment, 1)
	go func() {
		p, err := l.Report(t.Context(), order.Money{Reference: "pi_between", OrderID: receipt.OrderID})
		assert.NoError(t, err)
		kept <- p
	}()
	s.AwaitWaiting(t, 1)
	require.NoError(t, marking.Commit(t.Context()))
	p := testshop.Answer(t, kept)
	require.Equal(t, order.PaymentWaiting, p.State)
	require.Zero(t, p.SaleID, "it is not deleted with the sale")
	require.Equal(t, order.PaymentWaiting, report(t, l, "pi_after", receipt.OrderID).State)
	_, err = l.SweepPayments(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, p, report(t, l, "pi_between", receipt.OrderID))
}

// A file of which a byte is missing or wrong is refused, and nothing is taken from it.
func TestDamagedFileIsRefused(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, receipt := endedSale(t, s, 1)
	done, err := archiveSale(t, s, t.TempDir(), sale)
	require.NoError(t, err)
	whole, err := os.ReadFile(done.Path)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "damaged")
	for n := 0; n < len(whole); n += 97 {
		wrong := bytes.Clone(whole)
		wrong[n] ^= 0x10
		for _, content := range [][]byte{wrong, whole[:n], append(bytes.Clone(whole), whole[:n+1]...)} {
			require.NoError(t, os.WriteFile(path, content, 0o600))
			_, end, err := archive.Verify(path)
			if err == nil { // the time in gzip's own header
				require.Equal(t, done.Trailer, end)
				continue
			}
			_, err = archive.Restore(t.Context(), s.Pool, path)
			require.Error(t, err)
			_, err = archive.Audit(t.Context(), s.Pool, path)
			require.Error(t, err)
		}
	}
	requireArchived(t, s, sale, receipt)
}

// The month of an archived sale goes on to work, also if its tables were removed.
func TestMonthOfArchivedSaleGoesOn(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, receipt := endedSale(t, s, 1)
	_, err := archiveSale(t, s, t.TempDir(), sale)
	require.NoError(t, err)
	require.NoError(t, s.Exec(t, `DO $$ DECLARE part text; BEGIN
		FOR part IN SELECT unnest(ARRAY[orders, events]) FROM order_months LOOP EXECUTE 'DROP TABLE ' || part; END LOOP;
		END $$`))
	require.NoError(t, s.Exec(t, sql.WorkerMakeMonths))
	other := s.Open(t, 10) // its month is created again
	s.Buy(t, other, "ann")
	testwork.Fulfil(t, s)
	s.AwaitConfirmed(t, 1)
	requireArchived(t, s, sale, receipt)
}

package audit_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/upkeep/audit"
)

// termed opens a sale in which no term has a default value, with 2 orders.
func termed(t testing.TB, s *testshop.Shop) uuid.UUID {
	t.Helper()
	opens := time.Now().Add(-time.Hour).Truncate(time.Second).Add(123*time.Millisecond + 999*time.Microsecond)
	sale, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "termed", Stock: 20, PerOrderLimit: 7, PaymentWindow: testshop.PaymentWindow, OpensAt: opens,
		ClosesAt: opens.Add(48 * time.Hour),
	})
	require.NoError(t, err)
	require.Equal(t, 2, s.Crowd(t, sale.ID, 2))
	testwork.Fulfil(t, s)
	return sale.ID
}

func TestAuditReportsEachWrongTermInRedis(t *testing.T) {
	t.Parallel()
	for field, wrong := range map[string]any{
		"state": "paused", "opens_at_ms": 0, "closes_at_ms": 0, "per_order_limit": 8, "payment_window_s": 0, "revision": 2,
	} {
		t.Run(field, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			sale := termed(t, s)
			testwork.RequireUnbroken(t, s, sale)
			key := s.Keys.Sale(0, sale)
			right := s.Rdb.HGet(t.Context(), key, field).Val()
			require.NoError(t, s.Rdb.HSet(t.Context(), key, field, wrong).Err())

			report := testwork.Audit(t, s, sale)
			require.Equal(t, "S7", testwork.Broken(report), testwork.Text(t, report))
			require.Contains(t, testwork.Text(t, report),
				fmt.Sprintf("Redis has another definition of the sale than Postgres: %s is %v and not %s", field, wrong, right))
			require.Equal(t, audit.RemedyRebuild, report.Promise("S7").Findings[0].Remedy)
			testwork.RequireMended(t, s, sale, "")
			if field != "revision" { // each repair raises it
				require.Equal(t, right, s.Rdb.HGet(t.Context(), key, field).Val())
			}
		})
	}
}

// Terms that a sale is created with are right for Redis and for the audit, and the audit names all others, however they
// came into Postgres.
func TestBoundsOfTermsAgree(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	around := func(bounds ...int64) *rapid.Generator[int64] {
		return rapid.Custom(func(t *rapid.T) int64 {
			return rapid.SampledFrom(bounds).Draw(t, "bound") + rapid.Int64Range(-1, 1).Draw(t, "off")
		})
	}
	micros := around(0, 1_000, 999_999, time.Now().Add(time.Hour).UnixMicro(), 253402214400_000_000, 253402300800_000_000)
	moment := rapid.Custom(func(t *rapid.T) time.Time {
		if rapid.Bool().Draw(t, "none") {
			return time.Time{}
		}
		return time.UnixMicro(micros.Draw(t, "microseconds"))
	})
	terms := rapid.Custom(func(t *rapid.T) reservation.Terms {
		return reservation.Terms{
			Name: "bounds", Stock: around(1, 500, order.MaxStock).Draw(t, "stock"),
			PerOrderLimit: around(1, 5, order.MaxPerOrder).Draw(t, "per order"),
			OpensAt:       moment.Draw(t, "opens"), ClosesAt: moment.Draw(t, "closes"),
			PaymentWindow: time.Second *
				time.Duration(around(0, 600, int64(order.MaxPaymentWindow/time.Second)).Draw(t, "window")),
			PaymentGrace: time.Second *
				time.Duration(around(0, 0, int64(order.MaxPaymentGrace/time.Second)).Draw(t, "grace")),
			PaymentsPerSecond: around(0, 0, order.MaxPaymentsPerSecond).Draw(t, "pace"),
		}
	})
	accepted, refused := map[uuid.UUID]reservation.Terms{}, map[uuid.UUID]reservation.Terms{}
	for i := range 300 {
		drawn := terms.Example(i)
		sale, err := s.Catalog.Create(t.Context(), drawn)
		if err == nil {
			accepted[sale.ID] = drawn
			continue
		}
		require.ErrorAs(t, err, new(*order.InvalidError), "%+v", drawn)
		if drawn.Validate() == nil {
			continue // its closing time has passed
		}
		id := uuid.Must(uuid.NewV7())
		_, err = s.Pool.Exec(t.Context(), `INSERT INTO sales (id, name, stock, per_order_limit, opens_at, closes_at, payment_window_seconds,
			payment_grace_seconds, payments_per_second)
			VALUES ($1, 'forced', $2, $3, to_timestamp($4::numeric / 1000000), to_timestamp($5::numeric / 1000000), $6, $7, $8)`, id,
			drawn.Stock, drawn.PerOrderLimit, microsOf(drawn.OpensAt), microsOf(drawn.ClosesAt),
			int64(drawn.PaymentWindow/time.Second), int64(drawn.PaymentGrace/time.Second), drawn.PaymentsPerSecond)
		if err == nil { // not refused by a CHECK
			refused[id] = drawn
		}
	}
	require.NotEmpty(t, accepted)
	require.NotEmpty(t, refused)
	rows, err := s.Pool.Query(t.Context(), "WITH audit_sales AS (SELECT id AS sale_id FROM sales)\n"+sql.AuditTerms)
	require.NoError(t, err)
	named, err := pgx.CollectRows(rows, pgx.RowToMap) // of all sales: a report names the first ones only
	require.NoError(t, err)
	for _, finding := range named {
		id := uuid.UUID(finding["sale_id"].([16]byte))
		require.Zero(t, accepted[id], "it was accepted, and %s", finding["what"])
		delete(refused, id)
	}
	require.Empty(t, refused, "the audit does not name them")
	require.NoError(t, s.Exec(t, "DELETE FROM sales WHERE name = 'forced'"))
	testwork.RequireUnbroken(t, s, uuid.Nil)
}

func microsOf(t time.Time) *int64 {
	if t.IsZero() {
		return nil
	}
	n := t.UnixMicro()
	return &n
}

// A missing term is damage. An unpublished one is not.
func TestAuditIgnoresUnpublishedTerms(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := termed(t, s)
	require.NoError(t, s.Exec(t, `WITH s AS (UPDATE sales SET state = 'paused', revision = 2 WHERE id = $1)
		INSERT INTO sale_events (sale_id, revision, type, data) VALUES ($1, 2, 'SalePaused', '{}')`, sale))
	report := testwork.Audit(t, s, sale)
	require.Equal(t, "S7", testwork.Broken(report), testwork.Text(t, report))
	require.Contains(t, testwork.Text(t, report), "state is open and not paused, revision is 1 and not 2")
	require.Equal(t, "worker", testwork.Unmended(testwork.Reconcile(t, s)))

	// A revision above that of Postgres is not in transit.
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale), "revision", 3).Err())
	report = testwork.Audit(t, s, sale)
	require.Equal(t, audit.RemedyRebuild, report.Promise("S7").Findings[0].Remedy)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale), "revision", 1).Err())
	_, err := s.Catalog.PublishPending(t.Context())
	require.NoError(t, err)
	report = testwork.RequireUnbroken(t, s, sale)

	require.NoError(t, s.Rdb.HDel(t.Context(), s.Keys.Sale(0, sale), "state").Err())
	require.Contains(t, testwork.Text(t, testwork.Audit(t, s, sale)), "its fields in Redis are damaged: ")
	testwork.RequireMended(t, s, sale, "")
	require.Equal(t, "paused", s.Rdb.HGet(t.Context(), s.Keys.Sale(0, sale), "state").Val())
}

// A user id must not control the terminal of the reader.
func TestAuditEscapesControlCharacters(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	testwork.Fulfil(t, s)
	forged := order.CompactID(uuid.New()) + " 1 1 1a0c2d3e4f5"
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Buyers(0, sale), "\x1b[2Jann\u009b", forged, "\x1b", "\x1b").Err())
	require.NoError(t, s.Exec(t, "UPDATE sales SET name = E'\\x1b[2J'"))
	report := testwork.Audit(t, s, sale)
	text := testwork.Text(t, report)
	require.Equal(t, "S4", testwork.Broken(report), text)
	require.NotContains(t, text, "\x1b")
	require.NotContains(t, text, "\u009b")
	require.Contains(t, text, `user "\x1b[2Jann\u009b": the reservation in Redis is damaged`)
	require.Equal(t, "\x1b[2Jann\u009b", report.Promise("S4").Findings[0].User, "the field is not escaped")
}

func TestAuditIgnoresDeletedUnreadEntry(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, key := s.Open(t, 40), s.Keys.Orders(0)
	s.Crowd(t, sale, 22)
	testwork.Fulfil(t, s)
	s.Buy(t, sale, "ann")
	s.Buy(t, sale, "bob")
	entries, err := s.Rdb.XRevRangeN(t.Context(), key, "+", "-", 2).Result()
	require.NoError(t, err)
	require.NoError(t, s.Rdb.XDel(t.Context(), key, entries[1].ID).Err())
	report := testwork.Audit(t, s, sale)
	require.Contains(t, testwork.Text(t, report), "1 unfinished entry in "+key+": 1 unread, 0 pending")
	testwork.Fulfil(t, s)
	// Redis 7 and Valkey 8 count the deleted entry as unread forever. The audit does not.
	testwork.RequireMended(t, s, sale, "")
}

// A wrong revision keeps all later changes from Redis.
func TestAuditReportsAndReconcileRepairsForgedRevisions(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ damage, what string }{
		"raised": {"UPDATE sales SET revision = 9", "the sale is at revision 9, and its log ends with revision 3"},
		"raised to the maximum": {
			"UPDATE sales SET revision = 9223372036854775807",
			"the sale is at revision 9223372036854775807, and its log ends with revision 3",
		},
		"raised and marked as published": {
			"UPDATE sales SET revision = 9, published_revision = 9",
			"the sale is at revision 9, and its log ends with revision 3",
		},
		"lowered": {
			"UPDATE sales SET revision = 2, published_revision = 2",
			"the sale is at revision 2, and its log ends with revision 3",
		},
		"published revision too high": {
			"UPDATE sales SET published_revision = 9",
			"the sale is at revision 3, and its published revision is 9",
		},
		"published revision negative": {
			"UPDATE sales SET published_revision = -9",
			"the sale is at revision 3, and its published revision is -9",
		},
		"gap in the log": {
			"DELETE FROM sale_events WHERE revision = 2",
			"the log of the sale has 2 events from revision 1 to 3",
		},
		"log without its last event": {
			"DELETE FROM sale_events WHERE revision = 3",
			"the sale is at revision 3, and its log ends with revision 2",
		},
		"no log": {"DELETE FROM sale_events", "the sale is at revision 3, and its log ends with revision 0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			sale := termed(t, s)
			_, err := s.Catalog.Pause(t.Context(), sale)
			require.NoError(t, err)
			_, err = s.Catalog.Resume(t.Context(), sale)
			require.NoError(t, err)
			testwork.RequireUnbroken(t, s, sale)

			require.NoError(t, s.Exec(t, c.damage))
			require.Contains(t, testwork.Text(t, testwork.Audit(t, s, sale)), c.what)
			testwork.RequireMended(t, s, sale, "")
			_, err = s.Catalog.Pause(t.Context(), sale)
			require.NoError(t, err, "operators can change the sale again")
			require.Equal(t, "paused", s.SaleInRedis(t, sale)["state"])
			testwork.RequireUnbroken(t, s, sale)
		})
	}
}

// Units of a draw that everybody can buy are a broken promise; those of a waiting list may be offered or not.
func TestAuditReportsWrongStateOfOfferedSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	entries, err := s.Create(t.Context(), reservation.Terms{
		Name: "entries", Stock: 9, PerOrderLimit: 1, ClosesAt: time.Now().Add(time.Hour),
	})
	require.NoError(t, err)
	drawn := s.Open(t, 2)
	_, err = s.CreateDraw(t.Context(), drawn, catalog.DrawTerms{Entries: entries.ID, Freeze: time.Minute})
	require.NoError(t, err)
	list, err := s.Create(t.Context(), reservation.Terms{Name: "list", Stock: 2, PerOrderLimit: 1, Waitlist: true})
	require.NoError(t, err)
	state := func(sale uuid.UUID, state string) audit.Report {
		require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale), "state", state).Err())
		return testwork.Audit(t, s, sale)
	}
	for _, right := range []string{"offers", "waitlist"} {
		require.Empty(t, testwork.Broken(state(list.ID, right)), right)
	}
	require.Contains(t, testwork.Text(t, state(list.ID, "open")), "state is open and not waitlist")
	require.Contains(t, testwork.Text(t, state(drawn, "waitlist")), "state is waitlist and not offers")
	require.Contains(t, testwork.Text(t, state(drawn, "open")), "state is open and not offers")
	testwork.RequireMended(t, s, uuid.Nil, "")
	require.Equal(t, reservation.OffersOnly, s.Ask(t, drawn, "ann").Verdict)
}

// pricedSale opens a sale with a price of 500, and four orders: of user-1 and user-2, which are paid; of user-3, which
// was cancelled after its payment; and of user-4, which is not paid. Two more payments are due for refund, and one
// waits.
func pricedSale(t *testing.T, s *testshop.Shop) (sale uuid.UUID, orders []uuid.UUID) {
	t.Helper()
	sale = s.OpenPayable(t, 10)
	require.NoError(t, s.Exec(t, "UPDATE sales SET unit_price = 500, currency = 'EUR' WHERE id = $1", sale))
	testwork.Heartbeat(t, s.Pool)
	l := ledger.New(s.Pool)
	require.Equal(t, 4, s.Crowd(t, sale, 4))
	for _, out := range testwork.Fulfil(t, s) {
		orders = append(orders, out.Event.OrderID)
	}
	report := func(reference string, o uuid.UUID, amount int64, state order.PaymentState) {
		p, err := l.Report(t.Context(), order.Money{Reference: reference, OrderID: o, Amount: amount, Currency: "EUR"})
		require.NoError(t, err)
		require.Equal(t, state, p.State)
	}
	report("pi_1", orders[0], 500, order.PaymentSettled)
	testwork.Pay(t, l, orders[1], testwork.Order(t, s.Pool, orders[1]).UserID, "pi_2")
	report("pi_3", orders[2], 500, order.PaymentSettled)
	_, err := l.Withdraw(t.Context(), orders[2], "a mistake", "zoe")
	require.NoError(t, err)
	_, err = l.Refund(t.Context(), "pi_3", "re_3", "zoe")
	require.NoError(t, err)
	report("pi_4", orders[3], 400, order.PaymentRefundDue)
	report("pi_5", orders[0], 500, order.PaymentRefundDue)
	report("pi_6", order.NewOrderID(sale), 500, order.PaymentWaiting)
	testwork.ReleaseUnits(t, s)
	return sale, orders
}

func TestAuditShowsWhatBecameOfMoney(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, orders := pricedSale(t, s)
	report := testwork.RequireUnbroken(t, s, uuid.Nil)
	require.Equal(t, []audit.PaymentFigures{{
		Currency: "EUR", Payments: 6, Reported: 2900, Settled: 1000, SettledPayments: 2, RefundDue: 900, RefundDuePayments: 2,
		Refunded: 500, RefundedPayments: 1, Waiting: 500, WaitingPayments: 1,
	}}, report.Payments)
	require.Contains(t, testwork.Text(t, report), `
S8  no money is lost                   kept    6 payments = 2 settled + 2 due for refund + 1 refunded + 1 waiting
      2,900 = 1,000 + 900 + 500 + 500 in minor units of EUR
`)
	other := testwork.RequireUnbroken(t, s, s.Open(t, 5))
	require.EqualValues(t, 1, other.Payments[0].Payments, "only that without a sale")

	testwork.Cancel(t, ledger.New(s.Pool), orders[3], testwork.Order(t, s.Pool, orders[3]).UserID)
	testwork.ReleaseUnits(t, s)
	testwork.RequireUnbroken(t, s, sale)
}

// Each damage of the money, or of what it paid, is a finding of S8, and reconcile leaves it to people.
func TestAuditReportsEachDamageOfMoney(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ damage, says string }{
		"an event is missing": {
			"DELETE FROM payment_events WHERE reference = 'pi_3' AND version = 2", "pi_3: its log has 3 of the versions from 1 to 4",
		},
		"no report": {
			"UPDATE payment_events SET version = version + 2 WHERE reference = 'pi_1'", "pi_1: its log has 2 of the versions from 1 to 4",
		},
		"settled twice": {
			"INSERT INTO payment_events (reference, version, type, order_id, sale_id, amount, currency) SELECT reference, 3, type, order_id, " +
				"sale_id, amount, currency FROM payment_events WHERE reference = 'pi_1' AND version = 2",
			"pi_1: its log has an impossible history: PaymentReceived PaymentSettled PaymentSettled",
		},
		"another amount": {
			"UPDATE payment_events SET amount = 501 WHERE reference = 'pi_5' AND version = 2",
			"pi_5: its events have several orders, amounts or currencies",
		},
		"another currency": {
			"UPDATE payment_events SET currency = NULL WHERE reference = 'pi_5' AND version = 2",
			"0 of no currency were reported, and 500 are settled",
		},
		"another order": {
			"UPDATE payment_events SET order_id = gen_random_uuid() WHERE reference = 'pi_1' AND version = 2",
			"pi_1: its events have several orders, amounts or currencies",
		},
		"another sale": {
			"UPDATE payment_events SET sale_id = gen_random_uuid() WHERE reference = 'pi_1' AND version = 2",
			"pi_1: its events have several sales",
		},
		"no such sale": {
			"UPDATE payment_events SET sale_id = gen_random_uuid() WHERE reference = 'pi_6'", "pi_6: Postgres does not have its sale",
		},
		"no sale": {"UPDATE payment_events SET sale_id = NULL WHERE reference = 'pi_1'", "pi_1: it is settled, and has no sale"},
		"no reason": {
			"UPDATE payment_events SET reason = NULL WHERE reference = 'pi_4'",
			"pi_4: it is refund_due, and the reason is missing",
		},
		"a sum": {
			"UPDATE payment_events SET amount = 50 WHERE reference = 'pi_4' AND version = 2",
			"2900 EUR were reported, and 2550 are settled, due for refund, refunded, waiting, unclear or disputed",
		},
		"waits for too long": {
			"UPDATE payment_events SET occurred_at = now() - interval '16 minutes' WHERE reference = 'pi_6'",
			"pi_6: it waits for its order since 2",
		},
		"settled the order of another": {
			"UPDATE orders SET payment_reference = 'pi_9' WHERE payment_reference = 'pi_1'",
			"the payment pi_1 settled the order, which is paid with pi_9",
		},
		"settled after expiry": {
			"UPDATE orders SET status = 'expired' WHERE payment_reference = 'pi_2'", ":pi_2 settled the order, which is expired",
		},
		"the order is gone": {
			"DELETE FROM orders WHERE payment_reference = 'pi_1'", "pi_1 settled the order, which is missing",
		},
		"below the price": {
			"UPDATE sales SET unit_price = 600", "pi_1 settled the order, which is one of 600 EUR and not of 500 EUR",
		},
		"paid with no money": {"DELETE FROM payment_events WHERE reference = 'pi_1'", "the order is paid, and no payment settled it with the reference pi_1"},
		"counts twice": {
			"INSERT INTO payment_events (reference, version, type, order_id, sale_id, amount, currency) SELECT order_id || ':' || reference, " +
				"version, type, order_id, sale_id, amount, currency FROM payment_events WHERE reference = 'pi_1'",
			"the payment pi_1 counts twice",
		},
		"not open": {"DELETE FROM open_payments WHERE reference = 'pi_4'", "pi_4 is refund_due, and among the open payments it is missing"},
		"still open": {
			"UPDATE open_payments SET version = 9 WHERE reference = 'pi_5'", "pi_5 is refund_due, and among the open payments it is refund_due",
		},
		"a refund is lost": {
			"DELETE FROM payment_events WHERE reference = 'pi_3' AND version > 2",
			"the order is cancelled, and no refund is due with the reference pi_3",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			pricedSale(t, s)
			require.NoError(t, s.Exec(t, c.damage))
			report := testwork.Audit(t, s, uuid.Nil)
			require.False(t, report.Unchecked(), testwork.Text(t, report))
			found := report.Promise("S8").Findings
			var texts []string
			for _, f := range found {
				texts = append(texts, f.What)
			}
			require.Contains(t, strings.Join(texts, "\n"), c.says, testwork.Text(t, report))
			reconciled := testwork.Reconcile(t, s)
			require.NotEmpty(t, reconciled.Remedies)
			if name == "waits for too long" {
				require.Equal(t, "worker", testwork.Unmended(reconciled))
			} else {
				require.Contains(t, testwork.Unmended(reconciled), "payment")
			}
		})
	}
}

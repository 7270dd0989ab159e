package audit_test

import (
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
	"stampede/upkeep/audit"
)

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

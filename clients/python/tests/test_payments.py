import unittest
from datetime import timedelta

from stampede_client import ConfirmedOrder, OutcomeUnknownError

from .shop import Plan, ShopCase, create_sale

TERMS = {
    "per_order_limit": 2,
    "payment_window_seconds": 600,
    "payment_grace_seconds": 30,
    "payments_per_second": 1,
    "unit_price": 1290,
    "currency": "EUR",
}


class PaymentsTest(ShopCase):
    def test_an_order_says_what_to_pay_and_from_when_and_money_settles_it(self) -> None:
        sale = create_sale(**TERMS)
        self.assertEqual({name: getattr(sale, name) for name in TERMS}, TERMS)
        plan = Plan({"on": "POST /v1/payments", "do": "drop"})
        order = plan.client.buy(sale.id, quantity=2, wait=10).order
        assert isinstance(order, ConfirmedOrder)
        self.assertEqual((order.amount, order.currency), (2580, "EUR"))
        assert order.expires_at and order.pay_from
        self.assertEqual(order.expires_at - order.pay_from, timedelta(minutes=10))

        id, reference = order.order_id, f"pi_{order.order_id}"
        settled = plan.cashier.report_payment(id, reference, amount=2580, currency="EUR")
        self.assertEqual(
            (settled.state, settled.sale_id, settled.amount), ("settled", sale.id, 2580)
        )
        self.assertEqual([r["path"] for r in plan.seen()].count("/v1/payments"), 2)
        again = plan.cashier.report_payment(id, reference)
        self.assertEqual(again, settled)
        unclear = plan.cashier.report_payment(id, reference, amount=1)
        self.assertEqual((unclear.state, unclear.reason), ("unclear", "other-amount"))
        dismissed = plan.cashier.dismiss(unclear.reference, "Entered by hand.")
        self.assertEqual((dismissed.state, dismissed.note), ("dismissed", "Entered by hand."))
        self.assert_problem("not-unclear", lambda: plan.cashier.dismiss(reference, "r"))
        self.assertEqual(plan.client.order(id).payment_reference, reference)
        self.assert_problem("refund-not-due", lambda: plan.cashier.mark_refunded(reference, "re_1"))

    def test_money_that_settles_nothing_is_due_for_refund_until_it_is_refunded(self) -> None:
        sale = create_sale(**TERMS)
        plan = Plan()
        cashier = plan.cashier
        id = plan.client.buy(sale.id, wait=10).order.order_id
        less, right, again = (f"{what}/1 %2F?#{id}" for what in ("less", "right", "again"))
        for reference, amount, outcome in (
            (less, 1289, ("refund_due", "amount-mismatch")),
            (right, 1290, ("settled", None)),
            (again, 1290, ("refund_due", "already-paid")),
        ):
            payment = cashier.report_payment(id, reference, amount=amount, currency="EUR")
            self.assertEqual((payment.state, payment.reason), outcome)
        due = cashier.payments(state="refund_due", sale_id=sale.id, order_id=id, page_size=1)
        self.assertEqual([payment.reference for payment in due], [less, again])
        refunded = cashier.mark_refunded(less, "re/1")
        self.assertEqual((refunded.state, refunded.refund_reference), ("refunded", "re/1"))
        self.assertEqual(cashier.mark_refunded(less, "re/1"), refunded)
        other = self.assert_problem("already-refunded", lambda: cashier.mark_refunded(less, "re/2"))
        self.assertEqual(other.refund_reference, "re/1")
        self.assert_problem("payment-not-found", lambda: cashier.mark_refunded("none", "re/1"))

    def test_a_report_that_is_none_is_refused_and_one_without_an_answer_is_unknown(self) -> None:
        lost = {"on": "POST /v1/payments", "do": "drop"}
        cashier = Plan({**lost, "do": "answer", "status": 200, "body": "{}"}, lost).cashier
        for _ in range(2):
            error = self.error_of(lambda: cashier.report_payment("none", "pi_1", tries=1))
            self.assertIsInstance(error, OutcomeUnknownError)
        self.assert_problem("invalid-request", lambda: cashier.report_payment("none", ""))


if __name__ == "__main__":
    unittest.main()

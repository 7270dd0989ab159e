import time
import unittest

from stampede_client import OutcomeUnknownError, ProblemError, new_key

from .shop import Plan, ShopCase, buyer, create_sale, problem


class OrdersTest(ShopCase):
    def test_a_payment_may_be_repeated_and_another_one_is_refused(self) -> None:
        sale = create_sale(payment_window_seconds=600)
        plan = Plan({"on": "POST /pay", "do": "drop"})
        id = plan.client.buy(sale.id, wait=10).order.order_id
        paid = plan.client.pay(id, "pi_1")
        self.assertEqual((paid.status, paid.payment_reference, paid.version), ("paid", "pi_1", 3))
        self.assertIsNotNone(paid.paid_at)
        self.assertEqual(paid.paid_at, paid.updated_at)
        self.assertEqual(len(plan.seen()), 3)
        self.assertEqual(plan.client.pay(id, "pi_1").version, 3)
        other = self.assert_problem("already-paid", lambda: plan.client.pay(id, "pi_2"))
        self.assertEqual(other.payment_reference, "pi_1")
        self.assert_problem("illegal-transition", lambda: plan.client.cancel(id))

    def test_a_payment_waits_for_the_confirmation(self) -> None:
        sale = create_sale(payment_window_seconds=600)
        early = problem(409, "order-not-confirmed", **{"Retry-After": "1"})
        plan = Plan({"on": "POST /pay", **early})
        id = plan.client.buy(sale.id).order.order_id
        self.assertEqual(plan.client.pay(id, "pi_1").status, "paid")

    def test_the_outcome_of_a_payment_is_unknown_when_its_answers_are_lost(self) -> None:
        sale = create_sale(payment_window_seconds=600)
        plan = Plan({"on": "POST /pay", "do": "drop"})
        id = plan.client.buy(sale.id, wait=10).order.order_id
        lost = self.error_of(lambda: plan.client.pay(id, "pi_1", tries=1))
        assert isinstance(lost, OutcomeUnknownError)
        self.assertIsNone(lost.key)
        self.assertEqual(plan.client.order(id).status, "paid")

    def test_a_cancelled_order_gives_its_units_back(self) -> None:
        sale = create_sale(stock=1, payment_window_seconds=600)
        ann = buyer()
        id = ann.buy(sale.id, wait=10).order.order_id
        self.assertEqual(ann.cancel(id).status, "cancelled")
        self.assertEqual(ann.cancel(id).status, "cancelled")
        self.assert_problem("illegal-transition", lambda: ann.pay(id, "pi_1"))
        # One second passes before units that come back to an empty sale are sold.
        key, end = new_key(), time.monotonic() + 20
        while True:
            try:
                again = ann.buy(sale.id, key=key)
                break
            except ProblemError as e:
                self.assertIn(e.slug, ("sold-out", "already-purchased"))
                self.assertLess(time.monotonic(), end)
                time.sleep(0.05)
        self.assertNotEqual(again.order.order_id, id)

    def test_a_buyer_waits_is_offered_a_unit_and_leaves(self) -> None:
        sale = create_sale(stock=1, payment_window_seconds=600, waitlist=True)
        ann, bob, cid = buyer(), buyer(), buyer()
        self.assert_problem("not-sold-out", lambda: bob.join_waitlist(sale.id))
        id = ann.buy(sale.id, wait=10).order.order_id
        first = bob.join_waitlist(sale.id)
        self.assertEqual((bob.join_waitlist(sale.id), first.place, first.sale_id), (first, 1, sale.id))
        cid.join_waitlist(sale.id)
        self.assertEqual(cid.leave_waitlist(sale.id).state, "left")
        self.assertEqual(bob.waitlist_place(sale.id).state, "waiting")
        ann.cancel(id)
        end = time.monotonic() + 20
        while bob.waitlist_place(sale.id).state != "offered":
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)
        offered = bob.waitlist_place(sale.id).order_id or ""
        again = bob.join_waitlist(sale.id)
        self.assertEqual(
            (again.state, again.order_id, again.entry_order_id), ("offered", offered, first.entry_order_id)
        )
        self.assertEqual(bob.order(offered).sale_id, sale.id)

    def test_a_buyer_waits_for_an_item(self) -> None:
        sizes = [{"code": code, "name": code, "stock": 1} for code in ("m", "l")]
        sale = create_sale(stock=None, items=sizes, waitlist=True)
        ann, bob = buyer(), buyer()
        ann.buy(sale.id, items={"m": 1})
        self.assert_problem("not-sold-out", lambda: bob.join_waitlist(sale.id, "l"))
        self.assert_problem("unknown-item", lambda: bob.join_waitlist(sale.id, "xl"))
        self.assertEqual((bob.join_waitlist(sale.id, "m").item, bob.waitlist_place(sale.id).item), ("m", "m"))

    def test_orders_and_sales_are_listed_over_their_pages(self) -> None:
        plan = Plan()
        bought = [plan.client.buy(create_sale().id, wait=10).order.order_id for _ in range(7)]
        before = len(plan.seen())
        listed = [order.order_id for order in plan.client.orders(page_size=3)]
        self.assertEqual(listed, bought[::-1])
        self.assertEqual(len(plan.seen()) - before, 3)
        sale_id = plan.client.order(bought[-1]).sale_id
        self.assertEqual([o.order_id for o in plan.client.orders(sale_id=sale_id)], bought[-1:])
        sales = plan.client.sales(page_size=3)
        self.assertEqual(len({next(sales).id for _ in range(7)}), 7)
        self.assertEqual(list(buyer().orders()), [])

    def test_an_order_is_shown_to_its_buyer_and_with_its_receipt(self) -> None:
        sale = create_sale()
        ann = buyer()
        bought = ann.buy(sale.id, wait=10).order
        id, receipt = bought.order_id, bought.receipt
        self.assertEqual(ann.order(id).status, "confirmed")
        self.assertEqual(ann.order(id, receipt=receipt).status, "confirmed")
        self.assert_problem("invalid-request", lambda: ann.order(id, receipt=receipt + "x"))
        self.assert_problem("order-not-found", lambda: buyer().order(id))
        self.assert_problem("order-not-found", lambda: buyer().order(id, receipt=receipt))
        self.assert_problem("order-not-found", lambda: ann.order("../sales"))

    def test_a_sale_is_shown(self) -> None:
        sale = create_sale(name="Front row", opens_at="2099-01-01T00:00:00.000Z")
        self.assertEqual((sale.name, sale.state, sale.available), ("Front row", "scheduled", 10))
        assert sale.opens_at is not None
        self.assertEqual(sale.opens_at.year, 2099)


if __name__ == "__main__":
    unittest.main()

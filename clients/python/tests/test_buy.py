import unittest
from datetime import datetime, timedelta, timezone
from typing import List

from stampede_client import ConfirmedOrder, OutcomeUnknownError, new_key

from .shop import Fault, Plan, ShopCase, buyer, create_sale, new_user, problem, taken, until

# What no Stampede has answered. 502 and 504 are a proxy's, whatever they say.
answers_of_proxies: List[Fault] = [
    *(
        {"do": "answer", "status": status, "body": "<h1>A proxy</h1>"}
        for status in (200, 302, 400, 403, 404, 408, 413, 429, 431, 500, 502, 503, 504)
    ),
    {"do": "answer", "status": 202, "body": '{"order_id":"01a2027b-de9c-7adf-b6e6-5b26'},
    {"do": "answer", "status": 202, "body": '{"status":"reserved"}'},
    {"do": "answer", "status": 200, "body": "[1]"},
    {"do": "answer", "status": 409, "body": '{"type":"https://x.example/errors/conflict"}'},
    problem(502, "sale-unavailable"),
    problem(504, "overloaded"),
]


class BuyTest(ShopCase):
    def test_a_purchase_whose_answer_was_lost_buys_once(self) -> None:
        sale = create_sale()
        plan = Plan({"do": "drop"})
        purchase = plan.client.buy(sale.id)
        self.assertTrue(purchase.replayed)
        seen = plan.seen()
        self.assertEqual(
            [(r.get("fault"), r["status"]) for r in seen], [("drop", 202), (None, 202)]
        )
        self.assertEqual([r["headers"]["idempotency-key"] for r in seen], [purchase.key] * 2)
        self.assertEqual(seen[0]["body"], seen[1]["body"])
        until(lambda: taken(sale) > 0)
        self.assertEqual(taken(sale), 1)

    def test_temporary_answers_and_those_of_proxies_are_repeated(self) -> None:
        faults = [{"do": "refuse"}, problem(503, "overloaded"), problem(429, "rate-limited")]
        faults += answers_of_proxies
        sale = create_sale(stock=len(faults))
        for fault in faults:
            with self.subTest(fault=fault):
                plan = Plan(fault)
                self.assertFalse(plan.client.buy(sale.id).replayed)
                self.assertEqual(len({r["headers"]["idempotency-key"] for r in plan.seen()}), 1)
                self.assertEqual(len(plan.seen()), 2)

    def test_retry_after_is_obeyed(self) -> None:
        sale = create_sale()
        plan = Plan(problem(503, "overloaded", **{"Retry-After": "1"}))
        plan.client.buy(sale.id)
        first, second = plan.seen()
        self.assertGreaterEqual(second["at_ms"] - first["at_ms"], 1000)

    def test_a_retry_after_beyond_the_deadline_ends_the_call(self) -> None:
        sale = create_sale()
        plan = Plan(problem(503, "overloaded", **{"Retry-After": "100"}))
        self.assert_problem("overloaded", lambda: plan.client.buy(sale.id, deadline=5))
        self.assertEqual(len(plan.seen()), 1)

    def test_sold_out_is_not_repeated(self) -> None:
        sale = create_sale(stock=1)
        buyer().buy(sale.id)
        plan = Plan()
        self.assert_problem("sold-out", lambda: plan.client.buy(sale.id))
        self.assertEqual(len(plan.seen()), 1)

    def test_a_basket_is_bought_as_a_whole_or_not_at_all(self) -> None:
        sizes = [{"code": "m", "name": "M", "stock": 3}, {"code": "l", "name": "L", "stock": 1}]
        sale = create_sale(stock=None, items=sizes, per_order_limit=3)
        self.assertEqual([(i["code"], i["available"]) for i in sale.items], [("m", 3), ("l", 1)])
        user = new_user()
        bought = buyer(user).buy(sale.id, items={"m": 1, "l": 1})
        self.assertEqual((bought.order.items, bought.order.quantity), ({"m": 1, "l": 1}, 2))
        self.assertEqual(buyer(user).order(bought.order.order_id).items, {"m": 1, "l": 1})
        other = buyer()
        error = self.assert_problem("sold-out", lambda: other.buy(sale.id, items={"m": 1, "l": 1}))
        self.assertEqual((list(error.items), error.available), (["l"], {"m": 2, "l": 0}))
        error = self.assert_problem("unknown-item", lambda: other.buy(sale.id, items={"xl": 1}))
        self.assertEqual(error.item, "xl")
        other.buy(sale.id, items={"m": 2})

    def test_an_unknown_outcome_is_found_out_by_its_key(self) -> None:
        sale = create_sale()
        plan = Plan({"do": "drop"}, {"do": "refuse"})
        unknown = self.error_of(lambda: plan.client.buy(sale.id, tries=2))
        assert isinstance(unknown, OutcomeUnknownError)
        again = plan.client.buy(sale.id, key=unknown.key)
        self.assertEqual((again.key, again.replayed), (unknown.key, True))
        mine = self.assert_problem("already-purchased", lambda: plan.client.buy(sale.id))
        self.assertEqual(mine.order_id, again.order.order_id)

    def test_a_refusal_that_does_not_know_of_the_lost_try_leaves_the_outcome_unknown(self) -> None:
        sale = create_sale()
        plan = Plan({"do": "drop"}, problem(401, "unauthorized"))
        unknown = self.error_of(lambda: plan.client.buy(sale.id))
        self.assertIsInstance(unknown, OutcomeUnknownError)
        self.assertEqual(getattr(unknown.__cause__, "slug"), "unauthorized")

    def test_answers_of_proxies_leave_the_outcome_unknown(self) -> None:
        sale = create_sale()
        for fault in answers_of_proxies:
            with self.subTest(fault=fault):
                plan = Plan(fault)
                unknown = self.error_of(lambda: plan.client.buy(sale.id, tries=1))
                self.assertIsInstance(unknown, OutcomeUnknownError)
        plan = Plan({"do": "answer", "status": 413})
        cancelled = self.error_of(lambda: plan.client.cancel(sale.id, tries=1))
        self.assertIsInstance(cancelled, OutcomeUnknownError)

    def test_a_decision_after_a_lost_try_is_the_outcome(self) -> None:
        sale = create_sale(stock=1)
        buyer().buy(sale.id)
        self.assert_problem("sold-out", lambda: Plan({"do": "drop"}).client.buy(sale.id))

    def test_nothing_has_happened_when_all_tries_were_refused(self) -> None:
        sale = create_sale()
        plan = Plan(problem(503, "overloaded"), problem(429, "rate-limited"))
        self.assert_problem("rate-limited", lambda: plan.client.buy(sale.id, tries=2))
        self.assertEqual(taken(sale), 0)

    def test_a_request_that_takes_too_long_is_repeated(self) -> None:
        sale = create_sale()
        plan = Plan({"do": "hold"}, timeout=0.5)
        self.assertTrue(plan.client.buy(sale.id).replayed)
        self.assertGreaterEqual(len(plan.seen()), 2)

    def test_a_sale_that_is_not_open_yet_can_be_waited_for(self) -> None:
        opens = datetime.now(timezone.utc) + timedelta(seconds=4)
        opens = opens.replace(microsecond=opens.microsecond // 1000 * 1000)
        sale = create_sale(opens_at=opens.isoformat(timespec="milliseconds"))
        refused = self.assert_problem("sale-not-open", lambda: buyer().buy(sale.id))
        self.assertEqual(refused.opens_at, opens)
        self.assertIn(refused.retry_after, (1, 2, 3, 4))
        # The deadline counts from the opening.
        purchase = buyer().buy(sale.id, wait_for_opening=True, deadline=3, tries=1)
        self.assertGreaterEqual(purchase.order.reserved_at, opens)

    def test_the_server_waits_for_the_confirmation_if_it_is_asked_to(self) -> None:
        sale = create_sale(payment_window_seconds=600)
        purchase = buyer().buy(sale.id, wait=10)
        self.assertFalse(purchase.replayed)
        assert isinstance(purchase.order, ConfirmedOrder)
        self.assertEqual((purchase.order.status, purchase.order.version), ("confirmed", 2))
        self.assertTrue(purchase.order.receipt)
        assert purchase.order.expires_at is not None
        paying = purchase.order.expires_at - purchase.order.reserved_at
        self.assertAlmostEqual(paying.total_seconds(), 600, delta=30)

    def test_a_key_of_ones_own_survives_a_restart(self) -> None:
        sale = create_sale()
        key = new_key()
        user = new_user()
        before = buyer(user).buy(sale.id, key=key)
        after = buyer(user).buy(sale.id, key=key)
        self.assertEqual((after.order.order_id, after.replayed), (before.order.order_id, True))

    def test_problems_have_their_members(self) -> None:
        sale = create_sale(per_order_limit=2, payment_window_seconds=600)
        ann = buyer()
        over = self.assert_problem("quantity-over-limit", lambda: ann.buy(sale.id, quantity=3))
        self.assertEqual((over.status, over.limit), (422, 2))
        bought = ann.buy(sale.id, quantity=2, wait=10)
        self.assert_problem("idempotency-key-reused", lambda: ann.buy(sale.id, key=bought.key))
        ann.cancel(bought.order.order_id)
        ended = self.assert_problem(
            "order-ended", lambda: ann.buy(sale.id, key=bought.key, quantity=2)
        )
        self.assertEqual((ended.order_id, ended.order_status), (bought.order.order_id, "cancelled"))
        missing = "01a2027b-de9c-7adf-b6e6-5b263e1fb250"
        self.assert_problem("sale-not-found", lambda: ann.buy(missing))


if __name__ == "__main__":
    unittest.main()

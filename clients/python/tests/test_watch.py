import unittest
from typing import List, Tuple

from stampede_client import AcceptedOrder, NetworkError

from .shop import Fault, Plan, ShopCase, buyer, create_sale

EVENTS = "GET /events"


def event(version: int, status: str) -> str:
    """An event over two lines of data, with the other end of lines."""
    order = (
        f'"order_id":"x","sale_id":"s","user_id":"u","quantity":1,"reserved_at":"2026-11-22T09:00:02.187Z",'
        f'"version":{version}'
    )
    return (
        f'event: {status}\nid: {version}\r\ndata: {{{order},\ndata: "status":"{status}"}}\r\n\r\n'
    )


def stream(body: str) -> Fault:
    return {"on": EVENTS, "do": "answer", "status": 200, "body": body}


class WatchTest(ShopCase):
    def test_a_watch_that_is_cut_twice_sees_every_state(self) -> None:
        sale = create_sale(payment_window_seconds=600)
        plan = Plan(
            {"on": EVENTS, "do": "refuse"},
            {"on": EVENTS, "do": "cut", "events": 0},
            {"on": EVENTS, "do": "cut", "events": 1},
        )
        id = plan.client.buy(sale.id, wait=10).order.order_id
        states: List[Tuple[str, int]] = []
        for order in plan.client.watch_order(id):
            states.append((order.status, order.version))
            if order.status == "confirmed":
                plan.client.pay(id, "pi_1")
        self.assertEqual(states, [("confirmed", 2), ("paid", 3)])
        streams = [r for r in plan.seen() if r["path"].endswith("/events")]
        self.assertEqual(
            [(r.get("fault"), r["headers"].get("last-event-id")) for r in streams],
            [("refuse", None), ("cut", None), ("cut", None), (None, "2")],
        )

    def test_a_watch_ends_when_nothing_follows(self) -> None:
        sale = create_sale()
        plan = Plan()
        id = plan.client.buy(sale.id, wait=10).order.order_id
        # Without a payment window confirmed is final.
        self.assertEqual([o.status for o in plan.client.watch_order(id)], ["confirmed"])
        self.assertEqual(list(plan.client.watch_order(id, after=2)), [])
        self.assertEqual(plan.seen()[-1]["status"], 204)

    def test_a_silent_connection_is_given_up(self) -> None:
        sale = create_sale(payment_window_seconds=600)
        plan = Plan({"on": EVENTS, "do": "silence", "events": 1})
        id = plan.client.buy(sale.id, wait=10).order.order_id
        states = []
        for order in plan.client.watch_order(id, silence=1):
            states.append(order.status)
            if order.status == "confirmed":
                plan.client.pay(id, "pi_1")
        self.assertEqual(states, ["confirmed", "paid"])

    def test_a_watch_never_goes_back_to_a_lower_version(self) -> None:
        plan = Plan(
            stream(": \n\n" + event(2, "confirmed") + event(1, "reserved")),
            stream(event(1, "reserved") + event(2, "confirmed") + event(3, "paid") + event(4, "x")),
        )
        self.assertEqual([o.version for o in plan.client.watch_order("x")], [2, 3])

    def test_a_watch_shows_that_an_order_expired(self) -> None:
        sale = create_sale(payment_window_seconds=1)
        ann = buyer()
        id = ann.buy(sale.id).order.order_id
        self.assertEqual(list(ann.watch_order(id))[-1].status, "expired")
        self.assertEqual(
            self.assert_problem("order-expired", lambda: ann.pay(id, "pi_1")).status, 410
        )

    def test_a_watch_ends_after_as_many_failures_as_the_caller_allows(self) -> None:
        plan = Plan({"do": "refuse"}, {"do": "refuse"}, {"do": "refuse"})
        self.assertIsInstance(
            self.error_of(lambda: next(plan.client.watch_order("x", tries=2))), NetworkError
        )
        self.assertEqual(len(plan.seen()), 2)
        self.assert_problem("order-not-found", lambda: next(buyer().watch_order("x")))

    def test_the_confirmation_of_an_accepted_order_is_waited_for(self) -> None:
        sale = create_sale(payment_window_seconds=600)
        ann = buyer()
        order = ann.buy(sale.id).order
        assert isinstance(order, AcceptedOrder)
        confirmed = ann.wait_for_confirmation(order.order_id, receipt=order.receipt)
        self.assertEqual((confirmed.status, confirmed.version), ("confirmed", 2))

    def test_the_confirmation_is_found_without_events_too(self) -> None:
        sale = create_sale()
        held = event(1, "reserved").split("data: ")
        reserved = (held[1] + held[2]).replace("\r\n", "")
        plan = Plan(
            {"on": EVENTS, "do": "answer", "status": 502},
            {"on": "GET /v1/orders/", "do": "answer", "status": 200, "body": reserved},
            {"on": EVENTS, "do": "refuse"},
        )
        id = plan.client.buy(sale.id).order.order_id
        self.assertEqual(plan.client.wait_for_confirmation(id).status, "confirmed")
        paths = [r["path"].replace(id, "ID") for r in plan.seen()[1:]]
        self.assertEqual(
            paths[:3], ["/v1/orders/ID/events", "/v1/orders/ID", "/v1/orders/ID/events"]
        )

    def test_the_wait_for_a_confirmation_has_a_deadline(self) -> None:
        held = event(1, "reserved").split("data: ")
        reserved = (held[1] + held[2]).replace("\r\n", "")
        plan = Plan(stream(event(1, "reserved")), {"do": "answer", "status": 200, "body": reserved})
        lost = self.error_of(lambda: plan.client.wait_for_confirmation("x", deadline=0.2))
        self.assertIsInstance(lost, NetworkError)

    def test_a_watched_sale_shows_purchases(self) -> None:
        sale = create_sale(stock=3)
        plan = Plan({"on": EVENTS, "do": "cut", "events": 1})
        available: List[int] = []
        for now in plan.client.watch_sale(sale.id):
            # After a cut the same number comes again.
            if available[-1:] != [now.available]:
                available.append(now.available)
                if now.available == 0:
                    break
                buyer().buy(sale.id)
        self.assertEqual(available, [3, 2, 1, 0])
        self.assertGreaterEqual(len(plan.seen()), 2)
        self.assert_problem("sale-not-found", lambda: next(buyer().watch_sale("no-sale")))


if __name__ == "__main__":
    unittest.main()

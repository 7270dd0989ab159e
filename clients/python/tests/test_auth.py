import base64
import hashlib
import hmac
import json
import time
import unittest
import urllib.request
from typing import Any, List, Optional

from stampede_client import Stampede

from .shop import (
    JWT_SECRET,
    JWT_URL,
    URL,
    Plan,
    ShopCase,
    create_sale,
    new_user,
    problem,
)


def encode(part: bytes) -> bytes:
    return base64.urlsafe_b64encode(part).rstrip(b"=")


def make_token(user: str, expires_in: int) -> str:
    claims = {"sub": user, "exp": int(time.time()) + expires_in}
    parts: List[Any] = [{"alg": "HS256", "typ": "JWT"}, claims]
    signed = b".".join(encode(json.dumps(part).encode()) for part in parts)
    signature = hmac.new(JWT_SECRET.encode(), signed, hashlib.sha256).digest()
    return (signed + b"." + encode(signature)).decode()


class AuthTest(ShopCase):
    def test_a_buyer_with_a_token_buys_and_watches_and_the_shop_reports_the_money(self) -> None:
        sale = create_sale(payment_window_seconds=600)
        user = new_user()
        ann = Stampede(JWT_URL + "/", token=make_token(user, 600))
        order = ann.buy(sale.id).order
        confirmed = ann.wait_for_confirmation(order.order_id, receipt=order.receipt)
        self.assertEqual((confirmed.status, confirmed.user_id), ("confirmed", user))
        self.assert_problem("not-found", lambda: ann.pay(order.order_id, "pi_1"))
        Plan().cashier.report_payment(order.order_id, f"pi_{order.order_id}")
        states = [state.status for state in ann.watch_order(order.order_id, after=2)]
        self.assertEqual(states, ["paid"])

    def test_a_wrong_token_is_refused_at_once(self) -> None:
        plan = Plan(problem(401, "unauthorized"), token="wrong")
        self.assert_problem("unauthorized", lambda: plan.client.buy("any"))
        self.assertEqual(len(plan.seen()), 1)
        stranger = Stampede(JWT_URL, token="wrong")
        self.assert_problem("unauthorized", lambda: next(stranger.orders()))
        self.assert_problem("unauthorized", lambda: next(Stampede(URL).orders()))

    def test_a_token_that_has_expired_is_refreshed_once(self) -> None:
        sale = create_sale()
        user = new_user()
        expired = make_token(user, -3600)
        asked: List[Optional[str]] = []

        def token(refused: Optional[str]) -> str:
            asked.append(refused)
            return expired if refused is None else make_token(user, 600)

        ann = Stampede(JWT_URL, token=token)
        self.assertEqual(ann.buy(sale.id, wait=10).order.status, "confirmed")
        self.assertEqual(asked, [None, expired])

        asked.clear()

        def stubborn(refused: Optional[str]) -> str:
            asked.append(refused)
            return "wrong"

        self.assert_problem("unauthorized", lambda: Stampede(JWT_URL, token=stubborn).buy(sale.id))
        self.assertEqual(asked, [None, "wrong"])

    def test_a_ticket_opens_a_stream_without_a_header(self) -> None:
        sale = create_sale()
        ann = Stampede(JWT_URL, token=make_token(new_user(), 600))
        id = ann.buy(sale.id, wait=10).order.order_id
        for ticket, event in (
            (ann.order_ticket(id), b"event: confirmed\n"),
            (ann.sale_ticket(sale.id), b"event: sale\n"),
        ):
            with urllib.request.urlopen(JWT_URL + ticket.events_url, timeout=10) as stream:
                self.assertIn(event, (line for line in stream))

    def test_an_error_of_the_token_function_is_the_callers(self) -> None:
        def token(refused: Optional[str]) -> str:
            raise LookupError("no session")

        with self.assertRaises(LookupError):
            Stampede(URL, token=token).buy("any")


if __name__ == "__main__":
    unittest.main()

import base64
import json
import threading
import unittest
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Dict, List

from stampede_client import WebhookError, WebhookEvent, payment_of, verify_webhook
from standardwebhooks.webhooks import Webhook

from .shop import add_relay_target, buyer, create_sale, until

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_" + base64.b64encode(bytes([7] * 32)).decode()
EVENT = {
    "specversion": "1.0",
    "id": "o.3",
    "type": "stampede.order.paid",
    "subject": "o",
    "time": "2026-11-22T09:00:02.187Z",
    "data": {"reason": "ü €"},
}
BODY = json.dumps(EVENT, ensure_ascii=False)


def signed(age: float = 0, by: str = SECRET) -> Dict[str, str]:
    """Headers, signed by the reference implementation and not by this client."""
    at = datetime.now(timezone.utc) - timedelta(seconds=age)
    return {
        "Webhook-Id": "o.3",
        "Webhook-Timestamp": str(int(at.timestamp())),
        "Webhook-Signature": Webhook(by).sign("o.3", at, BODY),
    }


class WebhookTest(unittest.TestCase):
    def test_a_webhook_is_verified(self) -> None:
        event = verify_webhook(SECRET, signed(), BODY.encode())
        self.assertEqual((event.id, event.type, event.subject), ("o.3", "stampede.order.paid", "o"))
        self.assertEqual((event.data, event.members), ({"reason": "ü €"}, EVENT))
        verify_webhook(SECRET, {k.lower(): v for k, v in signed().items()}, BODY)

    def test_what_the_relay_sends_is_verified_in_order(self) -> None:
        received: List[WebhookEvent] = []
        failures: List[WebhookError] = []

        class Shop(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                try:
                    received.append(verify_webhook([OTHER, SECRET], dict(self.headers), body))
                    self.send_response(204)
                except WebhookError as e:
                    failures.append(e)
                    self.send_response(400)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Shop) as shop:
            threading.Thread(target=shop.serve_forever, daemon=True).start()
            add_relay_target(f"http://127.0.0.1:{shop.server_port}/", SECRET)
            sale = create_sale(payment_window_seconds=600)
            ann = buyer()
            id = ann.buy(sale.id, wait=10).order.order_id
            ann.pay(id, "pi_1")
            # The events of the order come in order, those of the sale and of the payment when they come.
            until(lambda: any(p.order_id == id for p in map(payment_of, received) if p))
            until(lambda: any(e.id == f"{id}.3" for e in received))
            until(lambda: ("stampede.sale.created", sale.id) in [(e.type, e.subject) for e in received])
            shop.shutdown()
        ours = {e.id: e for e in received if e.subject == id}
        self.assertEqual(list(ours), [f"{id}.2", f"{id}.3"])
        payment = next(p for p in map(payment_of, received) if p and p.order_id == id)
        self.assertEqual(
            (payment.state, payment.sale_id, payment.version), ("settled", sale.id, 2)
        )
        paid = ours[f"{id}.3"].data
        self.assertEqual((paid["sale_id"], paid["payment_reference"]), (sale.id, "pi_1"))
        self.assertEqual(failures, [])

    def test_secrets_are_rotated_by_several_secrets_or_several_signatures(self) -> None:
        verify_webhook([OTHER, SECRET], signed(), BODY)
        ours, theirs = signed()["Webhook-Signature"], signed(by=OTHER)["Webhook-Signature"]
        both = {**signed(), "Webhook-Signature": f"v2,xx v1,!! v1a,xx {theirs} {ours}"}
        verify_webhook(SECRET, both, BODY)

    def test_what_is_not_signed_or_not_now_is_refused(self) -> None:
        no_id = signed()
        del no_id["Webhook-Id"]
        for what, headers, body in (
            ("changed body", signed(), BODY + " "),
            ("other secret", signed(by=OTHER), BODY),
            ("other id", {**signed(), "Webhook-Id": "o.4"}, BODY),
            ("other time", {**signed(), "Webhook-Timestamp": signed(7)["Webhook-Timestamp"]}, BODY),
            ("old", signed(302), BODY),
            ("from the future", signed(-302), BODY),
            ("no number", {**signed(), "Webhook-Timestamp": "now"}, BODY),
            ("missing header", no_id, BODY),
            ("no signature", {**signed(), "Webhook-Signature": "v1, v1"}, BODY),
        ):
            with self.subTest(what), self.assertRaises(WebhookError):
                verify_webhook(SECRET, headers, body)
        verify_webhook(SECRET, signed(290), BODY)
        with self.assertRaises(ValueError):
            verify_webhook("whsec_", signed(), BODY)


if __name__ == "__main__":
    unittest.main()

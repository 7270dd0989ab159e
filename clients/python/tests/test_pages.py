"""What the client says is what the server and the pages say."""

import base64
import io
import os
import re
import unittest
from contextlib import redirect_stdout
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict
from unittest.mock import patch

from stampede_client import PROBLEM_SLUGS
from standardwebhooks.webhooks import Webhook

from .shop import ADMIN_TOKEN, URL, create_sale, send

CLIENT = Path(__file__).parent.parent


class PagesTest(unittest.TestCase):
    def test_the_slugs_are_those_of_the_server(self) -> None:
        types = send("GET", f"{URL}/openapi.json")["components"]["schemas"]["ProblemType"]["enum"]
        self.assertEqual({type.replace("/problems/", "") for type in types}, PROBLEM_SLUGS)

    def test_the_examples_of_the_readme_run(self) -> None:
        page = (CLIENT / "README.md").read_text(encoding="utf-8")
        buy, report, webhook = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        sale = create_sale(payment_window_seconds=600)
        secret = "whsec_" + base64.b64encode(bytes([1] * 32)).decode()
        with patch.dict(os.environ, {"SALE": sale.id, "WEBHOOK_SECRET": secret, "CASHIER_TOKEN": ADMIN_TOKEN}):
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(buy.replace("http://localhost:8080", URL), {})
            self.assertRegex(
                printed.getvalue(), r"^\S+ confirmed until .+ False\n3 paid\n(\S+ paid\n)+$"
            )
            defined: Dict[str, Any] = {}
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(report.replace("http://localhost:8080", URL), defined)
                defined["money_arrived"](None, "readme-python", 100)
            self.assertEqual(printed.getvalue(), "readme-python refund_due order-not-found\n")
            exec(webhook, defined)
            now = datetime.now(timezone.utc)
            body = '{"id":"o.3","type":"t","subject":"o","time":"","data":{}}'
            headers = {
                "webhook-id": "o.3",
                "webhook-timestamp": str(int(now.timestamp())),
                "webhook-signature": Webhook(secret).sign("o.3", now, body),
            }
            with redirect_stdout(io.StringIO()):
                self.assertEqual(defined["handle"](headers, body.encode()), 204)
                self.assertEqual(defined["handle"](headers, b"{}"), 400)


if __name__ == "__main__":
    unittest.main()

"""What the client says is what the pages say."""

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

from standardwebhooks.webhooks import Webhook

from stampede_client import PROBLEM_SLUGS

from .shop import URL, create_sale

CLIENT = Path(__file__).parent.parent


class PagesTest(unittest.TestCase):
    def test_the_slugs_are_those_of_the_servers_documentation(self) -> None:
        page = (CLIENT / "../../docs/http-api.md").read_text(encoding="utf-8")
        table = page.split("\n## Problems\n")[1].split("\n`Retry-After`")[0]
        self.assertEqual(set(re.findall(r"`([a-z-]+)`", table)), PROBLEM_SLUGS)

    def test_the_examples_of_the_readme_run(self) -> None:
        page = (CLIENT / "README.md").read_text(encoding="utf-8")
        buy, webhook = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        sale = create_sale(payment_window_seconds=600)
        secret = "whsec_" + base64.b64encode(bytes([1] * 32)).decode()
        with patch.dict(os.environ, {"SALE": sale.id, "WEBHOOK_SECRET": secret}):
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(buy.replace("http://localhost:8080", URL), {})
            self.assertRegex(
                printed.getvalue(), r"^\S+ confirmed until .+ False\n3 paid\n(\S+ paid\n)+$"
            )
            defined: Dict[str, Any] = {}
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

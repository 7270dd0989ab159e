"""What the tests share: the servers that `task test:clients` has started, sales, buyers, and faults on the way."""

import json
import os
import subprocess
import tempfile
import time
import unittest
import urllib.request
import uuid
from typing import Any, Callable, Dict, List, Optional

from stampede_client import Cashier, ProblemError, Sale, Stampede, StampedeError

URL = os.environ["STAMPEDE_TEST_URL"]
JWT_URL = os.environ["STAMPEDE_TEST_JWT_URL"]
JWT_SECRET = os.environ["STAMPEDE_TEST_JWT_SECRET"]
FAULTS_URL = os.environ["STAMPEDE_TEST_FAULTS_URL"]
PROGRAM = os.environ["STAMPEDE_TEST_PROGRAM"]
ADMIN_TOKEN = os.environ["STAMPEDE_TEST_ADMIN_TOKEN"]

Fault = Dict[str, Any]


def send(method: str, url: str, body: Any = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=10) as response:
        text = response.read()
        return json.loads(text) if text else None


def new_user() -> str:
    return f"ann-{uuid.uuid4()}"


def create_sale(**terms: Any) -> Sale:
    body = {"name": "Test", "stock": 10, **terms}
    made = send("POST", f"{URL}/v1/sales", body, Authorization=f"Bearer {ADMIN_TOKEN}")
    return buyer().sale(made["id"])


def buyer(user: Optional[str] = None) -> Stampede:
    """A client without faults."""
    return Stampede(URL, user=user or new_user())


class Plan:
    """A client behind a proxy, where each of the faults happens once."""

    def __init__(self, *faults: Fault, **options: Any) -> None:
        self._name = uuid.uuid4()
        send("PUT", f"{FAULTS_URL}/_plans/{self._name}", list(faults))
        url = f"{FAULTS_URL}/{self._name}"
        self.client = Stampede(url, **{"user": new_user(), **options})
        self.cashier = Cashier(url, token=ADMIN_TOKEN)

    def seen(self) -> List[Dict[str, Any]]:
        """The requests that the proxy has seen."""
        found: List[Dict[str, Any]] = send("GET", f"{FAULTS_URL}/_plans/{self._name}")
        return found


def problem(status: int, slug: str, **headers: str) -> Fault:
    return {
        "do": "answer",
        "status": status,
        "headers": {"Content-Type": "application/problem+json", **headers},
        "body": json.dumps(
            {"type": f"/problems/{slug}", "status": status, "detail": "By the proxy."}
        ),
    }


def add_relay_target(webhook: str, secret: str) -> None:
    """Has the relay send all events from now on to a webhook."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(secret)
        file.flush()
        target = ["relay", "add", f"shop-{uuid.uuid4()}", webhook]
        options = [f"--secret-file={file.name}", "--allow-private"]
        subprocess.run([PROGRAM, *target, *options], check=True, capture_output=True)


def taken(sale: Sale) -> int:
    """How many units are reserved or sold."""
    now = buyer().sale(sale.id)
    return now.held + now.sold


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 50
    while not what():
        if time.monotonic() > end:
            raise AssertionError("not within 50 s")
        time.sleep(0.02)


class ShopCase(unittest.TestCase):
    def assert_problem(self, slug: str, call: Callable[[], Any]) -> ProblemError:
        with self.assertRaises(ProblemError) as caught:
            call()
        self.assertEqual(caught.exception.slug, slug)
        return caught.exception

    def error_of(self, call: Callable[[], Any]) -> StampedeError:
        with self.assertRaises(StampedeError) as caught:
            call()
        return caught.exception

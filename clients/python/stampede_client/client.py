"""The client."""

from __future__ import annotations

import json
import re
import secrets
import time
from http.client import HTTPException, HTTPResponse
from typing import Any, Callable, Iterator, Mapping, Optional, Type, Union
from urllib.parse import quote, urlencode

from .errors import NetworkError, StampedeError
from .transport import Repeats, Request, Token, Transport, is_temporary, pause_before
from .types import (
    AcceptedOrder,
    ConfirmedOrder,
    Draw,
    DrawProof,
    Order,
    Purchase,
    Sale,
    SaleUpdate,
    StreamTicket,
    WaitlistEntry,
    WaitlistPlace,
    read,
)

# After these nothing follows. A confirmed order may be final too: then the server answers 204.
_FINAL = ("paid", "cancelled", "expired", "rejected", "voided")
# An event of Stampede has less than 2 KiB.
_LINE_BYTES_MAX = 1 << 20


def new_key() -> str:
    """Makes an idempotency key."""
    return secrets.token_hex(16)


class Stampede:
    """Talks to a Stampede as one buyer. It is safe for use by several threads. Times are in seconds.

    Give a token (JWT), or for a server that identifies buyers by a header, as dev does, a user. The token may be a
    function: it is called with None for each request, and with the refused token when the server refuses one. A call
    is tried at most `tries` times within `deadline`; one request may take `timeout`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: Token = None,
        user: Optional[str] = None,
        user_header: str = "X-User-ID",
        timeout: float = 15.0,
        tries: int = 8,
        deadline: float = 60.0,
    ) -> None:
        headers = {} if user is None else {user_header: user}
        self._transport = Transport(base_url, token, headers, timeout, tries, deadline)

    def buy(
        self,
        sale_id: str,
        *,
        quantity: int = 1,
        items: Optional[Mapping[str, int]] = None,
        key: Optional[str] = None,
        wait: int = 0,
        wait_for_opening: bool = False,
        tries: Optional[int] = None,
        deadline: Optional[float] = None,
    ) -> Purchase:
        """Buys units of a sale, once, however often it has to be tried: all tries have the same key.

        In a sale with items, `items` are the units by code, in place of quantity: all of them or none.
        The key is new_key() by default; to survive a restart, store your own before the call. `wait` is how long the
        server may wait for the confirmation, at most 30. With wait_for_opening, tries and deadline count from the
        opening of the sale. Raises ProblemError if the server refuses (sold-out, already-purchased, …), and
        OutcomeUnknownError if the order may exist and no answer came in time.
        """
        key = key or new_key()
        headers = {"Idempotency-Key": key}
        units = {"quantity": quantity} if items is None else {"items": dict(items)}
        if wait > 0:
            headers["Prefer"] = f"wait={wait}"
        answer = self._transport.call(
            Request("POST", f"/v1/sales/{_segment(sale_id)}/orders", headers, units),
            Repeats(tries, deadline, changes="order_id", key=key, wait_for_opening=wait_for_opening),
            extra=wait,
        )
        kind: Type[Union[AcceptedOrder, ConfirmedOrder]] = (
            AcceptedOrder if answer.json["status"] == "reserved" else ConfirmedOrder
        )
        replayed = answer.headers.get("Idempotency-Replayed") == "true"
        return Purchase(read(kind, answer.json), key, replayed)

    def wait_for_confirmation(
        self, order_id: str, *, receipt: Optional[str] = None, deadline: float = 60.0
    ) -> Order:
        """Waits until an accepted order is in the database, and returns it: confirmed, or what became of it instead.

        It reads the order's events, and asks for the order where events do not arrive. Raises NetworkError after the
        deadline.
        """
        until = time.monotonic() + deadline
        error = NetworkError(f"no confirmation within {deadline} s")
        failures = 0
        while time.monotonic() < until:
            failures += 1
            # The first event comes at once. Some proxies hold events back: look at the order after 5 seconds.
            silence = min(5.0, until - time.monotonic())
            try:
                for order in self.watch_order(order_id, receipt=receipt, tries=1, silence=silence):
                    if order.status != "reserved":
                        return order
            except StampedeError as e:
                if not is_temporary(e):
                    raise
            order = self.order(
                order_id, receipt=receipt, deadline=max(until - time.monotonic(), 0.1)
            )
            if order.status != "reserved":
                return order
            time.sleep(min(pause_before(failures, error), max(until - time.monotonic(), 0.0)))
        raise error

    def order(
        self,
        order_id: str,
        *,
        receipt: Optional[str] = None,
        tries: Optional[int] = None,
        deadline: Optional[float] = None,
    ) -> Order:
        """The order. With the receipt of its purchase, also one that was lost with Redis."""
        path = _order_path(order_id, "", receipt)
        return read(
            Order, self._transport.call(Request("GET", path), Repeats(tries, deadline)).json
        )

    def orders(
        self, *, sale_id: Optional[str] = None, page_size: Optional[int] = None
    ) -> Iterator[Order]:
        """The buyer's orders that are in the database, newest first, page after page."""
        query = {"sale_id": sale_id, "limit": page_size}
        return self._transport.list("/v1/orders", "orders", query, Order)

    def pay(
        self,
        order_id: str,
        reference: str,
        *,
        tries: Optional[int] = None,
        deadline: Optional[float] = None,
    ) -> Order:
        """Marks a confirmed order as paid, where the server lets buyers do so (STAMPEDE_BUYER_PAY).

        Otherwise the shop's server reports the money (Cashier). Waits for the confirmation if the order is still on its
        way.
        """
        return self._change(order_id, "pay", {"reference": reference}, tries, deadline)

    def cancel(
        self, order_id: str, *, tries: Optional[int] = None, deadline: Optional[float] = None
    ) -> Order:
        """Cancels a confirmed order that is not paid. Waits for the confirmation like pay."""
        return self._change(order_id, "cancel", {}, tries, deadline)

    def join_waitlist(
        self,
        sale_id: str,
        item: Optional[str] = None,
        *,
        key: Optional[str] = None,
        tries: Optional[int] = None,
        deadline: Optional[float] = None,
    ) -> WaitlistEntry:
        """Waits for a unit of a sale that is sold out, or of an item. A repeat keeps the place. Raises ProblemError, as
        not-sold-out."""
        key = key or new_key()
        body = {} if item is None else {"item": item}
        request = Request("POST", _waitlist(sale_id), {"Idempotency-Key": key}, body)
        repeats = Repeats(tries, deadline, changes="state", key=key)
        return read(WaitlistEntry, self._transport.call(request, repeats).json)

    def waitlist_place(self, sale_id: str) -> WaitlistPlace:
        """The own place in the waiting list of a sale, with the order when a unit was offered."""
        request = Request("GET", _waitlist(sale_id))
        return read(WaitlistPlace, self._transport.call(request, Repeats()).json)

    def leave_waitlist(
        self, sale_id: str, *, tries: Optional[int] = None, deadline: Optional[float] = None
    ) -> WaitlistPlace:
        """Gives the own place up. An order that was offered stays as it is."""
        request = Request("POST", _waitlist(sale_id) + "/leave", body={})
        repeats = Repeats(tries, deadline, changes="state", also_repeat="order-not-confirmed")
        return read(WaitlistPlace, self._transport.call(request, repeats).json)

    def sale(self, sale_id: str) -> Sale:
        """The sale."""
        request = Request("GET", f"/v1/sales/{_segment(sale_id)}")
        return read(Sale, self._transport.call(request, Repeats()).json)

    def sales(self, *, page_size: Optional[int] = None) -> Iterator[Sale]:
        """All sales, newest first."""
        return self._transport.list("/v1/sales", "sales", {"limit": page_size}, Sale)

    def draw(self, sale_id: str) -> Draw:
        """The draw of the units of the sale. To enter, buy a unit of its entries_sale_id, and keep the receipt."""
        request = Request("GET", f"/v1/sales/{_segment(sale_id)}/draw")
        return read(Draw, self._transport.call(request, Repeats()).json)

    def draw_proof(self, sale_id: str, receipt: str) -> DrawProof:
        """The part of an entry in the draw of the sale, by the receipt of the entry, once the list is frozen."""
        query = urlencode({"receipt": receipt})
        request = Request("GET", f"/v1/sales/{_segment(sale_id)}/draw/proof?{query}")
        return read(DrawProof, self._transport.call(request, Repeats()).json)

    def watch_order(
        self,
        order_id: str,
        *,
        receipt: Optional[str] = None,
        after: int = 0,
        tries: Optional[int] = None,
        silence: float = 40.0,
    ) -> Iterator[Order]:
        """The order as it is, and then every change, until the last one.

        It reconnects when a connection ends, or is silent for `silence`: the server speaks every 15 seconds. It never
        goes back to a lower version, and gives only versions higher than `after`. `tries` failed connections in a row
        end it with their error; there is no bound by default. Close the iterator to end it earlier.
        """
        seen = after
        path = _order_path(order_id, "/events", receipt)
        for members in self._events(path, lambda: seen, tries, silence):
            order = read(Order, members)
            if order.version <= seen:
                continue
            seen = order.version
            yield order
            if order.status in _FINAL:
                return

    def watch_sale(
        self, sale_id: str, *, tries: Optional[int] = None, silence: float = 40.0
    ) -> Iterator[SaleUpdate]:
        """The sale's numbers as they are, and then every change, until the caller stops."""
        path = f"/v1/sales/{_segment(sale_id)}/events"
        for members in self._events(path, lambda: 0, tries, silence):
            yield read(SaleUpdate, members)

    def order_ticket(self, order_id: str) -> StreamTicket:
        """A ticket for the events of an order. watch_order needs none."""
        request = Request("POST", _order_path(order_id, "/events/ticket"))
        return read(StreamTicket, self._transport.call(request, Repeats()).json)

    def sale_ticket(self, sale_id: str) -> StreamTicket:
        """A ticket for the events of a sale. watch_sale needs none."""
        request = Request("POST", f"/v1/sales/{_segment(sale_id)}/events/ticket")
        return read(StreamTicket, self._transport.call(request, Repeats()).json)

    def _change(
        self,
        order_id: str,
        change: str,
        body: Mapping[str, str],
        tries: Optional[int],
        deadline: Optional[float],
    ) -> Order:
        repeats = Repeats(tries, deadline, changes="order_id", also_repeat="order-not-confirmed")
        request = Request("POST", _order_path(order_id, f"/{change}"), body=body)
        return read(Order, self._transport.call(request, repeats).json)

    def _events(
        self, path: str, last_id: Callable[[], int], tries: Optional[int], silence: float
    ) -> Iterator[Any]:
        """The data of a stream's events, from as many connections as it takes, until none follow."""
        failures = 0
        retry = 0.0

        def on_retry(seconds: float) -> None:
            nonlocal retry
            retry = seconds

        while True:
            failures += 1
            error: StampedeError = NetworkError("the stream ended")
            headers = {"Accept": "text/event-stream"}
            if last_id() > 0:
                headers["Last-Event-ID"] = str(last_id())
            try:
                with self._transport.open(Request("GET", path, headers), silence) as response:
                    if response.status == 204:
                        return
                    for data in _read_events(response, on_retry):
                        failures = 1
                        yield data
            except StampedeError as e:
                error = e
            if not is_temporary(error) or (tries is not None and failures >= tries):
                raise error
            time.sleep(pause_before(failures, error, least=retry))


def _read_events(response: HTTPResponse, on_retry: Callable[[float], None]) -> Iterator[Any]:
    """Reads the data of server-sent events. One that is cut off by the end of the stream is dropped.

    on_retry gets the pause before a new connection that the server asks for.
    """
    data = b""
    while True:
        try:
            line = response.readline(_LINE_BYTES_MAX)
        except (OSError, HTTPException) as e:
            raise NetworkError("the stream was cut off, or silent for too long") from e
        if not line.endswith(b"\n"):
            return
        line = line.rstrip(b"\r\n")
        if line == b"" and data != b"":
            yield json.loads(data)
            data = b""
        elif line.startswith(b"data:") and len(data) < _LINE_BYTES_MAX:
            data += line[len(b"data:") :] + b"\n"
        elif re.fullmatch(rb"retry: ?[0-9]{1,5}", line):
            on_retry(int(line[len(b"retry:") :]) / 1000)


def _segment(text: str) -> str:
    return quote(text, safe="")


def _waitlist(sale_id: str) -> str:
    return f"/v1/sales/{_segment(sale_id)}/waitlist"


def _order_path(order_id: str, below: str, receipt: Optional[str] = None) -> str:
    query = "" if receipt is None else "?" + urlencode({"receipt": receipt})
    return f"/v1/orders/{_segment(order_id)}{below}{query}"

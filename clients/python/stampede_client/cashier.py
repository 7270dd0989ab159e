"""The client of the shop's server that reports money."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Optional
from urllib.parse import quote

from .transport import Repeats, Request, Token, Transport
from .types import Payment, PaymentState, read


class Cashier:
    """Reports money to a Stampede with the token of a cashier. It is safe for use by several threads."""

    def __init__(
        self,
        base_url: str,
        *,
        token: Token,
        timeout: float = 15.0,
        tries: int = 8,
        deadline: float = 60.0,
    ) -> None:
        self._transport = Transport(base_url, token, {}, timeout, tries, deadline)

    def report_payment(
        self,
        order_id: str,
        reference: str,
        *,
        amount: Optional[int] = None,
        currency: Optional[str] = None,
        tries: Optional[int] = None,
        deadline: Optional[float] = None,
    ) -> Payment:
        """Reports money, and tells what became of it: every state is an answer.

        The reference is the payment provider's: a repeat changes nothing, and gets the first one's answer. What
        contradicts the first report is a payment of its own, which is unclear. The amount is in minor units of the currency (ISO 4217); both are required, and compared, in a sale with
        a price. Acknowledge the provider's webhook when this returns. When it raises, refuse the webhook: the provider
        delivers it again.
        """
        report = {
            "order_id": order_id,
            "reference": reference,
            "amount": amount,
            "currency": currency,
        }
        given = {name: value for name, value in report.items() if value is not None}
        return self._post("/v1/payments", given, tries, deadline)

    def payments(
        self,
        *,
        state: Optional[PaymentState] = None,
        sale_id: Optional[str] = None,
        order_id: Optional[str] = None,
        page_size: Optional[int] = None,
    ) -> Iterator[Payment]:
        """The payments that match. Those with refund_due are what the shop has to pay back."""
        query = {"state": state, "sale": sale_id, "order": order_id, "limit": page_size}
        return self._transport.list("/v1/admin/payments", "payments", query, Payment)

    def mark_refunded(
        self,
        reference: str,
        refund_reference: str,
        *,
        tries: Optional[int] = None,
        deadline: Optional[float] = None,
    ) -> Payment:
        """Notes that the provider has paid the money back. It may be repeated. It needs the token of an operator."""
        path = f"/v1/admin/payments/{quote(reference, safe='')}/refunded"
        return self._post(path, {"refund_reference": refund_reference}, tries, deadline)

    def dismiss(
        self,
        reference: str,
        reason: str,
        *,
        tries: Optional[int] = None,
        deadline: Optional[float] = None,
    ) -> Payment:
        """Notes that nothing of an unclear payment has to go back. It may be repeated. It needs an operator's token."""
        path = f"/v1/admin/payments/{quote(reference, safe='')}/dismissed"
        return self._post(path, {"reason": reason}, tries, deadline)

    def _post(
        self,
        path: str,
        body: Mapping[str, Any],
        tries: Optional[int],
        deadline: Optional[float],
    ) -> Payment:
        request = Request("POST", path, body=body)
        repeats = Repeats(tries, deadline, changes="state")
        return read(Payment, self._transport.call(request, repeats).json)

"""What can go wrong: a problem of the server, no answer, or an outcome that is not known."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, Mapping, Optional, Sequence

from .types import read_time


class StampedeError(Exception):
    """The base of all errors of this package, WebhookError apart."""


class ProblemError(StampedeError):
    """The server refused the request (RFC 9457). Compare slug; detail is for people."""

    def __init__(
        self, status: int, members: Mapping[str, Any], retry_after: Optional[float] = None
    ) -> None:
        kind = re.fullmatch(r"/problems/([a-z-]+)", str(members.get("type", "")))
        self.status = status
        self.slug = kind.group(1) if kind else ""
        """One of PROBLEM_SLUGS; a newer server may have more. "" if Stampede did not make the answer."""
        self.detail: Optional[str] = members.get("detail")
        self.retry_after = retry_after
        """How long the server asks the client to wait, in seconds."""
        self.members = members
        """All members of the problem, with the names of the JSON."""
        super().__init__(f"{status} {self.slug or 'without a problem'}: {self.detail or ''}")

    @property
    def opens_at(self) -> Optional[datetime]:
        """With sale-not-open: when the sale opens."""
        return read_time(self.members["opens_at"]) if "opens_at" in self.members else None

    @property
    def limit(self) -> Optional[int]:
        """With quantity-over-limit: how many units one order may hold."""
        return self.members.get("limit")

    @property
    def item(self) -> Optional[str]:
        """With unknown-item: the code. With quantity-over-limit: the item whose limit it is; None for the sale's."""
        return self.members.get("item")

    @property
    def items(self) -> Sequence[str]:
        """With sold-out in a sale with items: the codes of the items that fell short."""
        items: Sequence[str] = self.members.get("items", ())
        return items

    @property
    def available(self) -> Optional[Mapping[str, int]]:
        """With sold-out in a sale with items: what is left of each, by code, if that is known."""
        return self.members.get("available")

    @property
    def payment_reference(self) -> Optional[str]:
        """With already-paid: the payment that counts."""
        return self.members.get("payment_reference")

    @property
    def refund_reference(self) -> Optional[str]:
        """With already-refunded: the refund that was noted."""
        return self.members.get("refund_reference")

    @property
    def order_id(self) -> Optional[str]:
        """With already-purchased: the buyer's live order in this sale. With order-ended: the one of this purchase."""
        return self.members.get("order_id")

    @property
    def order_status(self) -> Optional[str]:
        """With order-ended: how that order ended."""
        return self.members.get("order_status")

    @property
    def request_id(self) -> Optional[str]:
        """With internal-error: names the fault in the server's log."""
        return self.members.get("request_id")


class NetworkError(StampedeError):
    """No complete answer came: the connection failed, or time ran out. __cause__ says why."""


class OutcomeUnknownError(StampedeError):
    """A purchase, payment or cancellation may have been made, and this client could not find out in time.

    Repeat it: a purchase with the same sale, units and key, the others as they were. It cannot happen twice.
    """

    def __init__(self, key: Optional[str]) -> None:
        self.key = key
        """The idempotency key of the purchase; None for payments and cancellations, which need none."""
        super().__init__(
            "The outcome is unknown: repeat the call" + (f" with the key {key}" if key else "")
        )

"""Verifies what `stampede relay` sends to a shop (https://www.standardwebhooks.com)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
import time
from dataclasses import dataclass
from typing import Any, Mapping, Optional, Sequence, Union

from .types import PaymentEvent, read

_TOLERANCE_SECONDS = 300


class WebhookError(Exception):
    """The request is not a webhook of the sender that knows the secret, or it is too old. Answer 400."""


@dataclass(frozen=True)
class WebhookEvent:
    """An event (CloudEvents 1.0)."""

    id: str
    """The same at every delivery: process each id once."""
    type: str
    """stampede.order.paid or stampede.payment.refund_due, for example."""
    subject: str
    """The id of the order or sale, or the reference of the payment."""
    time: str
    data: Mapping[str, Any]
    members: Mapping[str, Any]
    """All members of the event."""


def verify_webhook(
    secret: Union[str, Sequence[str]],
    headers: Mapping[str, str],
    body: Union[bytes, str],
    *,
    now: Optional[float] = None,
) -> WebhookEvent:
    """Verifies a webhook and returns its event.

    The body must be the bytes as they came, before any JSON parser. While a secret is being replaced, give the old
    and the new one.
    """
    sent = {name.lower(): value for name, value in headers.items()}
    names = ("webhook-id", "webhook-timestamp", "webhook-signature")
    missing = [name for name in names if not sent.get(name)]
    if missing:
        raise WebhookError(f"{missing[0]} is missing")
    id, timestamp, signatures = (sent[name] for name in names)
    now = time.time() if now is None else now
    if (
        not re.fullmatch(r"[0-9]{1,12}", timestamp)
        or abs(now - int(timestamp)) > _TOLERANCE_SECONDS
    ):
        raise WebhookError("webhook-timestamp is more than 5 minutes from now, or not a time")
    raw = body.encode() if isinstance(body, str) else body
    signed = f"{id}.{timestamp}.".encode() + raw
    for one in [secret] if isinstance(secret, str) else secret:
        expected = hmac.new(_secret_bytes(one), signed, hashlib.sha256).digest()
        for signature in signatures.split(" "):
            version, _, value = signature.partition(",")
            if version == "v1" and hmac.compare_digest(_decode(value) or b"", expected):
                return _event(raw)
    raise WebhookError("no signature in webhook-signature is valid")


def payment_of(event: WebhookEvent) -> Optional[PaymentEvent]:
    """The payment that an event is about, or None for an event of an order or sale."""
    return read(PaymentEvent, event.data) if event.type.startswith("stampede.payment.") else None


def _event(body: bytes) -> WebhookEvent:
    members = json.loads(body)
    return WebhookEvent(
        id=members["id"],
        type=members["type"],
        subject=members["subject"],
        time=members["time"],
        data=members["data"],
        members=members,
    )


def _secret_bytes(secret: str) -> bytes:
    decoded = _decode(secret[len("whsec_") :] if secret.startswith("whsec_") else secret)
    if not decoded:
        raise ValueError("the secret is not whsec_ and base64")
    return decoded


def _decode(text: str) -> Optional[bytes]:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None

"""Client of Stampede's HTTP API. It uses the standard library alone."""

from .client import Stampede, new_key
from .errors import NetworkError, OutcomeUnknownError, ProblemError, StampedeError
from .types import (
    PROBLEM_SLUGS,
    AcceptedOrder,
    ConfirmedOrder,
    Order,
    OrderStatus,
    Purchase,
    Sale,
    SaleState,
    SaleUpdate,
    StreamTicket,
)
from .webhook import WebhookError, WebhookEvent, verify_webhook

__all__ = [
    "PROBLEM_SLUGS",
    "AcceptedOrder",
    "ConfirmedOrder",
    "NetworkError",
    "Order",
    "OrderStatus",
    "OutcomeUnknownError",
    "ProblemError",
    "Purchase",
    "Sale",
    "SaleState",
    "SaleUpdate",
    "Stampede",
    "StampedeError",
    "StreamTicket",
    "WebhookError",
    "WebhookEvent",
    "new_key",
    "verify_webhook",
]

"""Client of Stampede's HTTP API. It uses the standard library alone."""

from .cashier import Cashier
from .client import Stampede, new_key
from .errors import NetworkError, OutcomeUnknownError, ProblemError, StampedeError
from .types import (
    PROBLEM_SLUGS,
    AcceptedOrder,
    ConfirmedOrder,
    Draw,
    DrawOutcome,
    DrawProof,
    DrawState,
    Order,
    OrderStatus,
    Payment,
    PaymentEvent,
    PaymentState,
    Purchase,
    Sale,
    SaleState,
    SaleUpdate,
    StreamTicket,
)
from .webhook import WebhookError, WebhookEvent, payment_of, verify_webhook

__all__ = [
    "PROBLEM_SLUGS",
    "AcceptedOrder",
    "Cashier",
    "ConfirmedOrder",
    "Draw",
    "DrawOutcome",
    "DrawProof",
    "DrawState",
    "NetworkError",
    "Order",
    "OrderStatus",
    "OutcomeUnknownError",
    "Payment",
    "PaymentEvent",
    "PaymentState",
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
    "payment_of",
    "verify_webhook",
]

"""What Stampede answers, with the names of its JSON (docs/http-api.md).

_api.py is made of the description of the API: task generate:clients.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Mapping, Sequence, Type, TypeVar, Union, get_args

from . import _api
from ._api import (
    AcceptedOrder as AcceptedOrder,
    ConfirmedOrder as ConfirmedOrder,
    DrawOutcome as DrawOutcome,
    DrawProof as DrawProof,
    DrawState as DrawState,
    Order as Order,
    OrderKind as OrderKind,
    OrderStatus as OrderStatus,
    Payment as Payment,
    PaymentEvent as PaymentEvent,
    PaymentState as PaymentState,
    ProblemType,
    SaleState as SaleState,
    StreamTicket as StreamTicket,
    WaitlistEntry as WaitlistEntry,
    WaitlistPlace as WaitlistPlace,
    WaitlistState as WaitlistState,
)


@dataclass(frozen=True)
class Purchase:
    """An accepted purchase. The type of its order, or order.status, tells the two shapes apart."""

    order: Union[AcceptedOrder, ConfirmedOrder]
    key: str
    """The idempotency key: the same purchase with this key cannot buy twice."""
    replayed: bool
    """The server recognised the key: an earlier try had made the order."""


@dataclass(frozen=True)
class Sale(_api.Sale):
    """A sale."""

    items: Sequence[Mapping[str, Any]] = ()
    """What the sale sells, if it is more than one thing: code, name, stock, available and so on, as in the JSON."""


@dataclass(frozen=True)
class SaleUpdate(_api.SaleUpdate):
    """The numbers of a sale, as its event stream sends them."""

    items: Sequence[Mapping[str, Any]] = ()
    """Code, stock and available of each item, in a sale with items."""


@dataclass(frozen=True)
class Draw(_api.Draw):
    """A draw of the units of a sale, as far as it is."""

    parties: Sequence[Mapping[str, Any]] = ()
    """Name, commitment, and once it is revealed secret, of each party that gives the seed."""


PROBLEM_SLUGS = frozenset(name.rpartition("/")[2] for name in get_args(ProblemType))
"""All slugs of problems that the server knows: the last part of a problem's type."""

T = TypeVar("T")


def read(kind: Type[T], members: Mapping[str, Any]) -> T:
    """Makes a dataclass of a JSON object. Members that a newer server has added are left out."""
    values = {
        field.name: read_time(members[field.name])
        if field.name.endswith(("_at", "pay_from", "reveal_by"))
        else members[field.name]
        for field in fields(kind)  # type: ignore[arg-type]  # all kinds are dataclasses
        if field.name in members
    }
    return kind(**values)


def read_time(text: str) -> datetime:
    """Reads an RFC 3339 time in UTC, which fromisoformat understands since Python 3.11 only."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))

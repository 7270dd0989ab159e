"""What Stampede answers, with the names of its JSON (docs/http-api.md)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal, Mapping, Optional, Sequence, Type, TypeVar, Union

OrderKind = Literal["order", "offer", "entry", "place"]
"""Units that somebody bought, or was offered by a draw or a waiting list; an entry of a draw, or a place in a list."""
OrderStatus = Literal["reserved", "confirmed", "paid", "cancelled", "expired", "rejected", "voided"]
PaymentState = Literal[
    "waiting", "settled", "refund_due", "refunded", "unclear", "dismissed", "disputed", "claimed"
]
SaleState = Literal["scheduled", "open", "paused", "ended"]
DrawState = Literal["entering", "freezing", "frozen", "ranking", "offering", "over", "open", "void"]
DrawOutcome = Literal["waiting", "offered", "skipped"]
WaitlistState = Literal["waiting", "offered", "skipped", "left", "over"]


@dataclass(frozen=True)
class Order:
    """An order, as every call but the purchase answers it."""

    order_id: str
    sale_id: str
    user_id: str
    quantity: int
    status: OrderStatus
    version: int
    """1 when reserved, one more with each change."""
    reserved_at: datetime
    updated_at: Optional[datetime] = None
    """Time of the last change."""
    pay_from: Optional[datetime] = None
    """From when to pay, in a sale with a pace; only while there is something to pay."""
    expires_at: Optional[datetime] = None
    """Until when to pay; only while there is something to pay."""
    amount: Optional[int] = None
    """What the order costs, in minor units of the currency (ISO 4217); only in a sale with a price."""
    items: Optional[Mapping[str, int]] = None
    """The units by the code of the item, in a sale with items; quantity is their sum."""
    currency: Optional[str] = None
    paid_at: Optional[datetime] = None
    payment_reference: Optional[str] = None
    reason: Optional[str] = None
    """Why the order was rejected or voided."""
    kind: Optional[OrderKind] = None
    """What the order is; not before it is in the database."""
    entry_for: Optional[str] = None
    """The sale of which an entry of a draw, or a place in a waiting list, waits for units. There is nothing to pay."""
    may_be_behind: bool = False
    """The database could not be asked, and may know more."""


@dataclass(frozen=True)
class ConfirmedOrder(Order):
    """A purchase whose order is in the database (201): confirmed, or paid if it is repeated later."""

    status: Literal["confirmed", "paid"]
    receipt: str = ""


@dataclass(frozen=True)
class AcceptedOrder:
    """A purchase whose units are reserved (202): the order is on its way to the database."""

    order_id: str
    sale_id: str
    status: Literal["reserved"]
    quantity: int
    reserved_at: datetime
    receipt: str
    """Proves the order if Redis is lost before it is in the database. Keep it."""
    amount: Optional[int] = None
    """What the order costs, as in Order."""
    items: Optional[Mapping[str, int]] = None
    """The units by the code of the item, as in Order."""
    currency: Optional[str] = None
    may_be_behind: bool = False


@dataclass(frozen=True)
class Purchase:
    """An accepted purchase. The type of its order, or order.status, tells the two shapes apart."""

    order: Union[AcceptedOrder, ConfirmedOrder]
    key: str
    """The idempotency key: the same purchase with this key cannot buy twice."""
    replayed: bool
    """The server recognised the key: an earlier try had made the order."""


@dataclass(frozen=True)
class Sale:
    id: str
    name: str
    state: SaleState
    stock: int
    available: int
    """Units that are not reserved."""
    held: int
    """Units of orders that are not final."""
    sold: int
    """Units of orders that are final."""
    per_order_limit: int
    payment_window_seconds: int
    shards: int
    created_at: datetime
    opens_at: Optional[datetime] = None
    closes_at: Optional[datetime] = None
    payment_grace_seconds: int = 0
    """How long after its deadline an order still takes money. Do not tell buyers."""
    payments_per_second: int = 0
    """The pace: how many orders a second get their turn to pay."""
    unit_price: Optional[int] = None
    """In minor units of the currency (ISO 4217)."""
    currency: Optional[str] = None
    items: Sequence[Mapping[str, Any]] = ()
    """What the sale sells, if it is more than one thing: code, name, stock, available and so on, as in the JSON."""
    offers_only: bool = False
    """The units are offered by a draw, to those who enter entries_sale_id."""
    entries_sale_id: Optional[str] = None
    waitlist: bool = False
    """Units that return when none are left are offered to those who wait."""
    waitlist_closed: bool = False
    """Nobody can join the waiting list any more."""
    entry_for: Optional[str] = None
    """The sale whose units are offered to those who enter this one."""
    waiting: int = 0
    """How many wait."""


@dataclass(frozen=True)
class WaitlistEntry:
    """A place in the waiting list of a sale, as it is given; again, with its state, to who has one."""

    entry_order_id: str
    """The entry, which is an order of its own."""
    place: int
    state: WaitlistState
    sale_id: str
    reserved_at: datetime
    receipt: str
    item: Optional[str] = None
    """The item, in a sale with items."""
    reason: Optional[str] = None
    """Why the turn was skipped."""
    order_id: Optional[str] = None
    """The order that was made of the offer."""


@dataclass(frozen=True)
class WaitlistPlace:
    """The own place in the waiting list of a sale."""

    entry_order_id: str
    place: int
    state: WaitlistState
    before: Optional[int] = None
    """How many wait before, if that is known."""
    item: Optional[str] = None
    """The item, in a sale with items."""
    reason: Optional[str] = None
    """Why the turn was skipped."""
    order_id: Optional[str] = None
    """The order that was made of the offer."""


@dataclass(frozen=True)
class SaleUpdate:
    """The numbers of a sale, as its event stream sends them."""

    state: SaleState
    stock: int
    available: int
    held: int
    sold: int
    items: Sequence[Mapping[str, Any]] = ()
    """Code, stock and available of each item, in a sale with items."""


@dataclass(frozen=True)
class Draw:
    """A draw of the units of a sale, as far as it is."""

    sale_id: str
    entries_sale_id: str
    """The sale in which people enter: an order in it is an entry."""
    state: DrawState
    created_at: datetime
    closes_at: datetime
    """When the entries close."""
    freeze_seconds: int
    offered: int
    """Ranks that were offered a unit."""
    skipped: int
    """Ranks that were skipped for a reason."""
    round: Optional[int] = None
    """The round of drand quicknet that gives the seed, unless parties do."""
    round_at: Optional[datetime] = None
    """When the round can be known."""
    parties: Sequence[Mapping[str, Any]] = ()
    """Name, commitment, and once it is revealed secret, of each party that gives the seed."""
    reveal_by: Optional[datetime] = None
    entries: Optional[int] = None
    """How many entries there are, once their list is frozen."""
    root: Optional[str] = None
    frozen_at: Optional[datetime] = None
    seed: Optional[str] = None
    last_rank: Optional[int] = None
    """The last rank that had its turn, in a sale without items."""
    opening: bool = False
    """What is left is sold to everybody when each rank had its turn."""
    void_reason: Optional[str] = None
    version: int = 1
    """How a seed follows from parties, and what is public of the draw."""
    goods: Optional[Mapping[str, Any]] = None
    """Revision, stock, sold, items and holders: the units, when the list was frozen."""


@dataclass(frozen=True)
class DrawProof:
    """The part of an entry in a draw. Places and ranks count from 0."""

    place: int
    """The place in the list."""
    leaf: str
    path: Sequence[str]
    """With the leaf, the place and the number of entries it gives the root, by RFC 6962."""
    entries: int
    root: str
    outcome: DrawOutcome
    """waiting until the rank has had its turn."""
    rank: Optional[int] = None
    """The rank, among those with the same item, once the entries are ranked."""
    item: Optional[str] = None
    reason: Optional[str] = None
    """Why the rank was skipped."""
    order_id: Optional[str] = None
    """The order of the offer: it is the entrant's to pay."""


@dataclass(frozen=True)
class StreamTicket:
    """Opens a stream of events without any header: for a page with EventSource, which cannot send them."""

    ticket: str
    expires_at: datetime
    """The stream has to be opened by then, within a minute. It may stay open longer."""
    events_url: str
    """The path of the stream, with the ticket."""


@dataclass(frozen=True)
class Payment:
    """Money that Stampede was told of, and what became of it."""

    reference: str
    state: PaymentState
    """waiting until the order is in the database. Somebody has to look at what is unclear or disputed."""
    received_at: datetime
    updated_at: datetime
    reason: Optional[str] = None
    """Why a refund is, or was, due (order-expired, already-paid), or why it is, or was, unclear (other-order)."""
    order_id: Optional[str] = None
    sale_id: Optional[str] = None
    amount: Optional[int] = None
    currency: Optional[str] = None
    unreadable: Optional[str] = None
    """What the report has in place of an order, an amount or a currency."""
    refund_reference: Optional[str] = None
    operator: Optional[str] = None
    note: Optional[str] = None
    """Why it was dismissed, or how much of a settled payment went back at the payment provider."""
    dispute: Optional[str] = None
    """The dispute's name at the payment provider."""


@dataclass(frozen=True)
class PaymentEvent:
    """The data of the events stampede.payment. and each state but waiting."""

    reference: str
    state: PaymentState
    version: int
    occurred_at: datetime
    reason: Optional[str] = None
    order_id: Optional[str] = None
    sale_id: Optional[str] = None
    amount: Optional[int] = None
    currency: Optional[str] = None
    unreadable: Optional[str] = None
    refund_reference: Optional[str] = None
    operator: Optional[str] = None
    note: Optional[str] = None
    dispute: Optional[str] = None


PROBLEM_SLUGS = frozenset(
    {
        "already-paid",
        "already-purchased",
        "already-refunded",
        "body-too-large",
        "draw-not-found",
        "draw-not-frozen",
        "draw-void",
        "entry-not-found",
        "forbidden",
        "head-too-large",
        "idempotency-key-reused",
        "illegal-transition",
        "internal-error",
        "invalid-beacon",
        "invalid-request",
        "method-not-allowed",
        "not-found",
        "not-ready",
        "not-sold-out",
        "not-unclear",
        "offers-only",
        "order-archived",
        "order-ended",
        "order-expired",
        "order-not-confirmed",
        "order-not-found",
        "outcome-unknown",
        "overloaded",
        "payment-not-found",
        "precondition-failed",
        "quantity-over-limit",
        "rate-limited",
        "refund-not-due",
        "restock-withdrawn",
        "sale-ended",
        "sale-not-found",
        "sale-not-open",
        "sale-paused",
        "sale-unavailable",
        "sold-out",
        "unauthorized",
        "unknown-item",
        "unsupported-media-type",
        "waitlist-not-found",
    }
)
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

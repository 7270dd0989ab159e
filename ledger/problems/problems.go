// Package problems says what errors of sales, orders and draws mean to those outside: to clients of the API (RFC 9457),
// to operators on the dashboard, and to commands. Each role turns them into answers of its own form.
package problems

import (
	"context"
	"errors"
	"net/http"
	"slices"

	"stampede/draw"
	"stampede/internal/format"
	"stampede/internal/pg"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// Kind is a kind of problem. Clients tell kinds apart by the slug.
type Kind struct {
	Status int
	Slug   string
	Title  string
}

// The kinds of the API.
var (
	Invalid          = newKind(http.StatusBadRequest, "invalid-request", "The request is not valid")
	InvalidBeacon    = newKind(http.StatusBadRequest, "invalid-beacon", "The round does not give the seed of the draw")
	Unauthorized     = newKind(http.StatusUnauthorized, "unauthorized", "Authentication is required")
	Forbidden        = newKind(http.StatusForbidden, "forbidden", "The call is not allowed")
	NotFound         = newKind(http.StatusNotFound, "not-found", "The path does not exist")
	saleNotFound     = newKind(http.StatusNotFound, "sale-not-found", "The sale does not exist")
	OrderNotFound    = newKind(http.StatusNotFound, "order-not-found", "The order does not exist")
	paymentNotFound  = newKind(http.StatusNotFound, "payment-not-found", "The payment does not exist")
	drawNotFound     = newKind(http.StatusNotFound, "draw-not-found", "The sale has no draw")
	entryNotFound    = newKind(http.StatusNotFound, "entry-not-found", "The draw has no such entry")
	WaitlistNotFound = newKind(http.StatusNotFound, "waitlist-not-found", "The place to wait does not exist")
	Method           = newKind(http.StatusMethodNotAllowed, "method-not-allowed", "The method is not allowed")
	SoldOut          = newKind(http.StatusConflict, "sold-out", "Not enough units are left")
	AlreadyPurchased = newKind(http.StatusConflict, "already-purchased", "You already have an order in this sale")
	OrderEnded       = newKind(http.StatusConflict, "order-ended", "The order of this purchase has ended")
	NotOpen          = newKind(http.StatusConflict, "sale-not-open", "The sale is not open yet")
	Paused           = newKind(http.StatusConflict, "sale-paused", "The sale is paused")
	OffersOnly       = newKind(http.StatusConflict, "offers-only", "The units of the sale are offered")
	DrawNotFrozen    = newKind(http.StatusConflict, "draw-not-frozen", "The entries of the draw are not frozen yet")
	DrawVoid         = newKind(http.StatusConflict, "draw-void", "The draw is void")
	notSoldOut       = newKind(http.StatusConflict, "not-sold-out", "Units of the sale are left")
	Transition       = newKind(http.StatusConflict, "illegal-transition", "The current state does not allow this")
	alreadyPaid      = newKind(http.StatusConflict, "already-paid", "The order was paid with another reference")
	refundNotDue     = newKind(http.StatusConflict, "refund-not-due", "No refund of the payment is due")
	notUnclear       = newKind(http.StatusConflict, "not-unclear", "The payment is not unclear")
	Refunded         = newKind(http.StatusConflict, "already-refunded", "The payment was refunded with another reference")
	NotConfirmed     = newKind(http.StatusConflict, "order-not-confirmed", "The order is not confirmed yet")
	Ended            = newKind(http.StatusGone, "sale-ended", "The sale has ended")
	expired          = newKind(http.StatusGone, "order-expired", "The order has expired")
	archived         = newKind(http.StatusGone, "order-archived", "The order is archived")
	Precondition     = newKind(http.StatusPreconditionFailed, "precondition-failed", "The precondition failed")
	TooLarge         = newKind(http.StatusRequestEntityTooLarge, "body-too-large", "The body is too large")
	MediaType        = newKind(http.StatusUnsupportedMediaType, "unsupported-media-type", "The body is not JSON")
	keyReused        = newKind(http.StatusUnprocessableEntity, "idempotency-key-reused", "The idempotency key was reused")
	OverLimit        = newKind(http.StatusUnprocessableEntity, "quantity-over-limit", "The quantity is over the limit")
	UnknownItem      = newKind(http.StatusUnprocessableEntity, "unknown-item", "The sale has no such item")
	HeadTooLarge     = newKind(http.StatusRequestHeaderFieldsTooLarge, "head-too-large", "The head is too large")
	RateLimited      = newKind(http.StatusTooManyRequests, "rate-limited", "Too many requests")
	Internal         = newKind(http.StatusInternalServerError, "internal-error", "Internal error")
	Unavailable      = newKind(http.StatusServiceUnavailable, "sale-unavailable", "Temporarily unavailable")
	OutcomeUnknown   = newKind(http.StatusServiceUnavailable, "outcome-unknown", "The outcome is unknown")
	Overloaded       = newKind(http.StatusServiceUnavailable, "overloaded", "The server is overloaded")
	Withdrawn        = newKind(http.StatusServiceUnavailable, "restock-withdrawn", "The restock was withdrawn")
	NotReady         = newKind(http.StatusServiceUnavailable, "not-ready", "The server is not ready")
)

var kinds []Kind

func newKind(status int, slug, title string) Kind {
	kinds = append(kinds, Kind{status, slug, title})
	return kinds[len(kinds)-1]
}

// Kinds returns all kinds.
func Kinds() []Kind { return slices.Clone(kinds) }

// Known is an error that a caller can act on.
type Known struct {
	Err error
	Kind
	// Detail is for clients of the API.
	Detail string
	// Text and Hint are for operators: what is wrong, and what to do. Both are empty if no operator's call ends so.
	Text, Hint string
}

// table has the errors in this order: an error may be several. That a sale was changed, or may have been, comes before
// what kept it from being shown.
var table = []Known{
	{
		order.ErrNotFound, OrderNotFound, "You have no order with this id.",
		"Postgres has no such order.", "An order of the last seconds may be in Redis: give its user as well.",
	},
	{
		order.ErrTooWide, Invalid, "A list of orders needs user or sale; status alone would read all orders.",
		"A list of orders needs a user or a sale.", "Fill in one of them.",
	},
	{
		order.ErrArchived, archived, "The orders of this sale are archived.",
		"The orders of this sale are archived.", "stampede audit --archive reads the file.",
	},
	{
		Err: order.ErrNotConfirmed, Kind: NotConfirmed,
		Detail: "The order is reserved and will be confirmed in a moment. Retry then.",
	},
	{
		Err: order.ErrExpired, Kind: expired, Detail: "The order was not paid in time. Its units go back on sale.",
	},
	{
		Err: order.ErrDamaged, Kind: Internal,
		Detail: "The stored data of the order is inconsistent. Nothing was done, and a retry will not help.",
	},
	{
		order.ErrPaymentNotFound, paymentNotFound, "No payment has this reference.",
		"There is no payment with this reference.", "References are compared exactly. Look for it in the list.",
	},
	{
		order.ErrRefundNotDue, refundNotDue,
		"The payment is neither refund_due nor unclear. An operator's cancellation of a paid order makes its refund due.",
		"No refund of the payment is due.", "If its order is to be cancelled, do that first.",
	},
	{
		order.ErrNotUnclear, notUnclear, "Only a payment that is unclear can be dismissed. Look at its state.",
		"The payment is not unclear.",
		"Nothing was done. Another operator may have been faster, or its report was repeated and can be read now.",
	},
	{
		Err: reservation.ErrReservationDamaged, Kind: Internal,
		Detail: "The stored data of your reservation in this sale cannot be read. " +
			"This request reserved nothing, and a retry will not help until the data is repaired.",
	},
	{
		catalog.ErrIdempotencyKeyReused, keyReused, "This Idempotency-Key was used before, for a different request.",
		"This form was sent before with another number of units.",
		"Nothing more was changed. Look at the stock and the history, and fill in the form again if it is still needed.",
	},
	{
		Err: reservation.ErrOverloaded, Kind: Overloaded, Detail: "Nothing was reserved. Retry after a moment.",
	},
	{
		Err: reservation.ErrOutcomeUnknown, Kind: OutcomeUnknown,
		Detail: "The outcome is unknown: no answer came back in time, and the order may have been accepted. " +
			"Repeat the request with the same Idempotency-Key to find out: it cannot reserve twice.",
	},
	{
		catalog.ErrRestockUndecided, OutcomeUnknown,
		"The lower stock is recorded and takes effect if Redis grants it, which is not decided yet. " +
			"Repeat the request with the same Idempotency-Key to learn the outcome. " +
			"Without the key, it is another restock.",
		"Redis does not answer: the lower stock is recorded.",
		"It takes effect when Redis grants it. The history shows what became of it.",
	},
	{
		catalog.ErrRestockWithdrawn, Withdrawn,
		"The stock in Redis was rebuilt before it could be lowered: nothing was changed. " +
			"The same request is a new attempt, also with the same Idempotency-Key.",
		"The stock was rebuilt before it could be lowered.", "Nothing was changed. Repeat it if it is still needed.",
	},
	{
		// Not all operators' requests can be repeated safely.
		pg.ErrChangeUnknown, OutcomeUnknown,
		"The outcome is unknown: no answer came back in time, and the change may have been made. " +
			"Repeat the request to find out. Without an Idempotency-Key, a repeated restock is another restock, " +
			"and a repeated sale is another sale.",
		"Postgres did not answer: the change may have been made.",
		"Look at the history of the sale. To be sure, repeat it: a repeat changes nothing twice.",
	},
	{
		catalog.ErrNotInForce, Unavailable,
		"The change is recorded and takes effect as soon as Redis answers. You need not repeat it. " +
			"Without the same Idempotency-Key, a repeated restock is another restock.",
		"The change is recorded, and Redis does not answer.",
		"A worker puts it in force when Redis answers. You need not repeat it.",
	},
	{
		Err: reservation.ErrWaitlistClosed, Kind: WaitlistNotFound,
		Detail: "The waiting list of the sale is closed: nobody can join it.",
	},
	{
		Err: reservation.ErrNotSoldOut, Kind: notSoldOut,
		Detail: "Everybody can buy units of the sale now: POST /v1/sales/{sale}/orders.",
	},
	{
		Err: draw.ErrBeacon, Kind: InvalidBeacon,
		Detail: "signature is not that of the round: want the 48 bytes of drand quicknet, in hexadecimal.",
	},
	{
		Err: draw.ErrParties, Kind: Invalid,
		Detail: "secret must be the 32 bytes whose SHA-256 the party committed to, in hexadecimal.",
	},
	{
		Err: draws.ErrNoDraw, Kind: drawNotFound, Detail: "The units of this sale are not drawn, or there is no such sale.",
	},
	{
		Err: draws.ErrNotFrozen, Kind: DrawNotFrozen,
		Detail: "The list of the entries is not frozen yet. GET /v1/sales/{sale}/draw says how far the draw is.",
	},
	{
		Err: draws.ErrVoid, Kind: DrawVoid,
		Detail: "The draw is void: void_reason of GET /v1/sales/{sale}/draw says why.",
	},
	{
		Err: draws.ErrLate, Kind: DrawVoid, Detail: "The time for secrets is over, and one is missing.",
	},
	{
		Err: draws.ErrNoEntry, Kind: entryNotFound,
		Detail: "The order of the receipt is not in the list of the entries: it is of another sale, or was cancelled or " +
			"refused before the end. GET /v1/orders/{order} says so.",
	},
	{
		Err: draws.ErrNoParty, Kind: Invalid, Detail: "party must be the name of a party of the draw.",
	},
	{
		reservation.ErrSaleNotFound, saleNotFound, "No sale has this id.",
		"There is no such sale.", "Look for it in the list of sales.",
	},
	{
		reservation.ErrUnavailable, Unavailable,
		"A server that the request needs does not answer. Retry after a moment.",
		"A server does not answer, or the sale waits for a rebuild.",
		"Look at the overview: it says which. Nothing is known to have been done.",
	},
	{
		context.DeadlineExceeded, Unavailable,
		"A server that the request needs does not answer. Retry after a moment.",
		"The servers did not answer in time.",
		"Look at the overview, and whether the change was made, before you repeat it.",
	},
}

// All returns the errors of the table.
func All() []Known { return slices.Clone(table) }

// telling has the errors that say more than their kind, in this order: an error may be several. Err of what is returned
// is the error with its members.
var telling = []func(error) (Known, bool){
	tells(func(e *catalog.UnknownItemError) Known {
		return Known{
			Kind:   UnknownItem,
			Detail: "The sale has no item with the code in item. GET /v1/sales/{sale} lists its items.",
			Text:   "The " + e.Error() + ".", Hint: correct,
		}
	}),
	tells(func(e *order.InvalidError) Known {
		return Known{
			Kind: Invalid, Detail: e.Error() + ".", Text: "The " + e.Field + " " + e.Reason + ".", Hint: correct,
		}
	}),
	tells(func(e *reservation.IllegalTransitionError) Known {
		return Known{
			Kind: Transition, Detail: e.Error() + ".", Text: "You " + e.Error() + ".",
			Hint: "Nothing was done. Another operator may have been faster: see the history.",
		}
	}),
	tells(func(e *catalog.TakenError) Known {
		taken := format.Count(e.Taken)
		if e.Items != "" {
			taken = e.Items.Text()
		}
		return Known{
			Kind: Transition, Detail: e.Error() + ".",
			Text: "So many units cannot be removed: " + taken + " are taken, which is the lowest possible stock.",
			Hint: "Nothing was done. Remove fewer.",
		}
	}),
	tells(func(*order.AlreadyPaidError) Known {
		return Known{
			Kind: alreadyPaid, Detail: "The payment in payment_reference is valid. Refund the payment of this request.",
		}
	}),
	tells(func(e *order.RefundedError) Known {
		return Known{
			Kind:   Refunded,
			Detail: "The refund in refund_reference was noted before. If both were made, one of them is too much.",
			Text:   "The payment was refunded before, with the reference " + e.RefundReference + ".",
			Hint:   "Nothing was done. If money went back twice, only the payment provider can say so.",
		}
	}),
	tells(func(e *draws.WrongRoundError) Known { return Known{Kind: InvalidBeacon, Detail: e.Error() + "."} }),
	tells(func(e *order.TransitionError) Known {
		text := "The order is " + string(e.Status) + ", which does not allow this."
		return Known{Kind: Transition, Detail: text, Text: text, Hint: "Nothing was done."}
	}),
}

// correct is what to do about a form that is not valid.
const correct = "Correct it, and send the form again. Nothing was done."

func tells[E error](of func(E) Known) func(error) (Known, bool) {
	return func(err error) (k Known, found bool) {
		e, found := errors.AsType[E](err)
		if found {
			k = of(e)
			k.Err = e
		}
		return k, found
	}
}

// Find returns what is known of an error.
func Find(err error) (k Known, found bool) { return first(err, func(Known) bool { return true }) }

// ForOperators is Find among those that have a Text.
func ForOperators(err error) (k Known, found bool) {
	return first(err, func(k Known) bool { return k.Text != "" })
}

func first(err error, fits func(Known) bool) (Known, bool) {
	for _, find := range telling {
		if k, found := find(err); found && fits(k) {
			return k, true
		}
	}
	for _, k := range table {
		if errors.Is(err, k.Err) && fits(k) {
			return k, true
		}
	}
	return Known{}, false
}

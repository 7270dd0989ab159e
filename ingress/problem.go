package ingress

import (
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/internal/pg"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// kind is a kind of problem. Clients tell kinds apart by the slug.
type kind struct {
	status int
	slug   string
	title  string
}

var (
	kindInvalid          = kind{http.StatusBadRequest, "invalid-request", "The request is not valid"}
	kindUnauthorized     = kind{http.StatusUnauthorized, "unauthorized", "Authentication is required"}
	kindForbidden        = kind{http.StatusForbidden, "forbidden", "The call is not allowed"}
	kindNotFound         = kind{http.StatusNotFound, "not-found", "The path does not exist"}
	kindSaleNotFound     = kind{http.StatusNotFound, "sale-not-found", "The sale does not exist"}
	kindOrderNotFound    = kind{http.StatusNotFound, "order-not-found", "The order does not exist"}
	kindMethod           = kind{http.StatusMethodNotAllowed, "method-not-allowed", "The method is not allowed"}
	kindSoldOut          = kind{http.StatusConflict, "sold-out", "The sale is sold out"}
	kindAlreadyPurchased = kind{http.StatusConflict, "already-purchased", "You already have an order in this sale"}
	kindOrderEnded       = kind{http.StatusConflict, "order-ended", "The order of this purchase has ended"}
	kindNotOpen          = kind{http.StatusConflict, "sale-not-open", "The sale is not open yet"}
	kindPaused           = kind{http.StatusConflict, "sale-paused", "The sale is paused"}
	kindTransition       = kind{http.StatusConflict, "illegal-transition", "The current state does not allow this"}
	kindAlreadyPaid      = kind{http.StatusConflict, "already-paid", "The order was paid with another reference"}
	kindNotConfirmed     = kind{http.StatusConflict, "order-not-confirmed", "The order is not confirmed yet"}
	kindEnded            = kind{http.StatusGone, "sale-ended", "The sale has ended"}
	kindExpired          = kind{http.StatusGone, "order-expired", "The order has expired"}
	kindArchived         = kind{http.StatusGone, "order-archived", "The order is archived"}
	kindPrecondition     = kind{http.StatusPreconditionFailed, "precondition-failed", "The precondition failed"}
	kindTooLarge         = kind{http.StatusRequestEntityTooLarge, "body-too-large", "The body is too large"}
	kindMediaType        = kind{http.StatusUnsupportedMediaType, "unsupported-media-type", "The body is not JSON"}
	kindKeyReused        = kind{http.StatusUnprocessableEntity, "idempotency-key-reused", "The idempotency key was reused"}
	kindOverLimit        = kind{http.StatusUnprocessableEntity, "quantity-over-limit", "The quantity is over the limit"}
	kindRateLimited      = kind{http.StatusTooManyRequests, "rate-limited", "Too many requests"}
	kindInternal         = kind{http.StatusInternalServerError, "internal-error", "Internal error"}
	kindUnavailable      = kind{http.StatusServiceUnavailable, "sale-unavailable", "Temporarily unavailable"}
	kindOutcomeUnknown   = kind{http.StatusServiceUnavailable, "outcome-unknown", "The outcome is unknown"}
	kindOverloaded       = kind{http.StatusServiceUnavailable, "overloaded", "The server is overloaded"}
	kindWithdrawn        = kind{http.StatusServiceUnavailable, "restock-withdrawn", "The restock was withdrawn"}
	kindNotReady         = kind{http.StatusServiceUnavailable, "not-ready", "The server is not ready"}
)

// How many seconds a client is asked to wait.
const (
	retrySoon   = 1
	retryPaused = 5
	// retryLongest bounds the wait for the opening of a sale, because operators can move it.
	retryLongest = 3600
)

// problem is an answer of RFC 9457. It is an error, so that a handler can return it.
type problem struct {
	kind
	// detail is for people. It never holds the text of an error from below.
	detail string

	// Headers, left out where they are zero.
	location   string
	challenge  string
	retryAfter int // seconds
	// closes closes the connection, for a body that is not worth reading to its end.
	closes bool

	// Members beyond the standard's, left out where they are zero.
	opensAt time.Time
	limit   int64
	// paymentReference is the reference of the valid payment.
	paymentReference string
	// orderID and orderStatus belong to an order that has ended.
	orderID     uuid.UUID
	orderStatus order.Status
	requestID   string
	redis       string
	postgres    string

	// body is the JSON of a problem that fixed has made.
	body []byte
}

// Problems without a member that varies. They must not be changed.
var (
	problemRouteNotFound = fixed(problem{kind: kindNotFound, detail: "No route has this path."})
	problemNoSuchProblem = fixed(problem{kind: kindNotFound, detail: "No problem has this slug: GET /problems lists all."})
	problemPrecondition  = fixed(problem{kind: kindPrecondition, detail: "The current entity tag is not in If-Match."})
	problemMethod        = fixed(problem{kind: kindMethod, detail: "The Allow header lists the methods of this path."})
	problemTooLarge      = fixed(problem{kind: kindTooLarge, detail: "A body may have at most 4096 bytes.", closes: true})
	problemBodyBroken    = fixed(problem{
		kind: kindInvalid, closes: true, detail: "The body is incomplete, or arrived too slowly.",
	})
	problemMediaType = fixed(problem{
		kind:   kindMediaType,
		detail: "Send the body as application/json in UTF-8, without a Content-Encoding.",
	})
	problemKeyReused = fixed(problem{
		kind: kindKeyReused, detail: "This Idempotency-Key was used before, for a different request.",
	})
	problemOverloaded = fixed(problem{
		kind: kindOverloaded, retryAfter: retrySoon, detail: "Nothing was done. Retry after a moment.",
	})
	problemUnavailable = fixed(problem{
		kind: kindUnavailable, retryAfter: retrySoon,
		detail: "A server that the request needs does not answer. Retry after a moment.",
	})

	problemSaleNotFound = fixed(problem{kind: kindSaleNotFound, detail: "No sale has this id."})
	problemSoldOut      = fixed(problem{kind: kindSoldOut, detail: "Fewer units are left than you asked for."})
	problemPaused       = fixed(problem{
		kind: kindPaused, retryAfter: retryPaused, detail: "An operator paused the sale. Retry later.",
	})
	problemEnded = fixed(problem{
		kind: kindEnded, detail: "An operator ended the sale, or its closing time has passed.",
	})

	// problemNotReserved is problemOverloaded for a purchase.
	problemNotReserved = fixed(problem{
		kind: kindOverloaded, retryAfter: retrySoon, detail: "Nothing was reserved. Retry after a moment.",
	})
	problemPurchaseUnknown = fixed(problem{
		kind: kindOutcomeUnknown, retryAfter: retrySoon,
		detail: "The outcome is unknown: no answer came back in time, and the order may have been accepted. " +
			"Repeat the request with the same Idempotency-Key to find out: it cannot reserve twice.",
	})
	problemReservationDamaged = fixed(problem{
		kind: kindInternal,
		detail: "The stored data of your reservation in this sale cannot be read. " +
			"This request reserved nothing, and a retry will not help until the data is repaired.",
	})

	problemArchived      = fixed(problem{kind: kindArchived, detail: "The orders of this sale are archived."})
	problemOrderNotFound = fixed(problem{kind: kindOrderNotFound, detail: "You have no order with this id."})
	problemNotConfirmed  = fixed(problem{
		kind: kindNotConfirmed, retryAfter: retrySoon,
		detail: "The order is reserved and will be confirmed in a moment. Retry then.",
	})
	problemExpired = fixed(problem{
		kind: kindExpired, detail: "The order was not paid in time. Its units go back on sale.",
	})
	problemOrderDamaged = fixed(problem{
		kind:   kindInternal,
		detail: "The stored data of the order is inconsistent. Nothing was done, and a retry will not help.",
	})

	// problemSaleChangeUnknown is problemChangeUnknown for operators: not all of their requests can be repeated safely.
	problemSaleChangeUnknown = fixed(problem{
		kind: kindOutcomeUnknown, retryAfter: retrySoon,
		detail: "The outcome is unknown: no answer came back in time, and the change may have been made. " +
			"Repeat the request to find out. Without an Idempotency-Key, a repeated restock is another restock, " +
			"and a repeated sale is another sale.",
	})
	problemNotInForce = fixed(problem{
		kind: kindUnavailable, retryAfter: retrySoon,
		detail: "The change is recorded and takes effect as soon as Redis answers. You need not repeat it. " +
			"Without the same Idempotency-Key, a repeated restock is another restock.",
	})
	problemRestockUndecided = fixed(problem{
		kind: kindOutcomeUnknown, retryAfter: retrySoon,
		detail: "The lower stock is recorded and takes effect if Redis grants it, which is not decided yet. " +
			"Repeat the request with the same Idempotency-Key to learn the outcome. " +
			"Without the key, it is another restock.",
	})
	problemRestockWithdrawn = fixed(problem{
		kind: kindWithdrawn, retryAfter: retrySoon,
		detail: "The stock in Redis was rebuilt before it could be lowered: nothing was changed. " +
			"The same request is a new attempt, also with the same Idempotency-Key.",
	})
)

func fixed(p problem) *problem {
	p.body = p.appendJSON(nil)
	return &p
}

func invalid(detail string) *problem { return &problem{kind: kindInvalid, detail: detail} }

func (p *problem) Error() string { return p.slug + ": " + p.detail }

// problemOf is the only place that turns errors into answers. An error that it does not know comes from a
// store that could not do its work; its text goes to the log only.
func problemOf(err error) *problem {
	var (
		known   *problem
		input   *order.InvalidError
		illegal *reservation.IllegalTransitionError
		taken   *catalog.TakenError
		step    *order.TransitionError
		paid    *order.AlreadyPaidError
		routing *echo.HTTPError
	)
	switch {
	case errors.As(err, &known):
		return known
	case errors.As(err, &input):
		return invalid(input.Error() + ".")
	case errors.As(err, &illegal):
		return &problem{kind: kindTransition, detail: illegal.Error() + "."}
	case errors.As(err, &taken):
		return &problem{kind: kindTransition, detail: taken.Error() + "."}
	case errors.As(err, &paid):
		return &problem{
			kind: kindAlreadyPaid, paymentReference: paid.Reference,
			detail: "The payment in payment_reference is valid. Refund the payment of this request.",
		}
	case errors.As(err, &step):
		return &problem{kind: kindTransition, detail: "The order is " + string(step.Status) + ", which does not allow this."}
	case errors.Is(err, reservation.ErrSaleNotFound):
		return problemSaleNotFound
	case errors.Is(err, order.ErrNotFound):
		return problemOrderNotFound
	case errors.Is(err, order.ErrTooWide):
		return problemListTooWide
	case errors.Is(err, order.ErrArchived):
		return problemArchived
	case errors.Is(err, order.ErrNotConfirmed):
		return problemNotConfirmed
	case errors.Is(err, order.ErrExpired):
		return problemExpired
	case errors.Is(err, order.ErrDamaged):
		return problemOrderDamaged
	case errors.Is(err, reservation.ErrReservationDamaged):
		return problemReservationDamaged
	case errors.Is(err, catalog.ErrIdempotencyKeyReused):
		return problemKeyReused
	case errors.Is(err, reservation.ErrOverloaded):
		return problemNotReserved
	case errors.Is(err, reservation.ErrOutcomeUnknown):
		return problemPurchaseUnknown
	case errors.Is(err, catalog.ErrRestockUndecided):
		return problemRestockUndecided
	case errors.Is(err, catalog.ErrRestockWithdrawn):
		return problemRestockWithdrawn
	case errors.Is(err, pg.ErrChangeUnknown):
		return problemSaleChangeUnknown
	case errors.Is(err, catalog.ErrNotInForce):
		return problemNotInForce
	case errors.As(err, &routing) && routing.Code == http.StatusMethodNotAllowed:
		return problemMethod
	case errors.As(err, &routing) && routing.Code == http.StatusNotFound:
		return problemRouteNotFound
	}
	return problemUnavailable
}

// problemOfVerdict is the problem for a verdict that reserves nothing.
func problemOfVerdict(a reservation.Answer, now time.Time) *problem {
	switch a.Verdict {
	case reservation.SoldOut:
		return problemSoldOut
	case reservation.AlreadyPurchased:
		return &problem{
			kind: kindAlreadyPurchased, location: orderPath(a.Reservation.OrderID),
			detail: "A buyer may have one order per sale. The Location header names yours.",
		}
	case reservation.OrderEnded:
		return problemOrderEnded(a.Reservation.OrderID, a.Status)
	case reservation.NotOpen:
		return &problem{
			kind: kindNotOpen, detail: "The sale opens at the time in opens_at.",
			opensAt: a.OpensAt, retryAfter: secondsUntil(a.OpensAt, now),
		}
	case reservation.Paused:
		return problemPaused
	case reservation.Ended:
		return problemEnded
	case reservation.OverLimit:
		return &problem{
			kind: kindOverLimit, limit: a.Limit,
			detail: "In this sale an order may hold at most " + strconv.FormatInt(a.Limit, 10) + " units.",
		}
	case reservation.KeyReused:
		return problemKeyReused
	case reservation.UnknownSale:
		return problemSaleNotFound
	}
	return problemUnavailable
}

// secondsUntil rounds up: a client that waits that long finds the sale open.
func secondsUntil(t, now time.Time) int {
	s := (t.Sub(now) + time.Second - 1) / time.Second
	return int(min(max(s, retrySoon), retryLongest))
}

// appendJSON appends the body. It avoids the encoder because most purchases of a crowd are answered with a problem.
func (p *problem) appendJSON(dst []byte) []byte {
	dst = append(dst, `{"type":"/problems/`...)
	dst = append(dst, p.slug...)
	dst = append(dst, '"')
	dst = appendText(dst, "title", p.title)
	dst = append(dst, `,"status":`...)
	dst = strconv.AppendInt(dst, int64(p.status), 10)
	dst = appendText(dst, "detail", p.detail)
	if !p.opensAt.IsZero() {
		dst = append(dst, `,"opens_at":"`...)
		dst = append(order.AppendTime(dst, p.opensAt), '"')
	}
	if p.limit != 0 {
		dst = append(dst, `,"limit":`...)
		dst = strconv.AppendInt(dst, p.limit, 10)
	}
	dst = appendText(dst, "payment_reference", p.paymentReference)
	if p.orderID != uuid.Nil {
		dst = append(dst, `,"order_id":"`...)
		dst = append(order.AppendID(dst, p.orderID), '"')
	}
	dst = appendText(dst, "order_status", string(p.orderStatus))
	dst = appendText(dst, "request_id", p.requestID)
	dst = appendText(dst, "redis", p.redis)
	dst = appendText(dst, "postgres", p.postgres)
	return append(dst, "}\n"...)
}

// appendText appends another member to an object, unless it is empty.
func appendText(dst []byte, name, text string) []byte {
	if text == "" {
		return dst
	}
	dst = append(dst, `,"`...)
	dst = append(dst, name...)
	dst = append(dst, `":`...)
	// It fails only for invalid UTF-8, in place of which it appends U+FFFD.
	dst, _ = jsontext.AppendQuote(dst, text)
	return dst
}

package ingress

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation"
)

// kind is a sort of problem: what clients tell apart.
type kind struct {
	status int
	slug   string
	title  string
}

var (
	kindInvalid          = kind{http.StatusBadRequest, "invalid-request", "The request is not valid"}
	kindUnauthorized     = kind{http.StatusUnauthorized, "unauthorized", "Who asks is not known"}
	kindForbidden        = kind{http.StatusForbidden, "forbidden", "This is not allowed"}
	kindNotFound         = kind{http.StatusNotFound, "not-found", "There is nothing here"}
	kindSaleNotFound     = kind{http.StatusNotFound, "sale-not-found", "There is no such sale"}
	kindOrderNotFound    = kind{http.StatusNotFound, "order-not-found", "There is no such order"}
	kindMethod           = kind{http.StatusMethodNotAllowed, "method-not-allowed", "This method is not allowed here"}
	kindSoldOut          = kind{http.StatusConflict, "sold-out", "The sale is sold out"}
	kindAlreadyPurchased = kind{http.StatusConflict, "already-purchased", "You have an order in this sale"}
	kindOrderEnded       = kind{http.StatusConflict, "order-ended", "The order of this purchase has ended"}
	kindNotOpen          = kind{http.StatusConflict, "sale-not-open", "The sale is not open yet"}
	kindPaused           = kind{http.StatusConflict, "sale-paused", "The sale is paused"}
	kindTransition       = kind{http.StatusConflict, "illegal-transition", "The present state does not allow this"}
	kindAlreadyPaid      = kind{http.StatusConflict, "already-paid", "The order was paid with another reference"}
	kindNotConfirmed     = kind{http.StatusConflict, "order-not-confirmed", "The order is not confirmed yet"}
	kindEnded            = kind{http.StatusGone, "sale-ended", "The sale has ended"}
	kindExpired          = kind{http.StatusGone, "order-expired", "The order has expired"}
	kindTooLarge         = kind{http.StatusRequestEntityTooLarge, "body-too-large", "The body is too large"}
	kindMediaType        = kind{http.StatusUnsupportedMediaType, "unsupported-media-type", "The body is not JSON"}
	kindKeyReused        = kind{http.StatusUnprocessableEntity, "idempotency-key-reused", "The idempotency key belongs to another request"}
	kindOverLimit        = kind{http.StatusUnprocessableEntity, "quantity-over-limit", "That is more than one order may hold"}
	kindRateLimited      = kind{http.StatusTooManyRequests, "rate-limited", "Too many requests from you"}
	kindInternal         = kind{http.StatusInternalServerError, "internal-error", "Something went wrong here"}
	kindUnavailable      = kind{http.StatusServiceUnavailable, "sale-unavailable", "The sale cannot be reached"}
	kindOutcomeUnknown   = kind{http.StatusServiceUnavailable, "outcome-unknown", "The outcome is unknown"}
	kindOverloaded       = kind{http.StatusServiceUnavailable, "overloaded", "Too many requests at once"}
	kindWithdrawn        = kind{http.StatusServiceUnavailable, "restock-withdrawn", "The restock was withdrawn"}
	kindNotReady         = kind{http.StatusServiceUnavailable, "not-ready", "This server cannot sell now"}
)

// The problems whose every byte is known beforehand. They must not be changed.
var (
	problemSoldOut    = fixed(problem{kind: kindSoldOut, detail: "Fewer units are left than you asked for."})
	problemPaused     = fixed(problem{kind: kindPaused, detail: "An operator paused the sale. Try again later.", retryAfter: retryPaused})
	problemEnded      = fixed(problem{kind: kindEnded, detail: "The sale was ended or its closing time has passed."})
	problemKeyReused  = fixed(problem{kind: kindKeyReused, detail: "This Idempotency-Key was sent before with a request that asked for something else."})
	problemOverloaded = fixed(problem{kind: kindOverloaded, detail: "Nothing was done about this request. Try again in a moment.", retryAfter: retrySoon})
	// problemNotReserved is problemOverloaded for a purchase, which knows what was not done.
	problemNotReserved   = fixed(problem{kind: kindOverloaded, detail: "Nothing was reserved. Try again in a moment.", retryAfter: retrySoon})
	problemSaleNotFound  = fixed(problem{kind: kindSaleNotFound, detail: "No sale has this id."})
	problemOrderNotFound = fixed(problem{kind: kindOrderNotFound, detail: "You have no order with this id."})
	problemNotConfirmed  = fixed(problem{kind: kindNotConfirmed, detail: "It is reserved for you and will be confirmed in a moment. Try again then.", retryAfter: retrySoon})
	problemOrderDamaged  = fixed(problem{kind: kindInternal, detail: "What is stored about the order does not fit together. Nothing was done, and trying again will not help."})
	problemExpired       = fixed(problem{kind: kindExpired, detail: "It was not paid in time, and its units go back on sale."})
	// problemHeldDamaged is for a buyer of whom Redis has stored what it cannot have written.
	problemReservationDamaged = fixed(problem{kind: kindInternal, detail: "What is stored about you in this sale cannot be read. Nothing was reserved by this request, and trying again will not help until it is mended."})
	// problemNotLookedUp is for a repeated purchase of whose order a later version may have been shown than is known here now.
	problemStateUnknown = fixed(problem{
		kind: kindUnavailable, retryAfter: retrySoon,
		detail: "This purchase has made an order, and its state cannot be looked up now. Try again in a moment: " +
			"the same request with the same Idempotency-Key cannot reserve twice.",
	})
	// problemNotChanged and problemChangeUnknown are problemUnavailable and problemUnknown for a change of an order.
	problemNotChanged    = fixed(problem{kind: kindUnavailable, detail: "Nothing was done about this request, because a server that it needs does not answer. Try again in a moment.", retryAfter: retrySoon})
	problemChangeUnknown = fixed(problem{
		kind: kindOutcomeUnknown, retryAfter: retrySoon,
		detail: "The outcome is unknown: no answer came back in time, and the change may have been made. " +
			"The same request finds out safely: it changes nothing twice.",
	})
	// problemSaleChangeUnknown is problemChangeUnknown for operators, whose requests are not all known by what they ask for.
	problemSaleChangeUnknown = fixed(problem{
		kind: kindOutcomeUnknown, retryAfter: retrySoon,
		detail: "The outcome is unknown: no answer came back in time, and the change may have been made. " +
			"The same request finds out, but without an Idempotency-Key a restock is another one, and a sale another sale.",
	})
	problemPurchaseUnknown = fixed(problem{
		kind: kindOutcomeUnknown, retryAfter: retrySoon,
		detail: "The outcome is unknown: no answer came back in time, and the order may have been accepted. " +
			"The same request with the same Idempotency-Key finds out safely: it cannot reserve twice.",
	})
	problemNotInForce = fixed(problem{
		kind: kindUnavailable, retryAfter: retrySoon,
		detail: "The change is written down and takes effect as soon as Redis can be told; nothing more is to be done. " +
			"A restock that is repeated without the same Idempotency-Key is another one.",
	})
	problemRestockUndecided = fixed(problem{
		kind: kindOutcomeUnknown, retryAfter: retrySoon,
		detail: "The lower stock is written down and takes effect if Redis grants it, which could not be asked yet. " +
			"The same request with the same Idempotency-Key tells what became of it; without the key it is another restock.",
	})
	problemRestockWithdrawn = fixed(problem{
		kind: kindWithdrawn, retryAfter: retrySoon,
		detail: "The stock in Redis was rebuilt before it could be lowered: nothing was changed. " +
			"The same request makes a new attempt, also with the same Idempotency-Key.",
	})
	problemUnavailable   = fixed(problem{kind: kindUnavailable, detail: "A server that this needs does not answer. Try again in a moment.", retryAfter: retrySoon})
	problemRouteNotFound = fixed(problem{kind: kindNotFound, detail: "No route has this path."})
	problemMethod        = fixed(problem{kind: kindMethod, detail: "The Allow header lists the methods of this path."})
	problemTooLarge      = fixed(problem{kind: kindTooLarge, detail: "A body may have 4096 bytes at most.", closes: true})
	problemBodyBroken    = fixed(problem{kind: kindInvalid, detail: "The body broke off, or came too slowly.", closes: true})
	problemMediaType     = fixed(problem{kind: kindMediaType, detail: "Send the body as application/json in UTF-8, without a Content-Encoding."})
)

// How many seconds a client is asked to wait.
const (
	retrySoon   = 1
	retryPaused = 5
	// retryLongest bounds what a client is asked to wait for an opening, because operators move it.
	retryLongest = 3600
)

// problem is an answer of RFC 9457. It is an error, so that a handler can return it.
type problem struct {
	kind
	// detail is for whoever reads the answer; it never holds the text of an error from below.
	detail string

	// Headers, each left out where it is zero.
	location   string
	challenge  string
	retryAfter int // seconds
	// hangUp closes the connection, for a body that is not worth reading to its end.
	closes bool

	// Members beyond the standard's, each left out where it is zero.
	opensAt time.Time
	limit   int64
	// paymentReference is that of the payment that counts.
	paymentReference string
	// orderID and orderStatus are those of an order that has ended.
	orderID     uuid.UUID
	orderStatus reservation.Status
	requestID   string
	redis       string
	postgres    string

	// body is the JSON of a problem that was made by fixed.
	body []byte
}

func (p *problem) Error() string { return p.slug + ": " + p.detail }

func fixed(p problem) *problem {
	p.body = p.appendJSON(nil)
	return &p
}

func invalid(detail string) *problem { return &problem{kind: kindInvalid, detail: detail} }

// problemOf is the one place that turns errors into answers. What it does not know came from a
// store that could not do its work; its text stays in the log.
func problemOf(err error) *problem {
	var (
		known   *problem
		input   *reservation.InvalidError
		illegal *reservation.IllegalTransitionError
		taken   *reservation.TakenError
		step    *reservation.TransitionError
		paid    *reservation.AlreadyPaidError
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
			detail: "The payment in payment_reference counts. What was paid with the reference of this request must go back to the buyer.",
		}
	case errors.As(err, &step):
		return &problem{kind: kindTransition, detail: "The order is " + string(step.Status) + ", and this cannot follow."}
	case errors.Is(err, reservation.ErrSaleNotFound):
		return problemSaleNotFound
	case errors.Is(err, reservation.ErrOrderNotFound):
		return problemOrderNotFound
	case errors.Is(err, reservation.ErrOrderNotConfirmed):
		return problemNotConfirmed
	case errors.Is(err, reservation.ErrOrderExpired):
		return problemExpired
	case errors.Is(err, reservation.ErrOrderDamaged):
		return problemOrderDamaged
	case errors.Is(err, reservation.ErrReservationDamaged):
		return problemReservationDamaged
	case errors.Is(err, reservation.ErrIdempotencyKeyReused):
		return problemKeyReused
	case errors.Is(err, reservation.ErrOverloaded):
		return problemNotReserved
	case errors.Is(err, reservation.ErrOutcomeUnknown):
		return problemPurchaseUnknown
	case errors.Is(err, reservation.ErrRestockUndecided):
		return problemRestockUndecided
	case errors.Is(err, reservation.ErrRestockWithdrawn):
		return problemRestockWithdrawn
	case errors.Is(err, reservation.ErrChangeUnknown):
		return problemSaleChangeUnknown
	case errors.Is(err, reservation.ErrNotInForce):
		return problemNotInForce
	case errors.As(err, &routing) && routing.Code == http.StatusMethodNotAllowed:
		return problemMethod
	case errors.As(err, &routing) && routing.Code == http.StatusNotFound:
		return problemRouteNotFound
	}
	return problemUnavailable
}

// isOutage tells whether an error says something about our servers, and is therefore worth a line in
// the log: not so a refusal, a client that went away, or the overload that the metrics count.
func isOutage(ctx context.Context, p *problem) bool {
	return p.status >= http.StatusInternalServerError && p.slug != kindOverloaded.slug && p != problemRestockWithdrawn && ctx.Err() == nil
}

// refusalOf is the problem for a verdict that takes nothing from the sale.
func problemOfVerdict(a reservation.Answer, now time.Time) *problem {
	switch a.Verdict {
	case reservation.SoldOut:
		return problemSoldOut
	case reservation.AlreadyPurchased:
		return &problem{
			kind: kindAlreadyPurchased, location: orderPath(a.Reservation.OrderID),
			detail: "One order per buyer and sale. The Location header names yours.",
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
			detail: "One order may hold at most " + strconv.FormatInt(a.Limit, 10) + " in this sale.",
		}
	case reservation.KeyReused:
		return problemKeyReused
	case reservation.UnknownSale:
		return problemSaleNotFound
	}
	return problemUnavailable
}

// secondsUntil rounds up: a client that comes back at the second that it was told finds the sale open.
func secondsUntil(t, now time.Time) int {
	s := (t.Sub(now) + time.Second - 1) / time.Second
	return int(min(max(s, retrySoon), retryLongest))
}

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
		dst = append(appendTime(dst, p.opensAt), '"')
	}
	if p.limit != 0 {
		dst = append(dst, `,"limit":`...)
		dst = strconv.AppendInt(dst, p.limit, 10)
	}
	dst = appendText(dst, "payment_reference", p.paymentReference)
	if p.orderID != uuid.Nil {
		dst = append(dst, `,"order_id":"`...)
		dst = append(reservation.AppendID(dst, p.orderID), '"')
	}
	dst = appendText(dst, "order_status", string(p.orderStatus))
	dst = appendText(dst, "request_id", p.requestID)
	dst = appendText(dst, "redis", p.redis)
	dst = appendText(dst, "postgres", p.postgres)
	return append(dst, "}\n"...)
}

// appendText appends a further member of an object, unless it is empty.
func appendText(dst []byte, name, text string) []byte {
	if text == "" {
		return dst
	}
	dst = append(dst, `,"`...)
	dst = append(dst, name...)
	dst = append(dst, `":`...)
	// The error would be about invalid UTF-8, for which AppendQuote puts U+FFFD.
	dst, _ = jsontext.AppendQuote(dst, text)
	return dst
}

package ingress

import (
	"errors"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/internal/accept"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/reservation/problems"
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
	problems.Kind
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
	// item is the code that the sale does not have, or the item whose limit it is; items are those that fell short, and
	// available is what is left of each.
	item      string
	items     []string
	available order.Items
	// taken are the taken units of the items whose stock cannot be lowered as far.
	taken order.Items
	// paymentReference is the reference of the valid payment.
	paymentReference string
	// refundReference is the reference of the refund that was noted before.
	refundReference string
	// orderID is the order in the way of the purchase; orderStatus, unless it is live.
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
	problemRouteNotFound = fixed(problem{Kind: problems.NotFound, detail: "No route has this path."})
	problemNoSuchProblem = fixed(problem{
		Kind: problems.NotFound, detail: "No problem has this slug: GET /problems lists all.",
	})
	problemPrecondition = fixed(problem{
		Kind: problems.Precondition, detail: "The current entity tag is not in If-Match.",
	})
	problemMethod = fixed(problem{
		Kind: problems.Method, detail: "The Allow header lists the methods of this path.",
	})
	problemTooLarge = fixed(problem{
		Kind: problems.TooLarge, detail: "A body may have at most 4096 bytes.", closes: true,
	})
	problemSaleTooLarge = fixed(problem{
		Kind: problems.TooLarge, detail: "The body of a sale may have at most " + strconv.Itoa(saleBodyMax) + " bytes.",
		closes: true,
	})
	problemBodyBroken = fixed(problem{
		Kind: problems.Invalid, closes: true, detail: "The body is incomplete, or arrived too slowly.",
	})
	problemHeadTooLarge = fixed(problem{
		Kind: problems.HeadTooLarge, detail: "The request line and the headers may have at most " +
			strconv.Itoa(accept.MaxHeadBytes) + " bytes together.",
	})
	problemNotHTTP   = fixed(problem{Kind: problems.Invalid, detail: "This is no valid HTTP request."})
	problemMediaType = fixed(problem{
		Kind: problems.MediaType, detail: "Send the body as application/json in UTF-8, without a Content-Encoding.",
	})
	problemOverloaded = fixed(problem{
		Kind: problems.Overloaded, retryAfter: retrySoon, detail: "Nothing was done. Retry after a moment.",
	})
	problemSoldOut = fixed(problem{Kind: problems.SoldOut, detail: "Fewer units are left than you asked for."})
	problemPaused  = fixed(problem{
		Kind: problems.Paused, retryAfter: retryPaused, detail: "An operator paused the sale. Retry later.",
	})
	problemOffersOnly = fixed(problem{
		Kind: problems.OffersOnly,
		detail: "Units of this sale are offered to those who entered before. GET /v1/sales/{sale} says whether one can " +
			"enter: with waitlist, by POST /v1/sales/{sale}/waitlist; with entries_sale_id, by a purchase in that sale " +
			"while it is open.",
	})
	problemEnded = fixed(problem{
		Kind: problems.Ended, detail: "An operator ended the sale, or its closing time has passed.",
	})

	problemSaleNotFound  = problemFor(reservation.ErrSaleNotFound)
	problemOrderNotFound = problemFor(order.ErrNotFound)
	problemUnavailable   = problemFor(reservation.ErrUnavailable)
	problemKeyReused     = problemFor(catalog.ErrIdempotencyKeyReused)
	// problemNotReserved is problemOverloaded for a purchase.
	problemNotReserved = problemFor(reservation.ErrOverloaded)
)

// knownProblems has the problem of each error that package problems knows.
var knownProblems = sync.OnceValue(func() map[error]*problem {
	known := make(map[error]*problem)
	for _, k := range problems.All() {
		p := problem{Kind: k.Kind, detail: k.Detail}
		if k.Status == http.StatusServiceUnavailable || k.Kind == problems.NotConfirmed {
			p.retryAfter = retrySoon
		}
		known[k.Err] = fixed(p)
	}
	return known
})

func fixed(p problem) *problem {
	p.body = p.appendJSON(nil)
	return &p
}

func invalid(detail string) *problem { return &problem{Kind: problems.Invalid, detail: detail} }

func (p *problem) Error() string { return p.Slug + ": " + p.detail }

// problemFor is the only place that turns errors into answers. An error that it does not know comes from a
// store that could not do its work; its text goes to the log only.
func problemFor(err error) *problem {
	var (
		known   *problem
		unknown *catalog.UnknownItemError
		input   *order.InvalidError
		illegal *reservation.IllegalTransitionError
		taken   *catalog.TakenError
		step    *order.TransitionError
		paid    *order.AlreadyPaidError
		back    *order.RefundedError
		routing *echo.HTTPError
	)
	switch {
	case errors.As(err, &known):
		return known
	case errors.As(err, &unknown):
		return problemUnknownItem(unknown.Code)
	case errors.As(err, &input):
		return invalid(input.Error() + ".")
	case errors.As(err, &illegal):
		return &problem{Kind: problems.Transition, detail: illegal.Error() + "."}
	case errors.As(err, &taken):
		return &problem{Kind: problems.Transition, detail: taken.Error() + ".", taken: taken.Items}
	case errors.As(err, &paid):
		return &problem{
			Kind: problems.AlreadyPaid, paymentReference: paid.Reference,
			detail: "The payment in payment_reference is valid. Refund the payment of this request.",
		}
	case errors.As(err, &back):
		return &problem{
			Kind: problems.Refunded, refundReference: back.RefundReference,
			detail: "The refund in refund_reference was noted before. If both were made, one of them is too much.",
		}
	case errors.As(err, &step):
		detail := "The order is " + string(step.Status) + ", which does not allow this."
		return &problem{Kind: problems.Transition, detail: detail}
	case errors.As(err, &routing) && routing.Code == http.StatusMethodNotAllowed:
		return problemMethod
	case errors.As(err, &routing) && routing.Code == http.StatusNotFound:
		return problemRouteNotFound
	}
	k, found := problems.Find(err)
	if !found {
		k.Err = reservation.ErrUnavailable
	}
	return knownProblems()[k.Err]
}

// soldOutItems are the latest problems of items that are sold out, by the last letter of a code: all who want an item
// get the same *reservation.OfItems for a while.
var soldOutItems [8]atomic.Pointer[soldOutItem]

type soldOutItem struct {
	of      *reservation.OfItems
	problem *problem
}

// problemForSoldOut names what fell short in a sale with items.
func problemForSoldOut(of *reservation.OfItems) *problem {
	if of == nil || len(of.Codes) == 0 {
		return problemSoldOut
	}
	first := of.Codes[0]
	latest := &soldOutItems[int(first[len(first)-1])%len(soldOutItems)]
	if known := latest.Load(); known != nil && known.of == of {
		return known.problem
	}
	made := fixed(problem{
		Kind: problems.SoldOut, items: of.Codes, available: of.Units,
		detail: "Fewer units are left than you asked for of the items in items: nothing was reserved.",
	})
	latest.Store(&soldOutItem{of, made})
	return made
}

func problemUnknownItem(code string) *problem {
	return &problem{
		Kind: problems.UnknownItem, item: truncate(code),
		detail: "The sale has no item with the code in item. GET /v1/sales/{sale} lists its items.",
	}
}

// problemForVerdict is the problem for a verdict that reserves nothing.
func problemForVerdict(a reservation.Answer, now time.Time) *problem {
	switch a.Verdict {
	case reservation.SoldOut:
		return problemForSoldOut(a.Of)
	case reservation.UnknownItem:
		return problemUnknownItem(a.Of.Codes[0])
	case reservation.AlreadyPurchased:
		return &problem{
			Kind: problems.AlreadyPurchased, location: orderPath(a.Reservation.OrderID), orderID: a.Reservation.OrderID,
			detail: "A buyer may have one order per sale. Yours is order_id.",
		}
	case reservation.OrderEnded:
		return problemOrderEnded(a.Reservation.OrderID, a.Status)
	case reservation.NotOpen:
		return &problem{
			Kind: problems.NotOpen, detail: "The sale opens at the time in opens_at.",
			opensAt: a.OpensAt, retryAfter: secondsUntil(a.OpensAt, now),
		}
	case reservation.Paused:
		return problemPaused
	case reservation.OffersOnly:
		if a.Of == nil || len(a.Of.Codes) == 0 {
			return problemOffersOnly
		}
		return &problem{
			Kind: problems.OffersOnly, items: a.Of.Codes,
			detail: "Units of the items in items are offered to those who wait for them: nothing was reserved. " +
				"Wait for one of them by POST /v1/sales/{sale}/waitlist.",
		}
	case reservation.Ended:
		return problemEnded
	case reservation.OverLimit:
		of, item := "", ""
		if a.Of != nil {
			item = a.Of.Codes[0]
			of = " of item " + item
		}
		return &problem{
			Kind: problems.OverLimit, limit: a.Limit, item: item,
			detail: "In this sale an order may hold at most " + strconv.FormatInt(a.Limit, 10) + " units" + of + ".",
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
	dst = append(dst, p.Slug...)
	dst = append(dst, '"')
	dst = appendText(dst, "title", p.Title)
	dst = append(dst, `,"status":`...)
	dst = strconv.AppendInt(dst, int64(p.Status), 10)
	dst = appendText(dst, "detail", p.detail)
	if !p.opensAt.IsZero() {
		dst = append(dst, `,"opens_at":"`...)
		dst = append(order.AppendTime(dst, p.opensAt), '"')
	}
	if p.limit != 0 {
		dst = append(dst, `,"limit":`...)
		dst = strconv.AppendInt(dst, p.limit, 10)
	}
	dst = appendText(dst, "item", p.item)
	if len(p.items) > 0 {
		dst = append(append(dst, `,"items":["`...), strings.Join(p.items, `","`)...)
		dst = append(dst, `"]`...)
	}
	dst = appendObject(dst, "available", p.available)
	dst = appendObject(dst, "taken", p.taken)
	dst = appendText(dst, "payment_reference", p.paymentReference)
	dst = appendText(dst, "refund_reference", p.refundReference)
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

// appendObject appends units by item, unless there are none.
func appendObject(dst []byte, name string, items order.Items) []byte {
	if items == "" {
		return dst
	}
	dst = append(append(dst, `,"`...), name...)
	return append(append(dst, `":`...), items...)
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

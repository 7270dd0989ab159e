package ingress

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/internal/accept"
	"stampede/ledger/problems"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
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
	if known, ok := errors.AsType[*problem](err); ok {
		return known
	}
	if routing, ok := errors.AsType[*echo.HTTPError](err); ok {
		switch routing.Code {
		case http.StatusMethodNotAllowed:
			return problemMethod
		case http.StatusNotFound:
			return problemRouteNotFound
		}
	}
	k, found := problems.Find(err)
	if !found {
		k.Err = reservation.ErrUnavailable
	}
	if p := knownProblems()[k.Err]; p != nil {
		return p
	}
	p := &problem{Kind: k.Kind, detail: k.Detail}
	switch e := k.Err.(type) { //nolint:errorlint // Find has unwrapped it
	case *catalog.UnknownItemError:
		p.item = truncate(e.Code)
	case *catalog.TakenError:
		p.taken = e.Items
	case *order.AlreadyPaidError:
		p.paymentReference = e.Reference
	case *order.RefundedError:
		p.refundReference = e.RefundReference
	}
	return p
}

// refusalOf is the problem of an error that says that the store has answered; nil for no error, and for an outage.
func refusalOf(err error) *problem {
	if err == nil {
		return nil
	}
	if known, ok := errors.AsType[*problem](err); ok {
		return known
	}
	if p := problemFor(err); p.Status < http.StatusInternalServerError {
		return p
	}
	return nil
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
	return problemFor(&catalog.UnknownItemError{Code: code})
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

// Header values that are the same in every answer. They must not be changed.
var (
	noStore         = []string{"no-store"}
	jsonContent     = []string{"application/json"}
	problemContent  = []string{"application/problem+json"}
	closeConnection = []string{"close"}
	headerTrue      = []string{"true"}
)

func writeProblem(c echo.Context, p *problem) {
	h := c.Response().Header()
	h["Content-Type"] = problemContent
	if p.location != "" {
		h["Location"] = []string{p.location}
	}
	if p.challenge != "" {
		h["Www-Authenticate"] = []string{p.challenge}
	}
	if p.retryAfter != 0 {
		h["Retry-After"] = []string{strconv.Itoa(p.retryAfter)}
	}
	if p.closes {
		h["Connection"] = closeConnection
	}
	if p.body != nil {
		write(c, p.Status, p.body)
		return
	}
	buf := scratchPool.Get().(*scratch)
	defer scratchPool.Put(buf)
	buf.out = p.appendJSON(buf.out[:0])
	write(c, p.Status, buf.out)
}

// refusal returns the answer to a request that net/http refuses, as it is sent; nil for one of which no problem tells.
func refusal(status int) []byte {
	p := problemNotHTTP
	switch status {
	case http.StatusBadRequest:
	case http.StatusRequestHeaderFieldsTooLarge:
		p = problemHeadTooLarge
	default:
		return nil
	}
	return fmt.Appendf(nil, "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s",
		status, http.StatusText(status), problemContent[0], len(p.body), p.body)
}

// write sends the answer. An error means that the client has left.
func write(c echo.Context, status int, body []byte) {
	res := c.Response()
	res.WriteHeader(status)
	_, _ = res.Write(body)
}

// writeJSON answers with v.
func writeJSON(c echo.Context, status int, v any) error {
	body, err := marshalLine(v)
	if err != nil {
		return err
	}
	c.Response().Header()["Content-Type"] = jsonContent
	write(c, status, body)
	return nil
}

// writeTagged answers with a representation that has an entity tag, unless the client has it.
func writeTagged(c echo.Context, headers http.Header, etag, contentType string, body []byte) error {
	if isKnown, err := checkTag(c, headers, etag); err != nil || isKnown {
		return err
	}
	h := c.Response().Header()
	h["Content-Type"] = []string{contentType}
	h["Content-Length"] = []string{strconv.Itoa(len(body))} // net/http would send a long body in chunks
	write(c, http.StatusOK, body)
	return nil
}

// checkTag begins the answer with a representation that has an entity tag. If the client has it, that is the answer.
// If-Match comes before If-None-Match (RFC 9110, section 13.2.2). The other preconditions are about dates, which no
// answer has.
func checkTag(c echo.Context, headers http.Header, etag string) (isKnown bool, err error) {
	asked := c.Request().Header
	if tags := asked["If-Match"]; tags != nil && !matchesStrongly(tags, etag) {
		return false, problemPrecondition
	}
	h := c.Response().Header()
	maps.Copy(h, headers)
	h["Etag"] = []string{etag}
	if matchesWeakly(asked["If-None-Match"], etag) {
		c.Response().WriteHeader(http.StatusNotModified)
		return true, nil
	}
	return false, nil
}

// marshalLine returns v as one line of JSON, like every answer. The most frequent answers are written without it:
// see appendReservation and problem.appendJSON.
func marshalLine(v any) ([]byte, error) {
	body, err := json.Marshal(v)
	return append(body, '\n'), err
}

const (
	// heartbeatInterval is the pause between comments, which keep proxies from closing an idle stream, and by which
	// each end notices that the other is gone.
	heartbeatInterval = 15 * time.Second
	// eventTimeout bounds how long an event may take to write, before a client that does not read is cut off.
	eventTimeout = 10 * time.Second
)

var (
	heartbeatComment = []byte(": \n\n")
	// retryField has clients reconnect after two seconds. Browsers differ in what they do without it.
	retryField = []byte("retry: 2000\n\n")
)

// eventStream is an answer of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).
type eventStream struct {
	response   *echo.Response
	connection *http.ResponseController
	heartbeats *time.Ticker
	buf        []byte
}

// openStream sends the head of the answer immediately, because the first event may come late. The caller closes
// the stream.
func openStream(c echo.Context) *eventStream {
	response := c.Response()
	accept.EventStream(response.Header())
	response.WriteHeader(http.StatusOK)
	e := &eventStream{
		response: response, connection: http.NewResponseController(response), heartbeats: time.NewTicker(heartbeatInterval),
	}
	_ = e.write(retryField) // if the client has left, the next write fails too
	return e
}

func (e *eventStream) close() { e.heartbeats.Stop() }

// send sends an event. It leaves an id of 0 out; data is JSON without line ends. An error means that the client
// has left or does not read.
func (e *eventStream) send(event string, id int, data []byte) error {
	e.buf = append(append(e.buf[:0], "event: "...), event...)
	if id != 0 {
		e.buf = strconv.AppendInt(append(e.buf, "\nid: "...), int64(id), 10)
	}
	e.buf = append(append(e.buf, "\ndata: "...), data...)
	return e.write(append(e.buf, "\n\n"...))
}

func (e *eventStream) sendHeartbeat() error { return e.write(heartbeatComment) }

func (e *eventStream) write(text []byte) error {
	// Replaces the server's accept.WriteTimeout. It fails if the connection has no deadlines.
	_ = e.connection.SetWriteDeadline(time.Now().Add(eventTimeout))
	if _, err := e.response.Write(text); err != nil {
		return err
	}
	return e.connection.Flush()
}

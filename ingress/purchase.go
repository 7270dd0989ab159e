package ingress

import (
	"bytes"
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation"
	"stampede/reservation/order"
)

// purchase serves POST /v1/sales/{sale}/orders.
func (s *Server) purchase(c echo.Context) error {
	r := c.Request()
	arrival := arrivalOf(c)
	began := arrival.Read
	if arrival.Known {
		s.metrics.wait.Observe(began.Sub(arrival.At).Seconds())
	}
	sale, ok := parseID(c.Param("sale"))
	if err := s.limits.admitAddress(&s.limits.purchases, r, began); err != nil {
		s.metrics.countPurchase(sale, verdictRateLimited, began)
		return err
	}
	user, err := s.auth.user(r)
	if err != nil {
		return err
	}
	if err := s.limits.admitUser(&s.limits.purchases, user, began); err != nil {
		s.metrics.countPurchase(sale, verdictRateLimited, began)
		return err
	}
	if !ok {
		return problemSaleNotFound
	}
	key, err := idempotencyKey(r.Header)
	if err != nil {
		return err
	}
	wait, waits := preferredWait(r.Header["Prefer"])
	quantity, err := readQuantity(r)
	if err != nil {
		return err
	}
	if waits = waits && s.waitSlots.acquire(); waits {
		// While a slot is taken, announced outcomes are remembered: none is missed between the reservation and
		// the wait.
		defer s.waitSlots.release()
	}
	arrival = arrivalOf(c) // the body may have come later than the head
	request := reservation.Request{
		Sale: sale, User: user, IdempotencyKey: key, Quantity: quantity, Arrived: arrival.At, Client: arrival.Conn,
	}
	span := s.spanOf(r)
	answer, err := s.reserve(detached(span), request, arrival.Left, began)
	if span.On() {
		noteAnswer(span, answer)
	}
	if answer, err = s.orPastAnswer(c, request, answer, err); err != nil {
		return err
	}
	switch answer.Verdict {
	case reservation.SoldOut:
		// The answer to most of a crowd takes the shortest way.
		writeProblem(c, problemSoldOut)
		return nil
	case reservation.Reserved, reservation.Replayed:
	default:
		return problemOfVerdict(answer, time.Now())
	}
	if waits {
		c.Response().Header()["Preference-Applied"] = preferenceApplied(wait)
		return s.answerAfterWait(c, request, answer, began.Add(wait))
	}
	if answer.Verdict == reservation.Replayed {
		return s.answerReplay(c, request, answer)
	}
	s.answerAccepted(c, request, answer, false)
	return nil
}

var (
	problemQuantity = fixed(problem{
		kind: kindInvalid, detail: "quantity must be a whole number, 1 or more, in digits only.",
	})

	quantityStart = []byte(`{"quantity":`)
)

// readQuantity reads the body of a purchase.
func readQuantity(r *http.Request) (int64, error) {
	buf := scratchPool.Get().(*scratch)
	defer scratchPool.Put(buf)
	body, err := buf.readBody(r)
	if err != nil {
		return 0, err
	}
	return parseQuantity(body)
}

// parseQuantity reads how many units a body requests; an empty body requests one. It parses the usual form
// without the strict decoder, in a tenth of its time; the decoder gets everything else.
func parseQuantity(body []byte) (int64, error) {
	if len(body) == 0 {
		return 1, nil
	}
	if rest, ok := bytes.CutPrefix(body, quantityStart); ok {
		digits := bytes.TrimPrefix(bytes.TrimSuffix(rest, []byte{'}'}), []byte{' '})
		if len(rest) > 0 && rest[len(rest)-1] == '}' && isPositiveInteger(digits) {
			return clampQuantity(digits), nil
		}
	}
	var wanted struct {
		Quantity jsontext.Value `json:"quantity"`
	}
	if err := decodeStrict(body, &wanted); err != nil {
		return 0, err
	}
	switch {
	case wanted.Quantity == nil:
		return 1, nil
	case !isPositiveInteger(wanted.Quantity):
		return 0, problemQuantity
	}
	return clampQuantity(wanted.Quantity), nil
}

// isPositiveInteger accepts a positive JSON number without sign, fraction or exponent.
func isPositiveInteger(digits []byte) bool {
	if len(digits) == 0 || digits[0] == '0' {
		return false
	}
	for _, c := range digits {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}

// clampQuantity makes every number above the highest limit of any sale the same one. It is over the limit in
// every sale, and small enough for the script, whose numbers are doubles: 2^53+1 would not be.
func clampQuantity(digits []byte) int64 {
	const most = order.MaxPerOrder + 1
	var n int64
	for _, c := range digits {
		if n = n*10 + int64(c-'0'); n > most {
			return most
		}
	}
	return n
}

// reserve has Redis decide. It takes a slot after the body was read, so that clients who send slowly hold
// none. If the buyer had left by then, nothing is decided. Later it does not end when the buyer leaves: the answer is
// nearly due, and watching the connection would cost as much as the rest of the work.
func (s *Server) reserve(
	ctx context.Context, r reservation.Request, left bool, began time.Time,
) (reservation.Answer, error) {
	if left || !s.inFlight.purchases.acquire() {
		s.metrics.countPurchase(r.Sale, verdictOverloaded, began)
		return reservation.Answer{}, problemNotReserved
	}
	defer s.inFlight.purchases.release()
	var (
		answer reservation.Answer
		err    error = problemNoSecret
	)
	if s.signer.Load() != nil { // no purchase is accepted without a receipt
		answer, err = s.config.Reservations.Reserve(ctx, r)
	}
	verdict := answer.Verdict
	if err != nil {
		verdict = verdictOf(err)
	}
	s.metrics.countPurchase(r.Sale, verdict, began)
	return answer, err
}

// answerAccepted answers 202. With mayBeBehind the answer says that the order may be in a later state.
func (s *Server) answerAccepted(
	c echo.Context, r reservation.Request, answer reservation.Answer, mayBeBehind bool,
) {
	h := c.Response().Header()
	setOrderHeaders(h, answer)
	h["Content-Type"] = jsonContent
	buf := scratchPool.Get().(*scratch)
	defer scratchPool.Put(buf)
	buf.out = s.appendReservation(buf.out[:0], r, answer.Reservation, mayBeBehind)
	write(c, http.StatusAccepted, buf.out)
}

// setOrderHeaders sets the headers of an answer that is the buyer's order. Problems have none of them: a repeat may
// be answered by one before or after Redis knows that its order has ended.
func setOrderHeaders(h http.Header, answer reservation.Answer) {
	h["Location"] = []string{orderPath(answer.Reservation.OrderID)}
	if answer.Verdict == reservation.Replayed {
		h["Idempotency-Replayed"] = headerTrue
	}
}

// appendReservation appends the body of a 202. It avoids the encoder because it runs once per accepted purchase.
func (s *Server) appendReservation(
	dst []byte, r reservation.Request, held order.Reservation, mayBeBehind bool,
) []byte {
	dst = append(dst, `{"order_id":"`...)
	dst = order.AppendID(dst, held.OrderID)
	dst = append(dst, `","sale_id":"`...)
	dst = order.AppendID(dst, r.Sale)
	dst = append(dst, `","status":"reserved","quantity":`...)
	dst = strconv.AppendInt(dst, held.Quantity, 10)
	dst = append(dst, `,"reserved_at":"`...)
	dst = order.AppendTime(dst, held.ReservedAt)
	dst = append(dst, `","receipt":"`...)
	dst = s.appendReceipt(dst, r, held)
	if mayBeBehind {
		return append(dst, "\",\"may_be_behind\":true}\n"...)
	}
	return append(dst, "\"}\n"...)
}

func orderPath(id uuid.UUID) string {
	const prefix = "/v1/orders/"
	var path [len(prefix) + 36]byte
	return string(order.AppendID(append(path[:0], prefix...), id))
}

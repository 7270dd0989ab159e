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
)

var headerTrue = []string{"true"}

// purchase serves POST /v1/sales/{sale}/orders.
func (s *Server) purchase(c echo.Context) error {
	began := time.Now()
	r := c.Request()
	if err := s.limits.admitAddress(&s.limits.purchases, r, began); err != nil {
		s.metrics.countPurchase(verdictRateLimited, began)
		return err
	}
	user, err := s.auth.user(r)
	if err != nil {
		return err
	}
	if err := s.limits.admitUser(&s.limits.purchases, user, began); err != nil {
		s.metrics.countPurchase(verdictRateLimited, began)
		return err
	}
	sale, ok := parseID(c.Param("sale"))
	if !ok {
		return problemSaleNotFound
	}
	key, err := idempotencyKey(r.Header)
	if err != nil {
		return err
	}
	wait, waits := preferredWait(r.Header["Prefer"])
	if !waits {
		skipBackgroundRead(r)
	}
	quantity, err := readQuantity(r)
	if err != nil {
		return err
	}
	if waits = waits && s.waitSlots.acquire(); waits {
		// The place is taken before the purchase: from now on the hub takes in what becomes of orders.
		defer s.waitSlots.release()
	}
	request := reservation.Request{Sale: sale, User: user, IdempotencyKey: key, Quantity: quantity}
	answer, err := s.reserve(request, began)
	if err != nil {
		return err
	}
	h := c.Response().Header()
	switch answer.Verdict {
	case reservation.SoldOut:
		// What most of a crowd is told takes the shortest way.
		writeProblem(c, problemSoldOut)
		return nil
	case reservation.Reserved:
	case reservation.Replayed:
		h["Idempotency-Replayed"] = headerTrue
	default:
		return problemOfVerdict(answer, time.Now())
	}
	if waits {
		h["Preference-Applied"] = preferenceApplied(wait)
		return s.answerAfterWait(c, request, answer, began.Add(wait))
	}
	if answer.Verdict == reservation.Replayed {
		return s.answerReplay(c, request, answer)
	}
	s.answerAccepted(c, request, answer.Reservation, false)
	return nil
}

// reserve lets Redis decide. It takes its place only now that the body has been read, so that clients who send theirs
// slowly cannot take all of them. The answer comes soon enough for a buyer who has left not to matter, and to watch for
// that would cost as much as what is left to do here.
func (s *Server) reserve(r reservation.Request, began time.Time) (reservation.Answer, error) {
	if !s.inFlight.purchases.acquire() {
		s.metrics.countPurchase(verdictOverloaded, began)
		return reservation.Answer{}, problemNotReserved
	}
	defer s.inFlight.purchases.release()
	var (
		answer reservation.Answer
		err    error = problemNoSecret
	)
	if s.signer.Load() != nil { // nothing is accepted without a receipt
		answer, err = s.config.Reservations.Reserve(context.Background(), r)
	}
	verdict := answer.Verdict
	if err != nil {
		verdict = verdictOf(err)
	}
	s.metrics.countPurchase(verdict, began)
	return answer, err
}

// accept answers 202. With mayBeBehind it says that the order may have gone further than the answer tells.
func (s *Server) answerAccepted(c echo.Context, r reservation.Request, held reservation.Reservation, mayBeBehind bool) {
	h := c.Response().Header()
	h["Location"] = []string{orderPath(held.OrderID)}
	h["Content-Type"] = jsonContent
	buf := scratchPool.Get().(*scratch)
	defer scratchPool.Put(buf)
	buf.out = s.appendReservation(buf.out[:0], r, held, mayBeBehind)
	write(c, http.StatusAccepted, buf.out)
}

// appendReservation appends the answer to an accepted purchase; a replay's is the same.
func (s *Server) appendReservation(dst []byte, r reservation.Request, held reservation.Reservation, mayBeBehind bool) []byte {
	dst = append(dst, `{"order_id":"`...)
	dst = reservation.AppendID(dst, held.OrderID)
	dst = append(dst, `","sale_id":"`...)
	dst = reservation.AppendID(dst, r.Sale)
	dst = append(dst, `","status":"reserved","quantity":`...)
	dst = strconv.AppendInt(dst, held.Quantity, 10)
	dst = append(dst, `,"reserved_at":"`...)
	dst = appendTime(dst, held.ReservedAt)
	dst = append(dst, `","receipt":"`...)
	dst = s.appendReceipt(dst, r, held)
	if mayBeBehind {
		return append(dst, "\",\"may_be_behind\":true}\n"...)
	}
	return append(dst, "\"}\n"...)
}

func orderPath(order uuid.UUID) string { return "/v1/orders/" + order.String() }

// parseID takes the 36 characters that our own answers write, and none of the other forms that
// uuid.Parse knows (braces, urn:uuid:, no hyphens): one sale has one address.
func parseID(text string) (uuid.UUID, bool) {
	if len(text) != 36 {
		return uuid.Nil, false
	}
	id, err := uuid.Parse(text)
	return id, err == nil
}

// idempotencyKey is the key that the request carries, or "" if it carries none.
func idempotencyKey(h http.Header) (string, error) {
	switch keys := h["Idempotency-Key"]; len(keys) {
	case 0:
		return "", nil
	case 1:
		return keys[0], reservation.ValidateIdempotencyKey(keys[0])
	default:
		return "", invalid("Idempotency-Key must be sent once.")
	}
}

var (
	problemQuantity = fixed(problem{kind: kindInvalid, detail: "quantity must be a whole number, 1 or more, in digits only."})

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

// parseQuantity reads how many units a body asks for; an empty body asks for one. What nearly every
// client sends is read here by hand, in a tenth of the time; every other spelling of it, and every
// mistake, is left to the strict decoder.
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
	var order struct {
		Quantity jsontext.Value `json:"quantity"`
	}
	if err := decodeStrict(body, &order); err != nil {
		return 0, err
	}
	switch {
	case order.Quantity == nil:
		return 1, nil
	case !isPositiveInteger(order.Quantity):
		return 0, problemQuantity
	}
	return clampQuantity(order.Quantity), nil
}

// isWhole is true for a positive whole number as JSON writes it, without sign, fraction or exponent.
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

// clampQuantity makes everything above the highest limit that a sale can have the same number: it
// is over the limit in any sale, and 2^53+1 never comes near the script's doubles.
func clampQuantity(digits []byte) int64 {
	const most = reservation.MaxPerOrder + 1
	var n int64
	for _, c := range digits {
		if n = n*10 + int64(c-'0'); n > most {
			return most
		}
	}
	return n
}

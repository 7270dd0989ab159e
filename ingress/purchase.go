package ingress

import (
	"bytes"
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

// reserveTimeout bounds what a purchase waits for Redis. It is longer than one call of the script may
// take with all its tries, so that most of those who travel in a failing call hear what became of it.
const reserveTimeout = 5 * time.Second

var replayed = []string{"true"}

// purchase serves POST /v1/sales/{sale}/orders.
func (s *Server) purchase(c echo.Context) error {
	began := time.Now()
	r := c.Request()
	user, err := s.auth.user(r)
	if err != nil {
		return err
	}
	sale, ok := parseID(c.Param("sale"))
	if !ok {
		return problemSale
	}
	key, err := idempotencyKey(r.Header)
	if err != nil {
		return err
	}
	buf := scratches.Get().(*scratch)
	defer scratches.Put(buf)
	body, err := buf.readBody(r)
	if err != nil {
		return err
	}
	quantity, err := parseQuantity(body)
	if err != nil {
		return err
	}

	// Only now, so that clients who send their bodies slowly cannot take all places.
	if !s.room.enter() {
		return problemNotReserved
	}
	defer s.room.leave()
	wait := patience{request: r.Context(), length: reserveTimeout}
	defer wait.end()
	answer, err := s.config.Reservations.Reserve(&wait, reservation.Request{
		Sale: sale, User: user, IdempotencyKey: key, Quantity: quantity,
	})
	counted := s.metrics.failed
	if err == nil {
		counted = s.metrics.verdict(answer.Verdict)
	}
	counted.count.Inc()
	defer func() { counted.seconds.Observe(time.Since(began).Seconds()) }()
	if err != nil {
		if gaveUpWaiting(err) {
			return problemNotReserved
		}
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
		h["Idempotency-Replayed"] = replayed
	default:
		return refusalOf(answer, time.Now())
	}
	h["Location"] = []string{orderPath(answer.Reservation.OrderID)}
	h["Content-Type"] = jsonContent
	buf.out = appendReservation(buf.out[:0], sale, answer.Reservation)
	write(c, http.StatusAccepted, buf.out)
	return nil
}

// gaveUpWaiting tells whether reserveTimeout ended before the purchase was sent to Redis.
func gaveUpWaiting(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) &&
		!errors.Is(err, reservation.ErrOutcomeUnknown) && !errors.Is(err, reservation.ErrUnavailable)
}

// appendReservation appends the answer to an accepted purchase; a replay's is the same.
func appendReservation(dst []byte, sale uuid.UUID, r reservation.Reservation) []byte {
	dst = append(dst, `{"order_id":"`...)
	dst = reservation.AppendID(dst, r.OrderID)
	dst = append(dst, `","sale_id":"`...)
	dst = reservation.AppendID(dst, sale)
	dst = append(dst, `","status":"reserved","quantity":`...)
	dst = strconv.AppendInt(dst, r.Quantity, 10)
	dst = append(dst, `,"reserved_at":"`...)
	dst = appendTime(dst, r.ReservedAt)
	return append(dst, `"}`...)
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

// parseQuantity reads how many units a body asks for; an empty body asks for one. What nearly every
// client sends is read here by hand, in a tenth of the time; every other spelling of it, and every
// mistake, is left to the strict decoder.
func parseQuantity(body []byte) (int64, error) {
	if len(body) == 0 {
		return 1, nil
	}
	if rest, ok := bytes.CutPrefix(body, quantityStart); ok {
		digits := bytes.TrimPrefix(bytes.TrimSuffix(rest, []byte{'}'}), []byte{' '})
		if len(rest) > 0 && rest[len(rest)-1] == '}' && isWhole(digits) {
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
	case !isWhole(order.Quantity):
		return 0, problemQuantity
	}
	return clampQuantity(order.Quantity), nil
}

// isWhole is true for a positive whole number as JSON writes it, without sign, fraction or exponent.
func isWhole(digits []byte) bool {
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

package ingress

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/retry"
	"stampede/ledger/problems"
	"stampede/reservation"
	"stampede/reservation/order"
)

const (
	// secretTimeout bounds one attempt to read the secret for receipts; secretRetryPause is between two.
	secretTimeout    = 2 * time.Second
	secretRetryPause = time.Second
)

var (
	problemNoSecret = fixed(problem{
		Kind: problems.Unavailable, retryAfter: retrySoon,
		detail: "Nothing was done: this server has not read the secret for receipts from Postgres yet. " +
			"Retry after a moment.",
	})
	problemReceiptInvalid = fixed(problem{
		Kind: problems.Invalid,
		detail: "The receipt does not belong to this order. " +
			`Send the complete "receipt" from the answer to the purchase.`,
	})
	// problemOrderUndecided is the problem of an order that is missing, but has a valid receipt.
	problemOrderUndecided = fixed(problem{
		Kind: problems.Unavailable, retryAfter: retrySoon,
		detail: "The receipt is valid, but the outcome of the order is not decided yet. Retry after a moment.",
	})
)

// receipts signs and verifies receipts and tickets, with one secret.
type receipts struct {
	// signer is nil until the secret for receipts was read. Without it no purchase is accepted.
	signer  atomic.Pointer[order.Signer]
	tickets ticketSigner
	info    *prometheus.GaugeVec // of the secret
}

// start makes the signer of receipts. If it needs the secret in Postgres and Postgres does not answer, it
// retries in the background. Until then the server is not ready and refuses purchases: if Redis lost an order
// before a worker has written it, only its receipt would prove that it existed.
func (s *receipts) start(config Config, b *background) error {
	if config.ReceiptSecret != "" {
		return s.setSecret([]byte(config.ReceiptSecret))
	}
	err := s.load(b.ctx, config.Orders)
	if err == nil {
		return nil
	}
	config.Logger.Error("cannot read the secret for receipts from Postgres: purchases are refused until it was read, "+
		"or STAMPEDE_RECEIPT_SECRET is set", "error", err)
	b.start(func(ctx context.Context) {
		for s.load(ctx, config.Orders) != nil {
			if !retry.Pause(secretRetryPause, ctx.Done()) {
				return
			}
		}
		config.Logger.Info("the secret for receipts was read")
	})
	return nil
}

func (s *receipts) load(ctx context.Context, orders Orders) error {
	limited, cancel := context.WithTimeout(ctx, secretTimeout)
	defer cancel()
	secret, err := orders.ReceiptSecret(limited)
	if err != nil {
		return err
	}
	return s.setSecret(secret)
}

func (s *receipts) setSecret(secret []byte) error {
	signer, err := order.NewSigner(secret)
	if err == nil {
		s.tickets.setSecret(secret)
		s.signer.Store(signer)
		s.info.WithLabelValues(signer.Fingerprint()).Set(1)
	}
	return err
}

// append appends the signed receipt of a reservation.
func (s *receipts) append(dst []byte, r *reservation.Request, held *order.Reservation) []byte {
	return s.signer.Load().Sign(dst, newReceipt(r, held))
}

func newReceipt(r *reservation.Request, held *order.Reservation) order.Receipt {
	return order.Receipt{
		OrderID: held.OrderID, SaleID: r.Sale, User: r.User,
		Epoch: held.Epoch, Sequence: held.Sequence, Quantity: held.Quantity, Lines: held.Lines,
		ReservedAt: held.ReservedAt,
	}
}

// verify returns the receipt in the request's query, or nil if there is none. It must be the user's
// receipt of the order.
func (s *receipts) verify(c echo.Context, o uuid.UUID, user string) (*order.Receipt, error) {
	text := c.QueryParam("receipt")
	if text == "" {
		return nil, nil
	}
	signer := s.signer.Load()
	if signer == nil {
		return nil, problemNoSecret
	}
	r, err := signer.Verify(text)
	switch {
	case errors.Is(err, order.ErrReceiptInvalid):
		return nil, problemReceiptInvalid
	case err != nil:
		return nil, err
	case r.User != user:
		return nil, problemOrderNotFound
	case r.OrderID != o:
		return nil, problemReceiptInvalid
	}
	return &r, nil
}

const (
	// ticketLife is how long a ticket opens streams. It only has to last from one request to the next, and for the
	// reconnects of a connection that flaps; a stream may outlive its ticket.
	ticketLife = time.Minute
	// ticketKeyName separates the key of tickets from that of receipts, which are signed with the secret itself.
	ticketKeyName = "stampede stream ticket 1"
	ticketTag     = 16
	ticketMax     = len(uuid.UUID{}) + binary.MaxVarintLen64 + 1 + order.MaxUserBytes + ticketTag
)

// Kinds of streams that a ticket opens.
const (
	orderTicket = 'o'
	saleTicket  = 's'
)

var problemTicketInvalid = unauthorized(
	"The ticket is not valid, has expired, or is for another stream. Ask for a new one.", challengeBuyer+errorInvalid)

// ticket lets its holder open a stream without headers, which EventSource cannot send. In base64url without padding it
// is the kind, the id, the expiry in Unix seconds as a uvarint, the user, and the first ticketTag bytes of the
// HMAC-SHA256 of all of that. No server remembers it.
type ticket struct {
	kind    byte
	id      uuid.UUID // of the order or the sale
	user    string    // empty for a sale
	expires time.Time // to the second
}

// ticketSigner signs tickets; its zero value has no key yet.
type ticketSigner struct{ key atomic.Pointer[[]byte] }

// setSecret derives the key from the secret for receipts, which all ingresses share.
func (s *ticketSigner) setSecret(secret []byte) {
	mac := hmac.New(sha256.New, secret)
	_, _ = mac.Write([]byte(ticketKeyName)) // never fails
	key := mac.Sum(nil)
	s.key.Store(&key)
}

// sign fails while there is no key.
func (s *ticketSigner) sign(t ticket) (string, error) {
	key := s.key.Load()
	if key == nil {
		return "", problemNoSecret
	}
	raw := append(make([]byte, 0, ticketMax), t.kind)
	raw = append(raw, t.id[:]...)
	raw = binary.AppendUvarint(raw, uint64(t.expires.Unix()))
	raw = append(raw, t.user...)
	return base64.RawURLEncoding.EncodeToString(append(raw, ticketMAC(*key, raw)...)), nil
}

// verify returns whose ticket of this kind for this id a text is.
func (s *ticketSigner) verify(text string, kind byte, id uuid.UUID, now time.Time) (user string, err error) {
	key := s.key.Load()
	if key == nil {
		return "", problemNoSecret
	}
	if len(text) > base64.RawURLEncoding.EncodedLen(ticketMax) {
		return "", problemTicketInvalid
	}
	raw, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil || len(raw) <= ticketTag {
		return "", problemTicketInvalid
	}
	signed, tag := raw[:len(raw)-ticketTag], raw[len(raw)-ticketTag:]
	if !hmac.Equal(tag, ticketMAC(*key, signed)) {
		return "", problemTicketInvalid
	}
	// It is ours, so that it has all parts.
	expires, length := binary.Uvarint(signed[1+len(id):])
	if signed[0] != kind || uuid.UUID(signed[1:1+len(id)]) != id || now.Unix() >= int64(expires) {
		return "", problemTicketInvalid
	}
	return string(signed[1+len(id)+length:]), nil
}

func ticketMAC(key, signed []byte) []byte {
	mac := hmac.New(sha256.New, key)
	_, _ = mac.Write(signed) // never fails
	return mac.Sum(nil)[:ticketTag]
}

// createTicket serves POST /v1/orders/{order}/events/ticket. It signs what the caller asks for, without a look at
// the order: the stream looks whose order it is, so that a ticket says nothing about orders of others, costs neither
// Redis nor Postgres anything, and is there while they are not.
func (s *orderService) createTicket(c echo.Context, user string) error {
	id, err := orderInPath(c)
	if err != nil {
		return err
	}
	if err := readEmptyObject(c); err != nil {
		return err
	}
	return s.inFlight.orders.withSlot(func() error {
		return s.receipts.answerTicket(c, ticket{kind: orderTicket, id: id, user: user}, orderPath(id))
	})
}

// createTicket serves POST /v1/sales/{sale}/events/ticket. The stream of a sale is open to anyone; a ticket is for
// clients that treat both kinds of streams alike.
func (s *saleService) createTicket(c echo.Context) error {
	id, ok := parseID(c.Param("sale"))
	if !ok {
		return problemSaleNotFound
	}
	if err := readEmptyObject(c); err != nil {
		return err
	}
	return s.inFlight.sales.withSlot(func() error {
		return s.receipts.answerTicket(c, ticket{kind: saleTicket, id: id}, "/v1/sales/"+id.String())
	})
}

func (s *receipts) answerTicket(c echo.Context, t ticket, path string) error {
	t.expires = time.Now().Add(ticketLife).Truncate(time.Second)
	text, err := s.tickets.sign(t)
	if err != nil {
		return err
	}
	c.Response().Header()["Cache-Control"] = noStore
	return writeJSON(c, http.StatusCreated, struct {
		Ticket    string `json:"ticket"`
		ExpiresAt string `json:"expires_at"`
		EventsURL string `json:"events_url"`
	}{text, string(order.AppendTime(nil, t.expires)), path + "/events?ticket=" + text})
}

// ticketIn returns the ticket in the query of a stream. An empty one is one that is not valid.
func ticketIn(c echo.Context) (text string, given bool, err error) {
	switch tickets := c.QueryParams()["ticket"]; len(tickets) {
	case 0:
		return "", false, nil
	case 1:
		return tickets[0], true, nil
	}
	return "", false, invalid("ticket must be given once.")
}

// ticketHolder authenticates the buyer of a stream: by the ticket, if there is one, or as for every call.
func (s *core) ticketHolder(c echo.Context) (user string, err error) {
	text, given, err := ticketIn(c)
	if err != nil {
		return "", err
	}
	if !given {
		return s.auth.user(c.Request())
	}
	id, err := orderInPath(c)
	if err != nil {
		return "", err
	}
	return s.receipts.tickets.verify(text, orderTicket, id, time.Now())
}

// checkTicket checks the ticket of a stream of a sale, which needs none.
func (s *core) checkTicket(c echo.Context) error {
	sale, ok := parseID(c.Param("sale"))
	if !ok {
		return problemSaleNotFound
	}
	text, given, err := ticketIn(c)
	if err != nil || !given {
		return err
	}
	_, err = s.receipts.tickets.verify(text, saleTicket, sale, time.Now())
	return err
}

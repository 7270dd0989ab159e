package ingress

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/reservation/problems"
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

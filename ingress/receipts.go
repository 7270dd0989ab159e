package ingress

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

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
		kind: kindUnavailable, retryAfter: retrySoon,
		detail: "Nothing was done: this server has not read the secret for receipts from Postgres yet. " +
			"Retry after a moment.",
	})
	problemReceiptInvalid = fixed(problem{
		kind: kindInvalid,
		detail: "The receipt does not belong to this order. " +
			`Send the complete "receipt" from the answer to the purchase.`,
	})
	// problemOrderUndecided is the problem of an order that is missing, but has a valid receipt.
	problemOrderUndecided = fixed(problem{
		kind: kindUnavailable, retryAfter: retrySoon,
		detail: "The receipt is valid, but the outcome of the order is not decided yet. Retry after a moment.",
	})
)

// initSigner makes the signer of receipts. If it needs the secret in Postgres and Postgres does not answer, it
// retries in the background. Until then the server is not ready and refuses purchases: if Redis lost an order
// before a worker has written it, only its receipt would prove that it existed.
func (s *Server) initSigner() error {
	if s.config.ReceiptSecret != "" {
		return s.setSecret([]byte(s.config.ReceiptSecret))
	}
	err := s.loadSigner(s.background.ctx)
	if err == nil {
		return nil
	}
	s.log.Error("cannot read the secret for receipts from Postgres: purchases are refused until it was read, "+
		"or STAMPEDE_RECEIPT_SECRET is set", "error", err)
	s.background.start(func(ctx context.Context) {
		for s.loadSigner(ctx) != nil {
			select {
			case <-time.After(secretRetryPause):
			case <-ctx.Done():
				return
			}
		}
		s.log.Info("the secret for receipts was read")
	})
	return nil
}

func (s *Server) loadSigner(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, secretTimeout)
	defer cancel()
	secret, err := s.config.Orders.ReceiptSecret(limited)
	if err != nil {
		return err
	}
	return s.setSecret(secret)
}

func (s *Server) setSecret(secret []byte) error {
	signer, err := order.NewSigner(secret)
	if err == nil {
		s.tickets.setSecret(secret)
		s.signer.Store(signer)
		s.metrics.receiptSecret.WithLabelValues(signer.Fingerprint()).Set(1)
	}
	return err
}

// appendReceipt appends the signed receipt of a reservation.
func (s *Server) appendReceipt(dst []byte, r reservation.Request, held order.Reservation) []byte {
	return s.signer.Load().Sign(dst, receiptOf(r, held))
}

func receiptOf(r reservation.Request, held order.Reservation) order.Receipt {
	return order.Receipt{
		OrderID: held.OrderID, SaleID: r.Sale, User: r.User,
		Epoch: held.Epoch, Sequence: held.Sequence, Quantity: held.Quantity, ReservedAt: held.ReservedAt,
	}
}

// verifyReceipt returns the receipt in the request's query, or nil if there is none. It must be the user's
// receipt of the order.
func (s *Server) verifyReceipt(c echo.Context, o uuid.UUID, user string) (*order.Receipt, error) {
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

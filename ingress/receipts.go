package ingress

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation"
)

const (
	// secretTimeout bounds one try to read the secret for receipts, and secretAgain is the time between two.
	secretTimeout    = 2 * time.Second
	secretRetryPause = time.Second
)

var (
	problemReceiptInvalid = fixed(problem{kind: kindInvalid, detail: `The receipt is not one of this order. It is the "receipt" of the answer to the purchase, whole.`})
	// problemUndecided: with the receipt in hand, "there is no such order" would be wrong.
	problemFateUndecided = fixed(problem{
		kind: kindUnavailable, retryAfter: retrySoon,
		detail: "Your receipt is valid, and what becomes of the order is not decided yet. Try again in a moment.",
	})

	problemNoSecret = fixed(problem{
		kind: kindUnavailable, retryAfter: retrySoon,
		detail: "Nothing was done: this server could not read the secret for receipts from Postgres yet. Try again in a moment.",
	})
)

// initSigner makes the signer of receipts. If its secret is that of Postgres, and Postgres does not answer, it
// goes on trying in the background. Until then the server is not ready and refuses purchases: an order without a
// receipt that Redis loses before a worker has written it is unknown to everybody but its buyer.
func (s *Server) initSigner() error {
	if s.config.ReceiptSecret != "" {
		signer, err := reservation.NewSigner([]byte(s.config.ReceiptSecret))
		s.signer.Store(signer)
		return err
	}
	err := s.loadSigner(s.background.ctx)
	if err == nil {
		return nil
	}
	s.log.Error("the secret for receipts cannot be read from Postgres; no purchases are accepted until it can, or with STAMPEDE_RECEIPT_SECRET", "error", err)
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
	signer, err := reservation.NewSigner(secret)
	if err == nil {
		s.signer.Store(signer)
	}
	return err
}

// appendReceipt appends the receipt for what a buyer holds.
func (s *Server) appendReceipt(dst []byte, r reservation.Request, held reservation.Reservation) []byte {
	return s.signer.Load().Sign(dst, receiptOf(r, held))
}

func receiptOf(r reservation.Request, held reservation.Reservation) reservation.Receipt {
	return reservation.Receipt{
		OrderID: held.OrderID, SaleID: r.Sale, User: r.User,
		Epoch: held.Epoch, Sequence: held.Sequence, Quantity: held.Quantity, ReservedAt: held.ReservedAt,
	}
}

// receiptFor is the receipt that the request shows for the user's order, or nil if it shows none.
func (s *Server) verifyReceipt(c echo.Context, order uuid.UUID, user string) (*reservation.Receipt, error) {
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
	case errors.Is(err, reservation.ErrReceiptInvalid):
		return nil, problemReceiptInvalid
	case err != nil:
		return nil, err
	case r.User != user:
		return nil, problemOrderNotFound
	case r.OrderID != order:
		return nil, problemReceiptInvalid
	}
	return &r, nil
}

package ingress

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/labstack/echo/v4"

	"stampede/reservation/order"
)

// reportPayment serves POST /v1/payments: 200 whatever becomes of the money.
func (s *operatorService) reportPayment(c echo.Context, _ string) error {
	err := s.takeReport(c)
	s.metrics.countReport(reportByShop, err, "")
	return err
}

// refuseReport answers a request whose token was refused with err.
func (s *operatorService) refuseReport(c echo.Context, err error) error {
	s.metrics.countReport(reportByShop, err, c.Request().Header.Get("Authorization"))
	return s.limits.limitRefused(c.Request(), err)
}

// takeReport keeps the report of an admitted request.
func (s *operatorService) takeReport(c echo.Context) error {
	buf := scratchPool.Get().(*scratch)
	defer scratchPool.Put(buf)
	body, err := readBody(c.Request(), buf.body[:], problemTooLarge)
	if err != nil {
		return err
	}
	money, err := order.ReadMoney(body)
	if err != nil {
		return err
	}
	return s.keepReported(c, func(ctx context.Context) (order.Payment, error) {
		return s.config.Orders.Report(ctx, money)
	})
}

// keepReported is changePayment for what was reported. It takes a slot after the body was read, as
// orderService.answerChange does.
func (s *operatorService) keepReported(c echo.Context, keep func(context.Context) (order.Payment, error)) error {
	return s.inFlight.orders.withSlot(func() error { return s.changePayment(c, keep) })
}

// changePayment answers with the payment as the change leaves it.
func (s *operatorService) changePayment(
	c echo.Context, change func(context.Context) (order.Payment, error),
) error {
	var p order.Payment
	err := s.orders.changeInPostgres(c.Request().Context(), func(ctx context.Context) (err error) {
		p, err = change(ctx)
		return err
	})
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, p.View())
}

// noteRefund serves POST /v1/admin/payments/{reference}/refunded.
func (s *operatorService) noteRefund(c echo.Context, operator string) error {
	reference, err := referenceInPath(c)
	if err != nil {
		return err
	}
	var body struct {
		RefundReference string `json:"refund_reference"`
	}
	if err := readObject(c, &body); err != nil {
		return err
	}
	if err := order.ValidateRefundReference(body.RefundReference); err != nil {
		return err
	}
	return s.changePayment(c, func(ctx context.Context) (order.Payment, error) {
		return s.config.OperatorsOrders.Refund(ctx, reference, body.RefundReference, operator)
	})
}

// dismissPayment serves POST /v1/admin/payments/{reference}/dismissed.
func (s *operatorService) dismissPayment(c echo.Context, operator string) error {
	reference, err := referenceInPath(c)
	if err != nil {
		return err
	}
	var body struct {
		Reason string `json:"reason"`
	}
	if err := readObject(c, &body); err != nil {
		return err
	}
	if err := order.ValidateReason(body.Reason); err != nil {
		return err
	}
	return s.changePayment(c, func(ctx context.Context) (order.Payment, error) {
		return s.config.OperatorsOrders.Dismiss(ctx, reference, body.Reason, operator)
	})
}

// referenceInPath returns the reference of a payment in the path of a request.
func referenceInPath(c echo.Context) (reference string, err error) {
	reference = c.Param("reference")
	if c.Request().URL.RawPath != "" { // then the router has taken the path as it was sent
		reference, err = url.PathUnescape(reference)
	}
	if err != nil || !isText(reference) {
		return "", order.ErrPaymentNotFound
	}
	return reference, nil
}

// isText is false for what Postgres takes for no text: no payment has such a reference.
func isText(reference string) bool {
	return utf8.ValidString(reference) && strings.IndexByte(reference, 0) < 0
}

// defaultPayments is the length of a page if the request has no limit.
const defaultPayments = 50

// listPayments serves GET /v1/admin/payments. A reference may have slashes, so the payment with it is a list of one.
func (s *operatorService) listPayments(c echo.Context, _ string) error {
	var (
		filter    order.PaymentFilter
		reference string
		after     int64
	)
	limit := defaultPayments
	err := readQuery(c, map[string]func(string) error{
		"limit":  limitParameter(&limit, pageMax),
		"cursor": func(text string) (err error) { after, err = parsePosition(text); return err },
		"sale":   func(text string) error { return parseIDFilter("sale", "a sale", text, &filter.Sale) },
		"order":  func(text string) error { return parseIDFilter("order", "an order", text, &filter.Order) },
		"state": func(text string) error {
			if filter.State = order.PaymentState(text); !slices.Contains(order.PaymentStates(), filter.State) {
				return &order.InvalidError{Field: "state", Reason: "must be one of " + paymentStates()}
			}
			return nil
		},
		"reference": func(text string) error {
			if reference = text; text == "" || len(c.QueryParams()) > 1 {
				return &order.InvalidError{Field: "reference", Reason: "must be that of a payment, and stand alone"}
			}
			return nil
		},
	})
	if err != nil {
		return err
	}
	var answer struct {
		Payments   []order.PaymentView `json:"payments"`
		NextCursor string              `json:"next_cursor,omitempty"`
	}
	answer.Payments = []order.PaymentView{}
	err = s.orders.query(c.Request().Context(), operatorTimeout, func(ctx context.Context) error {
		payments, next, err := s.findPayments(ctx, reference, filter, after, limit)
		for _, p := range payments {
			answer.Payments = append(answer.Payments, p.View())
		}
		if next != 0 {
			answer.NextCursor = strconv.FormatInt(next, 10)
		}
		return err
	})
	if err != nil && !errors.Is(err, order.ErrPaymentNotFound) {
		return err
	}
	return writeJSON(c, http.StatusOK, answer)
}

// paymentStates lists the states of a payment for people.
func paymentStates() string {
	var names []string
	for _, state := range order.PaymentStates() {
		names = append(names, string(state))
	}
	return strings.Join(names, ", ")
}

func (s *operatorService) findPayments(
	ctx context.Context, reference string, filter order.PaymentFilter, after int64, limit int,
) (payments []order.Payment, next int64, err error) {
	switch {
	case reference == "":
		return s.config.OperatorsOrders.ListPayments(ctx, filter, after, limit)
	case !isText(reference):
		return nil, 0, order.ErrPaymentNotFound
	}
	p, err := s.config.OperatorsOrders.Payment(ctx, reference)
	if err != nil {
		return nil, 0, err
	}
	return []order.Payment{p}, 0, nil
}

// parsePosition reads the cursor of a list of payments, the position of the last one; no cursor is 0.
func parsePosition(text string) (int64, error) {
	if text == "" {
		return 0, nil
	}
	position, err := strconv.ParseInt(text, 10, 64)
	if err != nil || position == 0 || strconv.FormatInt(position, 10) != text {
		return 0, problemCursor
	}
	return position, nil
}

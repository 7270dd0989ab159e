package apiclient

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/google/uuid"

	"stampede/ledger/draws"
	"stampede/ledger/problems"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// reply is the answer of a server; its zero value is none.
type reply struct {
	status     int
	body       []byte
	retryAfter time.Duration
	// problem is empty unless an ingress wrote the answer.
	problem struct {
		Type, Title, Detail string
		RefundReference     string `json:"refund_reference"`
	}
}

// slug is the last part of the problem's type, or "" for an answer that no ingress made: that of a proxy, for example.
func (r reply) slug() string {
	slug, ours := strings.CutPrefix(r.problem.Type, "/problems/")
	if !ours {
		return ""
	}
	return slug
}

// isAnswerTo reports whether a success has what the answer to a change has: the id of its order or sale, or of the sale
// of a draw, or the reference of its payment. A proxy may answer 200 for others.
func (r reply) isAnswerTo(request call) bool {
	var changed struct {
		ID      uuid.UUID `json:"id"`
		OrderID uuid.UUID `json:"order_id"`
		SaleID  uuid.UUID `json:"sale_id"`

		Reference string `json:"reference"`
	}
	return request.method == http.MethodGet ||
		json.Unmarshal(r.body, &changed) == nil &&
			(changed.ID != uuid.Nil || changed.OrderID != uuid.Nil || changed.SaleID != uuid.Nil || changed.Reference != "")
}

// mayPass reports whether a later try may succeed, also of a call without an answer.
func (r reply) mayPass() bool {
	return r.slug() == "" || r.status == http.StatusTooManyRequests || r.status >= http.StatusInternalServerError
}

// decides reports whether an answer also tells what became of earlier tries of the same call.
func (r reply) decides() bool {
	switch r.status {
	case http.StatusNotFound, http.StatusConflict, http.StatusGone, http.StatusUnprocessableEntity:
		return r.slug() != ""
	}
	return false
}

// undecided reports whether an ingress does not say that nothing was done.
func (r reply) undecided() bool {
	switch r.slug() {
	case problems.Overloaded.Slug, problems.RateLimited.Slug, problems.Withdrawn.Slug, problems.NotReady.Slug:
		return r.status == http.StatusBadGateway || r.status == http.StatusGatewayTimeout // no ingress answers so
	case "":
		return true
	}
	return r.status >= http.StatusInternalServerError
}

// failure is the error of an answer that is no success.
func (r reply) failure() error {
	says := fmt.Sprintf("HTTP %d", r.status)
	switch {
	case r.problem.Detail != "":
		says += ": " + r.problem.Detail
	case r.problem.Title != "":
		says += ": " + r.problem.Title
	default:
		says += ", without a problem: is this the URL of an ingress?"
	}
	var err error
	switch r.slug() {
	case problems.Unauthorized.Slug, problems.Forbidden.Slug:
		err = ErrToken
	case problems.Invalid.Slug, problems.UnknownItem.Slug, problems.InvalidBeacon.Slug:
		err = ErrInvalid
	case problems.Transition.Slug, problems.NotConfirmed.Slug, problems.DrawNotFrozen.Slug, problems.DrawVoid.Slug:
		err = ErrRefused
	case problems.Refunded.Slug:
		err = &order.RefundedError{RefundReference: r.problem.RefundReference}
	case problems.OutcomeUnknown.Slug:
		err = ErrUnknown
	default:
		if err = r.sentinel(); err == nil {
			return errors.New(says)
		}
	}
	return fmt.Errorf("%w: %s", err, says)
}

// sentinel is the error on which a caller acts as if it had no server between, or nil.
func (r reply) sentinel() error {
	for _, err := range []error{
		reservation.ErrSaleNotFound, order.ErrNotFound, order.ErrArchived, catalog.ErrIdempotencyKeyReused,
		catalog.ErrRestockWithdrawn, order.ErrPaymentNotFound, order.ErrRefundNotDue, order.ErrNotUnclear,
		draws.ErrNoDraw,
	} {
		if known, _ := problems.Find(err); known.Slug == r.slug() {
			return err
		}
	}
	return nil
}

// neverSent reports whether a try failed before anything was sent.
func neverSent(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial"
}

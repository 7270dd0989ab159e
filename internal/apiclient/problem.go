package apiclient

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

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
	problem struct{ Type, Title, Detail string }
}

// slug is the last part of the problem's type.
func (r reply) slug() string {
	for i := len(r.problem.Type) - 1; i >= 0; i-- {
		if r.problem.Type[i] == '/' {
			return r.problem.Type[i+1:]
		}
	}
	return r.problem.Type
}

// mayPass reports whether a later try may succeed, also of a call without an answer.
func (r reply) mayPass() bool {
	return r.status == 0 || r.status == http.StatusTooManyRequests || r.status >= http.StatusInternalServerError
}

// undecided reports whether the server does not say that nothing was done.
func (r reply) undecided() bool {
	switch r.slug() {
	case "overloaded", "rate-limited", "restock-withdrawn", "not-ready":
		return false
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
	for slug, err := range map[string]error{
		"unauthorized":           ErrToken,
		"forbidden":              ErrToken,
		"sale-not-found":         reservation.ErrSaleNotFound,
		"order-not-found":        order.ErrNotFound,
		"order-archived":         order.ErrArchived,
		"invalid-request":        ErrInvalid,
		"idempotency-key-reused": catalog.ErrIdempotencyKeyReused,
		"restock-withdrawn":      catalog.ErrRestockWithdrawn,
		"illegal-transition":     ErrRefused,
		"order-not-confirmed":    ErrRefused,
		"outcome-unknown":        ErrUnknown,
	} {
		if r.slug() == slug {
			return fmt.Errorf("%w: %s", err, says)
		}
	}
	return errors.New(says)
}

// neverSent reports whether a try failed before anything was sent.
func neverSent(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial"
}

package stream

import (
	"fmt"
	"strings"

	"github.com/google/uuid"
)

// OrderErrors is returned by a handler that cannot apply these orders of a message, and has applied
// all others. Each becomes a dead letter of its own.
type OrderErrors []OrderError

// OrderError says why an order of a message cannot be applied.
type OrderError struct {
	OrderID uuid.UUID
	Err     error
}

// Error names the first few orders.
func (e OrderErrors) Error() string {
	const named = 3
	texts := make([]string, 0, named+1)
	for _, o := range e[:min(len(e), named)] {
		texts = append(texts, fmt.Sprintf("order %s: %v", o.OrderID, o.Err))
	}
	if more := len(e) - named; more > 0 {
		texts = append(texts, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(texts, "; ")
}

// Unwrap returns the errors of all orders.
func (e OrderErrors) Unwrap() []error {
	errs := make([]error, len(e))
	for i, o := range e {
		errs[i] = o.Err
	}
	return errs
}

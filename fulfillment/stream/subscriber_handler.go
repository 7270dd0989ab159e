package stream

import (
	"context"
	"fmt"
)

var (
	// ErrStopping is returned for a message that was not recorded before the worker had to stop. It
	// is no fault of the message, which stays pending and is delivered again. It wraps
	// context.Canceled, which the Router does not log as a failure.
	ErrStopping = fmt.Errorf("worker is stopping: %w", context.Canceled)

	// ErrPutOff is returned for messages of blocked sales when too many of them wait. They stay
	// pending, and are claimed after a while. It is no fault of the messages, nor a failure to the
	// Router.
	ErrPutOff = fmt.Errorf("too many messages of sales that are blocked: %w", context.Canceled)
)

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

	// ErrDeferred is returned for messages of blocked sales when too many of them wait. They stay
	// pending, and are claimed after a while. It is no fault of the messages, and the Router
	// does not log it as a failure.
	ErrDeferred = fmt.Errorf("too many messages of blocked sales are waiting: %w", context.Canceled)
)

package main

import (
	"errors"
	"fmt"
	"io"
	"net"

	"stampede/internal/connect"
	"stampede/reservation/order"
	"stampede/sql"
)

// The exit statuses.
const (
	exitOK     = 0
	exitFailed = 1 // also: a promise is broken, a setting is unsafe, a server is not ready
	exitUsage  = 2 // the command line or the configuration is wrong
	// exitUnknown: something could not be looked at, because a server did not answer or something else kept it; what could
	// be looked at is in order.
	exitUnknown = 3
)

// errBroken ends a command whose output has said already what is wrong.
var errBroken = errors.New("a promise is broken")

// errUnchecked ends a command whose output has told already what could not be looked at.
var errUnchecked = errors.New("something could not be looked at")

// lookError is for a command that could not look at what it is to judge.
type lookError struct{ err error }

func (e *lookError) Error() string { return e.err.Error() }
func (e *lookError) Unwrap() error { return e.err }

// couldNotLook marks an error of a look, nil for none.
func couldNotLook(err error) error {
	if err == nil {
		return nil
	}
	return &lookError{err}
}

// usageError is for what whoever typed the command can mend.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, a ...any) error { return &usageError{fmt.Errorf(format, a...)} }

// listenError names the setting behind an address on which a server could not listen.
func listenError(err error, variable, flag string) error {
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "listen" {
		return fmt.Errorf("%w: let %s (%s) name another address", err, variable, flag)
	}
	return err
}

// reportError says what went wrong, once, and maps it to the exit status. This is the only place that does.
func reportError(stderr io.Writer, err error) int {
	var (
		usage   *usageError
		invalid *order.InvalidError
		unknown *lookError
	)
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errBroken), errors.Is(err, errRemaining):
		return exitFailed
	case errors.As(err, &usage), errors.As(err, &invalid),
		errors.Is(err, connect.ErrRedisURL), errors.Is(err, sql.ErrDatabaseURL):
		_, _ = fmt.Fprintln(stderr, "stampede:", err)
		return exitUsage
	case errors.Is(err, errUnchecked):
		return exitUnknown
	case errors.As(err, &unknown):
		_, _ = fmt.Fprintln(stderr, "stampede:", err)
		return exitUnknown
	default:
		_, _ = fmt.Fprintln(stderr, "stampede:", err)
		return exitFailed
	}
}

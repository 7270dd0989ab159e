package main

import (
	"errors"
	"fmt"
	"io"
	"net"

	"stampede/internal/connect"
	"stampede/internal/operators"
	"stampede/reservation/order"
	"stampede/sql"
)

// The exit statuses.
const (
	exitOK     = 0
	exitFailed = 1 // also if a promise is broken, a setting is unsafe or a server is not ready
	exitUsage  = 2 // the command line or the configuration is wrong
	// exitUnknown: something could not be checked, for example because a server did not answer; what was checked
	// is in order.
	exitUnknown = 3
)

// errBroken ends a command whose output already shows what is wrong.
var errBroken = errors.New("a promise is broken")

// errUnchecked ends a command whose output already shows what could not be checked.
var errUnchecked = errors.New("something could not be checked")

// uncheckedError is the error of a command that could not read what it checks.
type uncheckedError struct{ err error }

func (e *uncheckedError) Error() string { return e.err.Error() }
func (e *uncheckedError) Unwrap() error { return e.err }

// unchecked wraps an error that prevented a check; nil stays nil.
func unchecked(err error) error {
	if err == nil {
		return nil
	}
	return &uncheckedError{err}
}

// usageError is an error that a change of the command line or configuration corrects.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, a ...any) error { return &usageError{fmt.Errorf(format, a...)} }

// listenError names the setting behind an address on which a server could not listen.
func listenError(err error, variable, flag string) error {
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "listen" {
		return fmt.Errorf("%w: set %s (%s) to another address", err, variable, flag)
	}
	return err
}

// reportError prints the error and maps it to the exit status. This is the only place that does either.
func reportError(stderr io.Writer, err error) int {
	var (
		usage   *usageError
		invalid *order.InvalidError
		unknown *uncheckedError
	)
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errBroken), errors.Is(err, errRemaining):
		return exitFailed
	case errors.As(err, &usage), errors.As(err, &invalid),
		errors.Is(err, connect.ErrRedisURL), errors.Is(err, sql.ErrDatabaseURL), errors.Is(err, operators.ErrFile):
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

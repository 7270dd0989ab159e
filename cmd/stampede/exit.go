package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
	"github.com/jackc/pgx/v5/pgconn"

	"stampede/internal/connect"
	"stampede/internal/operators"
	"stampede/ledger/deadletter"
	"stampede/ledger/draws"
	"stampede/reservation/order"
	"stampede/reservation/problems"
	"stampede/sql"
	"stampede/upkeep/archive"
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

// exitStatuses is part of the help.
const exitStatuses = "Exit status: 0, all is well; 1, a promise is broken, a setting is unsafe or the command failed; " +
	"2, the command line or a setting is wrong, and nothing was done; 3, something could not be looked at, for example " +
	"because a server does not answer."

// look is embedded by commands that change nothing. If they cannot read what they show, their exit status is
// exitUnknown, because nothing is known to be wrong.
type look struct{}

func (look) onlyLooks() {}

// onlyLooks reports whether a command embeds look.
func onlyLooks(command *kong.Node) bool {
	if command == nil || !command.Target.CanAddr() {
		return false
	}
	_, looks := command.Target.Addr().Interface().(interface{ onlyLooks() })
	return looks
}

// unseen wraps the error of a command that only looks, unless the error is what it found: that there is no such thing,
// that a process is not ready, or that a file is damaged or cannot be written.
func unseen(err error) error {
	if known, ok := problems.Find(err); ok && known.Status == http.StatusNotFound {
		return err
	}
	for _, found := range []error{
		errBroken, errNotReady, deadletter.ErrNotFound, order.ErrPaymentNotFound, draws.ErrNoDraw, archive.ErrDamagedFile,
	} {
		if errors.Is(err, found) {
			return err
		}
	}
	if _, file := errors.AsType[*fs.PathError](err); file {
		return err
	}
	return unchecked(err)
}

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
		say(stderr, err)
		return exitUsage
	case errors.Is(err, errUnchecked):
		return exitUnknown
	case errors.As(err, &unknown):
		say(stderr, err)
		return exitUnknown
	default:
		say(stderr, err)
		return exitFailed
	}
}

// say prints an error, which may quote what others wrote.
func say(stderr io.Writer, err error) {
	lines := strings.Split(message(err), "\n")
	for i := range lines {
		lines[i] = printable(lines[i])
	}
	_, _ = fmt.Fprintln(stderr, "stampede:", strings.Join(lines, "\n"))
}

// message is the text of an error. If a server was not reached, it names the setting that says where the server is.
func message(err error) string {
	text, setting := unreached(err)
	if setting == "" {
		return text
	}
	return text + ": " + startOr(setting)
}

func startOr(setting string) string {
	return "start the server, or set " + setting + " to the right one"
}

// unreached returns the text of an error, and the setting of the server that was not reached, or "". Of pgx, which
// tries each address with TLS and without, the text has each failure once.
func unreached(err error) (text, setting string) {
	text = err.Error()
	if failed, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		setting = "DATABASE_URL"
		if _, answered := errors.AsType[*pgconn.PgError](err); answered { // such as: too many clients
			setting = ""
		}
		tries := strings.Split(failed.Error(), "\n\t")
		once := strings.TrimSpace(tries[0] + " " + strings.Join(slices.Compact(tries[1:]), "; "))
		return strings.ReplaceAll(text, failed.Error(), once), setting
	}
	_, overHTTP := errors.AsType[*url.Error](err)
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" && !overHTTP {
		setting = "REDIS_URL"
	}
	return text, setting
}

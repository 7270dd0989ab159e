package ledger

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"stampede/reservation/order"
)

var (
	// ErrUnknownSale is returned for an event of a sale that Postgres does not have.
	ErrUnknownSale = errors.New("unknown sale")
	// ErrContradiction is returned for an event that says something else of its order than what was recorded.
	ErrContradiction = errors.New("event contradicts the ledger")
	// ErrOversold is returned when a batch holds more units than are left of a sale in Postgres.
	ErrOversold = errors.New("more units than the sale's stock holds")
	// ErrGuardMissing is returned where Postgres lacks a constraint or an index of the schema, without which nothing can be
	// recorded. Its text tells the SQL that puts it back.
	ErrGuardMissing = errors.New("a constraint or an index is missing in Postgres")

	// errEpochOver: the stock of a sale was made anew while orders of it were being recorded. The next try
	// finds out which of them it goes without.
	ErrEpochOver = errors.New("the epoch of a sale has just ended")

	// errNoConnection: Postgres is away, or all connections are in use.
	errNoConnection = errors.New("no connection to Postgres")

	ErrPanicked = errors.New("panic while recording")

	// errBlocked: events were not recorded because of a lock that somebody else has, or because it took too long. That says
	// nothing about them; they are tried again apart from others.
	ErrBlocked = errors.New("blocked")
)

// Fault tells what an error means for the messages that it befell.
type Fault int

const (
	// transient: the surroundings are at fault, and the same batch will succeed when they have recovered.
	Transient Fault = iota
	// badData: an event of the batch is at fault, and will be tomorrow.
	BadData
	// oversold: Postgres' stock does not hold the batch; one event less may fit.
	oversold
)

const (
	// oversoldConstraint is the CHECK on sales in sql/migrations.
	oversoldConstraint = "sales_not_oversold"

	notNullViolation = "23502"
	uniqueViolation  = "23505"
	// noSuchConstraint is the answer to an ON CONFLICT for which there is no unique index.
	noSuchConstraint = "42P10"

	lockNotAvailable   = "55P03"
	queryCanceled      = "57014"
	transactionTimeout = "25P04"
)

// FaultOf classifies an error of the ledger or of the decoder. Whatever it does not know counts as
// transient: to wait for an operator loses nothing, to park healthy orders as dead letters would.
func FaultOf(err error) Fault {
	switch {
	case errors.Is(err, ErrOversold):
		return oversold
	case errors.Is(err, ErrEpochOver):
		return Transient
	}
	for _, data := range []error{ErrUnknownSale, ErrContradiction, ErrPanicked, order.ErrUndecodable} {
		if errors.Is(err, data) {
			return BadData
		}
	}
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && (hasClass(pgErr, "22") || hasClass(pgErr, "23")) {
		return BadData // data exception, integrity constraint violation
	}
	var unreadable pgx.ScanArgError
	if errors.As(err, &unreadable) {
		return BadData // what is stored of an order of the batch cannot be read, and will not be tomorrow
	}
	return Transient
}

// saleError is an error of the statement that changes the counter of a sale.
type saleError struct {
	sale uuid.UUID
	error
}

func (e *saleError) Unwrap() error { return e.error }

// IsLocked tells whether somebody else had a lock for too long that the transaction needed.
func IsLocked(err error) bool { return hasCode(err, lockNotAvailable) }

// IsTooSlow tells whether a transaction that was under way has taken too long. Less of it may not.
func IsTooSlow(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, errNoConnection) || hasCode(err, queryCanceled) || hasCode(err, transactionTimeout)
}

func hasCode(err error, code string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == code
}

func hasClass(err *pgconn.PgError, class string) bool { return strings.HasPrefix(err.Code, class) }

// OfConstraint names what a constraint says, or one that is missing, so that callers need not know SQLSTATEs.
func OfConstraint(err error) error {
	var pgErr *pgconn.PgError
	switch {
	case !errors.As(err, &pgErr):
		return err
	case pgErr.Code == noSuchConstraint:
		return fmt.Errorf("%w (`stampede doctor` names it): %w", ErrGuardMissing, err)
	case pgErr.ConstraintName == oversoldConstraint:
		return fmt.Errorf("%w: %w", ErrOversold, err)
	case pgErr.Code == notNullViolation && pgErr.TableName == "sales" && pgErr.ColumnName == "epoch": // see ledger/add_sold.sql
		return fmt.Errorf("%w: %w", ErrEpochOver, err)
	}
	return err
}

// isNotFresh tells whether ledger/record_fresh.sql has failed because some of its events were not for it.
func isNotFresh(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) &&
		(pgErr.Code == uniqueViolation || pgErr.Code == notNullViolation && pgErr.TableName == "order_events" && pgErr.ColumnName == "sale_id")
}

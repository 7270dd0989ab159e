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
	// errUnknownSale is returned for an event of a sale that Postgres does not have.
	errUnknownSale = errors.New("unknown sale")
	// errWrongItems is returned for an event whose lines are not items of its sale, or that lacks lines or has some
	// against its sale.
	errWrongItems = errors.New("the lines are not of the items of the sale")
	// ErrContradiction is returned for an event that differs from what was recorded of its order.
	ErrContradiction = errors.New("event contradicts the ledger")
	// errOversold is returned when a batch holds more units than a sale has left in Postgres.
	errOversold = errors.New("more units than the sale's stock holds")
	// ErrGuardMissing is returned when Postgres lacks a constraint or an index without which nothing can
	// be recorded. Its text includes the SQL that restores it.
	ErrGuardMissing = errors.New("a constraint or an index is missing in Postgres")

	// ErrEpochOver is returned when a sale's stock was rebuilt while its orders were being recorded. The
	// next attempt voids the orders of the earlier epoch.
	ErrEpochOver = errors.New("the epoch of a sale has just ended")

	// errNoConnection is returned when Postgres is unreachable or all connections are in use.
	errNoConnection = errors.New("no connection to Postgres")

	// ErrPanicked is returned after a panic while a batch was recorded.
	ErrPanicked = errors.New("panic while recording")

	// ErrBlocked is returned for events that were not recorded because of a lock or a slow transaction.
	// The events may be valid; they are retried apart from others.
	ErrBlocked = errors.New("blocked")
)

// Fault says where the cause of an error lies.
type Fault int

const (
	// Transient: the environment is at fault; the same batch succeeds once it has recovered.
	Transient Fault = iota
	// BadData: an event of the batch is at fault; retries do not help.
	BadData
	// oversold: the stock in Postgres does not hold the batch; a smaller batch may fit.
	oversold
)

const (
	// The CHECKs on sales and sale_items in sql/migrations.
	oversoldConstraint      = "sales_not_oversold"
	oversoldItemsConstraint = "sale_items_not_oversold"

	notNullViolation = "23502"
	uniqueViolation  = "23505"
	checkViolation   = "23514"
	// noSuchConstraint is the error of an ON CONFLICT without a matching unique index.
	noSuchConstraint = "42P10"

	lockNotAvailable   = "55P03"
	queryCanceled      = "57014"
	transactionTimeout = "25P04"
)

// FaultOf classifies an error of the ledger or of the decoder. Unknown errors count as transient: waiting
// for an operator loses nothing, while dead-lettering would park healthy orders.
func FaultOf(err error) Fault {
	switch {
	case errors.Is(err, errOversold):
		return oversold
	case errors.Is(err, ErrEpochOver):
		return Transient
	}
	for _, data := range []error{
		errUnknownSale, errWrongItems, order.ErrArchived, ErrContradiction, ErrPanicked, order.ErrUndecodable,
	} {
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
		return BadData // the stored order of the batch cannot be read
	}
	return Transient
}

// saleError is an error of the statement that changes the counter of a sale, or those of its items.
type saleError struct {
	sale uuid.UUID
	error
}

func (e *saleError) Unwrap() error { return e.error }

// IsLocked reports whether the transaction waited too long for a lock.
func IsLocked(err error) bool { return hasCode(err, lockNotAvailable) }

// IsTooSlow reports whether a running transaction took too long. A smaller one may not.
func IsTooSlow(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, errNoConnection) || hasCode(err, queryCanceled) ||
		hasCode(err, transactionTimeout)
}

func hasCode(err error, code string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == code
}

func hasClass(err *pgconn.PgError, class string) bool { return strings.HasPrefix(err.Code, class) }

// TranslateError translates SQLSTATEs of constraints, violated or missing, into errors of this package.
func TranslateError(err error) error {
	var pgErr *pgconn.PgError
	switch {
	case !errors.As(err, &pgErr):
		return err
	case pgErr.Code == noSuchConstraint:
		return fmt.Errorf("%w (`stampede doctor` names it): %w", ErrGuardMissing, err)
	case pgErr.ConstraintName == oversoldConstraint, pgErr.ConstraintName == oversoldItemsConstraint:
		return fmt.Errorf("%w: %w", errOversold, err)
	// see ledger/add_sold.sql
	case pgErr.Code == notNullViolation && pgErr.TableName == "sales" && pgErr.ColumnName == "epoch":
		return fmt.Errorf("%w: %w", ErrEpochOver, err)
	// see ledger/return_sold.sql
	case pgErr.Code == notNullViolation && pgErr.TableName == "sales" && pgErr.ColumnName == "sold":
		return fmt.Errorf("%w: %w", order.ErrArchived, err)
	}
	return err
}

// isWithoutMonth reports whether Postgres has no tables for the orders of a sale. A partitioned table then fails like
// a CHECK without a name.
func isWithoutMonth(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == checkViolation && pgErr.ConstraintName == "" &&
		(pgErr.TableName == "order_events" || pgErr.TableName == "orders")
}

// isNotFresh reports whether record_fresh.sql failed because some of its events need record_orders.sql.
func isNotFresh(err error) bool {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return false
	}
	return pgErr.Code == uniqueViolation || pgErr.Code == notNullViolation && pgErr.ColumnName == "sale_id" ||
		isWithoutMonth(err)
}

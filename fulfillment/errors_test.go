package fulfillment

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/stream"
	"stampede/reservation"
)

func TestFaultOf(t *testing.T) {
	t.Parallel()
	state := func(code string) error { return fmt.Errorf("record: %w", &pgconn.PgError{Code: code}) }
	for _, c := range []struct {
		what string
		err  error
		want fault
	}{
		{"connection failure", state("08006"), transient},
		{"admin shutdown", state("57P01"), transient},
		{"starting up", state("57P03"), transient},
		{"query cancelled by a time-out", state("57014"), transient},
		{"too many connections", state("53300"), transient},
		{"disk full", state("53100"), transient},
		{"serialization failure", state("40001"), transient},
		{"deadlock", state("40P01"), transient},
		{"lock not available", state("55P03"), transient},
		{"read only", state("25006"), transient},
		{"password changed", state("28P01"), transient},
		{"no such database", state("3D000"), transient},
		{"undefined table: not migrated", state("42P01"), transient},
		{"undefined column: another schema", state("42703"), transient},
		{"internal error", state("XX000"), transient},
		{"data corrupted", state("XX001"), transient},
		{"unknown class", state("ZZ999"), transient},
		{"connection lost", fmt.Errorf("record: %w", io.ErrUnexpectedEOF), transient},
		{"time is up", context.DeadlineExceeded, transient},
		{"anything else", errors.New("who knows"), transient},

		{"text too long", state("22001"), badData},
		{"number out of range", state("22003"), badData},
		{"zero byte in a text", state("22021"), badData},
		{"not null", state("23502"), badData},
		{"unique", state("23505"), badData},
		{"check", state("23514"), badData},
		{"a row that cannot be read", fmt.Errorf("record: %w", pgx.ScanArgError{Err: errors.New("cannot scan -Infinity")}), badData},
		{"undecodable", fmt.Errorf("message: %w", reservation.ErrUndecodable), badData},
		{"unknown sale", fmt.Errorf("%w: x", ErrUnknownSale), badData},
		{"contradiction", fmt.Errorf("%w: x", ErrContradiction), badData},
		{"panic", fmt.Errorf("%w: x", errPanicked), badData},

		{"the sale's own check", ofConstraint(&pgconn.PgError{Code: "23514", ConstraintName: "sales_not_oversold"}), oversold},
		{"an epoch that is over", ofConstraint(&pgconn.PgError{Code: "23502", TableName: "sales", ColumnName: "epoch"}), transient},
		{"another value that is missing", ofConstraint(&pgconn.PgError{Code: "23502", TableName: "orders", ColumnName: "epoch"}), badData},
		{"another check", ofConstraint(&pgconn.PgError{Code: "23514", ConstraintName: "orders_quantity_check"}), badData},
	} {
		require.Equal(t, c.want, faultOf(c.err), c.what)
	}
}

func TestErrStoppingWrapsCanceled(t *testing.T) {
	t.Parallel()
	require.ErrorIs(t, stream.ErrStopping, context.Canceled)
}

package ledger

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"stampede/reservation/order"
	"stampede/stream"
)

func TestFaultOf(t *testing.T) {
	t.Parallel()
	state := func(code string) error { return fmt.Errorf("record: %w", &pgconn.PgError{Code: code}) }
	for _, c := range []struct {
		what string
		err  error
		want Fault
	}{
		{"connection failure", state("08006"), Transient},
		{"admin shutdown", state("57P01"), Transient},
		{"starting up", state("57P03"), Transient},
		{"query cancelled by a time-out", state("57014"), Transient},
		{"too many connections", state("53300"), Transient},
		{"disk full", state("53100"), Transient},
		{"serialization failure", state("40001"), Transient},
		{"deadlock", state("40P01"), Transient},
		{"lock not available", state("55P03"), Transient},
		{"read only", state("25006"), Transient},
		{"password changed", state("28P01"), Transient},
		{"no such database", state("3D000"), Transient},
		{"undefined table: not migrated", state("42P01"), Transient},
		{"undefined column: another schema", state("42703"), Transient},
		{"internal error", state("XX000"), Transient},
		{"data corrupted", state("XX001"), Transient},
		{"unknown class", state("ZZ999"), Transient},
		{"connection lost", fmt.Errorf("record: %w", io.ErrUnexpectedEOF), Transient},
		{"deadline exceeded", context.DeadlineExceeded, Transient},
		{"anything else", errors.New("unknown"), Transient},

		{"text too long", state("22001"), BadData},
		{"number out of range", state("22003"), BadData},
		{"zero byte in a text", state("22021"), BadData},
		{"not null", state("23502"), BadData},
		{"unique", state("23505"), BadData},
		{"check", state("23514"), BadData},
		{
			"a row that cannot be read",
			fmt.Errorf("record: %w", pgx.ScanArgError{Err: errors.New("cannot scan -Infinity")}), BadData,
		},
		{"undecodable", fmt.Errorf("message: %w", order.ErrUndecodable), BadData},
		{"unknown sale", fmt.Errorf("%w: x", errUnknownSale), BadData},
		{"contradiction", fmt.Errorf("%w: x", ErrContradiction), BadData},
		{"panic", fmt.Errorf("%w: x", ErrPanicked), BadData},

		{
			"the check of the stock", TranslateError(&pgconn.PgError{Code: "23514", ConstraintName: "sales_not_oversold"}),
			oversold,
		},
		{
			"an ended epoch", TranslateError(&pgconn.PgError{Code: "23502", TableName: "sales", ColumnName: "epoch"}),
			Transient,
		},
		{
			"another missing value",
			TranslateError(&pgconn.PgError{Code: "23502", TableName: "orders", ColumnName: "epoch"}), BadData,
		},
		{"another check", TranslateError(&pgconn.PgError{Code: "23514", ConstraintName: "orders_quantity_check"}), BadData},
	} {
		require.Equal(t, c.want, FaultOf(c.err), c.what)
	}
}

func TestErrStoppingWrapsCanceled(t *testing.T) {
	t.Parallel()
	require.ErrorIs(t, stream.ErrStopping, context.Canceled)
}

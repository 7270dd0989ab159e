package target

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"stampede/sql"
)

// Claim makes a process the one that delivers to a target. It returns ErrNotFound if the target is not active.
func Claim(ctx context.Context, conn *pgx.Conn, name, holder string) (*Target, error) {
	rows, err := conn.Query(ctx, sql.RelayClaim, name, holder)
	if err != nil {
		return nil, fmt.Errorf("claim the target %s: %w", name, err)
	}
	t, err := pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByName[Target])
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("claim the target %s: %w", name, err)
	}
	return t, nil
}

// Move records that all events up to a position are delivered, and that some of them were delivered just now. It
// returns ErrStale for a holder that was replaced.
func (t *Target) Move(ctx context.Context, conn *pgx.Conn, position int64, delivered bool) error {
	tag, err := conn.Exec(ctx, sql.RelayMove, t.Name, t.Fence, position, delivered)
	switch {
	case err != nil:
		return fmt.Errorf("move the position of the target %s: %w", t.Name, err)
	case tag.RowsAffected() == 0:
		return ErrStale
	}
	t.Position, t.Failures = position, 0
	return nil
}

// NoteFailure records why a delivery failed, after which pause the next one is tried, and up to which position all
// events are delivered. It disables the target if that is final.
func (t *Target) NoteFailure(
	ctx context.Context, conn *pgx.Conn, position int64, failure error, pause time.Duration, final bool,
) error {
	text := strings.ToValidUTF8(failure.Error(), "?")
	text = strings.ReplaceAll(text[:min(len(text), errorMax)], "\x00", "?")
	tag, err := conn.Exec(ctx, sql.RelayNoteFailure, t.Name, t.Fence, t.Failures+1, strings.ToValidUTF8(text, "?"),
		pause.Milliseconds(), final, position)
	switch {
	case err != nil:
		return fmt.Errorf("note the failure of the target %s: %w", t.Name, err)
	case tag.RowsAffected() == 0:
		return ErrStale
	}
	t.Position, t.Failures = position, t.Failures+1
	return nil
}

package designs

import (
	"context"
	_ "embed"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"

	"stampede/bench/front"
)

//go:embed sql/record_order.sql
var recordOrderSQL string

// execer is a pool, a connection or a transaction.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// unnumbered is the sequence of orders in designs that do not number them.
const unnumbered = 0

// recordOrder writes the rows of a confirmed order, as the product's ledger does, in one round trip. A
// repetition changes nothing.
func recordOrder(ctx context.Context, db execer, o front.Order, sequence int64) error {
	_, err := db.Exec(ctx, recordOrderSQL, o.ID, o.Sale, o.User, o.Quantity, reservedAt(o.ID), sequence)
	if err != nil {
		return fmt.Errorf("record order=%s: %w", o.ID, err)
	}
	return nil
}

// reservedAt is the time in the order's UUIDv7.
func reservedAt(order uuid.UUID) time.Time {
	return time.Unix(order.Time().UnixTime()).UTC()
}

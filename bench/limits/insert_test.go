package limits

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// insertBatch is the number of orders per transaction: the maximum of a worker.
const insertBatch = 500

// The rows that the ledger writes for confirmed orders, without any check: whether the sale exists,
// whether an event was recorded before, whether the user has another order.
const (
	insertEvents = `INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at,
		reserved_at, sequence, epoch)
		SELECT order_id, 2, 'OrderConfirmed', $2, user_id, 1, now(), $5, sequence, 1
		FROM unnest($1::uuid[], $3::text[], $4::bigint[]) AS e (order_id, user_id, sequence)`
	insertOrders = `INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at,
		updated_at, key_fingerprint)
		SELECT order_id, $2, user_id, 1, 'confirmed', 2, sequence, 1, $5, now(), NULL
		FROM unnest($1::uuid[], $3::text[], $4::bigint[]) AS e (order_id, user_id, sequence)`
	addSold = `UPDATE sales SET sold = sold + $2, last_sequence = greatest(last_sequence, $3) WHERE id = $1`
)

// orderColumns are the orders of one transaction as arrays, built before the clock starts.
type orderColumns struct {
	ids       []uuid.UUID
	users     []string
	sequences []int64
	at        time.Time
}

func newColumns(requests []request) []orderColumns {
	var all []orderColumns
	for first := 0; first < len(requests); first += insertBatch {
		c := orderColumns{at: time.Now()}
		for i, r := range requests[first:min(first+insertBatch, len(requests))] {
			c.ids, c.users = append(c.ids, r.order), append(c.users, r.user)
			c.sequences = append(c.sequences, int64(first+i+1))
		}
		all = append(all, c)
	}
	return all
}

// inserter writes orders in one transaction.
type inserter func(ctx context.Context, conn *pgx.Conn, sale uuid.UUID, c orderColumns) error

// insertAll writes the orders over several connections, each its share, one transaction after another.
func (s shop) insertAll(b *testing.B, orders []orderColumns, connections int, write inserter) {
	b.Helper()
	var all errgroup.Group
	for i := range connections {
		all.Go(func() error {
			return s.Pool.AcquireFunc(b.Context(), func(conn *pgxpool.Conn) error {
				for n := i; n < len(orders); n += connections {
					if err := write(b.Context(), conn.Conn(), s.sale, orders[n]); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
	require.NoError(b, all.Wait())
}

// insertUnnest sends one transaction in one round trip.
func insertUnnest(ctx context.Context, conn *pgx.Conn, sale uuid.UUID, c orderColumns) error {
	batch := &pgx.Batch{}
	batch.Queue("BEGIN")
	batch.Queue(insertEvents, c.ids, sale, c.users, c.sequences, c.at)
	batch.Queue(insertOrders, c.ids, sale, c.users, c.sequences, c.at)
	batch.Queue(addSold, sale, len(c.ids), c.sequences[len(c.sequences)-1])
	batch.Queue("COMMIT")
	return conn.SendBatch(ctx, batch).Close()
}

// insertCopy writes the same rows by COPY, with more round trips and less parsing.
func insertCopy(ctx context.Context, conn *pgx.Conn, sale uuid.UUID, c orderColumns) error {
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		events := pgx.CopyFromSlice(len(c.ids), func(i int) ([]any, error) {
			return []any{
				c.ids[i], 2, "OrderConfirmed", sale, c.users[i], 1, c.at, c.at, c.sequences[i], 1,
			}, nil
		})
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"order_events"}, []string{
			"order_id", "version", "type", "sale_id", "user_id", "quantity", "occurred_at", "reserved_at", "sequence", "epoch",
		}, events)
		if err != nil {
			return err
		}
		orders := pgx.CopyFromSlice(len(c.ids), func(i int) ([]any, error) {
			return []any{c.ids[i], sale, c.users[i], 1, "confirmed", 2, c.sequences[i], 1, c.at, c.at, nil}, nil
		})
		_, err = tx.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{
			"id", "sale_id", "user_id", "quantity", "status", "version", "sequence", "epoch", "reserved_at", "updated_at",
			"key_fingerprint",
		}, orders)
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, addSold, sale, len(c.ids), c.sequences[len(c.sequences)-1])
		return err
	})
}

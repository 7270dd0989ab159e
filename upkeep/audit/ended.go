package audit

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

// loadEnded copies the ended orders in Redis. It runs after the snapshot of Postgres: Redis gets an
// ended order before its release is deleted.
func (l *look) loadEnded(ctx context.Context, tx pgx.Tx) error {
	if err := l.unreadError(theSales); err != nil {
		return err
	}
	for _, shard := range l.readable {
		key := l.Keys.Ended(shard.partition, shard.id)
		for cursor, begun := uint64(0), false; !begun || cursor != 0; begun = true {
			page, next, err := l.Redis.HScan(ctx, key, cursor, "", buyersPerTrip).Result()
			if stream.IsWrongType(err) {
				break // reported as a foreign key
			} else if err != nil {
				return fmt.Errorf("read the ended orders of sale %s: %w", shard.id, err)
			}
			cursor = next
			if err := copyEnded(ctx, tx, shard, page); err != nil {
				return fmt.Errorf("copy the ended orders: %w", err)
			}
		}
	}
	return nil
}

// copyEnded copies a page: name, order, name, …. Names of users of another shard are left out: no request finds them.
func copyEnded(ctx context.Context, tx pgx.Tx, shard auditedShard, page []string) error {
	rows := make([][]any, 0, len(page)/2)
	for ; len(page) >= 2; page = page[2:] {
		name, text := page[0], page[1]
		if deadletter.Storable(name) != name || len(name) < order.FingerprintChars { // no order has this name
			continue
		}
		if shard.layout.ShardOf(name[order.FingerprintChars:]) != shard.shard {
			continue
		}
		row := []any{shard.id, name, nil, nil, nil}
		if id, quantity, status, err := reservation.ParseEnded(text); err == nil {
			row[2], row[3], row[4] = id, quantity, string(status)
		}
		rows = append(rows, row)
	}
	if len(rows) == 0 {
		return nil
	}
	_, err := tx.CopyFrom(ctx, pgx.Identifier{"audit_ended"},
		[]string{"sale_id", "name", "order_id", "quantity", "status"}, pgx.CopyFromRows(rows))
	return err
}

package audit

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/stream"
)

var waitingColumns = []string{"order_id", "parked"}

// loadWaiting copies the orders whose events are unread or pending in the streams.
//
// The buyers were read before, so an event of theirs that is missing here was finished: it is in
// Postgres, as an order or a dead letter, or it is lost.
func (l *look) loadWaiting(ctx context.Context) error {
	if err := l.unreadError(theStreams); err != nil {
		return err
	}
	for _, key := range l.streams {
		scan := waitingScan{ctx: ctx, rdb: l.Redis, stream: key, pending: map[string]bool{}}
		if err := scan.begin(); stream.IsWrongType(err) {
			continue // reported as a foreign key, and holds no event
		} else if err != nil {
			return fmt.Errorf("read the unfinished entries of %s: %w", key, err)
		}
		if _, err := l.conn.CopyFrom(ctx, pgx.Identifier{"audit_waiting"}, waitingColumns,
			pgx.CopyFromFunc(scan.next)); scan.err != nil {
			return fmt.Errorf("read the unfinished entries of %s: %w", key, scan.err)
		} else if err != nil {
			return fmt.Errorf("copy the unfinished entries of %s: %w", key, err)
		}
	}
	return nil
}

// waitingScan streams the orders of unfinished entries.
type waitingScan struct {
	ctx    context.Context // of the copy, which takes a function without one
	rdb    redis.UniversalClient
	stream string

	// pending are the ids of pending entries; entries after delivered are unread.
	pending   map[string]bool
	delivered string
	from      string
	page      []redis.XMessage
	orders    []order.OrderReserved // of the last entry
	done      bool
	err       error // an error of Redis
}

// begin reads which entries are unfinished. Those that are acknowledged later are in Postgres by then.
func (s *waitingScan) begin() error {
	s.from, s.delivered = "-", "0-0"
	groups, err := s.rdb.XInfoGroups(s.ctx, s.stream).Result()
	if err := stream.UnlessMissing(err); err != nil {
		return err
	}
	grouped := false
	for _, g := range groups {
		if g.Name == reservation.Group {
			s.delivered, grouped = g.LastDeliveredID, true
		}
	}
	if !grouped {
		return nil
	}
	s.from = "(" + s.delivered
	for after := "-"; ; {
		page, err := s.rdb.XPendingExt(s.ctx, &redis.XPendingExtArgs{
			Stream: s.stream, Group: reservation.Group, Start: after, End: "+", Count: stream.EntriesPerTrip,
		}).Result()
		if err := stream.UnlessMissing(err); err != nil || len(page) == 0 {
			return err
		}
		if len(s.pending) == 0 {
			s.from = page[0].ID // the oldest
		}
		for _, p := range page {
			s.pending[p.ID] = true
		}
		after = "(" + page[len(page)-1].ID
	}
}

// next returns the next order as a row, nil after the last one.
func (s *waitingScan) next() ([]any, error) {
	for {
		if len(s.orders) > 0 {
			id := s.orders[0].OrderID
			s.orders = s.orders[1:]
			return []any{id, false}, nil
		}
		if len(s.page) > 0 {
			entry := s.page[0]
			s.page = s.page[1:]
			if !s.pending[entry.ID] && !stream.EntryAfter(entry.ID, s.delivered) {
				continue
			}
			// An unreadable entry becomes a dead letter.
			s.orders, _ = deadletter.OrdersOf(stream.Entry{
				Stream: s.stream, ID: entry.ID, Fields: stream.FieldsOf(entry.Values),
			})
			continue
		}
		if s.done {
			return nil, nil
		}
		if s.page, s.err = s.rdb.XRangeN(s.ctx, s.stream, s.from, "+", stream.EntriesPerTrip).Result(); s.err != nil {
			return nil, s.err
		}
		if s.done = len(s.page) < stream.EntriesPerTrip; len(s.page) > 0 {
			s.from = "(" + s.page[len(s.page)-1].ID
		}
	}
}

// loadParked copies the orders whose events are parked dead letters.
func (l *look) loadParked(ctx context.Context, tx pgx.Tx) error {
	rows, _ := tx.Query(ctx, sql.AuditParked) // its error comes with the rows
	var parked []uuid.UUID
	for rows.Next() {
		letter, err := deadletter.ScanLetter(rows)
		if err != nil {
			rows.Close()
			return fmt.Errorf("read the dead letters: %w", err)
		}
		// An unreadable one parks no order: the reservation shows what it stands for.
		if letter.Damage == "" {
			orders, _ := deadletter.OrdersOf(letter.Entry)
			for _, o := range orders {
				parked = append(parked, o.OrderID)
			}
		}
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("read the dead letters: %w", err)
	}
	_, err := tx.CopyFrom(ctx, pgx.Identifier{"audit_waiting"}, waitingColumns,
		pgx.CopyFromSlice(len(parked), func(i int) ([]any, error) { return []any{parked[i], true}, nil }))
	return err
}

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
		row := []any{shard.id, name, nil, nil, nil, ""}
		if ended, err := reservation.ParseEnded(text); err == nil {
			row[2], row[3], row[4], row[5] = ended.OrderID, ended.Quantity, string(ended.Status), string(ended.Lines)
		}
		rows = append(rows, row)
	}
	if len(rows) == 0 {
		return nil
	}
	_, err := tx.CopyFrom(ctx, pgx.Identifier{"audit_ended"},
		[]string{"sale_id", "name", "order_id", "quantity", "status", "lines"}, pgx.CopyFromRows(rows))
	return err
}

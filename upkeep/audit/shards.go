package audit

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/stream"
)

// auditedSale is a sale to audit, and where it is in Redis.
type auditedSale struct {
	id     uuid.UUID
	layout reservation.Layout
	items  []string // their codes
}

// auditedShard is one of the shards of a sale to audit, and its partition.
type auditedShard struct {
	auditedSale
	shard, partition int
}

func (s auditedSale) shards() []auditedShard {
	shards := make([]auditedShard, s.layout.Shards)
	for i := range shards {
		shards[i] = auditedShard{auditedSale: s, shard: i, partition: s.layout.Partition(i)}
	}
	return shards
}

// wrongLayout says what is impossible about the sale's layout in Postgres, or is empty.
func (s auditedSale) wrongLayout() string {
	switch l := s.layout; {
	case l.Partitions > reservation.MaxPartitions:
		return fmt.Sprintf("sales.partitions is %d, and the maximum is %d", l.Partitions, reservation.MaxPartitions)
	case l.Shards > l.Partitions:
		return fmt.Sprintf("sales.shards is %d, and sales.partitions is %d", l.Shards, l.Partitions)
	}
	return ""
}

// isUnreachable reports whether the server of any shard of a sale does not answer.
func (l *snapshot) isUnreachable(s auditedSale) bool {
	for _, shard := range s.shards() {
		if l.unreachable[shard.partition] != nil {
			return true
		}
	}
	return false
}

// label begins the findings about a shard. It is empty for the only one of a sale.
func (s auditedShard) label() string {
	if s.layout.Shards == 1 {
		return ""
	}
	return fmt.Sprintf("shard %d: ", s.shard)
}

// moves are the units that a shard has given to each other shard, and got from it, in its epoch (lua/give.lua): of each
// item, or in a sale without items of its stock.
type moves struct{ given, got [][]int64 }

// moveFields are the fields of moves, in the order in which readMoves reads them.
func (s auditedShard) moveFields() []string {
	if s.layout.Shards == 1 {
		return nil
	}
	fields := make([]string, 0, 2*s.layout.Shards)
	for _, kind := range []string{"given:", "got:"} {
		for other := range s.layout.Shards {
			fields = append(fields, kind+strconv.Itoa(other))
		}
	}
	return fields
}

// readMoves reads the fields of moveFields. It returns an error for the first that is damaged.
func (s auditedShard) readMoves(fields []any) (moves, error) {
	totals := make([][]int64, len(fields))
	for i, field := range fields {
		text, _ := field.(string)
		var ok bool
		if totals[i], ok = s.readTotal(text); !ok && field != nil {
			return moves{}, fmt.Errorf("%s is %.50q", s.moveFields()[i], text)
		}
	}
	return moves{given: totals[:len(totals)/2], got: totals[len(totals)/2:]}, nil
}

// readTotal reads the units of each item from a total, which has one form. An empty text is none.
func (s auditedSale) readTotal(text string) (units []int64, ok bool) {
	units = make([]int64, max(1, len(s.items)))
	if len(s.items) == 0 {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || strconv.FormatInt(n, 10) != text || n < 0 || n > numberMax {
			return units, false
		}
		units[0] = n
		return units, true
	}
	read := make([]int64, len(units))
	for rest := text; rest != ""; {
		digits := len(rest[1:]) - len(strings.TrimLeft(rest[1:], "0123456789")) + 1
		n, err := strconv.ParseInt(rest[1:digits], 10, 64)
		item := strings.Index(order.ItemLetters(len(s.items)), rest[:1])
		if err != nil || item < 0 || n > numberMax {
			return units, false
		}
		read[item], rest = n, rest[digits:]
	}
	if text == "" || string(order.MakeLines(read)) != text {
		return units, false
	}
	return read, true
}

// onTheWay returns the units that the shards of a sale have given to each other and not yet got, by the shards that
// will get them and by item, as the shards were read one after another. It is nil if they are not comparable: one is
// missing, or is being rebuilt.
func onTheWay(shards []redisShard) (units [][]int64) {
	for _, s := range shards {
		if !s.present || *s.epoch == 0 || *s.epoch != *shards[0].epoch {
			return nil
		}
	}
	for to, taker := range shards {
		units = append(units, make([]int64, max(1, len(taker.items))))
		for from, giver := range shards {
			if len(shards) == 1 {
				continue
			}
			for item := range units[to] {
				units[to][item] += giver.given[to][item] - taker.got[from][item]
			}
		}
	}
	return units
}

// findStill notes the shards to which no unit returned while their buyers were read. It also reports units that a shard
// got before, and that no other has given even now.
func (l *snapshot) findStill(ctx context.Context, before []redisShard) error {
	ids, shards := []uuid.UUID{}, []int{}
	given := make([][][]int64, 0, len(before)) // nil where the shard is in another epoch now, or cannot be read
	err := l.eachShard(ctx,
		func(s auditedShard) []string { return append([]string{"generation", "epoch"}, s.moveFields()...) },
		func(s auditedShard, fields []any, err error) {
			b := before[len(given)]
			now, damage := s.readMoves(fields[2:])
			if err != nil || damage != nil || !b.present || !isNumber(fields[1], *b.epoch) {
				given = append(given, nil)
				return
			}
			given = append(given, now.given)
			if isNumber(fields[0], *b.generation) {
				ids, shards = append(ids, s.id), append(shards, s.shard)
			}
		})
	if err != nil {
		return err
	}
	for i, b := range before {
		first := i - b.shard // the sale's first shard
		for giver := range b.got {
			from := given[first+giver]
			if from == nil || !b.present || *b.epoch != *before[first+giver].epoch {
				continue
			}
			for item, got := range b.got[giver] {
				if got <= from[b.shard][item] {
					continue
				}
				of := ""
				if len(b.items) > 0 {
					of = " of the item " + b.items[item]
				}
				l.note("S4", Finding{Sale: &b.id, Remedy: RemedyRebuild, What: fmt.Sprintf(
					"%sit has got %d units%s from shard %d, which has given it %d", b.label(), got, of, giver,
					from[b.shard][item])})
			}
		}
	}
	_, err = l.conn.Exec(ctx, sql.AuditNoteStill, ids, shards)
	return err
}

// isNumber reports whether a field of Redis is this number.
func isNumber(field any, n int64) bool {
	text, _ := field.(string)
	return text == strconv.FormatInt(n, 10)
}

// itemInRedis is what Redis has of an item. The limit is 0 if it has none of its own.
type itemInRedis struct{ left, stock, limit int64 }

// itemFields are the fields of the items, in the order in which readItems reads them.
func (s auditedSale) itemFields() []string {
	if len(s.items) == 0 {
		return nil
	}
	fields := []string{"limit"}
	for item := range s.items {
		letter := order.ItemLetter(item)
		fields = append(fields, "left."+letter, "stock."+letter, "limit."+letter)
	}
	return fields
}

// readItems reads the fields of itemFields. It returns an error for the first that is damaged. In a closed sale the
// units are 0.
func (s *redisShard) readItems(fields []any, closed bool) error {
	s.orderLimit, s.redisItems = nil, nil
	numbers := make([]int64, len(fields))
	for i, field := range fields {
		name := s.itemFields()[i]
		text, is := field.(string)
		if isLimit := i > 0 && i%3 == 0; !is && (closed || isLimit) {
			continue
		}
		if !is {
			return fmt.Errorf("%s is missing", name)
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || strconv.FormatInt(n, 10) != text || n < 0 && i%3 != 1 || n > numberMax || n < -numberMax {
			return fmt.Errorf("%s is %.50q", name, text)
		}
		numbers[i] = n
	}
	if len(numbers) > 0 && !closed {
		s.orderLimit = &numbers[0]
	}
	for ; len(numbers) > 3; numbers = numbers[3:] {
		s.redisItems = append(s.redisItems, itemInRedis{numbers[1], numbers[2], numbers[3]})
	}
	return nil
}

// hasItems reports whether an order of the sale can have these lines.
func (s auditedSale) hasItems(lines order.Lines) bool {
	for item := range lines.Each() {
		if item >= len(s.items) {
			return false
		}
	}
	return (lines != "") == (len(s.items) > 0)
}

var waitingColumns = []string{"order_id", "parked"}

// loadWaiting copies the orders whose events are unread or pending in the streams.
//
// The buyers were read before, so an event of theirs that is missing here was finished: it is in
// Postgres, as an order or a dead letter, or it is lost.
func (l *snapshot) loadWaiting(ctx context.Context) error {
	if err := l.unreadError(theStreams); err != nil {
		return err
	}
	for _, key := range l.streams {
		scan := waitingScan{ctx: ctx, rdb: l.Catalog.Store.Redis, stream: key, pending: map[string]bool{}}
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
func (l *snapshot) loadParked(ctx context.Context, tx pgx.Tx) error {
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
func (l *snapshot) loadEnded(ctx context.Context, tx pgx.Tx) error {
	if err := l.unreadError(theSales); err != nil {
		return err
	}
	for _, shard := range l.readable {
		key := l.Catalog.Store.Keys.Ended(shard.partition, shard.id)
		for cursor, begun := uint64(0), false; !begun || cursor != 0; begun = true {
			page, next, err := l.Catalog.Store.Redis.HScan(ctx, key, cursor, "", buyersPerTrip).Result()
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

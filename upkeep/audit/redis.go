package audit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"stampede/internal/pg"
	"stampede/internal/progress"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/stream"
)

const (
	// salesPerTrip is how many sales are looked up in one round trip to Redis.
	salesPerTrip = 500
	// buyersPerTrip is how many buyers one HSCAN asks for.
	buyersPerTrip = 1000
)

// redisShard is a shard of a sale as Redis has it.
type redisShard struct {
	auditedShard
	present                                           bool
	epoch, units, stock, places, generation, revision *int64
	opensAt, closesAt, limit, window                  *int64
	orderLimit                                        *int64 // of a sale with items
	state                                             string
	moves
	redisItems []itemInRedis
}

// numberMax is the highest number that the scripts read. Stampede writes none above it.
const numberMax = 999_999_999_999_999

// loadRedis copies the sales and buyers in Redis to temporary tables of the connection. Read errors
// go to the report.
func (l *snapshot) loadRedis(ctx context.Context) error {
	for _, statements := range []string{sql.AuditDrop, sql.AuditTables} {
		if err := pg.Run(ctx, l.conn, statements); err != nil {
			return fmt.Errorf("make the tables: %w", err)
		}
	}
	progress.Step(ctx, "reading Redis")
	var all []redisShard
	err := l.eachShard(ctx, auditedShard.fields, func(s auditedShard, fields []any, err error) {
		all = append(all, l.readShard(s, fields, err))
		progress.At(ctx, int64(len(all)), int64(len(l.readable)), "shards of sales")
	})
	if err := l.noteUnread(ctx, theSales, err); err != nil {
		return err
	}
	if l.unreadError(theSales) != nil {
		all = nil
	}
	if err := l.copySales(ctx, all); err != nil {
		return fmt.Errorf("copy the sales: %w", err)
	}
	if err := l.noteUnread(ctx, theSales, l.loadBuyers(ctx, all)); l.isFatal(ctx, err) {
		return err
	}
	if err := l.noteUnread(ctx, theStreams, l.loadWaiting(ctx)); l.isFatal(ctx, err) {
		return err
	}
	return nil
}

// copySales copies all sales and their shards: those that were read, in their order, and those that exist but could
// not be read.
func (l *snapshot) copySales(ctx context.Context, read []redisShard) error {
	var sales, shards, items [][]any
	for _, sale := range l.sales {
		unread := l.isUnreachable(sale) || l.unreadError(theSales) != nil
		var own []redisShard
		if unread {
			for _, s := range sale.shards() {
				own = append(own, redisShard{auditedShard: s})
			}
		} else {
			own, read = read[:sale.layout.Shards], read[sale.layout.Shards:]
		}
		moving, sum := onTheWay(own), int64(0)
		for _, units := range slices.Concat(moving...) {
			sum += units
		}
		sales = append(sales, []any{sale.id, sale.layout.Shards, len(sale.items), unread, sum})
		for _, s := range own {
			shards = append(shards, []any{
				s.id, s.shard, s.label(), s.present, s.epoch, s.units, s.stock, s.places, s.generation, s.revision,
				s.opensAt, s.closesAt, s.limit, s.window, s.state, s.orderLimit,
			})
			for item, i := range s.redisItems {
				its := int64(0)
				if moving != nil {
					its = moving[s.shard][item]
				}
				items = append(items, []any{s.id, s.shard, order.ItemLetter(item), i.left, i.stock, its, i.limit})
			}
		}
	}
	if _, err := l.conn.CopyFrom(ctx, pgx.Identifier{"audit_sales"},
		[]string{"sale_id", "shards", "items", "unread", "on_the_way"}, pgx.CopyFromRows(sales)); err != nil {
		return err
	}
	_, err := l.conn.CopyFrom(ctx, pgx.Identifier{"audit_shards"}, []string{
		"sale_id", "shard", "label", "present", "epoch", "units", "stock", "places", "generation", "revision",
		"opens_at_ms", "closes_at_ms", "per_order_limit", "payment_window_s", "state", "order_limit",
	}, pgx.CopyFromRows(shards))
	if err != nil {
		return err
	}
	_, err = l.conn.CopyFrom(ctx, pgx.Identifier{"audit_items"},
		[]string{"sale_id", "shard", "item", "units", "stock", "on_the_way", "per_order_limit"}, pgx.CopyFromRows(items))
	return err
}

// loadBuyers copies the buyers of the shards.
func (l *snapshot) loadBuyers(ctx context.Context, all []redisShard) error {
	if err := l.unreadError(theSales); err != nil {
		return err
	}
	scan := buyerScan{ctx: ctx, snapshot: l, shards: all}
	_, err := l.conn.CopyFrom(ctx, pgx.Identifier{"audit_scan"},
		[]string{
			"sale_id", "shard", "user_id", "order_id", "quantity", "sequence", "epoch", "reserved_at",
			"key_fingerprint", "late", "lines",
		},
		pgx.CopyFromFunc(scan.next))
	if scan.err != nil {
		return scan.err
	} else if err != nil {
		return fmt.Errorf("copy the buyers: %w", err)
	}
	if err := l.findUnlisted(ctx, all); err != nil {
		return err
	}
	return l.findStill(ctx, all)
}

// findUnlisted reports shards that Redis has and does not list, so that their orders are not found by
// id. It also reports shards whose ended orders are ignored, so that a used idempotency key would buy
// again, and keys with a time limit.
func (l *snapshot) findUnlisted(ctx context.Context, all []redisShard) error {
	type asked struct {
		listed *redis.BoolCmd
		ended  *redis.StatusCmd
		flag   *redis.StringCmd
		ends   []*redis.DurationCmd // of the keys of the shard
	}
	for ; len(all) > 0; all = all[min(len(all), salesPerTrip):] {
		page := all[:min(len(all), salesPerTrip)]
		answers := make([]asked, len(page))
		_, _ = l.Catalog.Store.Redis.Pipelined(ctx, func(p redis.Pipeliner) error { // each command's own error counts
			for i, s := range page {
				answers[i] = asked{
					p.SIsMember(ctx, l.Catalog.Store.Keys.Sales(s.partition), s.id.String()),
					p.Type(ctx, l.Catalog.Store.Keys.Ended(s.partition, s.id)),
					p.HGet(ctx, l.Catalog.Store.Keys.Sale(s.partition, s.id), "ended"), // after its hash, which is written with it
					askTimeLimits(ctx, p, l.Catalog.Store.Keys.OfShard(s.partition, s.id)),
				}
			}
			return nil
		})
		for i, s := range page {
			a := answers[i]
			for _, err := range []error{
				a.listed.Err(), a.ended.Err(), a.flag.Err(),
				l.reportTimeLimits(&s.id, l.Catalog.Store.Keys.OfShard(s.partition, s.id), a.ends),
			} {
				if err != nil && !errors.Is(err, redis.Nil) &&
					!stream.IsWrongType(err) { // wrong types are reported as foreign keys
					return fmt.Errorf("look up sale %s in Redis: %w", s.id, err)
				}
			}
			if !s.present {
				continue
			}
			if a.listed.Err() == nil && !a.listed.Val() {
				l.note("S7", Finding{
					Sale: &s.id, Remedy: RemedyRebuild,
					What: s.label() + "Redis has the sale, and does not list it among the sales of its partition",
				})
			}
			switch kind := a.ended.Val(); {
			case kind != "none" && kind != "hash":
				l.note("S7", Finding{
					Sale: &s.id, Remedy: RemedyRebuild,
					What: s.label() + "the key of its ended orders in Redis has a wrong type: " + kind,
				})
			case kind == "hash" && a.flag.Val() != "1" && *s.epoch > 0:
				l.note("S7", Finding{
					Sale: &s.id, Remedy: RemedyRebuild,
					What: s.label() + "Redis has ended orders of the sale, and does not use them: used idempotency keys would " +
						"buy again",
				})
			}
		}
	}
	return nil
}

// findLatest notes the current sequences of the shards, which no order in the snapshot can exceed.
func (l *snapshot) findLatest(ctx context.Context, tx pgx.Tx) error {
	ids, shards, latest := []uuid.UUID{}, []int{}, []int64{}
	if err := l.unreadError(theSales); err != nil {
		return err
	}
	sequence := []string{"sequence", "state"}
	err := l.eachShard(ctx, func(auditedShard) []string { return sequence }, func(s auditedShard, fields []any, _ error) {
		text, _ := fields[0].(string)
		if n, err := strconv.ParseInt(text, 10, 64); err == nil && fields[1] != reservation.StateRetired {
			ids, shards, latest = append(ids, s.id), append(shards, s.shard), append(latest, n)
		}
	})
	if err == nil {
		_, err = tx.Exec(ctx, sql.AuditNoteLatest, ids, shards, latest)
	}
	return err
}

// reportUnknownSales reports sales that are open in Redis and missing in Postgres: the database was
// set back, or is the wrong one. Their orders cannot be confirmed. It also reports sales that are archived.
func (l *snapshot) reportUnknownSales(
	ctx context.Context, inRedis []reservation.LocatedSale, known []auditedSale,
) error {
	knownIDs := make(map[uuid.UUID]bool, len(known))
	for _, s := range known {
		knownIDs[s.id] = true
	}
	var unknown []uuid.UUID
	buyers := map[uuid.UUID]int64{} // in all shards
	for _, s := range inRedis {
		if knownIDs[s.ID] {
			continue
		}
		n, err := l.Catalog.Store.Redis.HLen(ctx, l.Catalog.Store.Keys.Buyers(s.Partition, s.ID)).Result()
		if err != nil && !stream.IsWrongType(err) {
			return l.noteUnread(ctx, theSales, fmt.Errorf("count the buyers of sale %s in Redis: %w", s.ID, err))
		}
		if _, found := buyers[s.ID]; !found {
			unknown = append(unknown, s.ID)
		}
		buyers[s.ID] += n
	}
	rows, _ := l.conn.Query(ctx, sql.AuditArchivedSales, unknown) // its error comes with the rows
	archived, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return fmt.Errorf("look for archived sales: %w", err)
	}
	for _, id := range unknown {
		what := "Redis has this sale, with %s, and Postgres does not know it"
		if slices.Contains(archived, id) {
			what = "Redis still has this sale, with %s, and its orders are archived: repeat `stampede sale archive`, " +
				"or delete its keys"
		}
		l.note("S7", Finding{Sale: &id, Remedy: remedyUnknownSale, What: fmt.Sprintf(what, plural(buyers[id], "buyer"))})
	}
	return nil
}

// saleFields are the first fields that readShard reads, in its order.
var saleFields = []string{
	"epoch", "left", "stock", "sequence", "generation", "revision",
	"opens_at_ms", "closes_at_ms", "per_order_limit", "payment_window_s", "state",
}

// fields are those that readShard reads.
func (s auditedShard) fields() []string {
	return slices.Concat(saleFields, []string{"shard", "items"}, s.moveFields(), s.itemFields())
}

// eachShard reads fields of all readable shards; err is set if the key has a wrong type.
func (l *snapshot) eachShard(
	ctx context.Context, names func(auditedShard) []string, do func(s auditedShard, fields []any, err error),
) error {
	if err := l.unreadError(theSales); err != nil {
		return err
	}
	for shards := l.readable; len(shards) > 0; {
		n := min(len(shards), salesPerTrip)
		asked := make([]*redis.SliceCmd, n)
		_, _ = l.Catalog.Store.Redis.Pipelined(ctx, func(p redis.Pipeliner) error { // each command's own error counts
			for i, s := range shards[:n] {
				asked[i] = p.HMGet(ctx, l.Catalog.Store.Keys.Sale(s.partition, s.id), names(s)...)
			}
			return nil
		})
		for i, s := range shards[:n] {
			fields, err := asked[i].Result()
			if err != nil && !stream.IsWrongType(err) {
				return fmt.Errorf("look up sale %s in Redis: %w", s.id, err)
			}
			if err != nil {
				fields = make([]any, len(names(s)))
			}
			do(s, fields, err)
		}
		shards = shards[n:]
	}
	return nil
}

func (l *snapshot) readShard(s auditedShard, fields []any, err error) redisShard {
	shard := redisShard{auditedShard: s}
	if err != nil {
		l.note("S7", Finding{Sale: &s.id, What: s.label() + "its key in Redis has a wrong type", Remedy: RemedyRebuild})
		return shard
	}
	fields, layout, others := fields[:len(saleFields)], fields[len(saleFields)], fields[len(saleFields)+1:]
	codes, moved, items := others[0], others[1:1+len(s.moveFields())], others[1+len(s.moveFields()):]
	numbers := map[string]*int64{} // by the name of their field
	present, closed := false, fields[0] == "0"
	var damaged []string
	for i, field := range fields {
		text, _ := field.(string)
		if field == nil && closed { // lua/close.lua also closes missing sales
			text = "0"
		}
		present = present || field != nil
		if saleFields[i] == "state" {
			if shard.state = deadletter.Storable(text); text == "" {
				damaged = append(damaged, "state is missing")
			}
			continue
		}
		n, err := strconv.ParseInt(text, 10, 64)
		numbers[saleFields[i]] = &n
		switch {
		case field == nil && !closed:
			damaged = append(damaged, saleFields[i]+" is missing")
		case err != nil, strconv.FormatInt(n, 10) != text, n > numberMax, n < 0 && saleFields[i] != "left", n < -numberMax:
			damaged = append(damaged, fmt.Sprintf("%s is %.50q", saleFields[i], text))
		case saleFields[i] == "sequence" && !closed && int(n)%s.layout.Shards != s.shard:
			damaged = append(damaged, fmt.Sprintf("sequence is %d, before a place of another shard", n))
		}
	}
	if shard.moves, err = s.readMoves(moved); err != nil {
		damaged = append(damaged, err.Error())
	}
	if fields[len(fields)-1] != reservation.StateRetired {
		if err := shard.readItems(items, closed); err != nil {
			damaged = append(damaged, err.Error())
		}
	}
	if len(damaged) > 0 {
		if present {
			l.note("S7", Finding{
				Sale: &s.id, Remedy: RemedyRebuild,
				What: s.label() + "its fields in Redis are damaged: " + strings.Join(damaged, ", "),
			})
		}
		return shard
	}
	if text, _ := layout.(string); !closed && text != s.layout.Field(s.shard) {
		l.note("S7", Finding{
			Sale: &s.id, Remedy: RemedyRebuild,
			What: fmt.Sprintf("%sits place among the shards is %.50q in Redis and %q in Postgres", s.label(), text,
				s.layout.Field(s.shard)),
		})
	}
	if text, _ := codes.(string); !closed && text != strings.Join(s.items, " ") {
		l.note("S7", Finding{
			Sale: &s.id, Remedy: RemedyRebuild,
			What: fmt.Sprintf("%sits items are %.200q in Redis and %q in Postgres", s.label(), text,
				strings.Join(s.items, " ")),
		})
	}
	if shard.state == reservation.StateRetired {
		return shard // its units and buyers are in Postgres only, as of a sale whose keys were deleted
	}
	shard.present = true
	shard.epoch, shard.units, shard.stock = numbers["epoch"], numbers["left"], numbers["stock"]
	shard.places, shard.generation, shard.revision = numbers["sequence"], numbers["generation"], numbers["revision"]
	shard.opensAt, shard.closesAt = numbers["opens_at_ms"], numbers["closes_at_ms"]
	shard.limit, shard.window = numbers["per_order_limit"], numbers["payment_window_s"]
	return shard
}

// buyerScan streams the buyers of shards from Redis to Postgres.
type buyerScan struct {
	*snapshot
	ctx    context.Context // of the copy, which takes a function without one
	shards []redisShard

	shard  *redisShard // that of the page; findings keep a pointer to its id
	page   []string    // user, reservation, user, …
	cursor uint64      // 0 before the first page of a shard and after its last one
	err    error       // an error of Redis
}

// next returns the next buyer as a row, nil after the last one.
func (b *buyerScan) next() ([]any, error) {
	for {
		for len(b.page) >= 2 {
			user, text := b.page[0], b.page[1]
			b.page = b.page[2:]
			if row := b.row(user, text); row != nil {
				return row, nil
			}
		}
		if b.cursor == 0 {
			if len(b.shards) == 0 {
				return nil, nil
			}
			b.shard, b.shards = &b.shards[0], b.shards[1:]
		}
		if b.err = b.nextPage(); b.err != nil {
			return nil, b.err
		}
	}
}

// nextPage fetches the next page.
func (b *buyerScan) nextPage() (err error) {
	key := b.Catalog.Store.Keys.Buyers(b.shard.partition, b.shard.id)
	b.page, b.cursor, err = b.Catalog.Store.Redis.HScan(b.ctx, key, b.cursor, "", buyersPerTrip).Result()
	if stream.IsWrongType(err) {
		b.page, b.cursor = nil, 0
		b.note("S7", Finding{
			Sale: &b.shard.id, Remedy: RemedyRebuild,
			What: b.shard.label() + "the key of its buyers in Redis has a wrong type",
		})
		return nil
	} else if err != nil {
		return fmt.Errorf("read the buyers of sale %s: %w", b.shard.id, err)
	}
	return nil
}

// row returns nil for an unreadable buyer. A buyer is late if the shard had not assigned the place
// when it was read.
func (b *buyerScan) row(user, text string) []any {
	s := b.shard
	r, key, err := order.ParseReservation(text)
	if err != nil || deadletter.Storable(text) != text || !r.CanBeOf(user) ||
		!order.MayBelongTo(r.OrderID, s.id) || !s.hasItems(r.Lines) {
		b.note("S4", Finding{
			Sale: &s.id, User: deadletter.Storable(user), Remedy: RemedyRebuild,
			What: fmt.Sprintf("%sthe reservation in Redis is damaged: %.100q", s.label(), text),
		})
		return nil
	}
	b.findStray(user, r)
	late := s.places != nil && r.Sequence > *s.places
	if r.Epoch == 0 && s.epoch != nil {
		r.Epoch = *s.epoch
	}
	return []any{s.id, s.shard, user, r.OrderID, r.Quantity, r.Sequence, r.Epoch, r.ReservedAt, key, late, string(r.Lines)}
}

// findStray reports a reservation that is not in the shard of its user, or not at a place of that shard. Reservations
// of earlier epochs may have any place.
func (b *buyerScan) findStray(user string, r order.Reservation) {
	s, what := b.shard, ""
	home := s.layout.ShardOf(user)
	placed := int((r.Sequence - 1) % int64(s.layout.Shards))
	switch {
	case home != s.shard:
		what = fmt.Sprintf("%sthe reservation is of a user of shard %d", s.label(), home)
	case placed != home && r.Epoch == 0:
		what = fmt.Sprintf("%sthe reservation is at place %d, which is one of shard %d", s.label(), r.Sequence, placed)
	default:
		return
	}
	b.note("S4", Finding{Sale: &s.id, Order: &r.OrderID, User: user, Remedy: RemedyRebuild, What: what})
}

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

	"stampede/fulfillment/deadletter"
	"stampede/fulfillment/stream"
	"stampede/internal/pg"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

const (
	// salesPerTrip is how many sales are looked up in one round trip to Redis.
	salesPerTrip = 500
	// buyersPerTrip is how many buyers one HSCAN asks for.
	buyersPerTrip = 1000
)

// redisSale is a sale as Redis has it.
type redisSale struct {
	auditedSale
	present, unread                                   bool
	epoch, units, stock, places, generation, revision *int64
	opensAt, closesAt, limit, window                  *int64
	state                                             string
}

// numberMax is the highest number that the scripts read. Stampede writes none above it.
const numberMax = 999_999_999_999_999

// loadRedis copies the sales and buyers in Redis to temporary tables of the connection. Read errors
// go to the report.
func (l *look) loadRedis(ctx context.Context) error {
	for _, statements := range []string{sql.AuditDrop, sql.AuditTables} {
		if err := pg.Run(ctx, l.conn, statements); err != nil {
			return fmt.Errorf("make the tables: %w", err)
		}
	}
	var all []redisSale
	err := l.eachOfSales(ctx, saleFields, func(s auditedSale, fields []any, err error) {
		all = append(all, l.readSale(s, fields, err))
	})
	if err := l.noteUnread(ctx, theSales, err); err != nil {
		return err
	}
	if l.unreadError(theSales) != nil {
		all = nil
	}
	copied := slices.Clone(all)
	for _, s := range l.sales { // those that exist, but could not be read
		if l.dark[s.partition] != nil || l.unreadError(theSales) != nil {
			copied = append(copied, redisSale{auditedSale: s, unread: true})
		}
	}
	_, err = l.conn.CopyFrom(ctx, pgx.Identifier{"audit_sales"}, []string{
		"sale_id", "present", "unread", "epoch", "units", "stock", "places", "generation", "revision",
		"opens_at_ms", "closes_at_ms", "per_order_limit", "payment_window_s", "state",
	},
		pgx.CopyFromSlice(len(copied), func(i int) ([]any, error) {
			s := copied[i]
			return []any{
				s.id, s.present, s.unread, s.epoch, s.units, s.stock, s.places, s.generation, s.revision,
				s.opensAt, s.closesAt, s.limit, s.window, s.state,
			}, nil
		}))
	if err != nil {
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

// loadBuyers copies the buyers of the sales.
func (l *look) loadBuyers(ctx context.Context, all []redisSale) error {
	if err := l.unreadError(theSales); err != nil {
		return err
	}
	scan := buyerScan{ctx: ctx, look: l, sales: all}
	_, err := l.conn.CopyFrom(ctx, pgx.Identifier{"audit_scan"},
		[]string{"sale_id", "user_id", "order_id", "quantity", "sequence", "epoch", "reserved_at", "late"},
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

// findUnlisted reports sales that Redis has and does not list, so that their orders are not found by
// id. It also reports sales whose ended orders are ignored, so that a used idempotency key would buy
// again.
func (l *look) findUnlisted(ctx context.Context, all []redisSale) error {
	type asked struct {
		listed *redis.BoolCmd
		ended  *redis.StatusCmd
		flag   *redis.StringCmd
	}
	for ; len(all) > 0; all = all[min(len(all), salesPerTrip):] {
		page := all[:min(len(all), salesPerTrip)]
		answers := make([]asked, len(page))
		_, _ = l.Redis.Pipelined(ctx, func(p redis.Pipeliner) error { // each command's own error counts
			for i, s := range page {
				answers[i] = asked{
					p.SIsMember(ctx, l.Keys.Sales(s.partition), s.id.String()),
					p.Type(ctx, l.Keys.Ended(s.partition, s.id)),
					p.HGet(ctx, l.Keys.Sale(s.partition, s.id), "ended"), // after its hash, which is written with it
				}
			}
			return nil
		})
		for i, s := range page {
			a := answers[i]
			for _, err := range []error{a.listed.Err(), a.ended.Err(), a.flag.Err()} {
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
					What: "Redis has the sale, and does not list it among the sales of its partition",
				})
			}
			switch kind := a.ended.Val(); {
			case kind != "none" && kind != "hash":
				l.note("S7", Finding{
					Sale: &s.id, Remedy: RemedyRebuild,
					What: "the key of its ended orders in Redis has a wrong type: " + kind,
				})
			case kind == "hash" && a.flag.Val() != "1" && *s.epoch > 0:
				l.note("S7", Finding{
					Sale: &s.id, Remedy: RemedyRebuild,
					What: "Redis has ended orders of the sale, and does not use them: used idempotency keys would buy again",
				})
			}
		}
	}
	return nil
}

// findStill notes the sales to which no unit returned while their buyers were read.
func (l *look) findStill(ctx context.Context, before []redisSale) error {
	var still []uuid.UUID
	i := 0
	err := l.eachOfSales(ctx, []string{"generation"}, func(s auditedSale, fields []any, err error) {
		text, _ := fields[0].(string)
		if b := before[i]; err == nil && b.generation != nil && text == strconv.FormatInt(*b.generation, 10) {
			still = append(still, s.id)
		}
		i++
	})
	if err == nil {
		_, err = l.conn.Exec(ctx, sql.AuditNoteStill, still)
	}
	return err
}

// findLatest notes the current sequences of the sales, which no order in the snapshot can exceed.
func (l *look) findLatest(ctx context.Context, tx pgx.Tx) error {
	ids, latest := []uuid.UUID{}, []int64{}
	if err := l.unreadError(theSales); err != nil {
		return err
	}
	err := l.eachOfSales(ctx, []string{"sequence"}, func(s auditedSale, fields []any, _ error) {
		text, _ := fields[0].(string)
		if n, err := strconv.ParseInt(text, 10, 64); err == nil {
			ids, latest = append(ids, s.id), append(latest, n)
		}
	})
	if err == nil {
		_, err = tx.Exec(ctx, sql.AuditNoteLatest, ids, latest)
	}
	return err
}

// reportUnknownSales reports sales that are open in Redis and missing in Postgres: the database was
// set back, or is the wrong one. Their orders cannot be confirmed.
func (l *look) reportUnknownSales(ctx context.Context, inRedis []reservation.LocatedSale, known []auditedSale) error {
	knownIDs := make(map[uuid.UUID]bool, len(known))
	for _, s := range known {
		knownIDs[s.id] = true
	}
	for _, s := range inRedis {
		if knownIDs[s.ID] {
			continue
		}
		buyers, err := l.Redis.HLen(ctx, l.Keys.Buyers(s.Partition, s.ID)).Result()
		if err != nil && !stream.IsWrongType(err) {
			return l.noteUnread(ctx, theSales, fmt.Errorf("count the buyers of sale %s in Redis: %w", s.ID, err))
		}
		l.note("S7", Finding{
			Sale: &s.ID, Remedy: remedyOperator,
			What: fmt.Sprintf("Redis has this sale, with %s, and Postgres does not know it", plural(buyers, "buyer")),
		})
	}
	return nil
}

// saleFields are the fields that readSale reads, in its order.
var saleFields = []string{
	"epoch", "left", "stock", "sequence", "generation", "revision",
	"opens_at_ms", "closes_at_ms", "per_order_limit", "payment_window_s", "state",
}

// eachOfSales reads fields of all readable sales; err is set if the key has a wrong type.
func (l *look) eachOfSales(ctx context.Context, names []string, do func(s auditedSale, fields []any, err error)) error {
	if err := l.unreadError(theSales); err != nil {
		return err
	}
	for sales := l.readable; len(sales) > 0; {
		n := min(len(sales), salesPerTrip)
		asked := make([]*redis.SliceCmd, n)
		_, _ = l.Redis.Pipelined(ctx, func(p redis.Pipeliner) error { // each command's own error counts
			for i, s := range sales[:n] {
				asked[i] = p.HMGet(ctx, l.Keys.Sale(s.partition, s.id), names...)
			}
			return nil
		})
		for i, s := range sales[:n] {
			fields, err := asked[i].Result()
			if err != nil && !stream.IsWrongType(err) {
				return fmt.Errorf("look up sale %s in Redis: %w", s.id, err)
			}
			if err != nil {
				fields = make([]any, len(names))
			}
			do(s, fields, err)
		}
		sales = sales[n:]
	}
	return nil
}

func (l *look) readSale(s auditedSale, fields []any, err error) redisSale {
	sale := redisSale{auditedSale: s}
	if err != nil {
		l.note("S7", Finding{Sale: &s.id, What: "its key in Redis has a wrong type", Remedy: RemedyRebuild})
		return sale
	}
	numbers := make([]*int64, len(fields))
	present, closed := false, fields[0] == "0"
	var damaged []string
	for i, field := range fields {
		text, _ := field.(string)
		if field == nil && closed { // lua/close.lua also closes missing sales
			text = "0"
		}
		present = present || field != nil
		if saleFields[i] == "state" {
			if sale.state = deadletter.Storable(text); text == "" {
				damaged = append(damaged, "state is missing")
			}
			continue
		}
		n, err := strconv.ParseInt(text, 10, 64)
		numbers[i] = &n
		switch {
		case field == nil && !closed:
			damaged = append(damaged, saleFields[i]+" is missing")
		case err != nil, strconv.FormatInt(n, 10) != text, n > numberMax, n < 0 && saleFields[i] != "left", n < -numberMax:
			damaged = append(damaged, fmt.Sprintf("%s is %.50q", saleFields[i], text))
		}
	}
	if len(damaged) > 0 {
		if present {
			l.note("S7", Finding{
				Sale: &s.id, Remedy: RemedyRebuild,
				What: "its fields in Redis are damaged: " + strings.Join(damaged, ", "),
			})
		}
		return sale
	}
	sale.present = true
	sale.epoch, sale.units, sale.stock = numbers[0], numbers[1], numbers[2]
	sale.places, sale.generation, sale.revision = numbers[3], numbers[4], numbers[5]
	sale.opensAt, sale.closesAt, sale.limit, sale.window = numbers[6], numbers[7], numbers[8], numbers[9]
	return sale
}

// buyerScan streams the buyers of sales from Redis to Postgres.
type buyerScan struct {
	*look
	ctx   context.Context // of the copy, which takes a function without one
	sales []redisSale

	sale   redisSale // the sale of the page
	page   []string  // user, reservation, user, …
	cursor uint64    // 0 before the first page of a sale and after its last one
	err    error     // an error of Redis
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
			if len(b.sales) == 0 {
				return nil, nil
			}
			b.sale, b.sales = b.sales[0], b.sales[1:]
		}
		if b.err = b.nextPage(); b.err != nil {
			return nil, b.err
		}
	}
}

// nextPage fetches the next page.
func (b *buyerScan) nextPage() (err error) {
	key := b.Keys.Buyers(b.sale.partition, b.sale.id)
	b.page, b.cursor, err = b.Redis.HScan(b.ctx, key, b.cursor, "", buyersPerTrip).Result()
	if stream.IsWrongType(err) {
		b.page, b.cursor = nil, 0
		b.note("S7", Finding{
			Sale: &b.sale.id, Remedy: RemedyRebuild,
			What: "the key of its buyers in Redis has a wrong type",
		})
		return nil
	} else if err != nil {
		return fmt.Errorf("read the buyers of sale %s: %w", b.sale.id, err)
	}
	return nil
}

// row returns nil for an unreadable buyer. A buyer is late if the sale had not assigned the place
// when the sale was read.
func (b *buyerScan) row(user, text string) []any {
	r, _, err := order.ParseReservation(text)
	if err != nil || deadletter.Storable(text) != text || !r.CanBeOf(user) ||
		!order.MayBelongTo(r.OrderID, b.sale.id) {
		b.note("S4", Finding{
			Sale: &b.sale.id, User: deadletter.Storable(user), Remedy: RemedyRebuild,
			What: fmt.Sprintf("the reservation in Redis is damaged: %.100q", text),
		})
		return nil
	}
	late := b.sale.places != nil && r.Sequence > *b.sale.places
	if r.Epoch == 0 && b.sale.epoch != nil {
		r.Epoch = *b.sale.epoch
	}
	return []any{b.sale.id, user, r.OrderID, r.Quantity, r.Sequence, r.Epoch, r.ReservedAt, late}
}

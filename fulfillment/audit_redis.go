package fulfillment

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"stampede/reservation"
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
	present                     bool
	epoch, units, stock, places *int64
}

// loadRedis copies what Redis says of the sales to temporary tables of the connection. What cannot be
// read goes to the report.
func loadRedis(ctx context.Context, conn *pgx.Conn, c AuditConfig, sales []auditedSale, report *AuditReport) error {
	if _, err := conn.PgConn().Exec(ctx, sql.AuditTables).ReadAll(); err != nil {
		return fmt.Errorf("make the tables: %w", err)
	}
	var all []redisSale
	for len(sales) > 0 {
		n := min(len(sales), salesPerTrip)
		some, err := readSales(ctx, c, sales[:n], report)
		if err != nil {
			return err
		}
		all, sales = append(all, some...), sales[n:]
	}
	_, err := conn.CopyFrom(ctx, pgx.Identifier{"audit_sales"}, []string{"sale_id", "present", "epoch", "units", "stock", "places"},
		pgx.CopyFromSlice(len(all), func(i int) ([]any, error) {
			s := all[i]
			return []any{s.id, s.present, s.epoch, s.units, s.stock, s.places}, nil
		}))
	if err != nil {
		return fmt.Errorf("copy the sales: %w", err)
	}
	scan := buyerScan{ctx: ctx, c: c, sales: all, report: report}
	_, err = conn.CopyFrom(ctx, pgx.Identifier{"audit_scan"}, []string{"sale_id", "user_id", "order_id", "quantity", "sequence"},
		pgx.CopyFromFunc(scan.next))
	if err != nil {
		return fmt.Errorf("copy the buyers: %w", err)
	}
	if _, err := conn.PgConn().Exec(ctx, sql.AuditBuyers).ReadAll(); err != nil {
		return fmt.Errorf("index the buyers: %w", err)
	}
	return nil
}

// nameStrangers reports the sales that are open in Redis and that Postgres does not know: a database
// that was set back, or the wrong one. Whoever buys there gets an order that nobody can confirm.
func (r *AuditReport) nameStrangers(ctx context.Context, c AuditConfig, inRedis []reservation.LocatedSale, known []auditedSale) error {
	knownIDs := make(map[uuid.UUID]bool, len(known))
	for _, s := range known {
		knownIDs[s.id] = true
	}
	for _, s := range inRedis {
		if knownIDs[s.ID] {
			continue
		}
		buyers, err := c.Redis.HLen(ctx, c.Keys.Buyers(s.Partition, s.ID)).Result()
		if err != nil && !isWrongType(err) {
			return fmt.Errorf("count the buyers of sale %s in Redis: %w", s.ID, err)
		}
		r.add("S7", Finding{Sale: &s.ID, What: fmt.Sprintf("Redis has this sale, with %d buyers, and Postgres does not know it", buyers)})
	}
	return nil
}

func readSales(ctx context.Context, c AuditConfig, sales []auditedSale, report *AuditReport) ([]redisSale, error) {
	asked := make([]*redis.SliceCmd, len(sales))
	_, _ = c.Redis.Pipelined(ctx, func(p redis.Pipeliner) error { // each command's own error counts
		for i, s := range sales {
			asked[i] = p.HMGet(ctx, c.Keys.Sale(s.partition, s.id), "epoch", "left", "stock", "sequence")
		}
		return nil
	})
	all := make([]redisSale, len(sales))
	for i, s := range sales {
		fields, err := asked[i].Result()
		if isWrongType(err) {
			report.add("S7", Finding{Sale: &s.id, What: "its key in Redis holds something else"})
		} else if err != nil {
			return nil, fmt.Errorf("look up sale %s in Redis: %w", s.id, err)
		}
		all[i] = readSale(s, fields)
		if len(fields) > 0 && fields[0] != nil && !all[i].present {
			report.add("S7", Finding{Sale: &s.id, What: fmt.Sprintf("its fields in Redis are damaged: epoch, left, stock, sequence are %v", fields)})
		}
	}
	return all, nil
}

func readSale(s auditedSale, fields []any) redisSale {
	sale := redisSale{auditedSale: s}
	if len(fields) != 4 {
		return sale
	}
	var numbers [4]int64
	for i, field := range fields {
		text, _ := field.(string)
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return sale
		}
		numbers[i] = n
	}
	sale.present = true
	sale.epoch, sale.units, sale.stock, sale.places = &numbers[0], &numbers[1], &numbers[2], &numbers[3]
	return sale
}

// buyerScan streams the buyers of sales from Redis to Postgres.
type buyerScan struct {
	ctx    context.Context // of the copy, which takes a function without one
	c      AuditConfig
	sales  []redisSale
	report *AuditReport

	sale   redisSale // whose buyers the page holds
	page   []string  // user, reservation, user, …
	cursor uint64    // 0 before the first page of a sale and after its last one
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
		if err := b.turn(); err != nil {
			return nil, err
		}
	}
}

// turn fetches the next page.
func (b *buyerScan) turn() (err error) {
	key := b.c.Keys.Buyers(b.sale.partition, b.sale.id)
	b.page, b.cursor, err = b.c.Redis.HScan(b.ctx, key, b.cursor, "", buyersPerTrip).Result()
	if isWrongType(err) {
		b.page, b.cursor = nil, 0
		b.report.add("S7", Finding{Sale: &b.sale.id, What: "the key of its buyers in Redis holds something else"})
		return nil
	} else if err != nil {
		return fmt.Errorf("read the buyers of sale %s: %w", b.sale.id, err)
	}
	return nil
}

// row is nil for a buyer who is left out: one that came after the sale was looked at, or cannot be read.
func (b *buyerScan) row(user, text string) []any {
	r, err := reservation.ParseReservation(text)
	if err != nil {
		b.report.add("S4", Finding{Sale: &b.sale.id, User: user, What: fmt.Sprintf("the reservation in Redis is damaged: %.100q", text)})
		return nil
	}
	if b.sale.places != nil && r.Sequence > *b.sale.places {
		return nil
	}
	return []any{b.sale.id, user, r.OrderID, r.Quantity, r.Sequence}
}

func isWrongType(err error) bool { return err != nil && strings.HasPrefix(err.Error(), "WRONGTYPE") }

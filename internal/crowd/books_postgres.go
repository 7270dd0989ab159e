package crowd

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/sql"
)

// PostgresBooks reads Postgres itself, where the truth is.
type PostgresBooks struct {
	pool   *pgxpool.Pool
	sale   uuid.UUID
	sold   int64                  // when the books were opened
	before map[uuid.UUID]struct{} // the orders that were there by then
	api    *APIBooks              // nil to ask nobody
}

var _ Books = (*PostgresBooks)(nil)

// OpenPostgresBooks notes what the sale holds before the crowd comes.
func OpenPostgresBooks(ctx context.Context, pool *pgxpool.Pool, sale uuid.UUID) (*PostgresBooks, error) {
	b := &PostgresBooks{pool: pool, sale: sale, before: make(map[uuid.UUID]struct{})}
	var err error
	if b.sold, err = b.soldInAll(ctx); err != nil {
		return nil, err
	}
	err = b.eachOrder(ctx, func(o bookedOrder) { b.before[o.id] = struct{}{} })
	return b, err
}

// AskToo has accepted orders that Postgres lacks asked for at an ingress, with their receipts: if
// Redis has lost them, they are voided, and not missing.
func (b *PostgresBooks) AskToo(api *APIBooks) { b.api = api }

// Sold implements Books.
func (b *PostgresBooks) Sold(ctx context.Context) (int64, error) {
	sold, err := b.soldInAll(ctx)
	return sold - b.sold, err
}

func (b *PostgresBooks) soldInAll(ctx context.Context) (int64, error) {
	var sold int64
	err := b.pool.QueryRow(ctx, sql.CrowdSaleSold, b.sale).Scan(&sold)
	if err != nil {
		return 0, fmt.Errorf("read sale=%s: %w", b.sale, err)
	}
	return sold, nil
}

// bookedOrder is a row of orders.
type bookedOrder struct {
	id       uuid.UUID
	user     string
	quantity int64
	status   string
}

// live is true if the order holds units.
func (o bookedOrder) live() bool { return o.status == "confirmed" || o.status == "paid" }

func (b *PostgresBooks) eachOrder(ctx context.Context, see func(bookedOrder)) error {
	rows, _ := b.pool.Query(ctx, sql.CrowdSaleOrders, b.sale) // its error comes with the rows
	var o bookedOrder
	_, err := pgx.ForEachRow(rows, []any{&o.id, &o.user, &o.quantity, &o.status}, func() error {
		see(o)
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the orders of sale=%s: %w", b.sale, err)
	}
	return nil
}

// Compare implements Books.
func (b *PostgresBooks) Compare(ctx context.Context, l *Ledger) (Comparison, error) {
	accepted, contradictions := l.orders()
	undecided := l.undecided()
	c := Comparison{Accepted: len(accepted), Contradictions: contradictions}
	over := make(map[uuid.UUID]bool)
	err := b.eachOrder(ctx, func(o bookedOrder) {
		user, known := accepted[o.id]
		_, old := b.before[o.id]
		switch {
		case known:
			over[o.id] = !o.live()
			c.judge(l, o, user)
			delete(accepted, o.id) // what is left in the end is missing
		case !o.live(), old:
		case undecided[o.user]:
			c.Recovered++
		default:
			c.Strangers++
			c.example("order %s of %s: nobody was told of it", o.id, o.user)
		}
	})
	if err != nil {
		return Comparison{}, err
	}
	if b.api != nil {
		if err := b.api.judgeEach(ctx, &c, l, accepted, over); err != nil {
			return Comparison{}, err
		}
	} else if c.Missing = len(accepted); c.Missing > 0 {
		c.example("%d accepted orders are not in Postgres", c.Missing)
	}
	c.judgePairs(l, over)
	return c, nil
}

func (c *Comparison) judge(l *Ledger, o bookedOrder, user string) {
	switch {
	case o.user != user || o.quantity != l.quantity:
		c.Altered++
		c.example("order %s is %d units for %s, accepted were %d for %s", o.id, o.quantity, o.user, l.quantity, user)
	case o.live():
		c.Found++
	case o.status == "rejected":
		c.Refused++
	case o.status == "voided":
		c.Voided++
	case o.status == "cancelled":
		c.Cancelled++
	case o.status == "expired":
		c.Expired++
	default:
		c.Altered++
		c.example("order %s is %q", o.id, o.status)
	}
}

// judgePairs counts the buyers who hold two orders. Over tells of which orders nothing is held any more.
func (c *Comparison) judgePairs(l *Ledger, over map[uuid.UUID]bool) {
	for _, pair := range l.pairs() {
		if !over[pair[0]] && !over[pair[1]] {
			c.Contradictions++
			c.example("one buyer was given the orders %s and %s", pair[0], pair[1])
		}
	}
}

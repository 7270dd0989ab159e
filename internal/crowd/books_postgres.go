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

// Sold implements Books.
func (b *PostgresBooks) Sold(ctx context.Context) (int64, error) {
	sold, err := b.soldInAll(ctx)
	return sold - b.sold, err
}

func (b *PostgresBooks) soldInAll(ctx context.Context) (int64, error) {
	var sold int64
	err := b.pool.QueryRow(ctx, sql.SaleSold, b.sale).Scan(&sold)
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
	live     bool
}

func (b *PostgresBooks) eachOrder(ctx context.Context, see func(bookedOrder)) error {
	rows, _ := b.pool.Query(ctx, sql.SaleOrders, b.sale) // its error comes with the rows
	var o bookedOrder
	_, err := pgx.ForEachRow(rows, []any{&o.id, &o.user, &o.quantity, &o.live}, func() error {
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
	accepted, contradictions := l.Orders()
	undecided := l.Undecided()
	c := Comparison{Accepted: len(accepted), Contradictions: contradictions}
	seen := 0
	err := b.eachOrder(ctx, func(o bookedOrder) {
		user, known := accepted[o.id]
		_, old := b.before[o.id]
		switch {
		case known:
			seen++
			c.judge(l, o, user)
		case !o.live, old:
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
	if c.Missing = c.Accepted - seen; c.Missing > 0 {
		c.example("%d accepted orders are not in Postgres", c.Missing)
	}
	return c, nil
}

func (c *Comparison) judge(l *Ledger, o bookedOrder, user string) {
	switch {
	case o.user != user || o.quantity != l.quantity:
		c.Altered++
		c.example("order %s is %d units for %s, accepted were %d for %s", o.id, o.quantity, o.user, l.quantity, user)
	case o.live:
		c.Found++
	default:
		c.Refused++
	}
}

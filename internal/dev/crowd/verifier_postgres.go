package crowd

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/sql"
)

// PostgresVerifier reads the orders from Postgres.
type PostgresVerifier struct {
	pool   *pgxpool.Pool
	sale   uuid.UUID
	sold   int64                  // before the crowd
	before map[uuid.UUID]struct{} // the orders before the crowd
	api    *APIVerifier           // nil without UseAPI
}

var _ Verifier = (*PostgresVerifier)(nil)

// NewPostgresVerifier reads the orders of the sale before the crowd.
func NewPostgresVerifier(ctx context.Context, pool *pgxpool.Pool, sale uuid.UUID) (*PostgresVerifier, error) {
	v := &PostgresVerifier{pool: pool, sale: sale, before: make(map[uuid.UUID]struct{})}
	var err error
	if v.sold, err = v.totalSold(ctx); err != nil {
		return nil, err
	}
	err = v.eachOrder(ctx, func(o storedOrder) { v.before[o.id] = struct{}{} })
	return v, err
}

// UseAPI makes Compare look up accepted orders that Postgres lacks at an ingress, with their receipts: if Redis
// has lost them, they are voided, not missing.
func (v *PostgresVerifier) UseAPI(api *APIVerifier) { v.api = api }

// Sold implements Verifier.
func (v *PostgresVerifier) Sold(ctx context.Context) (int64, error) {
	sold, err := v.totalSold(ctx)
	return sold - v.sold, err
}

func (v *PostgresVerifier) totalSold(ctx context.Context) (int64, error) {
	var sold int64
	err := v.pool.QueryRow(ctx, sql.CrowdSaleSold, v.sale).Scan(&sold)
	if err != nil {
		return 0, fmt.Errorf("read sale=%s: %w", v.sale, err)
	}
	return sold, nil
}

func (v *PostgresVerifier) eachOrder(ctx context.Context, see func(storedOrder)) error {
	rows, _ := v.pool.Query(ctx, sql.CrowdSaleOrders, v.sale) // its error comes with the rows
	var o storedOrder
	_, err := pgx.ForEachRow(rows, []any{&o.id, &o.user, &o.quantity, &o.status}, func() error {
		see(o)
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the orders of sale=%s: %w", v.sale, err)
	}
	return nil
}

// Compare implements Verifier.
func (v *PostgresVerifier) Compare(ctx context.Context, l *Ledger) (Comparison, error) {
	missing, contradictions := l.orders() // until they are found
	undecided := l.undecided()
	c := Comparison{Accepted: len(missing), Contradictions: contradictions}
	ended := make(map[uuid.UUID]bool)
	err := v.eachOrder(ctx, func(o storedOrder) {
		user, known := missing[o.id]
		_, old := v.before[o.id]
		switch {
		case known:
			ended[o.id] = !o.live()
			c.countOrder(l, o, user)
			delete(missing, o.id)
		case !o.live(), old:
		case undecided[o.user]:
			c.Recovered++
		default:
			c.Unexpected++
			c.example("no answer named order %s of %s", o.id, o.user)
		}
	})
	if err != nil {
		return Comparison{}, err
	}
	if v.api != nil {
		if err := v.api.countOrders(ctx, &c, l, missing, ended); err != nil {
			return Comparison{}, err
		}
	} else if c.Missing = len(missing); c.Missing > 0 {
		c.example("%d accepted orders are not in Postgres", c.Missing)
	}
	c.countPairs(l, ended)
	return c, nil
}

package designs

import (
	"context"
	_ "embed"
	"sync/atomic"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/bench/front"
)

var (
	//go:embed sql/create_units.sql
	createUnitsSQL string
	//go:embed sql/fill_units.sql
	fillUnitsSQL string
	//go:embed sql/sell_units.sql
	sellUnitsSQL string
)

// postgresUnits is what one finds on asking how to get rid of the hot row: each unit is a row of its
// own, and SELECT … FOR UPDATE SKIP LOCKED gives every buyer one that nobody else is about to take.
//
// What it gets right: what postgres-row does, and buyers do not wait for each other any more, so that
// many of them share the wait for the disk (group commit), and more connections make it faster. Where
// the units differ, as seats do, it is the natural form.
//
// How it fails: still one transaction for each buyer, and now with a row for each unit, which has to be
// made before the sale. SKIP LOCKED does not know whether a locked unit will be sold: the last
// buyers may be told that all is sold while somebody is about to be refused, whose unit then stays
// until another buyer asks. How much is left, nobody knows without counting.
//
// A sold unit is deleted: to mark it in its row would write a second one. The index still leads to deleted
// units until VACUUM comes, and whoever looks for the lowest free unit would walk over all of them; so a
// process begins where it sold last, and looks at all units only if it finds none there. sales.sold stays
// 0: it would be the hot row again.
type postgresUnits struct {
	postgresStock
	// from is the lowest unit that is worth a look, unless there is none from there on.
	from atomic.Int64
}

const (
	// unitsConnections: of 4, 8, 16, 32 and 64 the fastest at 256 buyers.
	unitsConnections = 16
	// unitsBehind is how far below the highest unit that was sold others may still be about to sell.
	unitsBehind = 256
)

func newPostgresUnits(ctx context.Context, b front.Backend) (front.Design, error) {
	stock, err := openPostgresStock(ctx, b, unitsConnections)
	if err != nil {
		return nil, err
	}
	return &postgresUnits{postgresStock: stock}, nil
}

// Prepare implements front.Design.
func (d *postgresUnits) Prepare(ctx context.Context, sale uuid.UUID, stock int64) error {
	return pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, lockSaleSQL, sale)
		if err == nil {
			_, err = tx.Exec(ctx, createUnitsSQL)
		}
		if err == nil {
			_, err = tx.Exec(ctx, fillUnitsSQL, sale, stock)
		}
		return err
	})
}

// Buy implements front.Design.
func (d *postgresUnits) Buy(ctx context.Context, o front.Order) (front.Verdict, error) {
	from := d.from.Load()
	verdict, err := d.buyFrom(ctx, o, from)
	if verdict == front.SoldOut && from > 0 {
		return d.buyFrom(ctx, o, 0)
	}
	return verdict, err
}

func (d *postgresUnits) buyFrom(ctx context.Context, o front.Order, lowest int64) (front.Verdict, error) {
	var unit int64
	var word string
	err := d.pool.QueryRow(ctx, sellUnitsSQL, o.ID, o.Sale, o.User, o.Quantity, lowest).Scan(&unit, &word)
	for from := d.from.Load(); from < unit-unitsBehind; from = d.from.Load() {
		if d.from.CompareAndSwap(from, unit-unitsBehind) {
			break
		}
	}
	return sellVerdict(o, word, err)
}

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

// postgresUnits is the usual answer to the question how to avoid the hot row: each unit is its own row,
// and SELECT … FOR UPDATE SKIP LOCKED gives every buyer a row that no other transaction has locked.
//
// What it gets right: what postgres-row does, and buyers no longer wait for each other, so that many of
// them share the wait for the disk (group commit), and more connections make it faster. It is the
// natural form if units differ, as seats do.
//
// How it fails: there is still one transaction per buyer, and now also a row per unit, which must be
// inserted before the sale. SKIP LOCKED does not know whether a locked unit will be sold: the last
// buyers may get "sold out" while another purchase is about to be refused, and its unit then stays
// until another buyer asks. The number of units left is unknown without counting.
//
// A sold unit is deleted: marking its row would write a second version. The index still leads to
// deleted units until VACUUM runs, so a search for the lowest free unit would visit all of them.
// Therefore a process searches from where it sold last, and searches all units only if it finds none
// there. sales.sold stays 0: it would be the hot row again.
type postgresUnits struct {
	postgresStock
	// from is the lowest unit to look at first. Units below it are searched only if none is found from
	// there on.
	from atomic.Int64
}

const (
	// unitsConnections: of 4, 8, 16, 32 and 64 the fastest with 256 buyers.
	unitsConnections = 16
	// unitsBehind is how far below the highest sold unit other transactions may still be selling.
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

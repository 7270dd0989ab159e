package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/pg"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

// Reader reads orders and payments in Postgres, and changes nothing. It is safe for concurrent use.
type Reader struct{ pool *pgxpool.Pool }

// FindByReceipt returns the order of a receipt that Signer.Verify has accepted: as it is in Postgres, or
// voided if the sale's stock was rebuilt without the order. It returns order.ErrNotFound if the
// order may still be recorded, and order.ErrArchived if the orders of its sale were archived. Every other
// error is one of Postgres.
//
// The epoch is read before the order. Every transaction that confirms orders locks the row of their sale
// and compares epochs (ledger/add_sold.sql), so an order of an earlier epoch that is still missing can
// never be confirmed.
func (l *Reader) FindByReceipt(ctx context.Context, r order.Receipt) (order.Order, error) {
	batch := &pgx.Batch{}
	batch.Queue(sql.LedgerSaleEpoch, r.SaleID)
	batch.Queue(sql.LedgerFindOrders, r.SaleID, []uuid.UUID{r.OrderID})
	answers := l.pool.SendBatch(ctx, batch)
	var epoch int64
	var archived bool
	err := answers.QueryRow().Scan(&epoch, &archived)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil // unknown sale: no epoch of it has ended
	}
	found := map[uuid.UUID]order.Order{}
	findErr := readOrders(answers, found)
	if err := errors.Join(err, findErr, answers.Close()); err != nil {
		return order.Order{}, fmt.Errorf("find the order of a receipt: order=%s: %w", r.OrderID, err)
	}
	if o, ok := found[r.OrderID]; ok {
		return o, nil
	}
	if archived {
		return order.Order{}, fmt.Errorf("order %s: %w", r.OrderID, order.ErrArchived)
	}
	if epoch > r.Epoch {
		o := r.Order(order.StatusVoided)
		if o.Lines != "" {
			if err := l.pool.QueryRow(ctx, sql.LedgerNameLines, o.SaleID, o.Lines).Scan(&o.Items); err != nil {
				return order.Order{}, fmt.Errorf("find the items of a receipt: order=%s: %w", r.OrderID, err)
			}
		}
		return o, nil
	}
	return order.Order{}, fmt.Errorf("order %s: %w", r.OrderID, order.ErrNotFound)
}

// FindOrders returns the orders with these ids that are in Postgres, unordered.
func (l *Reader) FindOrders(ctx context.Context, ids []uuid.UUID) ([]order.Order, error) {
	found, err := l.findOrders(ctx, ids)
	if err != nil {
		return nil, fmt.Errorf("find %d orders: %w", len(ids), err)
	}
	return slices.Collect(maps.Values(found)), nil
}

// Order returns the order as it is in Postgres, or order.ErrNotFound. An order that was just
// reserved is not in Postgres yet.
func (l *Reader) Order(ctx context.Context, id uuid.UUID) (order.Order, error) {
	found, err := l.findOrders(ctx, []uuid.UUID{id})
	if err != nil {
		return order.Order{}, fmt.Errorf("find order %s: %w", id, err)
	}
	o, ok := found[id]
	if !ok {
		return order.Order{}, fmt.Errorf("order %s: %w", id, order.ErrNotFound)
	}
	return o, nil
}

// findOrders returns the orders with these ids by id.
func (l *Reader) findOrders(ctx context.Context, ids []uuid.UUID) (map[uuid.UUID]order.Order, error) {
	found := make(map[uuid.UUID]order.Order, len(ids))
	known := knownToAll.sales(ids)
	if err := l.readOrders(ctx, known, found); err != nil || len(found) == len(ids) {
		return found, err
	}
	missing := slices.DeleteFunc(slices.Clone(ids), func(id uuid.UUID) bool {
		_, ok := found[id]
		return ok
	})
	others, err := findOtherSales(ctx, l.pool, missing, known)
	if err == nil {
		err = l.readOrders(ctx, others, found)
	}
	for id := range found {
		knownToAll.add(found[id].SaleID)
	}
	return found, err
}

// readOrders adds the orders of these sales to found, in one round trip.
func (l *Reader) readOrders(ctx context.Context, bySale ordersBySale, found map[uuid.UUID]order.Order) (err error) {
	if len(bySale) == 0 {
		return nil
	}
	batch := &pgx.Batch{}
	for _, group := range bySale {
		batch.Queue(sql.LedgerFindOrders, group.sale, group.orders)
	}
	answers := l.pool.SendBatch(ctx, batch)
	for range bySale {
		if err = readOrders(answers, found); err != nil {
			break
		}
	}
	return closed(answers, err)
}

// findOtherSales returns the sales to which orders may belong, with those orders, except the known ones. It is mostly
// one sale for each order (order.NewOrderID). With the sale, Postgres reads one month of orders, and without it all.
func findOtherSales(
	ctx context.Context, on pg.Querier, ids []uuid.UUID, known ordersBySale,
) (bySale ordersBySale, err error) {
	rows, _ := on.Query(ctx, sql.LedgerSalesOfOrders, ids) // rows carry the error
	var place int
	var sale uuid.UUID
	_, err = pgx.ForEachRow(rows, []any{&place, &sale}, func() error {
		if !slices.ContainsFunc(known, func(group saleOrders) bool { return group.sale == sale }) {
			bySale.add(sale, ids[place-1])
		}
		return nil
	})
	return bySale, err
}

// knownSales has, for the two bytes that a sale shares with its orders, the sale of the last order that was found. So
// nearly all orders are found without a query for their sale. It is safe for concurrent use.
type knownSales struct{ byTag sync.Map }

// knownToAll is shared by all ledgers of the process: an ingress has several, each with its connections.
var knownToAll knownSales

func saleTag(id uuid.UUID) [2]byte { return [2]byte(id[14:]) }

func (k *knownSales) add(sale uuid.UUID) { k.byTag.Store(saleTag(sale), sale) }

// sales returns the known sales to which the orders may belong.
func (k *knownSales) sales(ids []uuid.UUID) (bySale ordersBySale) {
	for _, id := range ids {
		if sale, ok := k.byTag.Load(saleTag(id)); ok {
			bySale.add(sale.(uuid.UUID), id)
		}
	}
	return bySale
}

// Ping returns nil if Postgres answers a query for orders and takes writes. The error is pg.ErrReadOnly if it only does
// the former.
func (l *Reader) Ping(ctx context.Context) error {
	if _, err := l.pool.Exec(ctx, sql.LedgerFindOrders, uuid.Nil, []uuid.UUID{}); err != nil {
		return err
	}
	return pg.Writable(ctx, l.pool)
}

// ReceiptSecret returns the secret with which all ingresses on this database sign receipts by default.
func (l *Reader) ReceiptSecret(ctx context.Context) (secret []byte, err error) {
	if err := l.pool.QueryRow(ctx, sql.LedgerReceiptSecret).Scan(&secret); err != nil {
		return nil, fmt.Errorf("read the secret for receipts: %w", err)
	}
	return secret, nil
}

// PastAnswer returns the answer to a purchase in a sale that is over and of which Redis has no buyers any more. It is
// the one that lua/reserve.lua gave as long as Redis had them: a repeated request gets its order, and every other one
// Ended. Every order of such a sale is in Postgres, unless it is archived. Every error is one of Postgres.
func (l *Reader) PastAnswer(ctx context.Context, r reservation.Request) (reservation.Answer, error) {
	key := r.KeyFingerprint()
	rows, _ := l.pool.Query(ctx, sql.LedgerPastOrders, r.Sale, r.User, zeronull.Text(key)) // rows carry the error
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[pastOrder])
	if err != nil {
		return reservation.Answer{}, fmt.Errorf("find the orders of user=%s in sale=%s: %w", r.User, r.Sale, err)
	}
	answer := reservation.Answer{Verdict: reservation.Ended}
	for i := range found {
		o := &found[i]
		switch isSame := key != "" && o.KeyFingerprint == key; {
		case isSame && !o.isFor(r):
			return reservation.Answer{Verdict: reservation.KeyReused}, nil
		case isSame && o.Status.Live():
			return reservation.Answer{Verdict: reservation.Replayed, Reservation: o.reservation(), Of: o.items()}, nil
		case isSame:
			return reservation.Answer{
				Verdict: reservation.OrderEnded, Status: o.Status,
				Reservation: order.Reservation{OrderID: o.ID, Quantity: o.Quantity, Lines: order.Lines(o.Lines)}, Of: o.items(),
			}, nil
		default: // a live order of another request
			answer = reservation.Answer{Verdict: reservation.AlreadyPurchased, Reservation: o.reservation(), Of: o.items()}
		}
	}
	return answer, nil
}

// pastOrder is an order as ledger/past_orders.sql returns it.
type pastOrder struct {
	ID                        uuid.UUID
	Quantity, Sequence, Epoch int64
	Lines, Items              zeronull.Text
	ReservedAt                time.Time
	Status                    order.Status
	KeyFingerprint            string
}

func (o *pastOrder) reservation() order.Reservation {
	return order.Reservation{
		OrderID: o.ID, Quantity: o.Quantity, Lines: order.Lines(o.Lines), Sequence: o.Sequence, Epoch: o.Epoch,
		ReservedAt: o.ReservedAt.UTC(),
	}
}

func (o *pastOrder) items() *reservation.OfItems {
	if o.Lines == "" {
		return nil
	}
	return &reservation.OfItems{Units: order.Items(o.Items)}
}

// isFor reports whether the order has the units that the request asks for.
func (o *pastOrder) isFor(r reservation.Request) bool {
	if len(r.Items) == 0 {
		return o.Lines == "" && o.Quantity == r.Quantity
	}
	var items map[string]int64
	err := json.Unmarshal([]byte(o.Items), &items)
	return err == nil && maps.Equal(items, r.Items)
}

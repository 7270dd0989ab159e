package rebuild

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"stampede/internal/crashpoint"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

const (
	// holdersPerCall is how many orders of a shard go to Redis in one call. Redis serves no other client meanwhile, and
	// larger calls are hardly faster.
	holdersPerCall = 1000
	// holdCalls bounds the concurrent calls: while Redis works on one, the next one is sent.
	holdCalls = 2
)

// errOvertaken is returned if another rebuild of the sale has raised its epoch since this one began.
var errOvertaken = errors.New("another rebuild has raised the epoch of the sale")

// staged counts what was copied to Redis for the new epoch of a shard: live orders, their units, and ended orders.
type staged struct {
	orders, units, ended int64
	// items are the units by place of the item.
	items [order.MaxItems]int64
}

// add counts a live order.
func (s *staged) add(r *order.Reservation) error {
	s.orders++
	s.units += r.Quantity
	if r.Lines == "" {
		return nil
	}
	lines, err := order.ParseLines(string(r.Lines))
	if err != nil {
		return fmt.Errorf("order=%s: %w", r.OrderID, err)
	}
	for item, units := range lines.Each() {
		s.items[item] += units
	}
	return nil
}

// addUp sums what was copied for all shards.
func addUp(shards []staged) (all staged) {
	for _, s := range shards {
		all.orders, all.units, all.ended = all.orders+s.orders, all.units+s.units, all.ended+s.ended
	}
	return all
}

// stageBuyers copies the live orders of a sale to keys beside the old buyers, each to the shard of its user, and the
// ended orders with an idempotency key to others. It reads one snapshot after the raise of the epoch: no order can be
// added any more, and the units of an order that ends later are released in the new epoch. It returns what it copied
// for each shard.
func (b *build) stageBuyers(ctx context.Context, sale raisedSale) ([]staged, error) {
	layout := sale.Layout()
	counts := make([]staged, layout.Shards)
	calls, callCtx := errgroup.WithContext(ctx)
	calls.SetLimit(holdCalls)
	free := make(chan []reservation.Holder, holdCalls)
	for range cap(free) {
		free <- make([]reservation.Holder, 0, holdersPerCall)
	}
	send := func(shard int, page []reservation.Holder) (next []reservation.Holder, err error) {
		for i := range page {
			if err := counts[shard].add(&page[i].Reservation); err != nil {
				return nil, err
			}
		}
		calls.Go(func() error {
			defer func() { free <- page[:0] }()
			return b.holdPage(callCtx, sale, layout.Partition(shard), page)
		})
		crashpoint.Hit(crashpoint.RebuildStaging)
		return <-free, callCtx.Err()
	}
	// Uses ctx and not callCtx: a cancelled query ends the session, and the lock with it.
	readErr := b.session.snapshot(ctx, sale, func(tx pgx.Tx) error {
		if err := eachHolder(ctx, tx, sale, send); err != nil {
			return err
		}
		return b.stageEnded(ctx, tx, sale, counts)
	})
	if err := calls.Wait(); err != nil {
		return nil, err // the cause of readErr, if there is one
	}
	return counts, readErr
}

// stageEnded copies the ended orders, and counts them.
func (b *build) stageEnded(ctx context.Context, tx pgx.Tx, sale raisedSale, counts []staged) error {
	var e reservation.EndedOrder
	layout, pages := sale.Layout(), make([][]reservation.EndedOrder, len(counts))
	send := func(shard int) error {
		ctx, cancel := context.WithTimeout(ctx, retry.CallTimeout)
		defer cancel()
		counts[shard].ended += int64(len(pages[shard]))
		err := b.config.Catalog.Store.StageEnded(ctx, layout.Partition(shard), sale.ID, b.token, pages[shard])
		pages[shard] = pages[shard][:0]
		return err
	}
	query, into := sql.RebuildEndedOrders, []any{
		&e.User, &e.KeyFingerprint, (*[16]byte)(&e.OrderID), &e.Quantity, &e.Status,
	}
	if len(sale.Items) > 0 {
		query, into = sql.RebuildEndedLines, append(into, &e.Lines)
	}
	rows, _ := tx.Query(ctx, query, sale.ID) // its error comes with the rows
	_, err := pgx.ForEachRow(rows, into, func() error {
		shard := layout.ShardOf(e.User)
		if pages[shard] = append(pages[shard], e); len(pages[shard]) < holdersPerCall {
			return nil
		}
		return send(shard)
	})
	for shard := range pages {
		if err == nil && len(pages[shard]) > 0 {
			err = send(shard)
		}
	}
	return err
}

func (b *build) holdPage(ctx context.Context, sale raisedSale, partition int, page []reservation.Holder) error {
	ctx, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	return b.config.Catalog.Store.StageBuyers(ctx, partition, sale.ID, b.token, sale.Epoch, page)
}

// snapshot calls read in a snapshot of Postgres in the new epoch of the sale, or returns errOvertaken.
func (s *lockSession) snapshot(ctx context.Context, sale raisedSale, read func(pgx.Tx) error) error {
	snapshot := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}
	return pgx.BeginTxFunc(ctx, s.conn, snapshot, func(tx pgx.Tx) error {
		var epoch int64
		if err := tx.QueryRow(ctx, sql.LedgerSaleEpoch, sale.ID).Scan(&epoch, nil); err != nil {
			return err
		}
		if epoch != sale.Epoch {
			return fmt.Errorf("%w: it is %d, and was %d", errOvertaken, epoch, sale.Epoch)
		}
		return read(tx)
	})
}

// eachHolder reads the live orders of a sale into a page for each shard, calls take with each full page and the last
// ones, and continues with the page that take returns.
func eachHolder(ctx context.Context, tx pgx.Tx, sale raisedSale,
	take func(shard int, page []reservation.Holder) (next []reservation.Holder, err error),
) error {
	layout := sale.Layout()
	pages := make([][]reservation.Holder, layout.Shards)
	for shard := range pages {
		pages[shard] = make([]reservation.Holder, 0, holdersPerCall)
	}
	rows, _ := tx.Query(ctx, sql.RebuildHolders, sale.ID) // its error comes with the rows
	var h reservation.Holder
	r := &h.Reservation
	// By position: there is a row for each order, and a scan by name takes up to twice the CPU.
	into := []any{
		&h.User, (*[16]byte)(&r.OrderID), &r.Quantity, &r.Sequence, &r.ReservedAt, &h.KeyFingerprint, &h.Epoch,
		(*string)(&r.Lines),
	}
	_, err := pgx.ForEachRow(rows, into, func() (err error) {
		shard := layout.ShardOf(h.User)
		if pages[shard] = append(pages[shard], h); len(pages[shard]) == holdersPerCall {
			pages[shard], err = take(shard, pages[shard])
		}
		return err
	})
	for shard, page := range pages {
		if err == nil && len(page) > 0 {
			_, err = take(shard, page)
		}
	}
	return err
}

// clearLeftovers deletes what an interrupted earlier rebuild of the sale has staged.
func (b *build) clearLeftovers(ctx context.Context, sale raisedSale, closed []reservation.ClosedSale) error {
	for shard, c := range closed {
		if c.LastToken == "" {
			continue
		}
		limited, cancel := retry.ForCall(ctx)
		p := sale.Layout().Partition(shard)
		err := b.config.Catalog.Store.Redis.Unlink(limited, b.config.Catalog.Store.Keys.Staged(p, sale.ID, c.LastToken),
			b.config.Catalog.Store.Keys.StagedEnded(p, sale.ID, c.LastToken)).Err()
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

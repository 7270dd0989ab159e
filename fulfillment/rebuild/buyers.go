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
	"stampede/sql"
)

const (
	// holdersPerCall is how many orders go to Redis in one call. Redis serves no other client meanwhile, and larger
	// calls are hardly faster.
	holdersPerCall = 1000
	// holdCalls bounds the concurrent calls: while Redis works on one, the next one is sent.
	holdCalls = 2
)

// errOvertaken is returned if another rebuild of the sale has raised its epoch since this one began.
var errOvertaken = errors.New("another rebuild has raised the epoch of the sale")

// staged counts what was copied to Redis for the new epoch of a sale: live orders, their units, and ended orders.
type staged struct{ orders, units, ended int64 }

// stageBuyers copies the live orders of a sale to a key beside the old buyers, and its ended orders with an idempotency
// key to another. It reads one snapshot after the raise of the epoch: no order can be added any more, and the units
// of an order that ends later are released in the new epoch.
func (b *build) stageBuyers(ctx context.Context, sale raisedSale) (all staged, err error) {
	calls, callCtx := errgroup.WithContext(ctx)
	calls.SetLimit(holdCalls)
	free := make(chan []reservation.Holder, holdCalls+1) // one of them is being filled
	for range cap(free) {
		free <- make([]reservation.Holder, 0, holdersPerCall)
	}
	send := func(page []reservation.Holder) ([]reservation.Holder, error) {
		all.orders += int64(len(page))
		for i := range page {
			all.units += page[i].Reservation.Quantity
		}
		calls.Go(func() error {
			defer func() { free <- page[:0] }()
			return b.holdPage(callCtx, sale, page)
		})
		crashpoint.Hit(crashpoint.RebuildStaging)
		return <-free, callCtx.Err()
	}
	// Uses ctx and not callCtx: a cancelled query ends the session, and the lock with it.
	readErr := b.session.snapshot(ctx, sale, func(tx pgx.Tx) error {
		if err := eachHolder(ctx, tx, sale, <-free, send); err != nil {
			return err
		}
		return b.stageEnded(ctx, tx, sale, &all.ended)
	})
	if err := calls.Wait(); err != nil {
		return staged{}, err // the cause of readErr, if there is one
	}
	return all, readErr
}

// stageEnded copies the ended orders, and counts them.
func (b *build) stageEnded(ctx context.Context, tx pgx.Tx, sale raisedSale, count *int64) error {
	var e reservation.EndedOrder
	page := make([]reservation.EndedOrder, 0, holdersPerCall)
	send := func() error {
		ctx, cancel := context.WithTimeout(ctx, retry.CallTimeout)
		defer cancel()
		*count += int64(len(page))
		err := b.config.Store.StageEnded(ctx, b.partition, sale.ID, b.token, page)
		page = page[:0]
		return err
	}
	rows, _ := tx.Query(ctx, sql.RebuildEndedOrders, sale.ID) // its error comes with the rows
	_, err := pgx.ForEachRow(rows, []any{&e.User, &e.KeyFingerprint, (*[16]byte)(&e.OrderID), &e.Quantity, &e.Status},
		func() error {
			if page = append(page, e); len(page) < cap(page) {
				return nil
			}
			return send()
		})
	if err == nil && len(page) > 0 {
		err = send()
	}
	return err
}

func (b *build) holdPage(ctx context.Context, sale raisedSale, page []reservation.Holder) error {
	ctx, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	return b.config.Store.StageBuyers(ctx, b.partition, sale.ID, b.token, sale.Epoch, page)
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

// eachHolder reads the live orders of a sale into the page, calls take with each full page and the last one, and
// continues with the page that take returns.
func eachHolder(ctx context.Context, tx pgx.Tx, sale raisedSale, page []reservation.Holder,
	take func([]reservation.Holder) ([]reservation.Holder, error),
) error {
	rows, _ := tx.Query(ctx, sql.RebuildHolders, sale.ID) // its error comes with the rows
	var h reservation.Holder
	r := &h.Reservation
	// By position: there is a row for each order, and a scan by name takes up to twice the CPU.
	into := []any{&h.User, (*[16]byte)(&r.OrderID), &r.Quantity, &r.Sequence, &r.ReservedAt, &h.KeyFingerprint, &h.Epoch}
	_, err := pgx.ForEachRow(rows, into, func() (err error) {
		if page = append(page, h); len(page) == cap(page) {
			page, err = take(page)
		}
		return err
	})
	if err == nil && len(page) > 0 {
		_, err = take(page)
	}
	return err
}

// clearLeftovers deletes what an interrupted earlier rebuild of the sale has staged.
func (b *build) clearLeftovers(ctx context.Context, sale requiredSale) error {
	if sale.closed.LastToken == "" {
		return nil
	}
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	token := sale.closed.LastToken
	return b.config.Redis.Unlink(ctx,
		b.config.Keys.Staged(b.partition, sale.id, token), b.config.Keys.StagedEnded(b.partition, sale.id, token)).Err()
}

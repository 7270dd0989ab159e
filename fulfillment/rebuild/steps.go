package rebuild

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"stampede/internal/crashpoint"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/sql"
)

// wholePartition is one try of Rebuilder.Partition.
func (b *build) wholePartition(ctx context.Context) error {
	if err := b.session.requireGuards(ctx); err != nil {
		return err
	}
	b.at("identify the Redis server and mark it as unverified")
	server, err := b.inspect(ctx)
	if err != nil {
		return err
	}
	crashpoint.Hit(crashpoint.RebuildBegun)
	if err := b.distrust(ctx); err != nil {
		return err
	}
	crashpoint.Hit(crashpoint.RebuildDistrusted)
	// Read after distrust: a sale that is created later is published only to a verified server.
	sales, err := b.salesOf(ctx, b.partition)
	if err != nil {
		return err
	}
	if err := b.closeAndDrain(ctx, sales); err != nil {
		return err
	}
	var live, ended []requiredSale
	for _, sale := range sales {
		if sale.ended {
			ended = append(ended, sale)
		} else {
			live = append(live, sale)
		}
	}
	// A sale that cannot be rebuilt stays closed and delays no other.
	failed := b.rebuildSales(ctx, live)
	b.at("mark the Redis server as verified")
	if err := b.markVerified(ctx, server); err != nil {
		return errors.Join(err, failed)
	}
	return errors.Join(failed, b.rebuildSales(ctx, ended))
}

// oneSale is one try of Rebuilder.Sale.
func (b *build) oneSale(ctx context.Context, id uuid.UUID) error {
	if err := b.session.requireGuards(ctx); err != nil {
		return err
	}
	sale, err := b.findSale(ctx, id)
	if err != nil {
		return err
	}
	server, err := b.inspect(ctx)
	if err != nil {
		return err
	}
	if !server.Known {
		return ErrServerUnverified
	}
	crashpoint.Hit(crashpoint.RebuildBegun)
	sales := []requiredSale{sale}
	if err := b.closeAndDrain(ctx, sales); err != nil {
		return err
	}
	return b.rebuildSales(ctx, sales)
}

// closeAndDrain closes the sales in Redis, so that no order is accepted, and records the accepted ones. It stores in
// each sale what Redis knew of it.
func (b *build) closeAndDrain(ctx context.Context, sales []requiredSale) error {
	b.at("close the sales in Redis")
	closed := make(map[uuid.UUID]bool, len(sales))
	for i := range sales {
		var err error
		if sales[i].closed, err = b.closeSale(ctx, sales[i]); err != nil {
			return fmt.Errorf("close sale=%s: %w", sales[i].id, err)
		}
		closed[sales[i].id] = true
		if i%salesPerPage == salesPerPage-1 {
			if err := b.session.ping(ctx); err != nil {
				return err
			}
		}
	}
	crashpoint.Hit(crashpoint.RebuildClosed)
	b.at("record the unfinished entries of the stream")
	if err := b.drainStream(ctx, closed); err != nil {
		return fmt.Errorf("drain the stream: %w", err)
	}
	crashpoint.Hit(crashpoint.RebuildDrained)
	return nil
}

// rebuildSales rebuilds as many of these sales as it can.
func (b *build) rebuildSales(ctx context.Context, sales []requiredSale) error {
	var failed []error
	for i := range sales {
		rebuilt, err := b.rebuildSale(ctx, sales[i])
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("sale=%s: %w", sales[i].id, err))
			continue
		}
		b.report.Sales = append(b.report.Sales, rebuilt)
	}
	return errors.Join(failed...)
}

// markVerified records that the server has the stock, in Postgres first: an ingress on another server then refuses to
// sell from it.
func (b *build) markVerified(ctx context.Context, server reservation.ServerState) error {
	if err := b.session.saveServer(ctx, b.partition, server); err != nil {
		return err
	}
	crashpoint.Hit(crashpoint.RebuildServerSaved)
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	if err := b.config.Store.MarkVerified(limited, b.partition, server, b.token); err != nil {
		return err
	}
	crashpoint.Hit(crashpoint.RebuildVerified)
	return nil
}

func (b *build) inspect(ctx context.Context) (reservation.ServerState, error) {
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	return b.config.Store.Inspect(limited, b.partition)
}

func (b *build) distrust(ctx context.Context) error {
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	return b.config.Store.DistrustFor(limited, b.partition, b.token)
}

func (b *build) closeSale(ctx context.Context, sale requiredSale) (reservation.ClosedSale, error) {
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	return b.config.Store.CloseSale(limited, sale.id, b.partition, b.token, sale.epoch)
}

// rebuildSale rebuilds one closed sale.
func (b *build) rebuildSale(ctx context.Context, sale requiredSale) (SaleReport, error) {
	began := time.Now()
	b.atSale("raise the epoch of the sale, with its row locked", sale.id)
	raised, err := b.session.raiseEpoch(ctx, sale, b.of.Reason)
	if err != nil {
		return SaleReport{}, fmt.Errorf("raise the epoch: %w", err)
	}
	crashpoint.Hit(crashpoint.RebuildRaised)
	if err := b.clearLeftovers(ctx, sale); err != nil {
		return SaleReport{}, fmt.Errorf("clear leftovers: %w", err)
	}
	b.atSale("copy the orders of the sale to Redis", sale.id)
	all, err := b.stageBuyers(ctx, raised)
	if err != nil {
		return SaleReport{}, fmt.Errorf("copy its orders: %w", err)
	}
	crashpoint.Hit(crashpoint.RebuildStaged)
	left := raised.Stock - all.units
	if left < 0 {
		b.log.Error("live orders hold more units than the sale's stock: no unit is left for sale", "sale", sale.id, "stock",
			raised.Stock, "held", all.units)
		left = 0
	}
	b.atSale("open the sale", sale.id)
	if err := b.openSale(ctx, raised, left, all); err != nil {
		return SaleReport{}, err
	}
	crashpoint.Hit(crashpoint.RebuildOpened)
	if err := b.session.exec(ctx, sql.CatalogMarkPublished, sale.id, raised.Revision); err != nil {
		return SaleReport{}, fmt.Errorf("record the published revision: %w", err)
	}
	crashpoint.Hit(crashpoint.RebuildPublished)
	return SaleReport{
		ID: sale.id, Epoch: raised.Epoch, Revision: raised.Revision, Ended: sale.ended, Stock: raised.Stock, Left: left,
		Held: all.units, Orders: all.orders, Sequence: raised.sequence, Seconds: time.Since(began).Seconds(),
	}, nil
}

func (b *build) openSale(ctx context.Context, sale raisedSale, left int64, all staged) error {
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	return b.config.Store.OpenRebuilt(limited, reservation.Rebuilt{
		Sale: sale.Sale, Left: left, Held: all.units, LastPlace: sale.sequence, Holders: all.orders, Ended: all.ended,
		Token: b.token,
	})
}

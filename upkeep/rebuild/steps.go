package rebuild

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/internal/crashpoint"
	"stampede/internal/retry"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/stream"
)

// wholePartition is one try of Rebuilder.Partition.
func (b *build) wholePartition(ctx context.Context) error {
	if err := b.session.requireGuards(ctx); err != nil {
		return err
	}
	b.at("identify the Redis server and mark it as unverified")
	server, err := b.inspect(ctx, b.partition)
	if err != nil {
		return err
	}
	crashpoint.Hit(crashpoint.RebuildBegun)
	if err := b.distrust(ctx); err != nil {
		return err
	}
	crashpoint.Hit(crashpoint.RebuildDistrusted)
	// Read after distrust: a sale that is created later is published only to a verified server.
	sales, err := b.salesIn(ctx, b.partition)
	if err != nil {
		return err
	}
	// Of a sale with several shards only this one is closed and drained. The sale is rebuilt afterwards, on its own.
	if err := b.closeAndDrain(ctx, sales, b.partition); err != nil {
		return err
	}
	var live, ended []requiredSale
	for _, sale := range sales {
		switch {
		case sale.isSharded():
			b.report.Unfinished = append(b.report.Unfinished, sale.id)
		case sale.ended:
			ended = append(ended, sale)
		default:
			live = append(live, sale)
		}
	}
	b.salesTotal.Store(int64(len(live) + len(ended)))
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
	layout := sale.layout
	if b.shards != 0 {
		if err := sale.checkShards(b.shards); err != nil {
			return err
		}
		layout.Shards = b.shards
	}
	b.at("identify the Redis servers of the sale")
	if err := b.requireServers(ctx, layout); err != nil {
		return err
	}
	crashpoint.Hit(crashpoint.RebuildBegun)
	sales, partitions := []requiredSale{sale}, make([]int, sale.layout.Shards)
	for shard := range partitions {
		partitions[shard] = sale.layout.Partition(shard)
	}
	if err := b.closeAndDrain(ctx, sales, partitions...); err != nil {
		return err
	}
	b.salesTotal.Store(1)
	return b.rebuildSales(ctx, sales)
}

// closeAndDrain closes the shards of the sales in these partitions in Redis, so that they accept no order, and records
// the accepted ones. It stores in each sale what Redis knew of them.
func (b *build) closeAndDrain(ctx context.Context, sales []requiredSale, partitions ...int) error {
	b.at("close the sales in Redis")
	closed := make(map[uuid.UUID]bool, len(sales))
	for i := range sales {
		for _, p := range partitions {
			if err := b.closeIn(ctx, &sales[i], p); err != nil {
				return fmt.Errorf("close sale=%s: %w", sales[i].id, err)
			}
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
	for _, p := range partitions {
		if err := b.drainStream(ctx, p, closed); err != nil {
			return fmt.Errorf("drain the stream of partition %d: %w", p, err)
		}
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
		b.salesDone.Add(1)
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
	if err := b.config.Catalog.Store.MarkVerified(limited, b.partition, server, b.token); err != nil {
		return err
	}
	crashpoint.Hit(crashpoint.RebuildVerified)
	return nil
}

func (r *Rebuilder) inspect(ctx context.Context, partition int) (reservation.ServerState, error) {
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	return r.config.Catalog.Store.Inspect(limited, partition)
}

func (b *build) distrust(ctx context.Context) error {
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	return b.config.Catalog.Store.DistrustFor(limited, b.partition, b.token)
}

// closeIn closes the shard of a sale in a partition.
func (b *build) closeIn(ctx context.Context, sale *requiredSale, partition int) error {
	shard, is := sale.layout.ShardIn(partition)
	if !is {
		return nil
	}
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	known, err := b.config.Catalog.Store.CloseSale(limited, sale.id, partition, b.token, sale.epoch)
	if err != nil {
		return err
	}
	if sale.closed == nil {
		sale.closed = make([]reservation.ClosedSale, sale.layout.Shards)
	}
	sale.closed[shard] = known
	return nil
}

// rebuildSale rebuilds one closed sale.
func (b *build) rebuildSale(ctx context.Context, sale requiredSale) (SaleReport, error) {
	began := time.Now()
	b.atSale("raise the epoch of the sale, with its row locked", sale.id)
	raised, err := b.session.raiseEpoch(ctx, sale, b.need.Reason, b.shards)
	if err != nil {
		return SaleReport{}, fmt.Errorf("raise the epoch: %w", err)
	}
	crashpoint.Hit(crashpoint.RebuildRaised)
	// New shards are closed after Postgres has them: they have sold nothing, and a crash before leaves none behind.
	sale.layout = raised.Layout()
	for shard := len(sale.closed); shard < sale.layout.Shards; shard++ {
		sale.closed = append(sale.closed, reservation.ClosedSale{})
		if err := b.closeIn(ctx, &sale, sale.layout.Partition(shard)); err != nil {
			return SaleReport{}, fmt.Errorf("close its new shard %d: %w", shard, err)
		}
	}
	if err := b.clearLeftovers(ctx, raised, sale.closed); err != nil {
		return SaleReport{}, fmt.Errorf("clear leftovers: %w", err)
	}
	b.atSale("copy the orders of the sale to Redis", sale.id)
	shards := make([]staged, raised.Layout().Shards)
	if !raised.retired {
		if shards, err = b.stageBuyers(ctx, raised); err != nil {
			return SaleReport{}, fmt.Errorf("copy its orders: %w", err)
		}
	}
	crashpoint.Hit(crashpoint.RebuildStaged)
	all := addUp(shards)
	left, leftItems := b.left(raised, all.units, shards)
	b.atSale("open the sale", sale.id)
	if err := b.openSale(ctx, raised, left, leftItems, shards); err != nil {
		return SaleReport{}, err
	}
	if err := b.session.exec(ctx, sql.CatalogMarkPublished, sale.id, raised.Revision); err != nil {
		return SaleReport{}, fmt.Errorf("record the published revision: %w", err)
	}
	crashpoint.Hit(crashpoint.RebuildPublished)
	return SaleReport{
		ID: sale.id, Epoch: raised.Epoch, Revision: raised.Revision, Ended: sale.ended, Retired: raised.retired,
		Shards: raised.Shards,
		Stock:  raised.Stock, Left: left, Held: all.units, Orders: all.orders, Sequence: raised.sequence,
		Seconds: time.Since(began).Seconds(),
	}, nil
}

// left returns what is left for sale, in all and of each item.
func (b *build) left(sale raisedSale, held int64, shards []staged) (left int64, items []int64) {
	if sale.retired {
		return 0, nil
	}
	of := func(stock, held int64, about ...any) int64 {
		if stock < held {
			b.log.Error("live orders hold more units than the sale's stock: no unit is left for sale",
				append([]any{"sale", sale.ID, "stock", stock, "held", held}, about...)...)
		}
		return max(0, stock-held)
	}
	if len(sale.Items) == 0 {
		return of(sale.Stock, held), nil
	}
	for place, item := range sale.Items {
		var held int64
		for _, s := range shards {
			held += s.items[place]
		}
		units := of(item.Stock, held, "item", item.Code)
		left, items = left+units, append(items, units)
	}
	return left, items
}

// openSale opens the shards, each with an even share of the units that are left.
func (b *build) openSale(
	ctx context.Context, sale raisedSale, left int64, leftItems []int64, shards []staged,
) error {
	layout := sale.Layout()
	for shard, s := range shards {
		rebuilt := reservation.Rebuilt{
			Sale: sale.Sale, Shard: shard, Left: layout.Share(left, shard), Held: s.units,
			LastPlace: sale.sequence, Holders: s.orders, Ended: s.ended, Token: b.token, Retired: sale.retired,
		}
		if leftItems != nil {
			rebuilt.Left, rebuilt.HeldItems = 0, s.items[:len(leftItems)]
		}
		for place, units := range leftItems {
			share := layout.ShareOfItem(place, units, shard)
			rebuilt.Left, rebuilt.LeftItems = rebuilt.Left+share, append(rebuilt.LeftItems, share)
		}
		if err := b.openShard(ctx, rebuilt); err != nil {
			return err
		}
		crashpoint.Hit(crashpoint.RebuildOpened)
	}
	return nil
}

func (b *build) openShard(ctx context.Context, shard reservation.Rebuilt) error {
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	return b.config.Catalog.Store.OpenRebuilt(limited, shard)
}

// drainPage is how many entries are read at a time.
const drainPage = 32

// Drained counts the entries of the stream that a rebuild read.
type Drained struct {
	// Entries counts all of them. Of their orders, Confirmed, Rejected and Voided were recorded by the rebuild.
	Entries   int64 `json:"entries"`
	Confirmed int64 `json:"confirmed"`
	Rejected  int64 `json:"rejected"`
	Voided    int64 `json:"voided"`
	// Recorded orders were in Postgres before.
	Recorded int64 `json:"recorded"`
	// Left counts entries for the workers: orders of other sales, and entries that cannot be applied.
	Left int64 `json:"left"`
}

// drainStream records the orders of closed sales in the unfinished entries of a partition's stream: unread ones, and
// pending ones, whose workers find them recorded. The entries stay in the stream. Closed sales add none, so there is a
// last one.
func (b *build) drainStream(ctx context.Context, partition int, closed map[uuid.UUID]bool) error {
	key := b.config.Catalog.Store.Keys.Orders(partition)
	limited, cancel := retry.ForCall(ctx)
	from, to, err := stream.Unfinished(limited, b.config.Catalog.Store.Redis, key, reservation.Group)
	cancel()
	if err != nil || to == "" {
		return err
	}
	for {
		entries, err := b.readEntries(ctx, key, from, to)
		if err != nil {
			return err
		}
		if len(entries) == 0 {
			return nil
		}
		if err := b.record(ctx, entries, closed); err != nil {
			return err
		}
		if err := b.session.ping(ctx); err != nil {
			return err
		}
		from = "(" + entries[len(entries)-1].ID
	}
}

func (b *build) readEntries(ctx context.Context, key, from, to string) ([]redis.XMessage, error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	return b.config.Catalog.Store.Redis.XRangeN(ctx, key, from, to, drainPage).Result()
}

// record records the orders of closed sales among these entries. Entries that cannot be applied are left to the
// workers, which park them as dead letters.
func (b *build) record(ctx context.Context, entries []redis.XMessage, closed map[uuid.UUID]bool) error {
	found := &b.report.Drained
	found.Entries += int64(len(entries))
	events := make([]order.OrderReserved, 0, len(entries))
	for _, entry := range entries {
		msg, err := stream.DecodeEntry(entry.ID, entry.Values, 0)
		var held []order.OrderReserved
		if err == nil {
			held, err = order.DecodeReserved(msg)
		}
		if err != nil {
			found.Left++
			continue
		}
		for _, event := range held {
			if closed[event.SaleID] {
				events = append(events, event)
			} else {
				found.Left++
			}
		}
	}
	slices.SortStableFunc(events, ledger.BySaleAndSequence)
	for batch := range slices.Chunk(events, ledger.BatchMax) {
		if err := b.recordBatch(ctx, batch); err != nil {
			return err
		}
	}
	return nil
}

func (b *build) recordBatch(ctx context.Context, events []order.OrderReserved) error {
	found := &b.report.Drained
	for _, out := range ledger.RecordWith(ctx, b.Ledger, b.try, events) {
		switch {
		case out.Err != nil && ledger.FaultOf(out.Err) == ledger.Transient:
			return out.Err
		case out.Err != nil:
			found.Left++
		case !out.Fresh:
			found.Recorded++
		case out.Status == order.StatusConfirmed:
			found.Confirmed++
		case out.Status == order.StatusVoided:
			found.Voided++
		default:
			found.Rejected++
		}
	}
	return nil
}

// try tries a transaction once, because callers retry a failed rebuild.
func (b *build) try(ctx context.Context, t ledger.Transaction) ([]ledger.Outcome, error) {
	outcomes, err := ledger.Attempt(ctx, b.log, t)
	if errors.Is(err, ledger.ErrEpochOver) {
		return nil, fmt.Errorf("%w: %w", errOvertaken, err)
	}
	return outcomes, err
}

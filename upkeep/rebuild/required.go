package rebuild

import (
	"context"
	"sync"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/ledger"
	"stampede/reservation"
	"stampede/sql"
)

// requiredSale is a sale, as Postgres has it, that Redis must have.
type requiredSale struct {
	id                          uuid.UUID
	layout                      reservation.Layout
	epoch, lastSequence         int64
	revision, publishedRevision int64
	ended                       bool
	// open is true if it sells now.
	open bool
	// retired is true if Redis has no buyers of it any more.
	retired bool
	// hasItems is true for a sale with items, which has one shard.
	hasItems bool

	// closed is what Redis knew of each shard when the rebuild closed it.
	closed []reservation.ClosedSale
}

// isSharded is true for a sale with several shards. It is rebuilt under the lock of its home partition, and not with
// one of its partitions.
func (s *requiredSale) isSharded() bool { return s.layout.Shards > 1 }

// shards returns all shards of the sale.
func (s *requiredSale) shards() []requiredShard {
	all := make([]requiredShard, s.layout.Shards)
	for shard := range all {
		all[shard] = requiredShard{*s, shard}
	}
	return all
}

// requiredShard is a shard of a sale.
type requiredShard struct {
	requiredSale
	shard int
}

func (s *requiredShard) partition() int { return s.layout.Partition(s.shard) }

// Required is what Postgres required of Redis when it was read. It is safe for concurrent use.
type Required struct {
	withEnded bool
	// sales are the shards of those that are not over, or of all if withEnded, by partition.
	sales map[int][]requiredShard
	// servers are the run ids of the verified servers, by partition.
	servers map[int]string
	// used reads, once, of which partitions a sale was ever published.
	used func() (map[int]bool, error)
}

// Required reads once for all partitions what Redis must have. The sales that are over are included only if withEnded.
func (r *Rebuilder) Required(ctx context.Context, withEnded bool) (*Required, error) {
	required := &Required{
		withEnded: withEnded, sales: map[int][]requiredShard{},
		used: sync.OnceValues(func() (map[int]bool, error) { return r.usedPartitions(ctx) }),
	}
	err := r.eachSale(ctx, withEnded, func(page []requiredSale) error {
		for _, sale := range page {
			for _, s := range sale.shards() {
				required.sales[s.partition()] = append(required.sales[s.partition()], s)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	// Last, because a rebuild by another process changes them, and they are compared with the servers next.
	required.servers, err = r.verifiedServers(ctx)
	return required, err
}

// ShardedSale is a sale with several shards that is not over.
type ShardedSale struct {
	ID     uuid.UUID
	Layout reservation.Layout
	Epoch  int64
}

// ShardedAt returns the sales with several shards whose home is this partition and which are not over.
func (r *Required) ShardedAt(partition int) (sales []ShardedSale) {
	for _, s := range r.sales[partition] {
		if s.isSharded() && s.shard == 0 && !s.ended {
			sales = append(sales, ShardedSale{s.id, s.layout, s.epoch})
		}
	}
	return sales
}

func (r *Rebuilder) usedPartitions(ctx context.Context) (map[int]bool, error) {
	used := map[int]bool{}
	err := r.eachSale(ctx, true, func(page []requiredSale) error {
		for _, sale := range page {
			for _, s := range sale.shards() {
				used[s.partition()] = used[s.partition()] || sale.publishedRevision > 0
			}
		}
		return nil
	})
	return used, err
}

// verifiedServers returns the run id of the verified server of each partition.
func (r *Rebuilder) verifiedServers(ctx context.Context) (map[int]string, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	return reservation.VerifiedServers(ctx, r.config.Pool)
}

// Partitions returns the number of partitions of new and older sales.
func (r *Rebuilder) Partitions(ctx context.Context) (int, error) {
	return CountPartitions(ctx, r.config.Pool, r.config.Keys)
}

// salesPerPage is how many sales are read at a time.
const salesPerPage = 1000

// eachSale calls f with the sales that are not over, or all if withEnded, a page at a time.
func (r *Rebuilder) eachSale(ctx context.Context, withEnded bool, f func([]requiredSale) error) error {
	after := uuid.Nil
	for {
		page, err := r.salePage(ctx, after, salesPerPage, withEnded)
		if err != nil || len(page) == 0 {
			return err
		}
		full, last := len(page) == salesPerPage, page[len(page)-1].id
		if err := f(page); err != nil || !full {
			return err
		}
		after = last
	}
}

func (r *Rebuilder) salePage(ctx context.Context, after uuid.UUID, limit int, withEnded bool) ([]requiredSale, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	rows, _ := r.config.Pool.Query(ctx, sql.RebuildSalesInRedis, after, limit, withEnded) // its error comes with the rows
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (requiredSale, error) {
		s, err := pgx.RowToStructByName[struct {
			ID                                               uuid.UUID
			Partitions, Shards                               int
			Epoch, LastSequence, Revision, PublishedRevision int64
			Ended, Retired, Open, HasItems                   bool
		}](row)
		if err != nil {
			return requiredSale{}, err
		}
		return requiredSale{
			id: s.ID, layout: reservation.LayoutOf(s.ID, s.Partitions, s.Shards), epoch: s.Epoch,
			lastSequence: s.LastSequence, revision: s.Revision, publishedRevision: s.PublishedRevision, ended: s.Ended,
			retired: s.Retired, open: s.Open, hasItems: s.HasItems,
		}, nil
	})
}

// salesIn returns all sales with a shard in a partition.
func (r *Rebuilder) salesIn(ctx context.Context, partition int) (sales []requiredSale, err error) {
	err = r.eachSale(ctx, true, func(page []requiredSale) error {
		for _, sale := range page {
			if _, is := sale.layout.ShardIn(partition); is {
				sales = append(sales, sale)
			}
		}
		return nil
	})
	return sales, err
}

// findSale returns one sale, or reservation.ErrSaleNotFound.
func (r *Rebuilder) findSale(ctx context.Context, id uuid.UUID) (requiredSale, error) {
	sales, err := r.salePage(ctx, idBelow(id), 1, true)
	if err == nil && (len(sales) == 0 || sales[0].id != id) {
		err = reservation.ErrSaleNotFound
	}
	if err != nil {
		return requiredSale{}, err
	}
	return sales[0], nil
}

// idBelow returns the next lower id.
func idBelow(id uuid.UUID) uuid.UUID {
	for i := len(id) - 1; i >= 0; i-- {
		id[i]--
		if id[i] != 0xff {
			break
		}
	}
	return id
}

// CountPartitions returns the number of partitions of new and older sales.
func CountPartitions(ctx context.Context, pool *pgxpool.Pool, keys reservation.Keys) (partitions int, err error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	err = pool.QueryRow(ctx, sql.WorkerMostPartitions).Scan(&partitions)
	return max(partitions, keys.Partitions), err
}

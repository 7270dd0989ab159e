package rebuild

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/fulfillment/ledger"
	"stampede/fulfillment/stream"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/sql"
)

// ErrOtherServer is returned for a Redis server whose record says that it is verified, while Postgres names another
// server: an old one was put back, or one was cut off and replaced. Only an operator knows which one is right, and
// rebuilds the partition on it.
var ErrOtherServer = errors.New("this is not the Redis server that Postgres names")

// requiredSale is a sale, as Postgres has it, that Redis must have.
type requiredSale struct {
	id                          uuid.UUID
	partition                   int
	epoch, lastSequence         int64
	revision, publishedRevision int64
	ended                       bool

	// closed is what Redis knew when the rebuild closed the sale.
	closed reservation.ClosedSale
}

// Need is what has to be rebuilt: a partition, or one sale of it.
type Need struct {
	partition int
	Sale      uuid.UUID // uuid.Nil for all of them
	Reason    string
}

// Needs finds what has to be rebuilt in the first partitions: whole partitions whose server may have lost sales, and
// single sales that Redis lacks or that differ from Postgres. Ended sales are checked only if withEnded, and may be
// missing, because operators may delete their keys.
//
// Sales are created and rebuilt concurrently, so only the holder of the lock of rebuilds gets a lasting answer.
func (r *Rebuilder) Needs(ctx context.Context, partitions int, withEnded bool) ([]Need, error) {
	servers, err := r.verifiedServers(ctx)
	if err != nil {
		return nil, err
	}
	var found []Need
	var failed []error
	whole := make(map[int]bool, partitions)
	for p := range partitions {
		reason, err := r.needOfPartition(ctx, p, servers)
		switch {
		case err != nil:
			failed = append(failed, fmt.Errorf("partition %d: %w", p, err))
		case reason != "":
			found = append(found, Need{partition: p, Reason: reason})
		default:
			whole[p] = true
		}
	}
	counted := map[bool]map[int]int64{false: {}}
	if withEnded {
		counted[true] = map[int]int64{}
	}
	// Postgres is read before Redis, where sequences only rise.
	err = r.eachSale(ctx, withEnded, func(sales []requiredSale) error {
		sales = slices.DeleteFunc(sales, func(s requiredSale) bool { return !whole[s.partition] })
		inRedis, err := r.readSales(ctx, sales)
		if err != nil {
			return err
		}
		var agreeing []requiredSale
		for i, sale := range sales {
			if reason := needOfSale(sale, inRedis[i]); reason != "" {
				found = append(found, Need{sale.partition, sale.id, reason})
			} else if inRedis[i].present {
				counted[sale.ended][sale.partition] += inRedis[i].sequence - sale.lastSequence
				agreeing = append(agreeing, sale)
			}
		}
		reasons, err := r.proofsIn(ctx, agreeing)
		for i, reason := range reasons {
			if reason != "" {
				found = append(found, Need{agreeing[i].partition, agreeing[i].id, reason})
			}
		}
		return err
	})
	if err == nil {
		r.behind.set(counted)
	}
	return found, errors.Join(append(failed, err)...)
}

// needOfPartition returns the reason to rebuild a partition, or "" if its server is the verified one.
func (r *Rebuilder) needOfPartition(
	ctx context.Context, partition int, servers map[int]string,
) (reason string, err error) {
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	state, err := r.config.Store.Inspect(limited, partition)
	if err != nil {
		return "", err
	}
	runID, verified := servers[partition]
	switch {
	case verified && state.Known && state.RunID == runID:
		return "", nil
	case verified && state.Known:
		return "", ErrOtherServer
	}
	sales, err := r.salesOf(ctx, partition)
	if err != nil {
		return "", err
	}
	used := slices.ContainsFunc(sales, func(s requiredSale) bool { return s.publishedRevision > 0 })
	if verified && !used {
		// Its first user may have recorded the server in Postgres, and not yet in Redis.
		state, err = r.config.Store.AwaitFirstUse(limited, partition)
		if err != nil || state.Known {
			return "", err // the next call compares the servers
		}
	}
	switch {
	case verified:
		return ReasonServer, nil
	case !used:
		return "", nil
	}
	// The server is recorded before the first sale is published: this may have happened since the first read.
	if servers, err = r.verifiedServers(ctx); err != nil {
		return "", err
	}
	if _, verified = servers[partition]; verified {
		return "", nil // the next call compares the servers
	}
	return ReasonUnverified, nil
}

// needOfSale returns the reason to rebuild a sale, or "" if its numbers agree or Redis need not have it.
func needOfSale(sale requiredSale, found saleInRedis) (reason string) {
	switch {
	case found.present && found.epoch != sale.epoch:
		return ReasonUnfinished
	case found.present && found.sequence < sale.lastSequence:
		return ReasonSetBack
	case found.present:
		return ""
	case sale.publishedRevision == 0 && sale.epoch == 1:
		return "" // never published: its creation publishes it
	case sale.ended && sale.publishedRevision == sale.revision:
		return "" // deleted to free memory
	}
	return ReasonSaleLost
}

// verifiedServers returns the run id of the verified server of each partition.
func (r *Rebuilder) verifiedServers(ctx context.Context) (map[int]string, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	rows, _ := r.config.Pool.Query(ctx, sql.ReservationVerifiedServers) // its error comes with the rows
	servers := map[int]string{}
	var partition int
	var runID string
	_, err := pgx.ForEachRow(rows, []any{&partition, &runID}, func() error {
		servers[partition] = runID
		return nil
	})
	return servers, err
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
			Partitions                                       int
			Epoch, LastSequence, Revision, PublishedRevision int64
			Ended                                            bool
		}](row)
		if err != nil {
			return requiredSale{}, err
		}
		return requiredSale{
			id: s.ID, partition: reservation.PartitionAmong(s.ID, s.Partitions), epoch: s.Epoch, lastSequence: s.LastSequence,
			revision: s.Revision, publishedRevision: s.PublishedRevision, ended: s.Ended,
		}, nil
	})
}

// salesOf returns all sales of a partition.
func (r *Rebuilder) salesOf(ctx context.Context, partition int) (sales []requiredSale, err error) {
	err = r.eachSale(ctx, true, func(page []requiredSale) error {
		for _, sale := range page {
			if sale.partition == partition {
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

// saleInRedis are the fields of a sale in Redis that needOfSale compares.
type saleInRedis struct {
	present         bool
	epoch, sequence int64
}

// readSales reads sales from Redis, in their order. A number that cannot be read is -1.
func (r *Rebuilder) readSales(ctx context.Context, sales []requiredSale) ([]saleInRedis, error) {
	if len(sales) == 0 {
		return nil, nil
	}
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	asked := make([]*redis.SliceCmd, len(sales))
	_, _ = r.config.Redis.Pipelined(ctx, func(p redis.Pipeliner) error { // each command's own error counts
		for i, s := range sales {
			asked[i] = p.HMGet(ctx, r.config.Keys.Sale(s.partition, s.id), "epoch", "sequence")
		}
		return nil
	})
	found := make([]saleInRedis, len(sales))
	for i, s := range sales {
		fields, err := asked[i].Result()
		switch {
		case stream.IsWrongType(err):
			found[i] = saleInRedis{present: true, epoch: -1, sequence: -1}
		case err != nil:
			return nil, fmt.Errorf("look up sale=%s in Redis: %w", s.id, err)
		case fields[0] != nil || fields[1] != nil:
			found[i] = saleInRedis{present: true, epoch: numberOf(fields[0]), sequence: numberOf(fields[1])}
		}
	}
	return found, nil
}

func numberOf(field any) int64 {
	text, _ := field.(string)
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return n
	}
	return -1
}

// CountPartitions returns the number of partitions of new and older sales.
func CountPartitions(ctx context.Context, pool *pgxpool.Pool, keys reservation.Keys) (partitions int, err error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	err = pool.QueryRow(ctx, sql.WorkerMostPartitions).Scan(&partitions)
	return max(partitions, keys.Partitions), err
}

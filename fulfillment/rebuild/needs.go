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

// ErrOtherServer is returned for a Redis server that takes itself for the right one, while Postgres names
// another: an old one that was put back, or one that was cut off when another took its place. Which of the two
// is right only an operator knows, who rebuilds the partition on it by hand.
var ErrOtherServer = errors.New("this is not the Redis server that Postgres names")

// guardedSale is a sale that Redis has to know.
type guardedSale struct {
	id                          uuid.UUID
	partition                   int
	epoch, lastSequence         int64
	revision, publishedRevision int64
	ended                       bool

	// Closed is what Redis knew when the sale was closed for its rebuild.
	Closed reservation.ClosedSale
}

// Need is what has to be rebuilt: a partition, or one sale of it.
type Need struct {
	partition int
	Sale      uuid.UUID // uuid.Nil for all of them
	Reason    string
}

// Needs looks what has to be rebuilt in partitions 0 to n-1: all sales of one whose server may have lost some,
// and single sales that Redis lacks or has otherwise than Postgres. Of sales that are over it looks at
// those in Redis only, and only if withEnded: somebody may have deleted them.
//
// What it says may be out of date at once, because sales are created and rebuilt meanwhile. Under the lock of a
// rebuild it is not.
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
	// Postgres is read before Redis: there, sequences only rise.
	err = r.eachSale(ctx, withEnded, func(sales []guardedSale) error {
		sales = slices.DeleteFunc(sales, func(s guardedSale) bool { return !whole[s.partition] })
		inRedis, err := r.readSales(ctx, sales)
		if err != nil {
			return err
		}
		var agreeing []guardedSale
		for i, sale := range sales {
			if reason := needOfSale(sale, inRedis[i]); reason != "" {
				found = append(found, Need{sale.partition, sale.id, reason})
			} else if inRedis[i].present {
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
	return found, errors.Join(append(failed, err)...)
}

// needOfPartition is "" if the server is the one that is known to have all of the partition.
func (r *Rebuilder) needOfPartition(ctx context.Context, partition int,
	servers map[int]string,
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
	case verified:
		return RebuildServer, nil
	}
	// Nobody has used the partition, or none who would have noted its server.
	sales, err := r.salesOf(ctx, partition)
	if err != nil || !slices.ContainsFunc(sales, func(s guardedSale) bool { return s.publishedRevision > 0 }) {
		return "", err
	}
	// Whoever uses a partition first notes its server before he publishes: it may have been used since the look.
	if servers, err = r.verifiedServers(ctx); err != nil {
		return "", err
	}
	if _, verified = servers[partition]; verified {
		return "", nil // the next look tells
	}
	return RebuildUnverified, nil
}

// needOfSale is "" if Redis has the sale as Postgres does, or if it is not for a rebuild to bring it there.
func needOfSale(sale guardedSale, found saleInRedis) (reason string) {
	switch {
	case found.present && found.epoch != sale.epoch:
		return RebuildUnfinished
	case found.present && found.sequence < sale.lastSequence:
		return RebuildSetBack
	case found.present:
		return ""
	case sale.publishedRevision == 0 && sale.epoch == 1:
		return "" // it was never there: whoever creates it brings it
	case sale.ended && sale.publishedRevision == sale.revision:
		return "" // deleted, to make room
	}
	return RebuildLost
}

// verifiedServers is the run id of the verified server of each partition.
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

// Partitions is how many there are to be looked after: those of new sales, and those of sales that were made when
// there were more.
func (r *Rebuilder) Partitions(ctx context.Context) (int, error) {
	return MostPartitions(ctx, r.config.Pool, r.config.Keys)
}

// guardPage is how many sales are compared at a time.
const guardPage = 1000

// eachSale calls f with all sales, or those that are not over, a page at a time.
func (r *Rebuilder) eachSale(ctx context.Context, withEnded bool, f func([]guardedSale) error) error {
	after := uuid.Nil
	for {
		page, err := r.salePage(ctx, after, guardPage, withEnded)
		if err != nil || len(page) == 0 {
			return err
		}
		full, last := len(page) == guardPage, page[len(page)-1].id
		if err := f(page); err != nil || !full {
			return err
		}
		after = last
	}
}

func (r *Rebuilder) salePage(ctx context.Context, after uuid.UUID, limit int, withEnded bool) ([]guardedSale, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	rows, _ := r.config.Pool.Query(ctx, sql.RebuildSalesInRedis, after, limit, withEnded) // its error comes with the rows
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (guardedSale, error) {
		s, err := pgx.RowToStructByName[struct {
			ID                                               uuid.UUID
			Partitions                                       int
			Epoch, LastSequence, Revision, PublishedRevision int64
			Ended                                            bool
		}](row)
		if err != nil {
			return guardedSale{}, err
		}
		return guardedSale{
			id: s.ID, partition: reservation.PartitionAmong(s.ID, s.Partitions), epoch: s.Epoch, lastSequence: s.LastSequence,
			revision: s.Revision, publishedRevision: s.PublishedRevision, ended: s.Ended,
		}, nil
	})
}

// salesOf are all sales of a partition.
func (r *Rebuilder) salesOf(ctx context.Context, partition int) (sales []guardedSale, err error) {
	err = r.eachSale(ctx, true, func(page []guardedSale) error {
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
func (r *Rebuilder) findSale(ctx context.Context, id uuid.UUID) (guardedSale, error) {
	sales, err := r.salePage(ctx, before(id), 1, true)
	if err == nil && (len(sales) == 0 || sales[0].id != id) {
		err = reservation.ErrSaleNotFound
	}
	if err != nil {
		return guardedSale{}, err
	}
	return sales[0], nil
}

// before is the id below.
func before(id uuid.UUID) uuid.UUID {
	for i := len(id) - 1; i >= 0; i-- {
		id[i]--
		if id[i] != 0xff {
			break
		}
	}
	return id
}

// saleInRedis is as much of a sale in Redis as tells whether it is the one of Postgres.
type saleInRedis struct {
	present         bool
	epoch, sequence int64
}

// readSales looks sales up in Redis, in their order. A sale of which a number cannot be read has that number as -1.
func (r *Rebuilder) readSales(ctx context.Context, sales []guardedSale) ([]saleInRedis, error) {
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

func MostPartitions(ctx context.Context, pool *pgxpool.Pool, keys reservation.Keys) (partitions int, err error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	err = pool.QueryRow(ctx, sql.WorkerMostPartitions).Scan(&partitions)
	return max(partitions, keys.Partitions), err
}

package rebuild

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/fulfillment/stream"
	"stampede/internal/retry"
)

// ErrOtherServer is returned for a Redis server whose record says that it is verified, while Postgres names another
// server: an old one was put back, or one was cut off and replaced. Only an operator knows which one is right, and
// rebuilds the partition on it.
var ErrOtherServer = errors.New("this is not the Redis server that Postgres names")

// Need is what has to be rebuilt: a partition, or one sale of it.
type Need struct {
	partition int
	Sale      uuid.UUID // uuid.Nil for all of them
	Reason    string
}

// Needs finds what has to be rebuilt in the first partitions: whole partitions whose server may have lost sales, and
// single sales that Redis lacks or that differ from Postgres. Ended sales are checked only if withEnded, and may be
// missing, because operators may delete their keys. A partition that cannot be checked is in the error, and hides no
// need of the others.
//
// Sales are created and rebuilt concurrently, so only the holder of a partition's lock gets a lasting answer.
func (r *Rebuilder) Needs(ctx context.Context, partitions int, withEnded bool) ([]Need, error) {
	required, err := r.Required(ctx, withEnded)
	if err != nil {
		return nil, err
	}
	found := make([][]Need, partitions)
	err = eachPartition(partitions, func(p int) (err error) {
		found[p], err = r.needsOf(ctx, p, required)
		return err
	})
	return slices.Concat(found...), err
}

// eachPartition calls do for the first partitions, at the same time, and returns all errors.
func eachPartition(partitions int, do func(partition int) error) error {
	failed := make([]error, partitions)
	var doing sync.WaitGroup
	for p := range partitions {
		doing.Go(func() { failed[p] = do(p) })
	}
	doing.Wait()
	return errors.Join(failed...)
}

// needsOf finds what has to be rebuilt in one partition. The needs are also valid with an error.
func (r *Rebuilder) needsOf(ctx context.Context, partition int, required *Required) (found []Need, err error) {
	reason, err := r.needOfPartition(ctx, partition, required)
	switch {
	case err != nil:
		return nil, fmt.Errorf("partition %d: %w", partition, err)
	case reason != "":
		r.behind.set(partition, required.withEnded, map[bool]int64{})
		return []Need{{partition: partition, Reason: reason}}, nil
	}
	counted := map[bool]int64{}
	for page := range slices.Chunk(required.sales[partition], salesPerPage) {
		needs, err := r.needsAmong(ctx, page, counted)
		found = append(found, needs...)
		if err != nil {
			return found, fmt.Errorf("partition %d: %w", partition, err)
		}
	}
	r.behind.set(partition, required.withEnded, counted)
	return found, nil
}

// needsAmong finds which of these sales of a partition have to be rebuilt. For the others it adds to counted how far
// Postgres is behind, by whether the sale is over.
func (r *Rebuilder) needsAmong(
	ctx context.Context, sales []requiredSale, counted map[bool]int64,
) (found []Need, err error) {
	inRedis, err := r.readSales(ctx, sales)
	if err != nil {
		return nil, err
	}
	var agreeing []requiredSale
	for i, sale := range sales {
		if reason := needOfSale(sale, inRedis[i]); reason != "" {
			found = append(found, Need{sale.partition, sale.id, reason})
		} else if inRedis[i].present {
			counted[sale.ended] += inRedis[i].sequence - sale.lastSequence
			agreeing = append(agreeing, sale)
		}
	}
	reasons, err := r.proofsIn(ctx, agreeing)
	for i, reason := range reasons {
		if reason != "" {
			found = append(found, Need{agreeing[i].partition, agreeing[i].id, reason})
		}
	}
	return found, err
}

// needOfPartition returns the reason to rebuild a partition, or "" if its server is the verified one.
func (r *Rebuilder) needOfPartition(
	ctx context.Context, partition int, required *Required,
) (reason string, err error) {
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	state, err := r.config.Store.Inspect(limited, partition)
	if err != nil {
		return "", err
	}
	runID, verified := required.servers[partition]
	switch {
	case verified && state.Known && state.RunID == runID:
		return "", nil
	case verified && state.Known:
		return "", ErrOtherServer
	}
	used, err := required.used()
	if err != nil {
		return "", err
	}
	if verified && !used[partition] {
		// Its first user may have recorded the server in Postgres, and not yet in Redis.
		state, err = r.config.Store.AwaitFirstUse(limited, partition)
		if err != nil || state.Known {
			return "", err // the next call compares the servers
		}
	}
	switch {
	case verified:
		return ReasonServer, nil
	case !used[partition]:
		return "", nil
	}
	// The server is recorded before the first sale is published: this may have happened since the first read.
	servers, err := r.verifiedServers(ctx)
	if err != nil {
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

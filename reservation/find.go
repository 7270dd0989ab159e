package reservation

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/reservation/order"
)

// FindReserved returns the order of a reservation in Redis before a worker has recorded it in
// Postgres. It returns order.ErrNotFound if the user holds no such reservation, and an error that
// wraps ErrUnavailable if Redis does not answer or may have lost the reservation.
func (s *Store) FindReserved(ctx context.Context, id uuid.UUID, user string) (order.Order, error) {
	now := time.Now()
	if !mayExist(id, now) {
		return order.Order{}, order.ErrNotFound
	}
	if index := s.index.latest(); index != nil {
		found, err := s.findAmong(ctx, index.sales, id, user)
		if !errors.Is(err, order.ErrNotFound) {
			return found, err
		}
	}
	// The sale may be newer than that index. It was in Redis before the order was made, so an index
	// read after the time in the order's id is enough.
	index, err := s.indexSince(ctx, MadeAt(id).Add(ClockMargin))
	if err == nil && index.mayLack() {
		index, err = s.indexSince(ctx, now.Add(-indexTrust)) // it may be whole by now
	}
	if err != nil {
		return order.Order{}, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	found, err := s.findAmong(ctx, index.sales, id, user)
	if errors.Is(err, order.ErrNotFound) && (index.mayLack() || s.refusesAny()) {
		return order.Order{}, fmt.Errorf("find order=%s: %w", id, ErrUnverifiedServer)
	}
	return found, err
}

// ClockMargin is the largest difference between the clocks of two ingresses.
const ClockMargin = 10 * time.Second

// mayExist is false for an id that no ingress can have made.
func mayExist(id uuid.UUID, now time.Time) bool {
	return id.Version() == 7 && MadeAt(id).Before(now.Add(ClockMargin))
}

// MadeAt returns when an order or a sale was made, by the clock of the ingress: the time in its UUIDv7.
func MadeAt(id uuid.UUID) time.Time { return time.Unix(id.Time().UnixTime()) }

func (s *Store) findAmong(ctx context.Context, sales []LocatedSale, id uuid.UUID, user string) (order.Order, error) {
	for _, at := range sales {
		if !order.MayBelongTo(id, at.ID) {
			continue
		}
		if s.refused[at.Partition].Load() {
			return order.Order{}, fmt.Errorf("find order=%s: %w", id, ErrUnverifiedServer)
		}
		text, err := s.Redis.HGet(ctx, s.Keys.Buyers(at.Partition, at.ID), user).Result()
		if errors.Is(err, redis.Nil) {
			// An unverified server may have lost it.
			if _, err := s.look(ctx, at.Partition, at.ID); err != nil && !errors.Is(err, ErrSaleNotFound) {
				return order.Order{}, fmt.Errorf("find order=%s: %w", id, err)
			}
			continue
		} else if err != nil {
			return order.Order{}, fmt.Errorf("%w: find order=%s: %w", ErrUnavailable, id, err)
		}
		held, _, err := order.ParseReservation(text)
		if err != nil {
			return order.Order{}, fmt.Errorf("%w: find order=%s: %w", ErrUnavailable, id, err)
		}
		if held.OrderID == id {
			return order.Order{
				ID: id, SaleID: at.ID, UserID: user, Quantity: held.Quantity,
				Status: order.StatusReserved, Version: 1, ReservedAt: held.ReservedAt,
			}, nil
		}
	}
	return order.Order{}, order.ErrNotFound
}

// saleIndex caches which sales Redis holds. It is safe for concurrent use.
type saleIndex struct {
	mu   sync.Mutex
	last *indexReading // the last one started
	good *indexReading // the last successful one
}

// indexReading is one reading of the index, in progress or done.
type indexReading struct {
	begun time.Time
	done  chan struct{}
	// The others are set when done is closed.
	sales []LocatedSale
	// silent is true if a partition did not answer, and unverified if one for new sales is on an unverified server.
	silent, unverified bool
	err                error
}

// mayLack is true if sales may be missing.
func (r *indexReading) mayLack() bool { return r.silent || r.unverified }

const (
	// indexTrust is how long a sale that was missing in the index counts as unknown.
	indexTrust = time.Second
	// indexTimeout bounds a reading, which many requests may share.
	indexTimeout = time.Second
)

// latest returns the latest reading that succeeded, or nil.
func (x *saleIndex) latest() *indexReading {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.good
}

// indexSince returns a reading that began at that time or later; a time in the future counts as now.
// Waiting callers share one reading and its failure, and each waits no longer than its own ctx.
func (s *Store) indexSince(ctx context.Context, earliest time.Time) (*indexReading, error) {
	if now := time.Now(); earliest.After(now) {
		earliest = now
	}
	for {
		reading := s.joinReading(earliest)
		select {
		case <-reading.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if !reading.begun.Before(earliest) {
			return reading, reading.err
		}
	}
}

// joinReading returns the reading in progress, or the latest successful one if it is recent enough;
// otherwise it starts one.
func (s *Store) joinReading(earliest time.Time) *indexReading {
	x := &s.index
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.good != nil && !x.good.begun.Before(earliest) {
		return x.good
	}
	if x.last != nil {
		select {
		case <-x.last.done:
		default:
			return x.last
		}
	}
	reading := &indexReading{begun: time.Now(), done: make(chan struct{})}
	x.last = reading
	started := s.goBackground(func() {
		defer close(reading.done)
		ctx, cancel := context.WithTimeout(s.ctx, indexTimeout)
		defer cancel()
		var failed map[int]error
		reading.sales, failed = ListInRedis(ctx, s.Redis, s.Keys)
		reading.silent, reading.unverified = len(failed) > 0, s.anyUnverified(ctx)
		if reading.err = s.ctx.Err(); reading.err == nil {
			x.mu.Lock()
			x.good = reading
			x.mu.Unlock()
		}
	})
	if !started {
		reading.err = errClosed
		close(reading.done)
	}
	return reading
}

// anyUnverified is true if a partition for new sales is on an unverified server, or does not answer.
func (s *Store) anyUnverified(ctx context.Context) bool {
	var unverified atomic.Bool
	var asking sync.WaitGroup
	for partition := range s.Keys.Partitions {
		asking.Go(func() {
			if state, err := s.Inspect(ctx, partition); err != nil || !state.Known {
				unverified.Store(true)
			}
		})
	}
	asking.Wait()
	return unverified.Load()
}

// LocatedSale is a sale in Redis, and its partition.
type LocatedSale struct {
	ID        uuid.UUID
	Partition int
}

// ListInRedis lists the sales in Redis. It asks all partitions: a sale may be in one that is no
// longer used for new sales. Partitions that did not answer are in failed, with their errors.
func ListInRedis(
	ctx context.Context, rdb redis.UniversalClient, keys Keys,
) (sales []LocatedSale, failed map[int]error) {
	sets := make([]*redis.StringSliceCmd, MaxPartitions)
	if _, isCluster := rdb.(*redis.ClusterClient); isCluster {
		// A pipeline over several nodes fails as a whole if one does not answer in time.
		var asking sync.WaitGroup
		for partition := range sets {
			asking.Go(func() { sets[partition] = rdb.SMembers(ctx, keys.Sales(partition)) })
		}
		asking.Wait()
	} else {
		_, _ = rdb.Pipelined(ctx, func(p redis.Pipeliner) error { // each command's own error counts
			for partition := range sets {
				sets[partition] = p.SMembers(ctx, keys.Sales(partition))
			}
			return nil
		})
	}
	failed = make(map[int]error)
	for partition, set := range sets {
		if err := set.Err(); err != nil && !redis.HasErrorPrefix(err, "WRONGTYPE") { // the audit reports such a key
			failed[partition] = fmt.Errorf("list the sales in Redis: partition %d: %w", partition, err)
		}
		for _, member := range set.Val() {
			if id, err := uuid.Parse(member); err == nil {
				sales = append(sales, LocatedSale{id, partition})
			}
		}
	}
	return sales, failed
}

package reservation

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	if index, ok := s.index.latest(); ok {
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
	var tried []uuid.UUID
	for _, at := range sales {
		if !order.MayBelongTo(id, at.ID) || slices.Contains(tried, at.ID) {
			continue
		}
		tried = append(tried, at.ID)
		layout := oneShard(at.Partition)
		// A sale with several shards is listed for each of them.
		if slices.ContainsFunc(sales, func(other LocatedSale) bool { return other.ID == at.ID && other != at }) {
			var err error
			if layout, err = s.layoutOf(ctx, at); err != nil {
				return order.Order{}, fmt.Errorf("find order=%s: %w", id, err)
			}
		}
		found, err := s.findIn(ctx, at.ID, layout, id, user)
		if !errors.Is(err, order.ErrNotFound) {
			return found, err
		}
	}
	return order.Order{}, order.ErrNotFound
}

// findIn finds the order of a user in a sale.
func (s *Store) findIn(
	ctx context.Context, sale uuid.UUID, layout Layout, id uuid.UUID, user string,
) (order.Order, error) {
	partition := layout.PartitionOf(user)
	if s.refused[partition].Load() {
		return order.Order{}, fmt.Errorf("find order=%s: %w", id, ErrUnverifiedServer)
	}
	text, err := s.Redis.HGet(ctx, s.Keys.Buyers(partition, sale), user).Result()
	if errors.Is(err, redis.Nil) {
		// An unverified server may have lost it, or the shards may have changed.
		now, err := s.look(ctx, partition, sale)
		switch {
		case err == nil && now.layout.Shards != layout.Shards:
			return order.Order{}, fmt.Errorf("%w: find order=%s: the shards of its sale have changed", ErrUnavailable, id)
		case err != nil && !errors.Is(err, ErrSaleNotFound):
			return order.Order{}, fmt.Errorf("find order=%s: %w", id, err)
		}
		return order.Order{}, order.ErrNotFound
	} else if err != nil {
		return order.Order{}, fmt.Errorf("%w: find order=%s: %w", ErrUnavailable, id, err)
	}
	held, _, err := order.ParseReservation(text)
	switch {
	case err != nil:
		return order.Order{}, fmt.Errorf("%w: find order=%s: %w", ErrUnavailable, id, err)
	case held.OrderID != id:
		return order.Order{}, order.ErrNotFound
	}
	return order.Order{
		ID: id, SaleID: sale, UserID: user, Quantity: held.Quantity,
		Status: order.StatusReserved, Version: 1, ReservedAt: held.ReservedAt, UpdatedAt: held.ReservedAt,
	}, nil
}

// layoutOf returns the layout of a sale that Redis lists in a partition.
func (s *Store) layoutOf(ctx context.Context, at LocatedSale) (Layout, error) {
	if known := s.knownSeller(at.ID); known != nil {
		return known.place.layout, nil
	}
	field, err := s.Redis.HGet(ctx, s.Keys.Sale(at.Partition, at.ID), "shard").Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return Layout{}, fmt.Errorf("%w: look up sale=%s: %w", ErrUnavailable, at.ID, err)
	}
	return readLayout(field, at.Partition)
}

// saleIndex is which sales Redis holds.
type saleIndex struct {
	sales []LocatedSale
	// silent is true if a partition did not answer, and unverified if one for new sales is on an unverified server.
	silent, unverified bool
}

// mayLack is true if sales may be missing.
func (x *saleIndex) mayLack() bool { return x.silent || x.unverified }

const (
	// indexTrust is how long a sale that was missing in the index counts as unknown.
	indexTrust = time.Second
	// indexTimeout bounds a reading, which many requests may share.
	indexTimeout = time.Second
)

// indexSince returns an index whose reading began at that time or later.
func (s *Store) indexSince(ctx context.Context, earliest time.Time) (*saleIndex, error) {
	return s.index.since(ctx, s, earliest, indexTimeout, func(ctx context.Context) (*saleIndex, error) {
		sales, failed := ListInRedis(ctx, s.Redis, s.Keys)
		return &saleIndex{sales: sales, silent: len(failed) > 0, unverified: s.anyUnverified(ctx)}, nil
	})
}

// anyUnverified is true if a partition for new sales is on an unverified server, or does not answer.
func (s *Store) anyUnverified(ctx context.Context) bool {
	return each(s.Keys.Partitions, func(partition int) error {
		state, err := s.Inspect(ctx, partition)
		if err == nil && !state.Known {
			err = ErrUnverifiedServer
		}
		return err
	}) != nil
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
		_ = each(len(sets), func(partition int) error { // each command's own error counts
			sets[partition] = rdb.SMembers(ctx, keys.Sales(partition))
			return nil
		})
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

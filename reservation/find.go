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
)

// saleIndex remembers which sales a Redis holds, for those who look for an order by its id alone.
type saleIndex struct {
	snapshot atomic.Pointer[saleSnapshot]
	// taking is held while a snapshot is being taken, so that a crowd of lookers takes it together.
	taking sync.Mutex
}

type saleSnapshot struct {
	takenAt time.Time
	places  []indexedSale
}

type indexedSale struct {
	sale      uuid.UUID
	partition int
}

// FindReserved returns the order as a reservation in Redis knows it: the answer to a buyer who asks
// before a worker has written the order to Postgres. It returns ErrOrderNotFound if the user holds no
// such reservation, and an error that wraps ErrUnavailable if Redis does not answer.
func (s *Store) FindReserved(ctx context.Context, order uuid.UUID, user string) (Order, error) {
	if !mayExist(order, time.Now()) {
		return Order{}, ErrOrderNotFound
	}
	snapshot := s.index.snapshot.Load()
	if snapshot != nil {
		found, err := s.findAmong(ctx, snapshot.places, order, user)
		if !errors.Is(err, ErrOrderNotFound) || snapshot.covers(order) {
			return found, err
		}
	}
	snapshot, err := s.takeIndex(ctx)
	if err != nil {
		return Order{}, fmt.Errorf("%w: list the sales: %w", ErrUnavailable, err)
	}
	return s.findAmong(ctx, snapshot.places, order, user)
}

// clockMargin is by how much the clocks of ingresses may differ.
const clockMargin = 10 * time.Second

// mayExist is false for an id that no ingress has made: looking for it would be work for nothing.
func mayExist(order uuid.UUID, now time.Time) bool {
	return order.Version() == 7 && madeAt(order).Before(now.Add(clockMargin))
}

// madeAt is the time that a UUIDv7 carries.
func madeAt(order uuid.UUID) time.Time { return time.Unix(order.Time().UnixTime()) }

// covers is true if the sale of the order must be in the snapshot: an order's id tells when it was
// made, and its sale was there before.
func (s *saleSnapshot) covers(order uuid.UUID) bool {
	return madeAt(order).Add(clockMargin).Before(s.takenAt)
}

// takeIndex returns a snapshot that was taken after the call began.
func (s *Store) takeIndex(ctx context.Context) (*saleSnapshot, error) {
	called := time.Now()
	s.index.taking.Lock()
	defer s.index.taking.Unlock()
	if latest := s.index.snapshot.Load(); latest != nil && latest.takenAt.After(called) {
		return latest, nil
	}
	snapshot := &saleSnapshot{takenAt: time.Now()}
	sets := make([]*redis.StringSliceCmd, MaxPartitions)
	_, err := s.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for partition := range sets {
			sets[partition] = p.SMembers(ctx, s.keys.Sales(partition))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for partition, set := range sets {
		for _, member := range set.Val() {
			if sale, err := uuid.Parse(member); err == nil {
				snapshot.places = append(snapshot.places, indexedSale{sale, partition})
			}
		}
	}
	s.index.snapshot.Store(snapshot)
	return snapshot, nil
}

func (s *Store) findAmong(ctx context.Context, places []indexedSale, order uuid.UUID, user string) (Order, error) {
	for _, at := range places {
		if !mayBelongTo(order, at.sale) {
			continue
		}
		text, err := s.rdb.HGet(ctx, s.keys.Buyers(at.partition, at.sale), user).Result()
		if errors.Is(err, redis.Nil) {
			continue
		} else if err != nil {
			return Order{}, fmt.Errorf("%w: find order=%s: %w", ErrUnavailable, order, err)
		}
		held, err := ParseReservation(text)
		if err != nil {
			return Order{}, fmt.Errorf("%w: find order=%s: %w", ErrUnavailable, order, err)
		}
		if held.OrderID == order {
			return Order{
				ID: order, SaleID: at.sale, UserID: user, Quantity: held.Quantity,
				Status: StatusReserved, Version: 1, ReservedAt: held.ReservedAt,
			}, nil
		}
	}
	return Order{}, ErrOrderNotFound
}

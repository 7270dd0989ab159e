package reservation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
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
			if layout, err = s.findLayout(ctx, at); err != nil {
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
	items, err := s.namedItems(ctx, partition, sale, held.Lines)
	if err != nil {
		return order.Order{}, fmt.Errorf("find order=%s: %w", id, err)
	}
	return order.Order{
		ID: id, SaleID: sale, UserID: user, Quantity: held.Quantity, Lines: held.Lines, Items: items,
		Status: order.StatusReserved, Version: 1, ReservedAt: held.ReservedAt, UpdatedAt: held.ReservedAt,
	}, nil
}

// namedItems returns the lines of an order with the codes of its sale.
func (s *Store) namedItems(
	ctx context.Context, partition int, sale uuid.UUID, lines order.Lines,
) (order.Items, error) {
	if lines == "" {
		return "", nil
	}
	if known := s.knownSeller(sale); known != nil {
		return lines.Named(known.address.codes), nil
	}
	codes, err := s.Redis.HGet(ctx, s.Keys.Sale(partition, sale), "items").Result()
	if err != nil {
		return "", fmt.Errorf("%w: look up sale=%s: its items: %w", ErrUnavailable, sale, err)
	}
	return lines.Named(strings.Fields(codes)), nil
}

// findLayout returns the layout of a sale that Redis lists in a partition.
func (s *Store) findLayout(ctx context.Context, at LocatedSale) (Layout, error) {
	if known := s.knownSeller(at.ID); known != nil {
		return known.address.layout, nil
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

const (
	// unknownTrust is how long a missing sale is not looked up again, even if it is published
	// meanwhile.
	unknownTrust = 250 * time.Millisecond
	// unknownMax bounds how many missing sales are cached: about twice as many, of 24 bytes each.
	unknownMax = 4096
)

// saleLooks are the lookups of sales without a queue: one at a time per sale, and none for a sale
// that was missing less than unknownTrust ago. The zero value is ready; it is safe for concurrent use.
type saleLooks struct {
	mu         sync.Mutex
	inProgress map[uuid.UUID]*saleLook
	// young and old are the start times of lookups that found no sale. A full young becomes old.
	young, old map[uuid.UUID]time.Time
}

// saleLook is one lookup, whose place and err are set when done is closed.
type saleLook struct {
	done    chan struct{}
	address address
	err     error
}

// lookOnce finds a sale in Redis for a buyer, as find does.
func (s *Store) lookOnce(ctx context.Context, sale uuid.UUID) (address, error) {
	if !mayExist(sale, time.Now()) {
		return address{}, ErrSaleNotFound
	}
	look := s.joinLook(sale)
	select {
	case <-look.done:
		return look.address, look.err
	case <-ctx.Done():
		return address{}, ctx.Err()
	}
}

var unknownSale = func() *saleLook {
	look := &saleLook{done: make(chan struct{}), err: ErrSaleNotFound}
	close(look.done)
	return look
}()

// joinLook returns the lookup of a sale in progress, or unknownSale if the sale was just found
// missing, or begins a lookup.
func (s *Store) joinLook(sale uuid.UUID) *saleLook {
	x := &s.looks
	x.mu.Lock()
	defer x.mu.Unlock()
	if look := x.inProgress[sale]; look != nil {
		return look
	}
	began := time.Now()
	for _, seen := range []map[uuid.UUID]time.Time{x.young, x.old} {
		if at, there := seen[sale]; there && began.Sub(at) < unknownTrust {
			return unknownSale
		}
	}
	look := &saleLook{done: make(chan struct{})}
	if x.inProgress == nil {
		x.inProgress = make(map[uuid.UUID]*saleLook)
	}
	x.inProgress[sale] = look
	started := s.goBackground(func() {
		ctx, cancel := context.WithTimeout(s.ctx, s.options.CallTimeout)
		defer cancel()
		look.address, look.err = s.find(ctx, sale)
		x.end(sale, look, began)
	})
	if !started {
		look.err = errClosed
		delete(x.inProgress, sale)
		close(look.done)
	}
	return look
}

// end publishes the result of a lookup to its waiters.
func (x *saleLooks) end(sale uuid.UUID, look *saleLook, began time.Time) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.inProgress, sale)
	if errors.Is(look.err, ErrSaleNotFound) {
		if x.young == nil || len(x.young) >= unknownMax {
			x.young, x.old = make(map[uuid.UUID]time.Time), x.young
		}
		x.young[sale] = began
	}
	close(look.done)
}

// shared lets concurrent callers share readings of a value. One reading is in progress at a time. The zero value is
// ready; it is safe for concurrent use.
type shared[T any] struct {
	mu   sync.Mutex
	last *reading[T] // the last one started
	good *reading[T] // the last successful one
}

// reading is one reading of a value, in progress or done.
type reading[T any] struct {
	begun time.Time
	done  chan struct{}
	// The others are set when done is closed.
	value T
	err   error
}

// latest returns the latest value that was read, and false if there is none.
func (x *shared[T]) latest() (value T, ok bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.good == nil {
		return value, false
	}
	return x.good.value, true
}

// since returns a value whose reading began at that time or later; a time in the future counts as now. A new reading
// is one call of read in the background of the store, within the timeout. Waiting callers share one reading and its
// failure, and each waits no longer than its own ctx.
func (x *shared[T]) since(
	ctx context.Context, s *Store, earliest time.Time, timeout time.Duration, read func(context.Context) (T, error),
) (value T, err error) {
	if now := time.Now(); earliest.After(now) {
		earliest = now
	}
	for {
		r := x.join(s, earliest, timeout, read)
		select {
		case <-r.done:
		case <-ctx.Done():
			return value, ctx.Err()
		}
		if !r.begun.Before(earliest) {
			return r.value, r.err
		}
	}
}

// join returns the reading in progress, or the latest successful one if it is recent enough; otherwise it starts one.
func (x *shared[T]) join(
	s *Store, earliest time.Time, timeout time.Duration, read func(context.Context) (T, error),
) *reading[T] {
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
	r := &reading[T]{begun: time.Now(), done: make(chan struct{})}
	x.last = r
	started := s.goBackground(func() {
		defer close(r.done)
		ctx, cancel := context.WithTimeout(s.ctx, timeout)
		defer cancel()
		r.value, r.err = read(ctx)
		if s.ctx.Err() != nil {
			r.err = errClosed
		}
		if r.err == nil {
			x.mu.Lock()
			x.good = r
			x.mu.Unlock()
		}
	})
	if !started {
		r.err = errClosed
		close(r.done)
	}
	return r
}

package retire

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"stampede/internal/retry"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/stream"
)

// The checks whether a sale is at rest. Each returns why it is not, or an error if it could not look. A sale that is
// over gets no new buyers, so what is at rest stays so, except that an operator may cancel an order, and that an entry
// may become a dead letter: catalog/retire_sale.sql looks for what is open again.

const (
	// buyersPerTrip is how many buyers one HSCAN asks for.
	buyersPerTrip = 1000
	// entriesPerTrip is how many entries of a stream are read at a time, and entriesMax how many in one look. The rest
	// of a longer backlog is for a later look.
	entriesPerTrip, entriesMax = 50, 10_000
)

// open looks for what may still change in Postgres.
func (r *Retirer) open(ctx context.Context, s *candidate) (why string, err error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	err = r.Pool.QueryRow(ctx, sql.RetireOpenSale, s.ID).Scan(&why)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", fmt.Errorf("look for what is open: %w", err)
	}
	return why, nil
}

// servers compares the servers of the sale with those that Postgres names.
func (r *Retirer) servers(ctx context.Context, s *candidate) (string, error) {
	limited, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	rows, _ := r.Pool.Query(limited, sql.ReservationVerifiedServers) // its error comes with the rows
	named := map[int]string{}
	var partition int
	var runID string
	if _, err := pgx.ForEachRow(rows, []any{&partition, &runID}, func() error {
		named[partition] = runID
		return nil
	}); err != nil {
		return "", fmt.Errorf("read the verified servers: %w", err)
	}
	for shard := range s.layout().Shards {
		p := s.layout().Partition(shard)
		limited, cancel := retry.ForCall(ctx)
		state, err := r.Store.Inspect(limited, p)
		cancel()
		switch {
		case err != nil:
			return "", fmt.Errorf("inspect partition %d: %w", p, err)
		case !state.Known || named[p] != state.RunID:
			return "its Redis server is not verified", nil
		}
	}
	return "", nil
}

// waitingEntries looks for orders of the sale in the unfinished entries of its streams.
func (r *Retirer) waitingEntries(ctx context.Context, s *candidate) (string, error) {
	for shard := range s.layout().Shards {
		why, err := r.waitingIn(ctx, s.ID, r.Keys.Orders(s.layout().Partition(shard)))
		if err != nil || why != "" {
			return why, err
		}
	}
	return "", nil
}

func (r *Retirer) waitingIn(ctx context.Context, sale uuid.UUID, key string) (string, error) {
	limited, cancel := retry.ForCall(ctx)
	from, to, err := stream.Unfinished(limited, r.Redis, key, reservation.Group)
	cancel()
	if err != nil || to == "" {
		return "", stream.UnlessMissing(err)
	}
	for read := 0; ; {
		limited, cancel := retry.ForCall(ctx)
		page, err := r.Redis.XRangeN(limited, key, from, to, entriesPerTrip).Result()
		cancel()
		if err != nil {
			return "", fmt.Errorf("read the unfinished entries of %s: %w", key, err)
		}
		for _, entry := range page {
			if mayHoldOrderOf(sale, stream.Entry{Stream: key, ID: entry.ID, Fields: stream.FieldsOf(entry.Values)}) {
				return "an entry of its stream waits for a worker", nil
			}
		}
		if read += len(page); len(page) < entriesPerTrip {
			return "", nil
		} else if read >= entriesMax {
			return "its stream has too many entries that wait for a worker", nil
		}
		from = "(" + page[len(page)-1].ID
	}
}

// mayHoldOrderOf is true for an unreadable entry: it becomes a dead letter, in which an order of the sale may be found.
func mayHoldOrderOf(sale uuid.UUID, entry stream.Entry) bool {
	events, err := deadletter.OrdersOf(entry)
	return err != nil || slices.ContainsFunc(events, func(e order.OrderReserved) bool { return e.SaleID == sale })
}

// differences compares the buyers in Redis with the live orders in Postgres: they must be the same.
func (r *Retirer) differences(ctx context.Context, s *candidate) (string, error) {
	var orders, units int64
	limited, cancel := context.WithTimeout(ctx, countTimeout)
	defer cancel()
	if err := r.Pool.QueryRow(limited, sql.RetireLiveOrders, s.ID).Scan(&orders, &units); err != nil {
		return "", fmt.Errorf("count the live orders: %w", err)
	}
	var buyers, taken int64
	missing := 0
	for shard := range s.layout().Shards {
		found, err := r.readShard(ctx, s, shard)
		switch {
		case err != nil:
			return "", err
		case found.epoch == "":
			missing++
		case found.epoch != strconv.FormatInt(s.Epoch, 10):
			return "Redis has it in another epoch", nil
		}
		buyers, taken = buyers+found.buyers, taken+found.taken
	}
	if missing == s.layout().Shards && buyers == 0 {
		return "", nil // its keys were deleted
	}
	if buyers != orders || taken != units {
		return fmt.Sprintf("Redis has %d buyers with %d units, and Postgres %d live orders with %d: audit it",
			buyers, taken, orders, units), nil
	}
	for shard := range s.layout().Shards {
		if why, err := r.compareBuyers(ctx, s, s.layout().Partition(shard)); err != nil || why != "" {
			return why, err
		}
	}
	return "", nil
}

// shardInRedis is what Redis has of a shard.
type shardInRedis struct {
	epoch         string
	buyers, taken int64
}

func (r *Retirer) readShard(ctx context.Context, s *candidate, shard int) (found shardInRedis, err error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	p := s.layout().Partition(shard)
	var has struct {
		Epoch string `redis:"epoch"`
		Stock int64  `redis:"stock"`
		Left  int64  `redis:"left"`
	}
	err = r.Redis.HMGet(ctx, r.Keys.Sale(p, s.ID), "epoch", "stock", "left").Scan(&has)
	if err != nil && !errors.Is(err, redis.Nil) {
		return found, fmt.Errorf("read shard %d: %w", shard, err)
	}
	found.epoch, found.taken = has.Epoch, has.Stock-has.Left
	if found.buyers, err = r.Redis.HLen(ctx, r.Keys.Buyers(p, s.ID)).Result(); err != nil {
		return found, fmt.Errorf("count the buyers of shard %d: %w", shard, err)
	}
	return found, nil
}

// compareBuyers looks for each buyer of a shard for the live order in Postgres.
func (r *Retirer) compareBuyers(ctx context.Context, s *candidate, partition int) (string, error) {
	for cursor, begun := uint64(0), false; !begun || cursor != 0; begun = true {
		limited, cancel := retry.ForCall(ctx)
		page, next, err := r.Redis.HScan(limited, r.Keys.Buyers(partition, s.ID), cursor, "", buyersPerTrip).Result()
		cancel()
		if err != nil {
			return "", fmt.Errorf("read the buyers of partition %d: %w", partition, err)
		}
		cursor = next
		held := make(map[string]uuid.UUID, len(page)/2) // a page may have a buyer twice
		for ; len(page) >= 2; page = page[2:] {
			held[page[0]] = uuid.Nil // of no order, unless it can be read
			if reserved, _, err := order.ParseReservation(page[1]); err == nil {
				held[page[0]] = reserved.OrderID
			}
		}
		if matched, err := r.match(ctx, s.ID, held); err != nil {
			return "", err
		} else if matched != len(held) {
			return fmt.Sprintf("%d of its buyers have no live order in Postgres: audit it", len(held)-matched), nil
		}
	}
	return "", nil
}

func (r *Retirer) match(ctx context.Context, sale uuid.UUID, held map[string]uuid.UUID) (matched int, err error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	ids, users := make([]uuid.UUID, 0, len(held)), make([]string, 0, len(held))
	for user, id := range held {
		ids, users = append(ids, id), append(users, user)
	}
	if err := r.Pool.QueryRow(ctx, sql.RetireMatchOrders, sale, ids, users).Scan(&matched); err != nil {
		return 0, fmt.Errorf("compare buyers with orders: %w", err)
	}
	return matched, nil
}

// Package retire lets sales that are over leave Redis. Redis holds the buyers of a sale so that it can decide their
// requests; when the sale has ended and every order of it is final in Postgres, nothing is left to decide.
//
// The retirement itself is a change of the sale like an operator's (catalog.Catalog.Retire): a revision in Postgres,
// which is then published to Redis. So a crash between the two, a rebuild, and several workers need no rules of their
// own. This package finds the sales and makes sure that Redis knows nothing of them that Postgres does not.
package retire

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/internal/pg"
	"stampede/internal/retry"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/stream"
)

// Config configures a Retirer. All fields are required.
type Config struct {
	Catalog *catalog.Catalog
	// After is how long a sale must have been over.
	After  time.Duration
	Logger *slog.Logger
}

const (
	// candidatesMax bounds the sales of one sweep.
	candidatesMax = 100
	// waitMin and waitMax bound the pause before a sale that is not at rest is looked at again. It doubles.
	waitMin, waitMax = time.Second, 5 * time.Minute
	// waitingMax bounds how many such sales are remembered. The others are looked at too often.
	waitingMax = 10_000
	// silenceMax is how long the session with the lock may be silent before Postgres ends it. A large sale may take
	// longer: then another worker looks at it as well, and one of them retires it.
	silenceMax = 50 * time.Second
	// countTimeout bounds the count of the orders of a sale.
	countTimeout = time.Minute
)

// Retirer finds sales that can leave Redis. It belongs to one goroutine.
type Retirer struct {
	Config
	waiting map[uuid.UUID]*wait
}

// wait is when to look at a sale again.
type wait struct {
	until time.Time
	pause time.Duration
	why   string
}

// New returns a Retirer.
func New(c Config) *Retirer { return &Retirer{Config: c, waiting: map[uuid.UUID]*wait{}} }

// candidate is a sale that is over.
type candidate struct {
	ID                 uuid.UUID
	Partitions, Shards int
	Epoch, Revision    int64
	OverAt             time.Time
}

func (s *candidate) layout() reservation.Layout {
	return reservation.LayoutOf(s.ID, s.Partitions, s.Shards)
}

// Sweep retires the sales that have been over for long enough and are at rest, and returns how many. Any number of
// workers may call it; one at a time does the work. Sales that are not at rest are left for later, and are no error.
func (r *Retirer) Sweep(ctx context.Context) (retired int, err error) {
	found, err := r.candidates(ctx)
	if err != nil || len(found) == 0 {
		return 0, err
	}
	lock, err := pg.Begin(ctx, r.Catalog.Pool, pg.RetireLock, silenceMax)
	if errors.Is(err, pg.ErrLockHeld) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	defer lock.End()
	var failed []error
	for i := range found {
		s := &found[i]
		why, err := r.retire(ctx, s)
		switch {
		case ctx.Err() != nil:
			return retired, ctx.Err()
		case err != nil:
			failed = append(failed, fmt.Errorf("retire sale=%s: %w", s.ID, err))
			r.postpone(s.ID, err.Error())
		case why != "":
			r.postpone(s.ID, why)
		default:
			delete(r.waiting, s.ID)
			retired++
			r.Logger.Info("a sale that is over has left Redis", "sale", s.ID)
		}
	}
	return retired, errors.Join(failed...)
}

// candidates returns sales that are over and need not wait.
func (r *Retirer) candidates(ctx context.Context) ([]candidate, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	now, except := time.Now(), []uuid.UUID{}
	for id, w := range r.waiting {
		if now.Before(w.until) {
			except = append(except, id)
		}
	}
	// Its error comes with the rows.
	rows, _ := r.Catalog.Pool.Query(ctx, sql.RetireCandidates, r.After.Seconds(), except, candidatesMax)
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[candidate])
	if err != nil {
		return nil, fmt.Errorf("list sales that are over: %w", err)
	}
	return found, nil
}

// postpone leaves a sale for later.
func (r *Retirer) postpone(id uuid.UUID, why string) {
	w := r.waiting[id]
	if w == nil {
		if len(r.waiting) >= waitingMax {
			clear(r.waiting)
		}
		w = &wait{pause: waitMin / 2}
		r.waiting[id] = w
	}
	w.pause = min(2*w.pause, waitMax)
	w.until = time.Now().Add(w.pause)
	if w.why != why {
		w.why = why
		r.Logger.Debug("a sale that is over stays in Redis for now", "sale", id, "reason", why)
	}
}

// retire retires a sale, or returns why it cannot be retired yet.
func (r *Retirer) retire(ctx context.Context, s *candidate) (why string, err error) {
	why, err = r.checks(ctx, s, r.waits, r.over, r.open, r.servers, r.waitingEntries, r.counts, r.buyers)
	if err != nil || why != "" {
		return why, err
	}
	limited, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	err = r.Catalog.Retire(limited, s.ID, s.Epoch, s.Revision)
	switch {
	case errors.Is(err, catalog.ErrNotRetired):
		return "it has just changed", nil
	case errors.Is(err, catalog.ErrNotInForce):
		r.Logger.Warn("a sale is retired in Postgres, and leaves Redis when that can be published", "sale", s.ID,
			"error", err)
		return "", nil
	}
	return "", err
}

// AtRest returns why orders of a sale may still change by themselves, or "" if they cannot: the sale is over, and each
// order that Redis has accepted is in Postgres and final. Unlike a retirement it does not compare each buyer.
func (r *Retirer) AtRest(ctx context.Context, s reservation.Sale) (why string, err error) {
	return r.checks(ctx, &candidate{s.ID, s.Partitions, s.Shards, s.Epoch, s.Revision, time.Time{}},
		r.open, r.servers, r.waitingEntries, r.counts)
}

func (r *Retirer) checks(
	ctx context.Context, s *candidate, checks ...func(context.Context, *candidate) (string, error),
) (why string, err error) {
	for _, check := range checks {
		if why, err := check(ctx, s); err != nil || why != "" {
			return why, err
		}
	}
	return "", nil
}

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

// over compares the end of the sale with the clocks of Postgres and of its Redis servers, because nothing brings a sale
// back. They agree, up to a second.
func (r *Retirer) over(ctx context.Context, s *candidate) (why string, err error) {
	times, err := r.Catalog.Store.Times(ctx, r.Catalog.Pool, s.layout().All()...)
	if err == nil && times.Latest.Before(s.OverAt.Add(r.After)) {
		why = "it is not over for long enough"
	}
	return why, err
}

// open looks for what may still change in Postgres.
func (r *Retirer) open(ctx context.Context, s *candidate) (why string, err error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	err = r.Catalog.Pool.QueryRow(ctx, sql.RetireOpenSale, s.ID).Scan(&why)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", nil
	} else if err != nil {
		err = fmt.Errorf("look for what is open: %w", err)
	}
	return why, err
}

// waits looks whether the other half of the sale's pair still needs this one in Redis.
func (r *Retirer) waits(ctx context.Context, s *candidate) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	return catalog.Check(ctx, r.Catalog.Pool, catalog.OpRetire, s.ID)
}

// servers compares the servers of the sale with those that Postgres names.
func (r *Retirer) servers(ctx context.Context, s *candidate) (string, error) {
	limited, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	named, err := reservation.VerifiedServers(limited, r.Catalog.Pool)
	if err != nil {
		return "", fmt.Errorf("read the verified servers: %w", err)
	}
	for shard := range s.layout().Shards {
		p := s.layout().Partition(shard)
		limited, cancel := retry.ForCall(ctx)
		state, err := r.Catalog.Store.Inspect(limited, p)
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
		why, err := r.waitingIn(ctx, s.ID, r.Catalog.Store.Keys.Orders(s.layout().Partition(shard)))
		if err != nil || why != "" {
			return why, err
		}
	}
	return "", nil
}

func (r *Retirer) waitingIn(ctx context.Context, sale uuid.UUID, key string) (string, error) {
	limited, cancel := retry.ForCall(ctx)
	from, to, err := stream.Unfinished(limited, r.Catalog.Store.Redis, key, reservation.Group)
	cancel()
	if err != nil || to == "" {
		return "", stream.UnlessMissing(err)
	}
	for read := 0; ; {
		limited, cancel := retry.ForCall(ctx)
		page, err := r.Catalog.Store.Redis.XRangeN(limited, key, from, to, entriesPerTrip).Result()
		cancel()
		if err != nil {
			return "", fmt.Errorf("read the unfinished entries of %s: %w", key, err)
		}
		for _, entry := range page {
			if mayHoldOrder(sale, stream.Entry{Stream: key, ID: entry.ID, Fields: stream.FieldsOf(entry.Values)}) {
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

// mayHoldOrder is true for an unreadable entry: it becomes a dead letter, in which an order of the sale may be found.
func mayHoldOrder(sale uuid.UUID, entry stream.Entry) bool {
	events, err := deadletter.OrdersOf(entry)
	return err != nil || slices.ContainsFunc(events, func(e order.OrderReserved) bool { return e.SaleID == sale })
}

// counts compares the number of buyers in Redis, and of their units, with that of the live orders in Postgres.
func (r *Retirer) counts(ctx context.Context, s *candidate) (string, error) {
	var orders, units int64
	limited, cancel := context.WithTimeout(ctx, countTimeout)
	defer cancel()
	if err := r.Catalog.Pool.QueryRow(limited, sql.RetireLiveOrders, s.ID).Scan(&orders, &units); err != nil {
		return "", fmt.Errorf("count the live orders: %w", err)
	}
	var buyers, taken int64
	missing := 0
	for shard := range s.layout().Shards {
		found, err := r.readShard(ctx, s, shard)
		switch {
		case err != nil:
			return "", err
		case !found.Exists:
			missing++
		case found.Epoch != s.Epoch:
			return "Redis has it in another epoch", nil
		}
		buyers, taken = buyers+found.buyers, taken+max(0, found.Stock)-max(0, found.Left)
	}
	if missing == s.layout().Shards && buyers == 0 {
		return "", nil // its keys were deleted
	}
	if buyers != orders || taken != units {
		return fmt.Sprintf("Redis has %d buyers with %d units, and Postgres %d live orders with %d: audit it",
			buyers, taken, orders, units), nil
	}
	return "", nil
}

// buyers compares the buyers in Redis with the live orders in Postgres: they must be the same.
func (r *Retirer) buyers(ctx context.Context, s *candidate) (string, error) {
	for shard := range s.layout().Shards {
		if why, err := r.compareBuyers(ctx, s, s.layout().Partition(shard)); err != nil || why != "" {
			return why, err
		}
	}
	return "", nil
}

// shardInRedis is what Redis has of a shard.
type shardInRedis struct {
	reservation.ShardHash
	buyers int64
}

func (r *Retirer) readShard(ctx context.Context, s *candidate, shard int) (found shardInRedis, err error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	p := s.layout().Partition(shard)
	in := r.Catalog.Store
	if found.ShardHash, err = in.Keys.AskShard(ctx, in.Redis, p, s.ID, 0, "epoch", "stock", "left").Hash(); err != nil {
		return found, fmt.Errorf("read shard %d: %w", shard, err)
	}
	if found.buyers, err = r.Catalog.Store.Redis.HLen(ctx, r.Catalog.Store.Keys.Buyers(p, s.ID)).Result(); err != nil {
		return found, fmt.Errorf("count the buyers of shard %d: %w", shard, err)
	}
	return found, nil
}

// compareBuyers looks for each buyer of a shard for the live order in Postgres.
func (r *Retirer) compareBuyers(ctx context.Context, s *candidate, partition int) (string, error) {
	for cursor, begun := uint64(0), false; !begun || cursor != 0; begun = true {
		limited, cancel := retry.ForCall(ctx)
		key := r.Catalog.Store.Keys.Buyers(partition, s.ID)
		page, next, err := r.Catalog.Store.Redis.HScan(limited, key, cursor, "", buyersPerTrip).Result()
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
	if err := r.Catalog.Pool.QueryRow(ctx, sql.RetireMatchOrders, sale, ids, users).Scan(&matched); err != nil {
		return 0, fmt.Errorf("compare buyers with orders: %w", err)
	}
	return matched, nil
}

package rebuild

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"golang.org/x/time/rate"

	"stampede/internal/retry"
	"stampede/internal/tracing"
	"stampede/ledger"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/stream"
)

// A Redis that is set back within one process, by the snapshot of a virtual machine or by RESTORE, is still the
// verified server, and soon it has given out as many places as before. Workers find it by two proofs. An intact
// Redis never gives them, because it holds a reservation before the order is confirmed and until after it has ended.
//
//   - Postgres refuses an order whose reservation is in force in Redis: its buyer has another live order, or the
//     stock is taken (refusals).
//   - Redis does not hold a live order that this worker recorded (probes).
//
// A rebuild removes the cause of either. A client that can write to Redis can cause both repeatedly, so repeated
// rebuilds of a sale for these reasons are delayed more and more (rebuild/wait.sql).

// Texts of the log.
const (
	logOrderRefused = "Postgres refused an order that Redis had accepted: Redis lacks orders, or data was changed manually"
	logOrderMissing = "Redis lacks a live order that it had accepted: Redis was set back, or data was changed manually"
	logProofAgain   = "Redis and Postgres differ again about a rebuilt sale: its next rebuild is delayed; `stampede audit` " +
		"shows the difference"
)

// refusals holds the epochs of sales in which Postgres refused orders that Redis had accepted. An entry is removed when
// its sale is found in another epoch. The zero value is ready.
type refusals struct {
	mu     sync.Mutex
	epochs map[uuid.UUID]int64
}

// note adds a refused order, and returns true for the first one of an epoch.
func (r *refusals) note(sale uuid.UUID, epoch int64) (isNew bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.epochs == nil {
		r.epochs = map[uuid.UUID]int64{}
	}
	isNew = r.epochs[sale] != epoch
	r.epochs[sale] = epoch
	return isNew
}

// in reports whether an order was refused in this epoch of the sale.
func (r *refusals) in(sale uuid.UUID, epoch int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	refused, known := r.epochs[sale]
	if known && refused < epoch {
		delete(r.epochs, sale)
	}
	return known && refused == epoch
}

// NoteRefused is called for an order that Postgres has just refused and whose reservation was in force in Redis.
func (r *finder) NoteRefused(out ledger.Outcome) {
	if e := out.Event; r.refused.note(e.SaleID, e.Epoch) {
		r.config.Logger.Error(logOrderRefused, "sale", e.SaleID, "epoch", e.Epoch, "order", e.OrderID, "user", e.UserID,
			"trace_id", tracing.ID(e.TraceParent), "reason", out.Reason)
	}
}

// probe is an order of a sale that this worker has confirmed.
type probe struct {
	order    uuid.UUID
	user     string
	sequence int64
}

// probes holds two orders of each shard of which this worker has recorded orders: one that Redis held at the last
// check, and the one with the highest place of those confirmed since. The zero value is ready.
type probes struct {
	mu    sync.Mutex
	known map[seenIn]*[2]probe
	// seeded are the epochs of sales with several shards in which their newest orders were read from Postgres.
	seeded map[uuid.UUID]int64
}

// seenIn is a sale, and the partition in which this worker has seen its orders.
type seenIn struct {
	sale      uuid.UUID
	partition int
}

const (
	heldBefore = iota
	confirmedSince
)

// Note takes recorded orders of a partition, sorted by sale and place.
func (w *probes) Note(partition int, outcomes []ledger.Outcome) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range outcomes {
		out := &outcomes[i]
		if out.Err != nil || out.Status != order.StatusConfirmed || !out.Fresh ||
			i+1 < len(outcomes) && outcomes[i+1].Event.SaleID == out.Event.SaleID && outcomes[i+1].Fresh &&
				outcomes[i+1].Status == out.Status {
			continue // only the last one of a sale
		}
		e := &out.Event
		w.add(seenIn{e.SaleID, partition}, probe{e.OrderID, e.UserID, e.Sequence})
	}
}

// add adds a confirmed order. The caller has locked mu.
func (w *probes) add(at seenIn, confirmed probe) {
	pair := w.known[at]
	if pair == nil {
		if w.known == nil {
			w.known = map[seenIn]*[2]probe{}
		}
		pair = new([2]probe)
		w.known[at] = pair
	}
	if confirmed.sequence > pair[confirmedSince].sequence {
		pair[confirmedSince] = confirmed
	}
}

// seed adds live orders of a sale from Postgres, unless that was done in this epoch or a later one.
func (w *probes) seed(sale *requiredSale, newest []probe) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.seeded[sale.id] >= sale.epoch {
		return
	}
	if w.seeded == nil {
		w.seeded = map[uuid.UUID]int64{}
	}
	w.seeded[sale.id] = sale.epoch
	for _, live := range newest {
		w.add(seenIn{sale.id, sale.layout.PartitionOf(live.user)}, live)
	}
}

// needsSeed reports whether the newest orders of the sale were not read in this epoch.
func (w *probes) needsSeed(sale *requiredSale) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return sale.isSharded() && !sale.ended && w.seeded[sale.id] < sale.epoch
}

// pair returns the probes of a shard.
func (w *probes) pair(s *requiredShard) (found [2]probe) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if pair := w.known[s.seenIn()]; pair != nil {
		found = *pair
	}
	return found
}

func (s *requiredShard) seenIn() seenIn { return seenIn{s.id, s.partition()} }

// held records a check that missed none of these probes: seen are removed or kept. Ended orders are removed.
func (w *probes) held(s *requiredShard, seen [2]probe, isHeld [2]bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	pair := w.known[s.seenIn()]
	if pair == nil {
		return
	}
	switch {
	case isHeld[confirmedSince]:
		pair[heldBefore] = seen[confirmedSince]
	case !isHeld[heldBefore]:
		pair[heldBefore] = probe{}
	}
	if pair[confirmedSince] == seen[confirmedSince] {
		pair[confirmedSince] = probe{}
	}
}

// forget removes a shard of a sale that is over.
func (w *probes) forget(s *requiredShard) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.known, s.seenIn())
	delete(w.seeded, s.id)
}

// proofsIn returns the reasons to rebuild the sales of shards whose numbers agree with Postgres; "" for no rebuild.
func (r *finder) proofsIn(ctx context.Context, shards []requiredShard) (reasons []string, err error) {
	missed, err := r.missed(ctx, shards)
	if err != nil {
		return nil, err
	}
	reasons = make([]string, len(shards))
	for i := range shards {
		sale := &shards[i].requiredSale
		switch {
		case missed[i]:
			reasons[i] = ReasonSetBack
		case r.refused.in(sale.id, sale.epoch):
			reasons[i] = ReasonRefused
		default:
			continue
		}
		wait, err := r.waitBefore(ctx, sale.id)
		if err != nil {
			return nil, err
		}
		if wait > 0 {
			r.logged.delayed.Do(func() {
				r.config.Logger.Error(logProofAgain, "sale", sale.id, "reason", reasons[i], "in", wait.Round(time.Second))
			})
			reasons[i] = ""
		}
	}
	return reasons, nil
}

// proofsLoggedEvery is how often the log repeats a lasting proof.
const proofsLoggedEvery = time.Minute

// logged limits the log lines of lasting proofs.
type logged struct{ missed, delayed rate.Sometimes }

// reasonsOfProofs are the reasons that a client that can write to Redis can cause at will.
var reasonsOfProofs = []string{ReasonSetBack, ReasonRefused}

func (r *finder) waitBefore(ctx context.Context, sale uuid.UUID) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	var seconds float64
	if err := r.config.Catalog.Pool.QueryRow(ctx, sql.RebuildWait, sale, reasonsOfProofs).Scan(&seconds); err != nil {
		return 0, fmt.Errorf("look up rebuilds of sale=%s: %w", sale, err)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}

// seedWitnesses reads the newest live orders of a sale with several shards, at its first look in an epoch: a shard that
// was set back while no worker lived is found, too. Of one shard the highest place in Postgres shows that.
func (r *finder) seedWitnesses(ctx context.Context, sale *requiredSale) error {
	if !r.Probes.needsSeed(sale) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	// Its error comes with the rows.
	rows, _ := r.config.Catalog.Pool.Query(ctx, sql.RebuildNewestOrders, sale.id, sale.layout.Shards)
	var newest []probe
	var w probe
	_, err := pgx.ForEachRow(rows, []any{&w.order, &w.user, &w.sequence}, func() error {
		newest = append(newest, w)
		return nil
	})
	if err != nil {
		return fmt.Errorf("look up the newest orders of sale=%s: %w", sale.id, err)
	}
	r.Probes.seed(sale, newest)
	return nil
}

// missed reports for which shards Redis lacks a live probe. Redis is read before Postgres, so an order that is live
// in Postgres was live when Redis was read.
func (r *finder) missed(ctx context.Context, shards []requiredShard) ([]bool, error) {
	for i := range shards {
		if err := r.seedWitnesses(ctx, &shards[i].requiredSale); err != nil {
			return nil, err
		}
	}
	missed := make([]bool, len(shards))
	seen := make([][2]probe, len(shards))
	asked := make([][2]*redis.StringCmd, len(shards))
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	// Each command's own error counts.
	_, _ = r.config.Catalog.Store.Redis.Pipelined(limited, func(p redis.Pipeliner) error {
		for i := range shards {
			sale := &shards[i]
			seen[i] = r.Probes.pair(sale)
			for k, w := range seen[i] {
				if w.user != "" {
					key := r.config.Catalog.Store.Keys.Buyers(sale.layout.PartitionOf(w.user), sale.id)
					asked[i][k] = p.HGet(limited, key, w.user)
				}
			}
		}
		return nil
	})
	for i := range shards {
		sale := &shards[i]
		var isHeld [2]bool
		for k, w := range seen[i] {
			if asked[i][k] == nil {
				continue
			}
			held, err := asked[i][k].Result()
			if err != nil && !errors.Is(err, redis.Nil) && !stream.IsWrongType(err) {
				return nil, fmt.Errorf("look up a reservation of sale=%s: %w", sale.id, err)
			}
			reserved, _, err := order.ParseReservation(held)
			if isHeld[k] = err == nil && reserved.OrderID == w.order; isHeld[k] {
				continue
			}
			o, err := r.Ledger.Order(ctx, w.order)
			switch {
			case errors.Is(err, order.ErrNotFound):
			case err != nil:
				return nil, err
			case o.Status.Live():
				missed[i] = true
				r.logged.missed.Do(func() {
					r.config.Logger.Error(logOrderMissing, "sale", sale.id, "order", w.order, "user", w.user)
				})
			}
		}
		switch {
		case missed[i]: // until it is rebuilt
		case sale.ended:
			r.Probes.forget(sale)
		default:
			r.Probes.held(sale, seen[i], isHeld)
		}
	}
	return missed, nil
}

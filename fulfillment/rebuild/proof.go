package rebuild

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"golang.org/x/time/rate"

	"stampede/fulfillment/ledger"
	"stampede/fulfillment/stream"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

// A Redis that is set back while its process goes on, as with the snapshot of a virtual machine or by RESTORE, looks as
// before: it is the same server, and soon it has given out as many places as it had. Workers know
// it by two proofs, which a Redis that has all it had never gives, because the order of things is
// always the same: Redis holds a reservation before the order is confirmed, and until after it has
// ended.
//
//   - Postgres refuses an order whose reservation is in force in Redis: its buyer has another live order, or the stock
//     is taken (refusals).
//   - Redis does not hold an order that this worker has recorded and that is still live (witnesses).
//
// A rebuild takes either away, whatever the cause was. Somebody who can write to Redis can bring about both again and
// again, so a sale is rebuilt for them less and less often (rebuild/wait.sql).

// What the log says of proofs.
const (
	orderRefused = "Postgres has refused an order that Redis had accepted: Redis lacks orders, or one of them was " +
		"changed by hand"
	orderMissed  = "Redis does not hold a live order that it had accepted: it was set back, or changed by hand"
	refusedAgain = "Redis and Postgres differ once more about a sale that was rebuilt for that: it is rebuilt again " +
		"later; `stampede audit` shows the difference"
)

// refusals are the epochs of sales in which Postgres refused orders that Redis had accepted. There
// is an entry for a sale until a look finds it in another epoch. The zero value is ready.
type refusals struct {
	mu     sync.Mutex
	epochs map[uuid.UUID]int64
}

// note notes a refused order, and returns true for the first one of an epoch.
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

// in tells whether an order was refused in this epoch of the sale.
func (r *refusals) in(sale uuid.UUID, epoch int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	refused, known := r.epochs[sale]
	if known && refused != epoch {
		delete(r.epochs, sale)
	}
	return known && refused == epoch
}

// NoteRefused is called for an order that Postgres has just refused, and whose reservation was in force in Redis.
func (r *Rebuilder) NoteRefused(out ledger.Outcome) {
	if e := out.Event; r.refused.note(e.SaleID, e.Epoch) {
		r.config.Logger.Error(orderRefused, "sale", e.SaleID, "epoch", e.Epoch, "order", e.OrderID, "user", e.UserID,
			"rejected", out.Reason)
	}
}

// witness is an order of a sale that this worker has confirmed.
type witness struct {
	order    uuid.UUID
	user     string
	sequence int64
}

// witnesses are two orders of each sale: one that Redis held when it was asked last, and of those confirmed since the
// one with the highest place. There is an entry for each sale that this worker has recorded orders
// of. The zero value is ready.
type witnesses struct {
	mu    sync.Mutex
	known map[uuid.UUID]*[2]witness
}

const (
	heldBefore = iota
	confirmedSince
)

// Note notes what was recorded, in the order of sales and places.
func (w *witnesses) Note(outcomes []ledger.Outcome) {
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
		of := w.known[e.SaleID]
		if of == nil {
			if w.known == nil {
				w.known = map[uuid.UUID]*[2]witness{}
			}
			of = new([2]witness)
			w.known[e.SaleID] = of
		}
		if e.Sequence > of[confirmedSince].sequence {
			of[confirmedSince] = witness{e.OrderID, e.UserID, e.Sequence}
		}
	}
}

// of returns the witnesses of a sale.
func (w *witnesses) of(sale uuid.UUID) (found [2]witness) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if of := w.known[sale]; of != nil {
		found = *of
	}
	return found
}

// held notes that nothing is missing of these witnesses. One that has ended is none any more.
func (w *witnesses) held(sale uuid.UUID, seen [2]witness, isHeld [2]bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	of := w.known[sale]
	if of == nil {
		return
	}
	switch {
	case isHeld[confirmedSince]:
		of[heldBefore] = seen[confirmedSince]
	case !isHeld[heldBefore]:
		of[heldBefore] = witness{}
	}
	if of[confirmedSince] == seen[confirmedSince] {
		of[confirmedSince] = witness{}
	}
}

// forget forgets a sale that is over.
func (w *witnesses) forget(sale uuid.UUID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.known, sale)
}

// proofsIn returns why sales are to be rebuilt that agree with Postgres in all numbers: "" for those that are not.
func (r *Rebuilder) proofsIn(ctx context.Context, sales []guardedSale) (reasons []string, err error) {
	missed, err := r.missed(ctx, sales)
	if err != nil {
		return nil, err
	}
	reasons = make([]string, len(sales))
	for i, sale := range sales {
		switch {
		case missed[i]:
			reasons[i] = RebuildSetBack
		case r.refused.in(sale.id, sale.epoch):
			reasons[i] = RebuildRefused
		default:
			continue
		}
		wait, err := r.waitBefore(ctx, sale.id)
		if err != nil {
			return nil, err
		}
		if wait > 0 {
			r.said.putOff.Do(func() {
				r.config.Logger.Error(refusedAgain, "sale", sale.id, "reason", reasons[i], "in", wait.Round(time.Second))
			})
			reasons[i] = ""
		}
	}
	return reasons, nil
}

// proofsSaid is how often the log repeats what a proof says.
const proofsSaid = time.Minute

// said keeps proofs that last from filling the log.
type said struct{ missed, putOff rate.Sometimes }

// reasonsOfProofs are those of rebuilds that somebody who can write to Redis may bring about as often as he likes.
var reasonsOfProofs = []string{RebuildSetBack, RebuildRefused}

func (r *Rebuilder) waitBefore(ctx context.Context, sale uuid.UUID) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	var seconds float64
	if err := r.config.Pool.QueryRow(ctx, sql.RebuildWait, sale, reasonsOfProofs).Scan(&seconds); err != nil {
		return 0, fmt.Errorf("look up rebuilds of sale=%s: %w", sale, err)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}

// missed tells of which sales Redis does not hold an order that is live. Redis is asked before
// Postgres: an order that is live in Postgres afterwards was held all the time.
func (r *Rebuilder) missed(ctx context.Context, sales []guardedSale) ([]bool, error) {
	missed := make([]bool, len(sales))
	seen := make([][2]witness, len(sales))
	asked := make([][2]*redis.StringCmd, len(sales))
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	_, _ = r.config.Redis.Pipelined(limited, func(p redis.Pipeliner) error { // each command's own error counts
		for i, sale := range sales {
			seen[i] = r.Witnesses.of(sale.id)
			for k, w := range seen[i] {
				if w.user != "" {
					asked[i][k] = p.HGet(limited, r.config.Keys.Buyers(sale.partition, sale.id), w.user)
				}
			}
		}
		return nil
	})
	for i, sale := range sales {
		var isHeld [2]bool
		for k, w := range seen[i] {
			if asked[i][k] == nil {
				continue
			}
			held, err := asked[i][k].Result()
			if err != nil && !errors.Is(err, redis.Nil) && !stream.IsWrongType(err) {
				return nil, fmt.Errorf("look up a reservation of sale=%s: %w", sale.id, err)
			}
			reserved, err := reservation.ParseReservation(held)
			if isHeld[k] = err == nil && reserved.OrderID == w.order; isHeld[k] {
				continue
			}
			o, err := r.Ledger.Order(ctx, w.order)
			switch {
			case errors.Is(err, order.ErrOrderNotFound):
			case err != nil:
				return nil, err
			case o.Status.Live():
				missed[i] = true
				r.said.missed.Do(func() { r.config.Logger.Error(orderMissed, "sale", sale.id, "order", w.order, "user", w.user) })
			}
		}
		switch {
		case missed[i]: // until it is rebuilt
		case sale.ended:
			r.Witnesses.forget(sale.id)
		default:
			r.Witnesses.held(sale.id, seen[i], isHeld)
		}
	}
	return missed, nil
}

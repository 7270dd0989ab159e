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
	"stampede/reservation/order"
	"stampede/sql"
)

// A Redis that is set back within one process, by the snapshot of a virtual machine or by RESTORE, is still the
// verified server, and soon it has given out as many places as before. Workers find it by two proofs. An intact
// Redis never gives them, because it holds a reservation before the order is confirmed and until after it has ended.
//
//   - Postgres refuses an order whose reservation is in force in Redis: its buyer has another live order, or the
//     stock is taken (refusals).
//   - Redis does not hold a live order that this worker recorded (witnesses).
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
	if known && refused != epoch {
		delete(r.epochs, sale)
	}
	return known && refused == epoch
}

// NoteRefused is called for an order that Postgres has just refused and whose reservation was in force in Redis.
func (r *Rebuilder) NoteRefused(out ledger.Outcome) {
	if e := out.Event; r.refused.note(e.SaleID, e.Epoch) {
		r.config.Logger.Error(logOrderRefused, "sale", e.SaleID, "epoch", e.Epoch, "order", e.OrderID, "user", e.UserID,
			"rejected", out.Reason)
	}
}

// witness is an order of a sale that this worker has confirmed.
type witness struct {
	order    uuid.UUID
	user     string
	sequence int64
}

// witnesses holds two orders of each sale of which this worker has recorded orders: one that Redis held at the last
// check, and the one with the highest place of those confirmed since. The zero value is ready.
type witnesses struct {
	mu    sync.Mutex
	known map[uuid.UUID]*[2]witness
}

const (
	heldBefore = iota
	confirmedSince
)

// Note takes recorded orders, sorted by sale and place.
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

// held records a check that missed none of these witnesses: seen are removed or kept. Ended orders are removed.
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

// forget removes a sale that is over.
func (w *witnesses) forget(sale uuid.UUID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.known, sale)
}

// proofsIn returns the reasons to rebuild sales whose numbers agree with Postgres; "" for no rebuild.
func (r *Rebuilder) proofsIn(ctx context.Context, sales []requiredSale) (reasons []string, err error) {
	missed, err := r.missed(ctx, sales)
	if err != nil {
		return nil, err
	}
	reasons = make([]string, len(sales))
	for i, sale := range sales {
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

func (r *Rebuilder) waitBefore(ctx context.Context, sale uuid.UUID) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	var seconds float64
	if err := r.config.Pool.QueryRow(ctx, sql.RebuildWait, sale, reasonsOfProofs).Scan(&seconds); err != nil {
		return 0, fmt.Errorf("look up rebuilds of sale=%s: %w", sale, err)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}

// missed reports for which sales Redis lacks a live witness. Redis is read before Postgres, so an order that is live
// in Postgres was live when Redis was read.
func (r *Rebuilder) missed(ctx context.Context, sales []requiredSale) ([]bool, error) {
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
			r.Witnesses.forget(sale.id)
		default:
			r.Witnesses.held(sale.id, seen[i], isHeld)
		}
	}
	return missed, nil
}

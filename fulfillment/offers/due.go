package offers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"stampede/internal/pg"
	"stampede/internal/retry"
	"stampede/ledger/draws"
	"stampede/reservation"
)

const (
	// retryMin and retryMax bound the pause before a sale is looked at again that has units which cannot be offered now:
	// it is paused, or places of its list are not in Postgres.
	retryMin = 500 * time.Millisecond
	retryMax = 5 * time.Second
	// surveyInterval is the pause between two looks at all open sales, of lookMax together. It finds what nobody noted:
	// the version before this one notes nothing, and an operator may change Redis.
	surveyInterval = time.Minute
	lookMax        = 500
)

// finder finds the draws, or the waiting lists, with units to offer.
type finder struct {
	kind     draws.Kind
	surveyed time.Time
	retries  map[uuid.UUID]*retried
}

// retried is when to look at a sale again.
type retried struct {
	turn  int64
	until time.Time
	pause time.Duration
}

// eachDue has do offer the units of each sale that has some. do returns true when nothing is left to offer.
func (o *Offerer) eachDue(ctx context.Context, f *finder, do func(*draws.Draw) (finished bool, err error)) error {
	surveyErr := o.survey(ctx, f)
	due, err := o.draws.Due(ctx, f.kind)
	if len(due) == 0 {
		clear(f.retries)
	}
	return errors.Join(surveyErr, each(ctx, due, err, func(d *draws.Draw) error {
		r := f.retries[d.SaleID]
		if r == nil || r.turn != d.Turn() {
			r = &retried{turn: d.Turn(), pause: retryMin}
		} else if time.Now().Before(r.until) {
			return nil
		}
		began := time.Now()
		finished, err := do(d)
		if errors.Is(err, pg.ErrLockHeld) {
			return nil // another worker is at it; it is due until one finds nothing
		}
		if finished && err == nil {
			delete(f.retries, d.SaleID)
			return o.draws.Done(ctx, d)
		}
		if time.Since(began) < turn { // else there is more to do at once
			r.until = time.Now().Add(r.pause)
			r.pause = min(2*r.pause, retryMax)
			f.retries[d.SaleID] = r
		}
		return err
	}))
}

// survey notes the open sales that have units to offer, by what Redis has left of them, now and then.
func (o *Offerer) survey(ctx context.Context, f *finder) error {
	if time.Since(f.surveyed) < surveyInterval {
		return nil
	}
	open, err := o.draws.Open(ctx, f.kind)
	if err != nil {
		return err
	}
	f.surveyed = time.Now()
	var found []uuid.UUID
	var failed []error
	for some := range slices.Chunk(open, lookMax) {
		due, err := o.withUnits(ctx, f.kind, some)
		found, failed = append(found, due...), append(failed, err)
	}
	if len(found) > 0 {
		failed = append(failed, o.draws.NoteDue(ctx, found))
	}
	if err := errors.Join(failed...); err != nil {
		return fmt.Errorf("look for units to offer: %w", err)
	}
	return nil
}

// withUnits returns those of the sales that are due.
func (o *Offerer) withUnits(ctx context.Context, kind draws.Kind, sales []draws.OpenSale) (due []uuid.UUID, err error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	of := make([]reservation.Sale, len(sales))
	for i, s := range sales {
		of[i] = goods(s.SaleID, s.Partitions, s.Shards, s.Items)
	}
	found, err := o.Store.LookWhose(ctx, of)
	for i, s := range sales {
		now := &found[i]
		offers := slices.ContainsFunc(now.Units, func(u reservation.WhoseUnits) bool { return u.Offered > 0 })
		closes := kind == draws.ByPlace && s.Closed && !now.IsPlain
		if s.Unfinished || offers || kind == draws.ByHash && now.Left() > 0 || closes {
			due = append(due, s.SaleID)
		}
	}
	return due, err
}

// Package offers brings draws from the end of their entries to the last offer: it freezes the list once each entry is
// final, ranks the entries once there is a seed, and offers the units of the sale by rank. What it finds out and does
// is in Postgres (ledger/draws), so any number of workers may run it, and each goes on where another has stopped.
package offers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/google/uuid"

	"stampede/internal/clocks"
	"stampede/internal/pg"
	"stampede/internal/retry"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/upkeep/retire"
)

// Config configures an Offerer. All fields are required.
type Config struct {
	Catalog *catalog.Catalog
	Logger  *slog.Logger
}

// Offerer has the duties of a worker for draws and waiting lists. Prepare, Offer and OfferWaiting may run at the same
// time; each belongs to one goroutine.
type Offerer struct {
	Config
	draws *draws.Store
	rest  *retire.Retirer
	// waits has why the list of a draw is not frozen yet, so that it is logged once.
	waits map[uuid.UUID]string
	lists map[uuid.UUID]*list
	// drawn and listed find the draws and the waiting lists with units to offer.
	drawn, listed *finder
}

// New returns an Offerer.
func New(c Config) *Offerer {
	return &Offerer{
		Config: c, draws: draws.New(c.Catalog.Pool), waits: map[uuid.UUID]string{}, lists: map[uuid.UUID]*list{},
		drawn:  &finder{kind: draws.ByHash, retries: map[uuid.UUID]*retried{}},
		listed: &finder{kind: draws.ByPlace, retries: map[uuid.UUID]*retried{}},
		rest:   retire.New(retire.Config{Catalog: c.Catalog, Logger: c.Logger}),
	}
}

// Prepare does what is due of all draws until their units are offered. The draws are independent; the error has those
// of all that failed.
func (o *Offerer) Prepare(ctx context.Context) error {
	due, err := o.draws.Unprepared(ctx)
	return each(ctx, due, err, func(d *draws.Draw) error {
		read := o.clocks(d)
		switch ended, err := o.draws.EndLate(ctx, d, read); {
		case err != nil:
			return err
		case ended:
			o.Logger.Warn("a draw is void", "sale", d.SaleID)
			return nil
		}
		switch d.State {
		case draws.Freezing:
			if final, err := o.final(ctx, d, read); err != nil || !final {
				return err
			}
		case draws.Ranking:
		default:
			return nil
		}
		err := o.draws.Prepare(ctx, d.SaleID, read)
		if errors.Is(err, pg.ErrLockHeld) {
			return nil // another worker is at it
		}
		return err
	})
}

func each(ctx context.Context, due []draws.Draw, err error, do func(*draws.Draw) error) error {
	failed := []error{err}
	for i := range due {
		if ctx.Err() != nil {
			break
		}
		failed = append(failed, do(&due[i]))
	}
	return retry.Join(failed...)
}

// clocks reads those of Postgres and of the Redis server that accepts the entries of a draw.
func (o *Offerer) clocks(d *draws.Draw) draws.Clocks {
	return func(ctx context.Context, on pg.Querier) (clocks.Times, error) {
		return o.Catalog.Store.Times(ctx, on, entriesPartition(d))
	}
}

// entriesPartition is where the entries of a draw, or the places of a waiting list, are in Redis.
func entriesPartition(d *draws.Draw) int {
	return reservation.PartitionAmong(d.EntriesID, d.Partitions)
}

// final ends the entries when both clocks say that their time is over, and reports whether each of them is final. The
// end is published before anything is read, so no Redis accepts another one.
func (o *Offerer) final(ctx context.Context, d *draws.Draw, read draws.Clocks) (bool, error) {
	entries, err := o.Catalog.Show(ctx, d.EntriesID)
	if err != nil {
		return false, err
	}
	if !entries.Retired && entries.Sale.State != reservation.StateEnded {
		times, err := read(ctx, o.Catalog.Pool)
		if err != nil || times.Earliest.Before(d.ClosesAt) {
			return false, wrapEnd(d, err)
		}
		if entries, err = o.Catalog.End(ctx, d.EntriesID); err != nil {
			return false, wrapEnd(d, err)
		}
	}
	why := ""
	if !entries.Retired { // which needs that each of them is final
		why, err = o.rest.AtRest(ctx, entries.Sale)
	}
	if err == nil && why == "" {
		why, err = o.boughtBefore(ctx, d)
	}
	if err != nil {
		return false, fmt.Errorf("look for open entries of sale=%s: %w", d.SaleID, err)
	}
	switch why {
	case "":
		delete(o.waits, d.SaleID)
		return true, nil
	case o.waits[d.SaleID]:
	default:
		o.Logger.Info("the entries of a draw are over, but not final yet", "sale", d.SaleID, "reason", why)
		o.waits[d.SaleID] = why
	}
	return false, nil
}

// boughtBefore returns why it is not known yet who has bought units before the draw was created: that is published with
// the list.
func (o *Offerer) boughtBefore(ctx context.Context, d *draws.Draw) (why string, err error) {
	if !d.PublishesGoods() {
		return "", nil
	}
	goods, err := o.Catalog.Show(ctx, d.SaleID)
	if err == nil && goods.Stock-goods.Available != goods.Sale.Sold {
		why = "orders from before the draw are not in Postgres yet, or their units not back"
	}
	return why, err
}

func wrapEnd(d *draws.Draw, err error) error {
	if err != nil {
		err = fmt.Errorf("end the entries of sale=%s: %w", d.SaleID, err)
	}
	return err
}

// turn bounds the time that Offer spends on one draw while others wait.
const turn = 2 * time.Second

// Offer offers the units that are left in draws, by rank, and returns how many ranks had their turn.
func (o *Offerer) Offer(ctx context.Context) (done int, err error) {
	err = o.eachDue(ctx, o.drawn, func(d *draws.Draw) (finished bool, err error) {
		switch {
		case d.State == draws.Over && d.Opening:
			return o.openRest(ctx, d)
		case d.State != draws.Offering:
			return true, nil
		}
		had := d.Offered + d.Skipped
		for began := time.Now(); !d.Paused && time.Since(began) < turn; {
			now, err := o.look(ctx, d)
			if err != nil || now.IsLost {
				return false, err
			}
			n, err := o.draws.Offer(ctx, d.SaleID, ranksOf(d, now), o.reserver(d.SaleID))
			done, had = done+n, had+int64(n)
			if err != nil || n == 0 {
				isLast := d.Opening && had >= d.Entries // then it is due again: what is left is for everybody
				return now.Left() == 0 && d.InEpoch(now.Epoch) && !isLast, err
			}
		}
		return false, nil
	})
	return done, err
}

// openRest sells what is left to everybody; finished is false while an order that was offered is not in Postgres. A
// worker publishes it as each change of a sale.
func (o *Offerer) openRest(ctx context.Context, d *draws.Draw) (finished bool, err error) {
	opened, waits, err := o.draws.OpenRest(ctx, d.SaleID)
	if opened {
		o.Logger.Info("each rank had its turn: what is left is for everybody", "sale", d.SaleID)
	}
	return !waits, err
}

// look returns whom the units of the sale are for.
func (o *Offerer) look(ctx context.Context, d *draws.Draw) (reservation.Whose, error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	found, err := o.Catalog.Store.LookWhose(ctx, []reservation.Sale{goods(d.SaleID, d.Partitions, d.Shards, len(d.Items))})
	return found[0], err
}

// goods is a sale whose units are offered, as reservation.Store looks for it.
func goods(id uuid.UUID, partitions, shards, items int) reservation.Sale {
	return reservation.Sale{
		ID: id, Partitions: partitions, Terms: reservation.Terms{Shards: shards, Items: make([]reservation.Item, items)},
	}
}

// ranksOf are for how many ranks of each item, by its letter, there may be units: as many as Redis has left, but one
// even if none is left.
func ranksOf(d *draws.Draw, now reservation.Whose) map[string]int64 {
	ranks := map[string]int64{}
	for place, item := range d.Letters() {
		ranks[item] = max(now.Units[place].Left(), 1)
	}
	return ranks
}

// reserver reserves the units of turns in one call of the script.
func (o *Offerer) reserver(sale uuid.UUID) draws.Reserver {
	return func(ctx context.Context, turns []draws.Turn) ([]draws.Result, error) {
		results := make([]draws.Result, len(turns))
		var asked []reservation.Offer
		var places []int // of those asked among the turns
		for i, t := range turns {
			offer := reservation.Offer{
				OrderID: t.OrderID, UserID: t.UserID, Item: t.Code, Key: reservation.OfferKey(t.EntryID),
			}
			if !t.Cancelled {
				places = append(places, i)
				asked = append(asked, offer)
				continue
			}
			// A worker that died may have reserved the unit before the entry was cancelled, or have its call on its way.
			made, err := o.Catalog.Store.Withdraw(ctx, sale, offer)
			if err != nil {
				return nil, err
			}
			if results[i] = draws.Cancelled; made != uuid.Nil {
				results[i], turns[i].OrderID = draws.Won, made
			}
		}
		if len(asked) == 0 {
			return results, nil
		}
		answers, err := o.Catalog.Store.Offer(ctx, reservation.Sale{ID: sale, Epoch: turns[0].Epoch}, asked)
		if err != nil {
			return nil, err
		}
		for at, a := range answers {
			switch i := places[at]; a.Verdict {
			case reservation.Reserved, reservation.Replayed, reservation.OrderEnded:
				results[i], turns[i].OrderID = draws.Won, a.Reservation.OrderID
			case reservation.AlreadyPurchased:
				results[i] = draws.Holds
			default: // sold out, withdrawn, or the sale does not sell now
				results[i] = draws.NoUnit
			}
		}
		return results, nil
	}
}

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
	unitsErr := o.findUnits(ctx, f)
	due, err := o.draws.Due(ctx, f.kind)
	if len(due) == 0 {
		clear(f.retries)
	}
	return errors.Join(unitsErr, each(ctx, due, err, func(d *draws.Draw) error {
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

// findUnits notes the open sales that have units to offer, by what Redis has left of them, now and then.
func (o *Offerer) findUnits(ctx context.Context, f *finder) error {
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
	found, err := o.Catalog.Store.LookWhose(ctx, of)
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

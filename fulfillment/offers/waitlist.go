package offers

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"stampede/internal/retry"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

// lineMax bounds how many of those who wait are remembered, and lineAge for how long: to read them is to read the whole
// list, and who came to Postgres late waits behind them.
const (
	lineMax = 4096
	lineAge = 30 * time.Second
)

// waiters are what is remembered of those who wait for an item.
type waiters struct {
	// next are the first entries of the list. Some of them may have had their turn since.
	next []uuid.UUID
	read time.Time
}

// list is what is remembered of a waiting list: those who wait, by the letters of the items.
type list struct {
	lines map[string]*waiters
	// isHeld is true after it was logged that the sale cannot be reopened yet.
	isHeld bool
}

// OfferWaiting offers the units that have returned to those who wait, by place, and sells them to everybody again where
// nobody waits. It returns how many had their turn.
func (o *Offerer) OfferWaiting(ctx context.Context) (done int, err error) {
	err = o.eachDue(ctx, o.listed, func(d *draws.Draw) (finished bool, err error) {
		defer func() {
			if finished {
				delete(o.lists, d.SaleID)
			}
		}()
		if d.State == draws.Over {
			if d.Ended { // otherwise the entries have the same time, which may be over by one clock only
				_, err = o.Catalog.End(ctx, d.EntriesID)
			}
			return err == nil, err
		}
		l := o.lists[d.SaleID]
		if l == nil {
			l = &list{lines: map[string]*waiters{}}
			for _, item := range d.Letters() {
				l.lines[item] = &waiters{}
			}
			o.lists[d.SaleID] = l
		}
		for began := time.Now(); !d.Paused && time.Since(began) < turn; {
			now, err := o.look(ctx, d)
			if err != nil {
				return false, err
			}
			switch {
			case now.IsLost:
				return false, nil
			case now.IsPlain:
				return true, nil // the list is closed, and nobody waits
			}
			n, unwanted, goesOn, err := o.offerFirst(ctx, d, l, now)
			if done += n; err == nil && !goesOn {
				goesOn, err = o.reopen(ctx, d, l, now, unwanted)
			}
			if err != nil || !goesOn {
				closes := d.EntriesEnded && len(unwanted) == len(now.Units)
				return now.Offered() == 0 && d.InEpoch(now.Epoch) && !closes, err
			}
		}
		return false, nil
	})
	return done, err
}

// offerFirst offers what is left of each item to those who come next. goesOn is true if there may be more to do at
// once. If it is false, unwanted are the items, by their places, of which nobody is known who waits.
func (o *Offerer) offerFirst(
	ctx context.Context, d *draws.Draw, l *list, now reservation.Whose,
) (done int, unwanted []int, goesOn bool, err error) {
	if err := o.fill(ctx, d, l, now); err != nil {
		return 0, nil, false, err
	}
	first := map[string][]uuid.UUID{}
	for item, line := range l.lines {
		first[item] = line.next[:min(len(line.next), order.MaxPerMessage)]
	}
	done, waits, err := o.draws.OfferWaiting(ctx, d.SaleID, ranksOf(d, now), first, o.reserver(d.SaleID))
	if err != nil {
		return done, nil, false, err
	}
	goesOn = done > 0
	for place, item := range d.Letters() {
		switch n := len(first[item]); {
		case waits[item]:
		case n > 0: // all of them had a turn
			l.lines[item].next = l.lines[item].next[n:]
			goesOn = true
		default:
			unwanted = append(unwanted, place)
		}
	}
	return done, unwanted, goesOn, nil
}

// fill reads who is next for the items that somebody may be offered, if it is not known any more.
func (o *Offerer) fill(ctx context.Context, d *draws.Draw, l *list, now reservation.Whose) error {
	var before time.Time // for all items
	for place, item := range d.Letters() {
		line, units := l.lines[item], now.Units[place]
		isStale := len(line.next) == 0 || time.Since(line.read) > lineAge
		if !isStale || !units.IsOffered && units.ForSale == 0 {
			continue
		}
		var err error
		if before.IsZero() {
			if before, err = o.recordedBefore(ctx, d); err != nil {
				return err
			}
		}
		line.read = time.Now()
		if line.next, err = o.draws.Waiting(ctx, d, item, before, lineMax); err != nil {
			return err
		}
	}
	return nil
}

// recordedBefore returns when the oldest order was accepted that is not in Postgres, by the clock of Redis. All entries
// that were accepted earlier are in Postgres.
func (o *Offerer) recordedBefore(ctx context.Context, d *draws.Draw) (time.Time, error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	partition := entriesPartition(d)
	// Before the look at the stream: what it does not see yet was accepted later.
	in := o.Catalog.Store
	now, err := stream.Clock(ctx, in.Redis, in.Keys.Sale(partition, d.EntriesID))
	if err != nil {
		return time.Time{}, err
	}
	backlog, err := stream.ReadBacklog(ctx, in.Redis, in.Keys.Orders(partition), reservation.Group)
	return now.Add(-backlog.OldestWaitingAge), err
}

// canJoin is true while the end of the places is not published, so that Redis may still give one. If it has lost them,
// it gives none.
func (o *Offerer) canJoin(ctx context.Context, d *draws.Draw) (bool, error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	in := o.Catalog.Store
	places, err := in.Keys.AskShard(ctx, in.Redis, entriesPartition(d), d.EntriesID, 0, "state").Hash()
	if err != nil {
		return false, fmt.Errorf("read the places to wait for sale=%s: %w", d.SaleID, err)
	}
	return places.Exists && places.State != reservation.StateEnded, nil
}

// reopen sells the units that are left of items to everybody, if nobody waits for them. If the list is closed, too, and
// nobody waits for any item, it does so for good.
func (o *Offerer) reopen(
	ctx context.Context, d *draws.Draw, l *list, now reservation.Whose, items []int,
) (reopened bool, err error) {
	if closes := d.EntriesEnded && len(items) == len(now.Units); closes {
		if canJoin, err := o.canJoin(ctx, d); err != nil || canJoin {
			return false, err
		}
	} else {
		items = slices.DeleteFunc(slices.Clone(items), func(place int) bool { return !now.Units[place].IsOffered })
	}
	if len(items) == 0 {
		return false, nil
	}
	// Before IsWaiting: an entry that is not held any more is in Postgres.
	entries, err := o.Catalog.Show(ctx, d.EntriesID)
	if err != nil {
		return false, err
	}
	if entries.Held > 0 {
		if !l.isHeld {
			o.Logger.Info("a sale has units left and stays closed to others: places in its waiting list are not in Postgres yet",
				"sale", d.SaleID, "left", now.Offered(), "places", entries.Held)
		}
		l.isHeld = true
		return false, nil
	}
	l.isHeld = false
	var unwanted []int
	for _, place := range items {
		waits, err := o.draws.IsWaiting(ctx, d, d.Letters()[place])
		if err != nil {
			return false, err
		}
		if !waits {
			unwanted = append(unwanted, place)
		}
	}
	sale := goods(d.SaleID, d.Partitions, d.Shards, len(d.Items))
	sale.Epoch, sale.Waitlist = now.Epoch, true
	if sale.WaitlistClosed = d.EntriesEnded && len(unwanted) == len(now.Units); len(unwanted) == 0 {
		return false, nil
	}
	reopened, err = o.Catalog.Store.Reopen(ctx, sale, unwanted)
	if reopened {
		o.Logger.Info("nobody waits: what is left and was offered is for everybody", "sale", d.SaleID, "left", now.Offered())
	}
	return reopened, err
}

package offers

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"

	"stampede/internal/retry"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

// lineMax bounds how many of those who wait are remembered: to read them is to read the whole list.
const lineMax = 4096

// line is what is remembered of a waiting list.
type line struct {
	// asked has when the next turn was looked for.
	asked time.Time
	// next are the first entries of the list. Some of them may have had their turn since.
	next []uuid.UUID
	// isHeld is true after it was logged that the sale cannot be reopened yet.
	isHeld bool
}

// OfferWaiting offers the units that have returned to those who wait, by place, and sells them to everybody again where
// nobody waits. It returns how many had their turn.
func (o *Offerer) OfferWaiting(ctx context.Context) (done int, err error) {
	err = o.each(ctx, o.draws.Waitlists, func(ctx context.Context, d *draws.Draw) error {
		if d.State == draws.Over {
			delete(o.lines, d.SaleID)
			_, err := o.Catalog.End(ctx, d.EntriesID)
			return err
		}
		l := o.lines[d.SaleID]
		if l == nil {
			l = &line{}
			o.lines[d.SaleID] = l
		}
		n := 0
		for began := time.Now(); !d.Paused && time.Since(began) < turn; {
			now, err := o.look(ctx, d)
			offers := now.OpenState == reservation.StateOffers && now.Left > 0
			if err != nil || n == 0 && !offers && time.Since(l.asked) < askAgain {
				return err
			}
			l.asked = time.Now()
			if len(l.next) == 0 {
				if err := o.fill(ctx, d, l); err != nil {
					return err
				}
			}
			first := l.next[:min(len(l.next), order.MaxPerMessage)]
			var waits bool
			n, waits, err = o.draws.OfferWaiting(ctx, d.SaleID, max(now.Left, 1), first, o.reserver(d.SaleID))
			done += n
			switch {
			case err != nil:
				return err
			case waits && n == 0:
				return nil
			case !waits && len(first) == 0:
				return o.reopen(ctx, d, l, now)
			case !waits:
				l.next = l.next[len(first):]
			}
		}
		return nil
	})
	return done, err
}

// fill reads who is next.
func (o *Offerer) fill(ctx context.Context, d *draws.Draw, l *line) error {
	before, err := o.recordedBefore(ctx, d)
	if err != nil {
		return err
	}
	l.next, err = o.draws.Waiting(ctx, d, before, lineMax)
	return err
}

// inRedis is what Redis has of a sale with a waiting list; zero if it has lost the sale.
type inRedis struct {
	Left      int64             `redis:"left"`
	Epoch     int64             `redis:"epoch"`
	OpenState reservation.State `redis:"open_state"`
}

func (o *Offerer) look(ctx context.Context, d *draws.Draw) (now inRedis, err error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	key := o.Keys.Sale(reservation.PartitionAmong(d.SaleID, d.Partitions), d.SaleID)
	if err = o.Redis.HMGet(ctx, key, "left", "epoch", "open_state").Scan(&now); err != nil {
		return now, fmt.Errorf("read the units left of sale=%s: %w", d.SaleID, err)
	}
	return now, nil
}

// recordedBefore returns when the oldest order was accepted that is not in Postgres, by the clock of Redis. All entries
// that were accepted earlier are in Postgres.
func (o *Offerer) recordedBefore(ctx context.Context, d *draws.Draw) (time.Time, error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	partition := reservation.PartitionAmong(d.EntriesID, d.Partitions)
	// Before the look at the stream: what it does not see yet was accepted later.
	now, err := stream.Clock(ctx, o.Redis, o.Keys.Sale(partition, d.EntriesID))
	if err != nil {
		return time.Time{}, err
	}
	backlog, err := stream.ReadBacklog(ctx, o.Redis, o.Keys.Orders(partition), reservation.Group)
	return now.Add(-backlog.OldestWaitingAge), err
}

// reopen sells the units that are left to everybody, if nobody waits.
func (o *Offerer) reopen(ctx context.Context, d *draws.Draw, l *line, now inRedis) error {
	if now.OpenState != reservation.StateOffers || now.Left == 0 {
		return nil
	}
	// Before IsWaiting: an entry that is not held any more is in Postgres.
	entries, err := o.Catalog.Show(ctx, d.EntriesID)
	if err != nil {
		return err
	}
	if entries.Held > 0 {
		if !l.isHeld {
			o.Logger.Info("a sale has units left and stays closed to others: places in its waiting list are not in Postgres yet",
				"sale", d.SaleID, "left", now.Left, "places", entries.Held)
		}
		l.isHeld = true
		return nil
	}
	l.isHeld = false
	if waits, err := o.draws.IsWaiting(ctx, d); err != nil || waits {
		return err
	}
	reopened, err := o.Store.Reopen(ctx, reservation.Sale{
		ID: d.SaleID, Terms: reservation.Terms{Waitlist: true, Shards: 1}, Partitions: d.Partitions, Epoch: now.Epoch,
	})
	if reopened {
		o.Logger.Info("nobody waits: the units that are left are for everybody", "sale", d.SaleID, "left", now.Left)
	}
	return err
}

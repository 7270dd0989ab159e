package offers

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

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

// line is what is remembered of a waiting list.
type line struct {
	// next are the first entries of the list. Some of them may have had their turn since.
	next []uuid.UUID
	read time.Time
	// isHeld is true after it was logged that the sale cannot be reopened yet.
	isHeld bool
}

// OfferWaiting offers the units that have returned to those who wait, by place, and sells them to everybody again where
// nobody waits. It returns how many had their turn.
func (o *Offerer) OfferWaiting(ctx context.Context) (done int, err error) {
	err = o.eachDue(ctx, o.listed, func(d *draws.Draw) (finished bool, err error) {
		defer func() {
			if finished {
				delete(o.lines, d.SaleID)
			}
		}()
		if d.State == draws.Over {
			if d.Ended { // otherwise the entries have the same time, which may be over by one clock only
				_, err = o.Catalog.End(ctx, d.EntriesID)
			}
			return err == nil, err
		}
		l := o.lines[d.SaleID]
		if l == nil {
			l = &line{}
			o.lines[d.SaleID] = l
		}
		for began := time.Now(); !d.Paused && time.Since(began) < turn; {
			now, err := o.look(ctx, d)
			if err != nil {
				return false, err
			}
			if now.OpenState == reservation.StateOpen {
				return true, nil // the list is closed, and nobody waits
			}
			if len(l.next) == 0 || time.Since(l.read) > lineAge {
				if err := o.fill(ctx, d, l); err != nil {
					return false, err
				}
			}
			first := l.next[:min(len(l.next), order.MaxPerMessage)]
			n, waits, err := o.draws.OfferWaiting(ctx, d.SaleID, max(now.Left, 1), first, o.reserver(d.SaleID))
			done += n
			switch {
			case err != nil:
				return false, err
			case waits && n == 0:
				return now.isDone(d), nil
			case !waits && len(first) == 0:
				reopened, err := o.reopen(ctx, d, l, now)
				return reopened || !d.EntriesEnded && now.isDone(d), err
			case !waits:
				l.next = l.next[len(first):]
			}
		}
		return false, nil
	})
	return done, err
}

// fill reads who is next.
func (o *Offerer) fill(ctx context.Context, d *draws.Draw, l *line) error {
	before, err := o.recordedBefore(ctx, d)
	if err != nil {
		return err
	}
	l.read = time.Now()
	l.next, err = o.draws.Waiting(ctx, d, before, lineMax)
	return err
}

// inRedis is what Redis has of a sale with a waiting list; zero if it has lost the sale.
type inRedis struct {
	Left      int64             `redis:"left"`
	Epoch     int64             `redis:"epoch"`
	OpenState reservation.State `redis:"open_state"`
}

// isDone is true if no unit can be offered.
func (now inRedis) isDone(d *draws.Draw) bool {
	return d.InEpoch(now.Epoch) && (now.Left == 0 || now.OpenState != reservation.StateOffers)
}

func (o *Offerer) look(ctx context.Context, d *draws.Draw) (now inRedis, err error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	key := o.saleKey(d.SaleID, d.Partitions)
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

// canJoin is true while the end of the places is not published, so that Redis may still give one. If it has lost them,
// it gives none.
func (o *Offerer) canJoin(ctx context.Context, d *draws.Draw) (bool, error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	key := o.saleKey(d.EntriesID, d.Partitions)
	state, err := o.Redis.HGet(ctx, key, "state").Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return false, fmt.Errorf("read the places to wait for sale=%s: %w", d.SaleID, err)
	}
	return err == nil && reservation.State(state) != reservation.StateEnded, nil
}

// reopen sells the units that are left to everybody, if nobody waits. If the list is closed, too, it does so for good.
func (o *Offerer) reopen(ctx context.Context, d *draws.Draw, l *line, now inRedis) (reopened bool, err error) {
	if d.EntriesEnded {
		if canJoin, err := o.canJoin(ctx, d); err != nil || canJoin {
			return false, err
		}
	} else if now.OpenState != reservation.StateOffers || now.Left == 0 {
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
				"sale", d.SaleID, "left", now.Left, "places", entries.Held)
		}
		l.isHeld = true
		return false, nil
	}
	l.isHeld = false
	if waits, err := o.draws.IsWaiting(ctx, d); err != nil || waits {
		return false, err
	}
	reopened, err = o.Store.Reopen(ctx, reservation.Sale{
		ID: d.SaleID, Terms: reservation.Terms{Waitlist: true, Shards: 1}, Partitions: d.Partitions, Epoch: now.Epoch,
		WaitlistClosed: d.EntriesEnded,
	})
	if reopened {
		o.Logger.Info("nobody waits: the units that are left are for everybody", "sale", d.SaleID, "left", now.Left)
	}
	return reopened, err
}

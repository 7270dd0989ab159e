// Package offers brings draws from the end of their entries to the last offer: it freezes the list once each entry is
// final, ranks the entries once there is a seed, and offers the units of the sale by rank. What it finds out and does
// is in Postgres (ledger/draws), so any number of workers may run it, and each goes on where another has stopped.
package offers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/pg"
	"stampede/internal/retry"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/upkeep/retire"
)

// Config configures an Offerer. All fields are required.
type Config struct {
	Pool    *pgxpool.Pool
	Redis   redis.UniversalClient
	Keys    reservation.Keys
	Store   *reservation.Store
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
	// asked has when the next rank of a draw without units was looked for.
	asked map[uuid.UUID]time.Time
	lines map[uuid.UUID]*line
}

// New returns an Offerer.
func New(c Config) *Offerer {
	return &Offerer{
		Config: c, draws: draws.New(c.Pool), waits: map[uuid.UUID]string{}, asked: map[uuid.UUID]time.Time{},
		lines: map[uuid.UUID]*line{},
		rest: retire.New(retire.Config{
			Pool: c.Pool, Redis: c.Redis, Keys: c.Keys, Store: c.Store, Catalog: c.Catalog, Logger: c.Logger,
		}),
	}
}

// Prepare does what is due of all draws until their units are offered. The draws are independent; the error has those
// of all that failed.
func (o *Offerer) Prepare(ctx context.Context) error {
	return o.each(ctx, o.draws.Due, func(ctx context.Context, d *draws.Draw) error {
		switch ended, err := o.draws.EndLate(ctx, d); {
		case err != nil:
			return err
		case ended:
			o.Logger.Warn("a draw is void", "sale", d.SaleID)
			return nil
		}
		switch d.State {
		case draws.Freezing:
			if final, err := o.final(ctx, d); err != nil || !final {
				return err
			}
		case draws.Ranking:
		default:
			return nil
		}
		err := o.draws.Prepare(ctx, d.SaleID)
		if errors.Is(err, pg.ErrLockHeld) {
			return nil // another worker is at it
		}
		return err
	})
}

func (o *Offerer) each(
	ctx context.Context, list func(context.Context) ([]uuid.UUID, error), do func(context.Context, *draws.Draw) error,
) error {
	due, err := list(ctx)
	failed := []error{err}
	for _, sale := range due {
		if ctx.Err() != nil {
			break
		}
		d, err := o.draws.Find(ctx, sale)
		if err == nil {
			err = do(ctx, &d)
		}
		failed = append(failed, err)
	}
	return errors.Join(failed...)
}

// final ends the entries, and reports whether each of them is final. The end is published before anything is read, so
// no Redis accepts another one, whatever its clock says.
func (o *Offerer) final(ctx context.Context, d *draws.Draw) (bool, error) {
	entries, err := o.Catalog.Show(ctx, d.EntriesID)
	if err != nil {
		return false, err
	}
	if entries.Retired {
		return true, nil // which needs that each of them is final
	}
	if entries.Sale.State != reservation.StateEnded {
		if entries, err = o.Catalog.End(ctx, d.EntriesID); err != nil {
			return false, fmt.Errorf("end the entries of sale=%s: %w", d.SaleID, err)
		}
	}
	why, err := o.rest.AtRest(ctx, entries.Sale)
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

// turn bounds the time that Offer spends on one draw while others wait.
const turn = 2 * time.Second

// askAgain is how often the next turn is looked for when no unit is left: a worker that died may have reserved the last
// ones without a record.
const askAgain = 5 * time.Second

// Offer offers the units that are left in all draws, by rank, and returns how many ranks had their turn.
func (o *Offerer) Offer(ctx context.Context) (done int, err error) {
	err = o.each(ctx, o.draws.Due, func(ctx context.Context, d *draws.Draw) error {
		if d.State != draws.Offering || d.Paused {
			return nil
		}
		n := 0
		for began := time.Now(); time.Since(began) < turn; {
			ranks, left, err := o.ranks(ctx, d)
			if err != nil || len(ranks) == 0 || n == 0 && !left && time.Since(o.asked[d.SaleID]) < askAgain {
				return err
			}
			o.asked[d.SaleID] = time.Now()
			n, err = o.draws.Offer(ctx, d.SaleID, ranks, o.reserver(d.SaleID))
			if done += n; err != nil || n == 0 {
				return err
			}
		}
		return nil
	})
	return done, err
}

// ranks returns for how many ranks of each item, by its letter, there may be units: as many as Redis has left, but one
// even if none is left; and whether any are.
func (o *Offerer) ranks(ctx context.Context, d *draws.Draw) (ranks map[string]int64, left bool, err error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	letters, fields := []string{""}, []string{"left"}
	if len(d.Items) > 0 {
		letters, fields = nil, nil
	}
	for item := range d.Items {
		letters, fields = append(letters, order.ItemLetter(item)), append(fields, "left."+order.ItemLetter(item))
	}
	key := o.Keys.Sale(reservation.PartitionAmong(d.SaleID, d.Partitions), d.SaleID)
	values, err := o.Redis.HMGet(ctx, key, fields...).Result()
	if err != nil {
		return nil, false, fmt.Errorf("read the units left of sale=%s: %w", d.SaleID, err)
	}
	ranks = map[string]int64{}
	for i, value := range values {
		text, _ := value.(string) // a sale that Redis has lost has none
		if n, err := strconv.ParseInt(text, 10, 64); err == nil {
			ranks[letters[i]] = max(n, 1)
			left = left || n > 0
		}
	}
	return ranks, left, nil
}

// reserver reserves the units of turns in one call of the script.
func (o *Offerer) reserver(sale uuid.UUID) draws.Reserver {
	return func(ctx context.Context, turns []draws.Turn) ([]draws.Result, error) {
		results := make([]draws.Result, len(turns))
		var asked []reservation.Offer
		var places []int // of those asked among the turns
		for i, t := range turns {
			if t.Cancelled {
				// A worker that died may have reserved the unit before the entry was cancelled.
				switch _, err := o.Store.FindReserved(ctx, t.OrderID, t.UserID); {
				case err == nil:
					results[i] = draws.Won
				case errors.Is(err, order.ErrNotFound):
					results[i] = draws.Cancelled
				default:
					return nil, err
				}
				continue
			}
			places = append(places, i)
			asked = append(asked, reservation.Offer{
				OrderID: t.OrderID, UserID: t.UserID, Item: t.Code,
				Key: "stampede offer " + t.EntryID.String(), // buyers' keys have no spaces
			})
		}
		if len(asked) == 0 {
			return results, nil
		}
		answers, err := o.Store.Offer(ctx, reservation.Sale{ID: sale, Epoch: turns[0].Epoch}, asked)
		if err != nil {
			return nil, err
		}
		for at, a := range answers {
			switch i := places[at]; a.Verdict {
			case reservation.Reserved, reservation.Replayed, reservation.OrderEnded:
				results[i], turns[i].OrderID = draws.Won, a.Reservation.OrderID
			case reservation.AlreadyPurchased:
				results[i] = draws.Holds
			default: // sold out, or the sale does not sell now
				results[i] = draws.NoUnit
			}
		}
		return results, nil
	}
}

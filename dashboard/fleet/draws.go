package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"stampede/draw"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/upkeep/survey"
)

// watchedDraws are the draws and the waiting lists whose goods are not over. They are guarded by Fleet.mu.
type watchedDraws struct {
	found []draws.Watched // none if they were not read
	after time.Time       // the time of the next look
}

// lookAtDraws reads the draws. Counting who waits reads each turn of a list.
func (f *Fleet) lookAtDraws(ctx context.Context) {
	began := time.Now()
	f.mu.Lock()
	due := !began.Before(f.draws.after)
	f.mu.Unlock()
	if !due {
		return
	}
	limited, cancel := context.WithTimeout(ctx, roundTimeout)
	defer cancel()
	found, err := draws.New(f.config.Pool).Watch(limited, salesMax)
	if ctx.Err() != nil {
		return
	}
	now := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	if errors.Is(err, context.DeadlineExceeded) {
		f.config.Logger.Warn("looking at the draws and waiting lists takes too long")
	}
	f.draws = watchedDraws{found, now.Add(min(funnelShare*now.Sub(began), funnelPauseMax))}
}

// lookForRelay notes for how long events have waited without a relay.
func (f *Fleet) lookForRelay(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, roundTimeout)
	defer cancel()
	unserved, err := survey.Unserved(limited, f.config.Pool, f.config.Store.Redis, f.config.Store.Keys)
	if ctx.Err() != nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.unserved = unserved; err != nil {
		f.unserved = 0
	}
}

// show fills in what the units of a sale are offered by.
func (k *watchedDraws) show(sale *Sale) {
	at := slices.IndexFunc(k.found, func(w draws.Watched) bool { return w.SaleID == sale.ID })
	switch {
	case sale.State == reservation.StateEnded:
		sale.OffersOnly = false
	case at < 0:
	case k.found[at].Kind == draws.ByPlace:
		sale.OffersOnly = k.found[at].Waiting > 0 && len(sale.Items) == 0 // which are offered each by itself
	default:
		sale.DrawState = k.found[at].State
	}
}

// offersLeast is how many answers to offers tell how they end.
const offersLeast = 10

func (t *troubles) checkDraws(f *Fleet, s *Snapshot) {
	if !s.Postgres.Reachable {
		return
	}
	for i := range f.draws.found {
		w := &f.draws.found[i]
		of, name := w.SaleID.String(), printable(w.Name)
		if step, late, until := w.Next(); late > 0 {
			t.raise(drawWaits, of, "%s: %s", name, waitsFor(w, step, until)).since(t.now.Add(-late))
		}
		if w.State == draws.Void {
			t.raise(drawVoid, of, "%s: %s", name, w.VoidReason).since(w.VoidedAt)
		}
		if o := w.Offers; o.Expired > o.Answered && o.Expired+o.Answered >= offersLeast {
			t.raise(offersUnanswered, of, "%s: %d of its latest %d offers expired", name, o.Expired, o.Expired+o.Answered)
		}
	}
}

// waitsFor says what a draw waits for, and how much time is left.
func waitsFor(w *draws.Watched, step draws.Step, until time.Time) (text string) {
	switch step {
	case draws.StepFreeze:
		text = "its list is not frozen"
	case draws.StepReveal:
		text = "no secret of " + printable(strings.Join(w.Missing(), ", "))
	case draws.StepBeacon:
		public := w.At.Sub(draw.RoundTime(w.Round()))
		text = fmt.Sprintf("nobody has brought round %d, which is public for %v", w.Round(), public.Round(time.Second))
	case draws.StepRank:
		text = fmt.Sprintf("no worker has ranked its entries for %v", w.At.Sub(w.SeededAt).Round(time.Second))
	}
	if !until.IsZero() {
		text += fmt.Sprintf(", and in %v the draw is void", max(0, until.Sub(w.At)).Round(time.Second))
	}
	return text
}

func (t *troubles) checkNoRelay(f *Fleet, s *Snapshot) {
	if f.unserved > 0 && s.Postgres.Reachable && s.Redis.Reachable {
		t.raise(noRelay, "", "its events have waited for %v", f.unserved.Round(time.Second)).after = delayedReader
	}
}

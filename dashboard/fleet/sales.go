package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"stampede/draw"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/upkeep/survey"
)

// knownSales are the sales that are followed, as they were last read. They are guarded by Fleet.mu.
type knownSales struct {
	page   catalog.Page
	listed []catalog.CountedSale // the sales of page, without units
	readAt time.Time             // when Postgres listed them

	counted map[uuid.UUID]catalog.CountResult
	// paid are the paid units that were known when the sales were counted.
	paid   map[uuid.UUID]int64
	states map[int]reservation.ServerState
	// active has the sales of which ingresses have counted purchases, and when they last did.
	active map[uuid.UUID]time.Time
}

// activeFor is how long a sale is active after a purchase.
const activeFor = time.Minute

// noteActive notes which sales have had purchases in a round, and forgets which of them are not active any more.
func (k *knownSales) noteActive(gained *increase, now time.Time) {
	if k.active == nil {
		k.active = map[uuid.UUID]time.Time{}
	}
	for id := range gained.sales {
		k.active[id] = now
	}
	maps.DeleteFunc(k.active, func(_ uuid.UUID, at time.Time) bool { return now.Sub(at) > activeFor })
}

// lookAtSales reads the sales in Postgres.
func (f *Fleet) lookAtSales(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, roundTimeout)
	defer cancel()
	f.mu.Lock()
	active := slices.Collect(maps.Keys(f.sales.active))
	f.mu.Unlock()
	page, err := f.config.Catalog.ReadFollowed(limited, active, salesMax)
	if ctx.Err() != nil {
		return
	}
	now := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.postgres.note(err, now)
	if err == nil {
		f.sales.page, f.sales.listed, f.sales.readAt = page, page.Sales(), now
	}
}

// count stores the count of the sales, the paid units that went into it, and the servers of their partitions.
func (k *knownSales) count(
	counted []catalog.CountResult, paid map[uuid.UUID]int64, states map[int]reservation.ServerState,
) {
	k.counted = make(map[uuid.UUID]catalog.CountResult, len(counted))
	for _, c := range counted {
		k.counted[c.ID] = c
	}
	k.paid, k.states = paid, states
}

// showSales fills in the sales of a snapshot. Rates are known if an ingress counts purchases by sale.
func (f *Fleet) showSales(s *Snapshot, gained *increase, ratesKnown bool) {
	s.SalesRead, s.SalesAt = f.postgres.up || f.redis.up, f.sales.readAt
	f.sales.noteActive(gained, s.At)
	none := f.noneSells(s)
	s.Sales = make([]Sale, 0, len(f.sales.listed))
	for i := range f.sales.listed {
		listed := &f.sales.listed[i]
		sale := NewSale(listed)
		sale.State = listed.StateAt(s.At)
		sale.Rates, sale.RatesKnown = gained.sales[listed.ID].rates(), ratesKnown
		sale.Rates.PurchasesKnown = ratesKnown
		funnel, funnelKnown := f.funnels.counted[listed.ID]
		if funnelKnown {
			sale.Funnel, sale.FunnelKnown, sale.FunnelAt = funnel.counted, true, funnel.at
		}
		if unpaid, found := f.unpaid[listed.ID]; found && f.postgres.up {
			sale.Unpaid = &unpaid
			if s.Unpaid == nil {
				s.Unpaid = &Unpaid{}
			}
			s.Unpaid.add(unpaid)
		}
		counted, isCounted := f.sales.counted[listed.ID]
		_, paidKnown := f.sales.paid[listed.ID]
		paidKnown = paidKnown || !listed.AwaitsPayment()
		if isCounted && counted.Err == nil && f.postgres.up && f.redis.up && paidKnown {
			sale.SetUnits(&counted.CountedSale)
			sale.Items = counted.Items
		}
		sale.uncounted = f.postgres.up && f.redis.up && (!isCounted || counted.Err == nil && !paidKnown)
		f.draws.show(&sale)
		if sale.State == reservation.StateOpen {
			if f.redis.up && isCounted {
				sale.Shut = f.whyShut(s, &counted)
			}
			sale.Shut = cmp.Or(none, sale.Shut)
		}
		s.Sales = append(s.Sales, sale)
	}
}

// noneSells says why no sale sells anything: "" if they may.
func (f *Fleet) noneSells(s *Snapshot) string {
	if !f.redis.up && f.redis.err != "" {
		return "Redis does not answer"
	}
	if why := s.noneReady(); why != "" {
		return "no ingress takes purchases: " + why
	}
	if f.troubles.isMissed(s, "ingress") {
		return "no ingress answers"
	}
	return ""
}

// whyShut returns why an open sale sells nothing, "" if it sells.
func (f *Fleet) whyShut(s *Snapshot, sale *catalog.CountResult) string {
	layout := sale.Layout()
	why := ""
	for shard := range layout.Shards {
		p := layout.Partition(shard)
		state, inspected := f.sales.states[p]
		verified, recorded := f.records.servers[p]
		switch {
		case !inspected:
		case !state.Recorded:
			why = "no worker has published it to Redis"
		case !state.Known:
			why = fmt.Sprintf("the Redis server of partition %d is not verified: it was restarted, replaced or set back", p)
		case recorded && f.records.at.After(s.At.Add(-recordsTrusted)) && verified != state.RunID:
			why = fmt.Sprintf("the Redis server of partition %d is not the one that workers have verified", p)
		}
	}
	switch {
	case why != "" || sale.Err == nil:
	case errors.Is(sale.Err, reservation.ErrLostSale):
		why = "its stock in Redis is missing, or closed for a rebuild"
	case reservation.RefusalCode(sale.Err) != "":
		why = "its Redis server refuses commands: " + reservation.RefusalCode(sale.Err)
	default:
		why = "its Redis server does not answer"
	}
	if why == "" {
		return ""
	}
	for _, r := range s.Rebuilds {
		_, inPartition := layout.ShardIn(r.Partition)
		if r.Sale == sale.ID || r.Sale == uuid.Nil && inPartition {
			return "its stock is being rebuilt: " + r.Step
		}
	}
	return why
}

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
	found, err := draws.New(f.config.Catalog.Pool).Watch(limited, salesMax)
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
	at := f.config.Catalog
	unserved, err := survey.Unserved(limited, at.Pool, at.Store.Redis, at.Store.Keys)
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

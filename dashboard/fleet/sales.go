package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"

	"stampede/reservation"
	"stampede/reservation/catalog"
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

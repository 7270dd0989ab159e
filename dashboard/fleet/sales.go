package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
}

// lookAtSales reads the sales in Postgres.
func (f *Fleet) lookAtSales(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, roundTimeout)
	defer cancel()
	page, err := f.config.Catalog.ReadFollowed(limited, salesMax)
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
		counted, isCounted := f.sales.counted[listed.ID]
		_, paidKnown := f.sales.paid[listed.ID]
		if isCounted && counted.Err == nil && f.postgres.up && f.redis.up &&
			(paidKnown || !counted.AwaitsPayment()) {
			sale.Stock, sale.Items, sale.UnitsKnown = counted.Stock, counted.Items, true
			sale.Available, sale.Held, sale.Sold = counted.Available, counted.Held, counted.Sold
		}
		if sale.State == reservation.StateOpen {
			if f.redis.up && isCounted {
				sale.Shut = f.whyShut(&counted, s.Rebuilds)
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
func (f *Fleet) whyShut(sale *catalog.CountResult, rebuilds []Rebuild) string {
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
		case recorded && f.records.at.After(state.Now.Add(-recordsTrusted)) && verified != state.RunID:
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
	for _, r := range rebuilds {
		_, inPartition := layout.ShardIn(r.Partition)
		if r.Sale == sale.ID || r.Sale == uuid.Nil && inPartition {
			return "its stock is being rebuilt: " + r.Step
		}
	}
	return why
}

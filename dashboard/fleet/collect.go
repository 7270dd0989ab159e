package fleet

import (
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
)

// windowRounds is over how many rounds quantiles are taken: ten seconds.
const windowRounds = 10

// window holds what the last rounds have measured, of all processes together.
type window struct {
	ring [windowRounds]measured
	next int
}

type measured struct{ answers, durable histogram }

func (w *window) add(m measured) {
	w.ring[w.next] = m
	w.next = (w.next + 1) % windowRounds
}

func (w *window) sum() (all measured) {
	for _, m := range w.ring {
		all.answers, all.durable = all.answers.plus(m.answers), all.durable.plus(m.durable)
	}
	return all
}

// snapshot says what is known now. It ends a round: what processes have gained is counted once.
func (f *Fleet) snapshot(now time.Time) *Snapshot {
	s := &Snapshot{
		At: now, Postgres: f.postgres.shown(), Redis: f.redis.shown(),
		DeadLetters: f.records.letters, Rebuilds: []Rebuild{}, Audit: f.records.audit,
		Processes: make([]Process, 0, len(f.processes)), Troubles: []Trouble{}, RedisNodes: []RedisNode{},
		unlooked: !f.slowlySeen && f.postgres.up,
	}
	for i := range f.nodes {
		s.RedisNodes = append(s.RedisNodes, f.nodes[i].shown())
	}
	if f.postgres.up { // otherwise their progress is unknown
		s.Rebuilds = append(s.Rebuilds, f.records.rebuilds...)
	}
	var gained increase
	var fresh measured
	ended, counted := ends{rebuilds: map[string]bool{}}, money{}
	var purchasesKnown, durableKnown, salesKnown bool
	for _, p := range f.processes {
		s.Processes = append(s.Processes, p.shown())
		if !p.up {
			continue
		}
		gained.add(&p.gained)
		if p.gained.seconds > 0 {
			purchasesKnown, durableKnown = purchasesKnown || p.last.ingress, durableKnown || p.last.worker
			salesKnown = salesKnown || p.last.salesCounted
		}
		maps.Copy(ended.rebuilds, p.rebuilds)
		p.rebuilds = nil
		if p.fresh {
			p.fresh = false
			fresh.answers, fresh.durable = fresh.answers.plus(p.gained.answers), fresh.durable.plus(p.gained.durable)
			ended.rejected, ended.voided = ended.rejected+p.gained.rejected, ended.voided+p.gained.voided
			ended.lost += p.gained.lost
			for key, n := range p.gained.money {
				counted[key] += n
			}
		}
	}
	for _, n := range f.names {
		if n.err != "" {
			s.Processes = append(s.Processes, n.shown())
		}
	}
	f.window.add(fresh)
	s.Rates = gained.purchases.rates()
	s.Rates.Durable = gained.recorded
	s.Rates.PurchasesKnown, s.Rates.DurableKnown = purchasesKnown, durableKnown
	s.Payments = gained.money.rates(purchasesKnown)
	all := f.window.sum()
	s.Rates.AnswerP50, s.Rates.AnswerP99 = all.answers.quantile(0.5), all.answers.quantile(0.99)
	s.Rates.DurableP50, s.Rates.DurableP99 = all.durable.quantile(0.5), all.durable.quantile(0.99)
	streams := f.streams()
	s.Rates.Backlog, s.Rates.OldestWaiting, s.Rates.BacklogKnown = addBacklogs(streams)
	f.showSales(s, &gained, salesKnown)
	f.troubles.update(f, s, round{gained: &gained, ended: ended, streams: streams, money: counted})
	return s
}

// streams says of each stream what its workers say. They all report all streams, so their figures are not added.
func (f *Fleet) streams() map[string]streamSample {
	streams := map[string]streamSample{}
	for _, p := range f.processes {
		if !p.up {
			continue
		}
		for name, says := range p.last.streams {
			sum := streams[name]
			sum.reads = sum.reads || says.reads
			if says.known {
				sum.known = true
				sum.waiting, sum.oldest = max(sum.waiting, says.waiting), max(sum.oldest, says.oldest)
			}
			streams[name] = sum
		}
	}
	return streams
}

// addBacklogs adds up the streams. It is unknown if no worker can say it of a stream.
func addBacklogs(streams map[string]streamSample) (orders int64, oldest time.Duration, known bool) {
	known = len(streams) > 0
	for _, name := range slices.Sorted(maps.Keys(streams)) {
		stream := streams[name]
		known = known && stream.known
		orders += int64(stream.waiting)
		if stream.waiting > 0 { // else the first entry is one that is done and not trimmed yet
			oldest = max(oldest, seconds(stream.oldest))
		}
	}
	return orders, oldest, known
}

// historyMax is how many points are kept: fifteen minutes.
const historyMax = 900

// history is a ring of the last points. The zero value is empty.
type history struct {
	ring []Point
	next int // the place of the oldest point, once the ring is full
}

func (h *history) add(p Point) {
	if len(h.ring) < historyMax {
		h.ring = append(h.ring, p)
		return
	}
	h.ring[h.next] = p
	h.next = (h.next + 1) % historyMax
}

// points returns all points, oldest first.
func (h *history) points() []Point {
	return slices.Concat(h.ring[h.next:], h.ring[:h.next])
}

func newPoint(s *Snapshot) Point {
	p := Point{At: s.At, Rates: s.Rates, Sales: make(map[uuid.UUID]SalePoint, len(s.Sales))}
	for i := range s.Sales {
		sale := &s.Sales[i]
		p.Sales[sale.ID] = SalePoint{
			Rates: sale.Rates, Available: sale.Available, Held: sale.Held, Sold: sale.Sold,
			Known: sale.UnitsKnown && s.SalesRead,
		}
	}
	return p
}

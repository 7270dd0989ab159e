// Package fleet observes an installation once a second: it scrapes the metrics of all processes, reads Redis and
// Postgres, and publishes the result as a Snapshot. The number of watchers adds no load on the servers.
//
// It changes nothing in either server. A process or a server that does not answer is shown as gone, with the time
// since when, and does not delay the others.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"stampede/reservation/catalog"
)

const (
	// roundInterval is the time between two snapshots.
	roundInterval = time.Second
	// roundTimeout bounds what a snapshot waits for: a scrape, a look into Redis, a look into Postgres.
	roundTimeout = 800 * time.Millisecond
	// salesMax bounds the sales of a snapshot.
	salesMax = 50
)

// Config configures a Fleet.
type Config struct {
	// Catalog has no default.
	Catalog *catalog.Catalog
	// Targets are the URLs of metrics, such as http://worker-1:9090/metrics. The scheme dns+http resolves the host every
	// few seconds and scrapes each of its addresses as a process.
	Targets []string
	Logger  *slog.Logger
}

// Fleet collects snapshots of an installation. It is safe for concurrent use.
type Fleet struct {
	config Config
	newest atomic.Pointer[Snapshot]

	background sync.WaitGroup // looks that are under way

	// mu guards all fields below, and those of processes and servers.
	mu      sync.Mutex
	changed chan struct{} // closed with the next snapshot
	history history

	names     []*named
	processes []*process
	window    window
	postgres  server
	redis     server
	pageBusy  atomic.Bool
	redisBusy atomic.Bool
	slowBusy  atomic.Bool
	sales     knownSales
	funnels   funnels
	unpaid    map[uuid.UUID]Unpaid // nil if they were not counted
	draws     watchedDraws
	unserved  time.Duration // survey.Unserved
	slowLooks int
	// slowlySeen is true after the first look at all that changes slowly.
	slowlySeen bool
	records    records
	nodes      []node
	nodesAt    time.Time
	troubles   troubles
}

// New returns a Fleet. It connects to nothing before Run. The error wraps errTarget for a target that is no URL.
func New(config Config) (*Fleet, error) {
	if config.Catalog == nil {
		return nil, errors.New("a fleet needs a catalog")
	}
	if config.Logger == nil {
		config.Logger = slog.Default()
	}
	now := time.Now()
	f := &Fleet{config: config, changed: make(chan struct{})}
	f.postgres.since, f.redis.since = now, now
	for i, text := range config.Targets {
		t, err := parseTarget(text)
		switch {
		case err != nil:
			return nil, fmt.Errorf("target %d: %w", i+1, err)
		case t.dns:
			f.names = append(f.names, &named{target: t, place: i})
		case len(f.processes) == processesMax:
			return nil, fmt.Errorf("%w: more than %d targets", errTarget, processesMax)
		default:
			f.processes = append(f.processes, t.process(netip.Addr{}, i))
		}
	}
	f.newest.Store(&Snapshot{At: now})
	return f, nil
}

// Run collects until ctx is done, and returns nil then.
func (f *Fleet) Run(ctx context.Context) error {
	defer f.close()
	ticks := time.NewTicker(roundInterval)
	defer ticks.Stop()
	for {
		f.round(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		}
	}
}

// close waits for what is under way, which ends with the context of Run.
func (f *Fleet) close() {
	f.background.Wait()
	for _, p := range f.processes {
		p.target.client.CloseIdleConnections()
	}
}

// round looks at everything once and publishes a snapshot. It waits for what answered the last time; what did not is
// asked again, and delays nothing.
func (f *Fleet) round(ctx context.Context) {
	began := time.Now()
	f.resolve(ctx, began)
	waits := f.scrapeAll(ctx)
	waits = append(waits, f.lookIntoServers(ctx, began)...)
	late := time.NewTimer(roundTimeout)
	defer late.Stop()
	for _, done := range waits {
		select {
		case <-done:
		case <-late.C:
			late.Reset(0)
		case <-ctx.Done():
			return
		}
	}
	f.publish(time.Now())
}

// start calls do in the background, unless it is still under way there. The channel is closed when do has ended; it is
// nil if it was not called.
func (f *Fleet) start(busy *atomic.Bool, do func()) <-chan struct{} {
	if !busy.CompareAndSwap(false, true) {
		return nil
	}
	done := make(chan struct{})
	f.background.Go(func() {
		defer close(done)
		defer busy.Store(false)
		do()
	})
	return done
}

// scrapeAll begins to scrape all processes, and returns what to wait for.
func (f *Fleet) scrapeAll(ctx context.Context) (waits []<-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range f.processes {
		done := f.start(&p.busy, func() {
			limited, cancel := context.WithTimeout(ctx, roundTimeout)
			defer cancel()
			s, err := p.target.scrape(limited, p.url)
			if ctx.Err() != nil {
				return
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			p.seen(s, err, time.Now())
		})
		if done != nil && (p.up || p.misses == 0) {
			waits = append(waits, done)
		}
	}
	return waits
}

// Snapshot returns the newest one. Before the first round it is empty and its Number is 0.
func (f *Fleet) Snapshot() *Snapshot { return f.newest.Load() }

// Next waits for a snapshot with a Number above after and returns it. It returns the error of ctx.
func (f *Fleet) Next(ctx context.Context, after uint64) (*Snapshot, error) {
	for {
		f.mu.Lock()
		changed := f.changed
		f.mu.Unlock()
		if s := f.newest.Load(); s.Number > after {
			return s, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// History returns the last fifteen minutes, one point a second, oldest first. The points must not be changed.
func (f *Fleet) History() []Point {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.history.points()
}

// publish makes a snapshot of what is known now the newest one.
func (f *Fleet) publish(now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.snapshot(now)
	s.Number = f.newest.Load().Number + 1
	f.history.add(newPoint(s))
	f.newest.Store(s)
	close(f.changed)
	f.changed = make(chan struct{})
}

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

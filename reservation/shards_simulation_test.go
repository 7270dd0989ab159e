package reservation_test

import (
	"cmp"
	"container/heap"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/order"
)

// A simulation of a sale on one master per shard, in virtual time. The scripts are the real ones, on a real Redis; so
// what happens to the units is no model. Only the time is: a call waits for its shard, occupies it for as long as
// docs/bench measured, and travels each way.
type simulation struct {
	testing.TB
	rdb     redis.UniversalClient
	scripts [kinds]string // hashes
	keys    reservation.Keys
	layout  reservation.Layout
	sale    uuid.UUID

	now    time.Duration
	serial int
	events eventQueue
	busy   []time.Duration // until when, by shard

	ingresses []*simulatedIngress
	items     int
	calls     [kinds]int
	sold      []soldUnit
	refused   [][]time.Duration // when, by item
}

// soldUnit is when a buyer asked for a unit, Redis decided, and the ingress had the answer.
type soldUnit struct {
	item                     int
	asked, decided, answered time.Duration
}

// The kinds of calls.
const (
	callReserve = iota
	callCount
	callGive
	callTake
	kinds
)

const (
	// travel is the time from an ingress to a master, or back.
	travel = 100 * time.Microsecond
	// A call of the reserve script with b buyers takes 174 µs + b × 7.1 µs of Redis's CPU, and another one moveCost.
	callCost, buyerCost, moveCost = 174 * time.Microsecond, 7100 * time.Nanosecond, 30 * time.Microsecond
)

// simulatedCrowd is what happens in a simulation.
type simulatedCrowd struct {
	shards, ingresses, buyers int
	stock                     int64
	arriveWithin              time.Duration
	// favorite is the share of the buyers that belong to one shard, beside its equal part of the others.
	favorite float64
	// items are how many the sale has, all with the same stock, and the first of which has rare units. Each buyer wants
	// a unit of one of them. A sale without items has one thing.
	items int
	rare  int64
}

// stocks are those of the items, or of the sale.
func (of simulatedCrowd) stocks() []int64 {
	if of.items == 0 {
		return []int64{of.stock}
	}
	stocks := slices.Repeat([]int64{of.stock / int64(of.items)}, of.items)
	if of.rare > 0 {
		stocks[0] = of.rare
	}
	return stocks
}

func simulate(t testing.TB, of simulatedCrowd) *simulation {
	t.Helper()
	url := testkit.OwnRedis(t).URL
	o, err := redis.ParseURL(url)
	require.NoError(t, err)
	rdb := redis.NewClient(o)
	t.Cleanup(func() { _ = rdb.Close() })
	s := &simulation{
		TB: t, rdb: rdb, keys: reservation.Keys{Prefix: "simulation", Partitions: of.shards},
		busy: make([]time.Duration, of.shards), items: of.items, refused: make([][]time.Duration, max(1, of.items)),
	}
	sale := reservation.Sale{
		ID: uuid.Must(uuid.NewV7()), State: reservation.StateOpen, Partitions: of.shards, Epoch: 1,
		Terms: reservation.Terms{Stock: of.stock, PerOrderLimit: 1, Shards: of.shards},
	}
	for item, stock := range of.stocks() {
		if of.items > 0 {
			sale.Items = append(sale.Items, reservation.Item{Code: strconv.Itoa(item), Stock: stock})
		}
	}
	s.sale, s.layout = sale.ID, sale.Layout()
	store := reservation.NewStore(rdb, s.keys, reservation.StoreOptions{})
	t.Cleanup(store.Close)
	for shard := range of.shards {
		require.NoError(t, store.OpenShard(t.Context(), sale, shard, 1, of.stock))
	}
	fenced := lua.FencedBy("simulation")
	for kind, script := range []lua.FencedScript{
		callReserve: fenced.Reserve, callCount: fenced.Count, callGive: fenced.Give, callTake: fenced.Take,
	} {
		require.NoError(t, rdb.ScriptLoad(t.Context(), script.Source).Err())
		s.scripts[kind] = script.Hash
	}
	for range of.ingresses {
		in := &simulatedIngress{simulation: s, lines: make([]*simulatedLine, of.shards)}
		for shard := range in.lines {
			in.lines[shard] = &simulatedLine{simulatedIngress: in, shard: shard}
		}
		in.soldOut = make([]bool, max(1, of.items))
		s.ingresses = append(s.ingresses, in)
	}
	random := rand.New(rand.NewPCG(1, 2))
	for buyer := range of.buyers {
		at := time.Duration(random.Int64N(int64(of.arriveWithin)))
		in, user := s.ingresses[random.IntN(of.ingresses)], "u"+strconv.Itoa(buyer)
		shard := s.layout.ShardOf(user)
		if random.Float64() < of.favorite {
			shard = 0
		}
		item := 0
		if of.items > 0 {
			item = random.IntN(of.items)
		}
		s.at(at, func() { in.lines[shard].join(simulatedBuyer{user, item, at}) })
	}
	for len(s.events) > 0 {
		e := heap.Pop(&s.events).(*event)
		s.now = e.at
		e.do()
	}
	return s
}

// at schedules an event.
func (s *simulation) at(at time.Duration, do func()) {
	s.serial++
	heap.Push(&s.events, &event{at, s.serial, do})
}

// call runs a script on a shard, and then done with its answer, when it has travelled back.
func (s *simulation) call(kind, shard int, cost time.Duration, keys []string, args []any, done func(answer any)) {
	s.at(s.now+travel, func() {
		s.busy[shard] = max(s.now, s.busy[shard]) + cost
		s.at(s.busy[shard], func() {
			s.calls[kind]++
			answer, err := s.rdb.EvalSha(context.Background(), s.scripts[kind], keys, args...).Result()
			require.NoError(s, err)
			s.at(s.now+travel, func() { done(answer) })
		})
	})
}

func (s *simulation) saleKey(shard int) string {
	return s.keys.Sale(s.layout.Partition(shard), s.sale)
}

// move runs a script of the protocol of moves.
func (s *simulation) move(kind, shard int, done func(answer any), args ...any) {
	s.call(kind, shard, moveCost, []string{s.saleKey(shard)}, append([]any{1}, args...), done)
}

type simulatedBuyer struct {
	user  string
	item  int
	asked time.Duration
}

type simulatedIngress struct {
	*simulation
	lines []*simulatedLine
	// counting is true while a count is in progress; waiting get the next one.
	counting bool
	waiting  []func(*reservation.SaleCount)
	// soldOut is which items it remembers as sold out.
	soldOut []bool
}

// count passes a count that begins now or later: all lines share it.
func (in *simulatedIngress) count(then func(*reservation.SaleCount)) {
	in.waiting = append(in.waiting, then)
	if !in.counting {
		in.nextCount()
	}
}

func (in *simulatedIngress) nextCount() {
	takers := in.waiting
	in.waiting, in.counting = nil, len(takers) > 0
	if len(takers) == 0 {
		return
	}
	counts := make([]*reservation.ShardCount, len(in.lines))
	missing := len(counts)
	for shard := range counts {
		in.move(callCount, shard, func(answer any) {
			var words []string
			for _, v := range answer.([]any) {
				words = append(words, fmt.Sprint(v))
			}
			var err error
			counts[shard], err = reservation.ReadCount(words, len(counts), in.items)
			require.NoError(in, err)
			if missing--; missing > 0 {
				return
			}
			count := reservation.NewSaleCount(counts)
			in.nextCount()
			for _, then := range takers {
				then(count)
			}
		}, append([]any{len(counts)}, in.ofItems(order.ItemLetters(in.items))...)...)
	}
}

// ofItems is the argument of a script, in a sale with items.
func (s *simulation) ofItems(letters string) []any {
	if s.items == 0 {
		return nil
	}
	return []any{letters}
}

// simulatedLine is the queue of an ingress for a shard, with one call at a time.
type simulatedLine struct {
	*simulatedIngress
	shard   int
	waiting []simulatedBuyer
	busy    bool
}

func (l *simulatedLine) join(b simulatedBuyer) {
	if l.soldOut[b.item] {
		l.refused[b.item] = append(l.refused[b.item], l.now)
		return
	}
	l.waiting = append(l.waiting, b)
	l.next()
}

func (l *simulatedLine) next() {
	if l.busy || len(l.waiting) == 0 {
		return
	}
	n := min(len(l.waiting), order.MaxPerMessage)
	batch := slices.Clone(l.waiting[:n])
	l.waiting = slices.Delete(l.waiting, 0, n)
	l.busy = true
	l.ask(batch)
}

// ask runs the reserve script, answers who has won, and fills the others.
func (l *simulatedLine) ask(batch []simulatedBuyer) {
	p, id := l.layout.Partition(l.shard), l.sale
	keys := []string{l.keys.Sale(p, id), l.keys.Buyers(p, id), l.keys.Orders(p), l.keys.Ended(p, id)}
	args := []any{1, 0, order.ReservedMetadataPrefix(id, 1, l.items > 0)}
	for _, b := range batch {
		var quantity any = 1
		if l.items > 0 {
			quantity = order.ItemLetter(b.item) + "1"
		}
		args = append(args, b.user, "order-"+b.user, "-", quantity)
	}
	cost := callCost + time.Duration(len(batch))*buyerCost
	l.call(callReserve, l.shard, cost, keys, args, func(answer any) {
		var short []simulatedBuyer
		for i, word := range answer.([]any)[3:] {
			switch word := word.(string); {
			case strings.HasPrefix(word, "reserved "):
				l.sold = append(l.sold, soldUnit{batch[i].item, batch[i].asked, l.now - travel, l.now})
			case strings.HasPrefix(word, "sold-out"):
				short = append(short, batch[i])
			default:
				require.Fail(l, "unexpected answer", word)
			}
		}
		l.fill(short)
	})
}

// fill does what queue.fill does.
func (l *simulatedLine) fill(short []simulatedBuyer) {
	if len(short) == 0 {
		l.busy = false
		l.next()
		return
	}
	l.count(func(count *reservation.SaleCount) {
		wanted := make([]int64, max(1, l.items))
		for _, b := range short {
			wanted[b.item]++
		}
		gone := func(count *reservation.SaleCount) func(b simulatedBuyer) bool {
			return func(b simulatedBuyer) bool { return count.ForSale(b.item) == 0 }
		}
		gifts, wishes := count.OnTheWay(), count.Wishes(l.shard, wanted...)
		switch {
		case len(gifts) > 0:
			l.take(gifts, func() {
				if slices.ContainsFunc(gifts, func(g reservation.Gift) bool { return g.To() == l.shard }) {
					l.ask(short)
				} else {
					l.fill(short)
				}
			})
		case slices.ContainsFunc(short, gone(count)):
			l.count(func(second *reservation.SaleCount) {
				if count.Equal(second) {
					for _, b := range short {
						if gone(second)(b) {
							l.soldOut[b.item] = true
							l.refused[b.item] = append(l.refused[b.item], l.now)
						}
					}
					short = slices.DeleteFunc(short, gone(second))
				}
				l.fill(short)
			})
		case len(wishes) > 0:
			var given []reservation.Gift
			missing := len(wishes)
			for _, w := range wishes {
				l.move(callGive, w.From(), func(answer any) {
					_, text, _ := strings.Cut(answer.(string), " ")
					if gift, more := w.With(text); more {
						given = append(given, gift)
					}
					if missing--; missing == 0 {
						l.take(given, func() { l.ask(short) })
					}
				}, append([]any{w.To(), w.Total(), reservation.GiveParts, "sold"}, l.ofItems(w.Items())...)...)
			}
		default:
			l.ask(short)
		}
	})
}

// take completes gifts, and then calls done.
func (l *simulatedLine) take(gifts []reservation.Gift, done func()) {
	byTaker := make(map[int][]any)
	for _, g := range gifts {
		byTaker[g.To()] = append(byTaker[g.To()], g.From(), g.Total())
	}
	missing := len(byTaker)
	if missing == 0 {
		done()
	}
	for to, args := range byTaker {
		l.move(callTake, to, func(any) {
			if missing--; missing == 0 {
				done()
			}
		}, args...)
	}
}

type event struct {
	at     time.Duration
	serial int
	do     func()
}

// eventQueue is a heap by time.
type eventQueue []*event

func (q eventQueue) Len() int { return len(q) }

func (q eventQueue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].serial < q[j].serial
}

func (q eventQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }

func (q *eventQueue) Push(x any) { *q = append(*q, x.(*event)) }

func (q *eventQueue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

// soldOutAt is when the last unit was sold.
func (s *simulation) soldOutAt() time.Duration { return s.lastOf(s.sold).decided }

func (s *simulation) lastOf(units []soldUnit) soldUnit {
	return slices.MaxFunc(units, func(x, y soldUnit) int { return cmp.Compare(x.decided, y.decided) })
}

// soldOf are the units of an item that were sold.
func (s *simulation) soldOf(item int) []soldUnit {
	return slices.DeleteFunc(slices.Clone(s.sold), func(u soldUnit) bool { return u.item != item })
}

// moved is the number of units that were moved between shards.
func (s *simulation) moved() (units int64) {
	for shard := range s.layout.Shards {
		for field, value := range s.rdb.HGetAll(context.Background(), s.saleKey(shard)).Val() {
			if !strings.HasPrefix(field, "got:") {
				continue
			}
			if n, err := strconv.ParseInt(value, 10, 64); err == nil {
				units += n
			} else {
				units += order.Lines(value).Units()
			}
		}
	}
	return units
}

// latencies are those of the last n orders in the order of the decisions, sorted.
func (s *simulation) latencies(n int) []time.Duration {
	sold := slices.SortedFunc(slices.Values(s.sold), func(x, y soldUnit) int { return cmp.Compare(x.decided, y.decided) })
	var took []time.Duration
	for _, unit := range sold[max(0, len(sold)-n):] {
		took = append(took, unit.answered-unit.asked)
	}
	slices.Sort(took)
	return took
}

// check checks that all units are sold that buyers wanted, and that nobody was refused before the last one of their
// item was sold.
func (s *simulation) check(of simulatedCrowd) {
	refused := 0
	for item, stock := range of.stocks() {
		sold := s.soldOf(item)
		require.EqualValues(s, min(stock, int64(len(sold)+len(s.refused[item]))), len(sold), "item %d", item)
		refused += len(s.refused[item])
		for _, at := range s.refused[item] {
			require.GreaterOrEqual(s, at, s.lastOf(sold).decided, "a buyer was refused before the last unit was sold")
		}
	}
	require.Equal(s, of.buyers, len(s.sold)+refused)
}

// BenchmarkSimulation prints what a million buyers would meet on machines with a core for each master.
// docs/bench/shards.md has its figures.
func BenchmarkSimulation(b *testing.B) {
	for _, of := range []simulatedCrowd{
		{shards: 1, buyers: 1_000_000, stock: 1_000_000},
		{shards: 8, buyers: 1_000_000, stock: 1_000_000},
		{shards: 64, buyers: 1_000_000, stock: 1_000_000},
		{shards: 64, buyers: 1_000_000, stock: 500_000},
		{shards: 64, buyers: 1_000_000, stock: 10_000},
		{shards: 8, buyers: 200_000, stock: 100_000, favorite: 0.5},
		{shards: 8, buyers: 1_000_000, stock: 1_000_000, items: 5},
		{shards: 64, buyers: 1_000_000, stock: 500_000, items: 5},
		{shards: 64, buyers: 1_000_000, stock: 500_000, items: 5, rare: 10},
	} {
		of.ingresses, of.arriveWithin = 16, 100*time.Millisecond
		name := fmt.Sprintf("%d shards, stock %d, favorite %g, %d items, rare %d", of.shards, of.stock, of.favorite,
			of.items, of.rare)
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				s := simulate(b, of)
				s.check(of)
				last := s.latencies(100)
				b.ReportMetric(float64(len(s.sold))/s.soldOutAt().Seconds(), "accepted/s")
				b.ReportMetric(float64(len(s.sold))/float64(s.calls[callReserve]), "sold/call")
				b.ReportMetric(float64(s.calls[callCount]), "counts")
				b.ReportMetric(float64(s.calls[callGive]), "gives")
				b.ReportMetric(float64(s.calls[callTake]), "takes")
				b.ReportMetric(float64(s.moved()), "moved")
				b.ReportMetric(last[len(last)/2].Seconds()*1000, "ms-last100-p50")
				b.ReportMetric(last[len(last)*99/100].Seconds()*1000, "ms-last100-p99")
				b.ReportMetric(s.now.Seconds()*1000, "ms-all-answered")
				if of.rare > 0 {
					rare := s.lastOf(s.soldOf(0))
					b.ReportMetric((rare.answered-rare.asked).Seconds()*1000, "ms-last-rare")
				}
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

package reservation_test

import (
	"bufio"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/retry"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

const (
	historyIngresses = 3
	historyBuyers    = 6 // of each ingress
	historyRequests  = 20
	historyRefusals  = 3 // until a buyer leaves
)

var historySales = testkit.Soak(8)

// refusal is a request that got the answer that too little is left.
type refusal struct {
	sale       catalog.CountedSale
	request    reservation.Request
	begun, end time.Time
}

// units are what the request wants of each line: of the sale, or of its items by their places.
func (r refusal) units() []int64 {
	if len(r.sale.Terms.Items) == 0 {
		return []int64{r.request.Quantity}
	}
	var units []int64
	for _, item := range r.sale.Terms.Items {
		units = append(units, r.request.Items[item.Code])
	}
	return units
}

// Many buyers and several ingresses, whose calls are delayed, lost, cut off and repeated. Redis logs every write, so
// all states of the sales are known: no unit is lost or doubled in any, and for each request that was refused there is
// one, while it was in progress, in which too few units were for sale; every other sale has items, of which it was so
// for one that the request names.
func TestEveryRefusalWasTrueAtAnInstant(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	keys := testkit.Keys(t)
	keys.Partitions = 8
	shop := testshop.NewShopOn(t, testshop.Options{Redis: testkit.Client(t, own.URL), Keys: keys})
	log := recordWrites(t, shop, own.URL)
	var ingresses []*testshop.Shop
	var wires []*testshop.Wire
	for range historyIngresses {
		rdb, wire := testshop.Wired(t, own.URL)
		wire.Set(unreliable())
		ingresses, wires = append(ingresses, shop.Next(t, rdb)), append(wires, wire)
	}
	var mu sync.Mutex
	var refused []refusal
	var reserved int
	var failed []error
	for n := range historySales {
		sale := shop.ShardedSale(t, rand.Int64N(40)+10, n%7+2)
		if n%2 == 1 {
			sale = shop.ShardedItems(t, n%7+2, reservation.Item{Code: "s", Stock: rand.Int64N(3) + 1},
				reservation.Item{Code: "m", Stock: rand.Int64N(30) + 5}, reservation.Item{Code: "l", Stock: rand.Int64N(15) + 5})
		}
		log.watch(sale)
		var crowd sync.WaitGroup
		for i, ingress := range ingresses {
			for buyer := range historyBuyers {
				crowd.Go(func() {
					for request, refusals := 0, 0; request < historyRequests && refusals < historyRefusals; request++ {
						r := reservation.Request{Sale: sale.ID, User: fmt.Sprintf("user-%d-%d-%d", i, buyer, request)}
						if r.Items = randomBasket(sale); r.Items == nil {
							r.Quantity = rand.Int64N(3) + 1
						}
						begun := time.Now()
						answer, err := ingress.Reserve(context.Background(), r)
						end := time.Now()
						mu.Lock()
						switch {
						case err != nil:
							failed = append(failed, err)
						case answer.Verdict == reservation.SoldOut:
							refused = append(refused, refusal{sale, r, begun, end})
							refusals++
						default:
							reserved++
						}
						mu.Unlock()
						if err == nil && answer.Verdict == reservation.Reserved && rand.IntN(3) > 0 {
							_, _ = ingress.Release(context.Background(), []reservation.Release{{
								SaleID: sale.ID, OrderID: answer.Reservation.OrderID, UserID: r.User,
								Quantity: answer.Reservation.Quantity, Lines: answer.Reservation.Lines,
							}})
						}
					}
				})
			}
		}
		done := make(chan struct{})
		var ghost sync.WaitGroup
		ghost.Go(func() { repeatLate(shop.Rdb, wires, done) })
		crowd.Wait()
		close(done)
		ghost.Wait()
	}
	t.Logf("%d reserved, %d refused, %d failed", reserved, len(refused), len(failed))
	require.NotEmpty(t, failed)
	require.Greater(t, reserved, 10*historySales)
	require.Greater(t, len(refused), 10*historySales)
	log.end(t)
	for _, sale := range log.sales {
		sale.requireWhole(t)
	}
	var wrong int
	for _, r := range refused {
		if log.sales[r.sale.ID].hadAlways(r.units(), r.begun, r.end) {
			wrong++
			t.Errorf("sale=%s user=%s wanted %d for %v and was refused; so many were for sale all the time",
				r.sale.ID, r.request.User, r.units(), r.end.Sub(r.begun))
		}
	}
}

// randomBasket is an order of some items of a sale, or nil if it has none.
func randomBasket(sale catalog.CountedSale) map[string]int64 {
	var basket map[string]int64
	for len(basket) == 0 && len(sale.Terms.Items) > 0 {
		basket = map[string]int64{}
		for _, item := range sale.Terms.Items {
			if rand.IntN(2) == 0 {
				basket[item.Code] = rand.Int64N(2) + 1
			}
		}
	}
	return basket
}

// unreliable is the fate of the calls on a bad network: some are late, some are lost, and at times all.
func unreliable() func() testshop.Fate {
	cut := 0
	return func() testshop.Fate {
		switch chance := rand.IntN(1000); {
		case cut > 0:
			cut--
			return testshop.Lost
		case chance < 2:
			cut = rand.IntN(20)
			return testshop.Lost
		case chance < 7:
			return testshop.Lost
		case chance < 12:
			return testshop.Unanswered
		case chance < 300:
			return testshop.Late
		}
		return testshop.Passes
	}
}

// repeatLate repeats calls of the ingresses at any later time.
func repeatLate(rdb redis.UniversalClient, wires []*testshop.Wire, done <-chan struct{}) {
	for retry.Pause(time.Duration(rand.IntN(int(2*time.Millisecond))), done) {
		if calls := wires[rand.IntN(len(wires))].Calls(); len(calls) > 0 {
			_ = rdb.Do(context.Background(), calls[rand.IntN(len(calls))]...).Err()
		}
	}
}

// writeLog holds all states of some sales, from what the command MONITOR shows of the scripts.
type writeLog struct {
	shop   *testshop.Shop
	conn   net.Conn
	reader sync.WaitGroup
	sales  map[uuid.UUID]*saleLog

	mu     sync.Mutex
	shards map[string]*saleLog // by the keys of their hashes
	writes []write
}

// write is a command of a script.
type write struct {
	at   time.Time
	args []string
}

// saleLog is all states of a sale.
type saleLog struct {
	sale   reservation.Sale
	states []saleState
}

type saleState struct {
	from   time.Time
	shards []shardState
	taken  []int64 // of each line
}

type shardState struct {
	lines      []lineState
	given, got [][]int64 // by the other shard and by line
	holders    map[string]order.Reservation
}

// lineState is a line: an item, or all of a sale without items.
type lineState struct {
	left       int64
	quietSince int64 // in milliseconds
	returned   []unitsReturned
}

type unitsReturned struct {
	at    time.Time
	units int64
}

// recordWrites logs what the scripts write from now on. The test has the server for itself.
func recordWrites(t *testing.T, shop *testshop.Shop, at string) *writeLog {
	t.Helper()
	server, err := url.Parse(at)
	require.NoError(t, err)
	conn, err := net.Dial("tcp", server.Host)
	require.NoError(t, err)
	l := &writeLog{shop: shop, conn: conn, sales: map[uuid.UUID]*saleLog{}, shards: map[string]*saleLog{}}
	t.Cleanup(func() { _ = conn.Close(); l.reader.Wait() })
	_, err = conn.Write([]byte("MONITOR\r\n"))
	require.NoError(t, err)
	lines := bufio.NewReader(conn)
	ok, err := lines.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "+OK\r\n", ok)
	l.reader.Go(func() {
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				return
			}
			l.read(t, line)
		}
	})
	return l
}

// read reads a line like: +1339518083.107412 [0 lua] "HSET" "key" "field" "value". The commands of a script follow it.
func (l *writeLog) read(t *testing.T, line string) {
	head, rest, _ := strings.Cut(strings.TrimPrefix(line, "+"), " [0 ")
	source, rest, _ := strings.Cut(rest, "] ")
	var args []string
	if source == "lua" || strings.HasPrefix(rest, `"echo"`) {
		for rest != "\r\n" {
			quoted, err := strconv.QuotedPrefix(rest)
			if err != nil {
				t.Errorf("%v: %s", err, line)
				return
			}
			arg, _ := strconv.Unquote(quoted)
			args, rest = append(args, arg), strings.TrimPrefix(rest[len(quoted):], " ")
		}
	}
	seconds, micros, _ := strings.Cut(head, ".")
	s, _ := strconv.ParseInt(seconds, 10, 64)
	us, _ := strconv.ParseInt(micros, 10, 64)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.writes = append(l.writes, write{time.Unix(s, us*1000), args})
}

// watch adds a new sale.
func (l *writeLog) watch(sale catalog.CountedSale) {
	log := &saleLog{sale: sale.Sale}
	l.sales[sale.ID] = log
	for shard := range sale.Shards {
		partition := sale.Layout().Partition(shard)
		l.shards[l.shop.Keys.Sale(partition, sale.ID)], l.shards[l.shop.Keys.Buyers(partition, sale.ID)] = log, log
	}
}

// end waits for the whole log and reads the states of the sales from it.
func (l *writeLog) end(t testing.TB) {
	t.Helper()
	require.NoError(t, l.shop.Rdb.Echo(t.Context(), "the end").Err())
	testkit.Eventually(t, 30*time.Second, "the log is complete", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return slices.ContainsFunc(l.writes[max(0, len(l.writes)-100):], func(w write) bool {
			return slices.Equal(w.args, []string{"echo", "the end"})
		})
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	var changed *saleLog // by the present script
	for _, w := range l.writes {
		if len(w.args) == 0 || w.args[0] == "echo" { // the next script
			changed = nil
			continue
		}
		log := l.shards[w.args[min(1, len(w.args)-1)]]
		if log == nil || w.args[0] != "HSET" && w.args[0] != "HDEL" {
			continue
		}
		if changed == nil {
			log.states = append(log.states, log.next(w.at))
			changed = log
		}
		require.Same(t, changed, log, "a script changes one sale")
		log.states[len(log.states)-1].apply(t, log.sale.Layout(), l.shop.Keys, log.sale.ID, w)
	}
}

// next returns a copy of the last state.
func (l *saleLog) next(from time.Time) saleState {
	lines := max(1, len(l.sale.Items))
	state := saleState{shards: make([]shardState, l.sale.Shards), taken: make([]int64, lines)}
	for shard := range state.shards {
		one := &state.shards[shard]
		one.lines = make([]lineState, lines)
		for range l.sale.Shards {
			one.given, one.got = append(one.given, make([]int64, lines)), append(one.got, make([]int64, lines))
		}
		one.holders = map[string]order.Reservation{}
	}
	if len(l.states) > 0 {
		state = l.states[len(l.states)-1]
		state.shards, state.taken = slices.Clone(state.shards), slices.Clone(state.taken)
	}
	state.from = from
	return state
}

// unitsByLine are the units of an order, or of a total.
func unitsByLine(text string, lines int) []int64 {
	units := make([]int64, lines)
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		units[0] = n
		return units
	}
	for item, n := range order.Lines(text).Each() {
		units[item] = n
	}
	return units
}

func (s *saleState) take(held order.Reservation, sign int64) {
	text := string(held.Lines)
	if text == "" {
		text = strconv.FormatInt(held.Quantity, 10)
	}
	for line, units := range unitsByLine(text, len(s.taken)) {
		s.taken[line] += sign * units
	}
}

func (s *saleState) apply(t testing.TB, layout reservation.Layout, keys reservation.Keys, sale uuid.UUID, w write) {
	t.Helper()
	var at int
	for shard := range s.shards {
		if partition := layout.Partition(shard); w.args[1] == keys.Sale(partition, sale) ||
			w.args[1] == keys.Buyers(partition, sale) {
			at = shard
		}
	}
	shard := &s.shards[at]
	shard.holders, shard.given, shard.got = maps.Clone(shard.holders), slices.Clone(shard.given), slices.Clone(shard.got)
	shard.lines = slices.Clone(shard.lines)
	isBuyers := strings.Contains(w.args[1], "}:buyers:")
	switch {
	case w.args[0] == "HDEL" && isBuyers:
		for _, user := range w.args[2:] {
			s.take(shard.holders[user], -1)
			delete(shard.holders, user)
		}
	case w.args[0] == "HSET" && isBuyers:
		for i := 2; i < len(w.args); i += 2 {
			held, _, err := order.ParseReservation(w.args[i+1])
			require.NoError(t, err)
			require.Empty(t, shard.holders[w.args[i]].OrderID, "%s buys twice", w.args[i])
			shard.holders[w.args[i]] = held
			s.take(held, 1)
		}
	case w.args[0] == "HSET":
		before, moved := slices.Clone(shard.lines), false
		for i := 2; i < len(w.args); i += 2 {
			field, other, _ := strings.Cut(w.args[i], ":")
			n, _ := strconv.ParseInt(w.args[i+1], 10, 64) // 0 for the fields that are no numbers
			to, _ := strconv.Atoi(other)
			name, letter, isItem := strings.Cut(field, ".")
			line := 0
			if isItem {
				line = strings.Index(order.ItemLetters(order.MaxItems), letter)
			}
			switch {
			case name == "left" && isItem == (len(s.taken) > 1):
				shard.lines[line].left = n
			case field == "quiet_since_ms" && len(s.taken) == 1, name == "quiet":
				shard.lines[line].quietSince = n
			case field == "given":
				shard.given[to], moved = unitsByLine(w.args[i+1], len(s.taken)), true
			case field == "got":
				shard.got[to], moved = unitsByLine(w.args[i+1], len(s.taken)), true
			}
		}
		for i := range shard.lines {
			line := &shard.lines[i]
			if more := line.left - before[i].left; more > 0 && !moved {
				line.returned = append(slices.Clone(line.returned), unitsReturned{w.at, more})
			}
		}
	}
}

// moving is the number of units of a line that are on their way.
func (s *saleState) moving(line int) (units int64) {
	for from, giver := range s.shards {
		for to, taker := range s.shards {
			units += giver.given[to][line] - taker.got[from][line]
		}
	}
	return units
}

// requireWhole fails the test unless the sale has its stock in each state.
func (l *saleLog) requireWhole(t *testing.T) {
	t.Helper()
	require.NotEmpty(t, l.states)
	stocks := []int64{l.sale.Stock}
	for place, item := range l.sale.Items {
		stocks = append(stocks[:place], item.Stock)
	}
	for i, state := range l.states {
		if i < l.sale.Shards { // the shards are opened one by one
			continue
		}
		for line, stock := range stocks {
			units := state.taken[line] + state.moving(line)
			for to, shard := range state.shards {
				require.GreaterOrEqual(t, shard.lines[line].left, int64(0))
				units += shard.lines[line].left
				for from, giver := range state.shards {
					require.GreaterOrEqual(t, giver.given[to][line], shard.got[from][line], "state %d: from %d to %d", i, from, to)
				}
			}
			require.Equal(t, stock, units, "state %d: line %d: %+v", i, line, state)
		}
	}
}

// hadAlways is true if so many units of each line were for sale at all times between the two. A unit is for sale in the
// second after its return as well, if its shard sells.
func (l *saleLog) hadAlways(wanted []int64, begun, end time.Time) bool {
	first, _ := slices.BinarySearchFunc(l.states, begun, func(s saleState, at time.Time) int { return s.from.Compare(at) })
	for i := max(0, first-1); i < len(l.states) && !l.states[i].from.After(end); i++ {
		for line, units := range wanted {
			if l.states[i].forSale(line, later(l.states[i].from, begun)) < units {
				return false
			}
		}
	}
	return true
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// forSale is the number of units of a line that were for sale at that time.
func (s *saleState) forSale(line int, at time.Time) int64 {
	units := s.moving(line)
	for _, shard := range s.shards {
		its, quiet := shard.lines[line], int64(0)
		if at.UnixMilli()-its.quietSince < 1000 {
			for _, back := range its.returned {
				if at.Sub(back.at) < time.Second {
					quiet += back.units
				}
			}
		}
		units += max(0, its.left-quiet)
	}
	return units
}

package limits

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/bench/rig"
	"stampede/draw"
	"stampede/fulfillment/offers"
	"stampede/internal/clocks"
	"stampede/internal/pg"
	"stampede/ledger/draws"
	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// request is one buyer's part of the arguments of lua/reserve.lua, built before the clock starts: a
// limit of Redis must not include the building of strings.
type request struct {
	order   uuid.UUID
	user    string
	orderID string
}

// newRequests builds requests of users who have bought nothing yet.
func newRequests(sale uuid.UUID, n int) []request {
	requests := make([]request, n)
	for i := range requests {
		r := &requests[i]
		r.order = order.NewOrderID(sale)
		r.orderID = order.CompactID(r.order)
		r.user = "buyer-" + strconv.FormatUint(buyerSerial.Add(1), 10)
	}
	return requests
}

// scriptCaller calls the reserve script for one sale on one connection. It is not safe for concurrent
// use.
type scriptCaller struct {
	rdb   redis.UniversalClient
	units string
	args  []any
	head  int
}

func newScriptCaller(s shop) *scriptCaller {
	keys, sale := s.keys, s.sale
	p := keys.Partition(sale)
	args := []any{
		"evalsha", lua.Reserve.Hash(), 4, keys.Sale(p, sale), keys.Buyers(p, sale), keys.Orders(p), keys.Ended(p, sale),
		"1", "0", order.ReservedMetadataPrefix(sale, 1, s.units[0] > '9'),
	}
	return &scriptCaller{rdb: s.Redis, units: s.units, args: args, head: len(args)}
}

// reserve sends all requests in one call, and fails unless every one of them is reserved.
func (c *scriptCaller) reserve(ctx context.Context, batch []request) error {
	c.args = c.args[:c.head]
	for i := range batch {
		c.args = append(c.args, &batch[i].user, &batch[i].orderID, "-", c.units)
	}
	cmd := redis.NewStringSliceCmd(ctx, c.args...)
	if err := c.rdb.Process(ctx, cmd); err != nil {
		return err
	}
	const header = 3 // before the answers
	answers := cmd.Val()[header:]
	if len(answers) != len(batch) {
		return fmt.Errorf("the script answered %d of %d requests", len(answers), len(batch))
	}
	for _, answer := range answers {
		if !strings.HasPrefix(answer, "reserved ") {
			return fmt.Errorf("the script answered %q", answer)
		}
	}
	return nil
}

// reserveAll sends the requests in batches over several connections, each with one call in flight,
// until all are sent or the time is over, and returns how many were reserved.
func (s shop) reserveAll(b *testing.B, requests []request, batch, connections int, within time.Duration) int64 {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), within+callGrace)
	defer cancel()
	deadline := time.Now().Add(within)
	share := len(requests) / connections
	var reserved atomic.Int64
	var all errgroup.Group
	for i := range connections {
		all.Go(func() error {
			caller := newScriptCaller(s)
			for rest := requests[i*share : (i+1)*share]; len(rest) > 0 && time.Now().Before(deadline); {
				n := min(batch, len(rest))
				if err := caller.reserve(ctx, rest[:n]); err != nil {
					return err
				}
				reserved.Add(int64(n))
				rest = rest[n:]
			}
			return nil
		})
	}
	require.NoError(b, all.Wait())
	return reserved.Load()
}

const (
	plainOrder   = "a sale without items"
	oneLine      = "one line"
	twoLines     = "two lines"
	soldOutSale  = "sold-out sale"
	soldOutItem  = "sold-out item, others are left"
	answersASec  = "answers/s"
	callOfScript = 64
)

// BenchmarkItems compares orders of a sale with items, and its losers, with those of a sale without.
func BenchmarkItems(b *testing.B) {
	m := reservation.Item{Code: "m", Name: "M", Stock: hugeStock}
	l := reservation.Item{Code: "l", Name: "L", Stock: hugeStock}
	batch := func() int { return callOfScript }
	server := rig.Stampede{}.Start(b, 1)
	server.StopWorkers()
	loser := losers(b, server)
	results := rig.Compare(b,
		rig.Candidate{Name: plainOrder, Turn: script(batch, 1)},
		rig.Candidate{Name: oneLine, Turn: script(batch, 1, m)},
		rig.Candidate{Name: twoLines, Turn: script(batch, 1, m, l)},
		rig.Candidate{Name: soldOutSale, Turn: loser(reservation.Terms{Stock: 1}, `{"quantity":1}`)},
		rig.Candidate{Name: soldOutItem, Turn: loser(reservation.Terms{Stock: 3, Items: []reservation.Item{
			{Code: "m", Name: "M", Stock: 1}, {Code: "l", Name: "L", Stock: 2},
		}}, `{"items":{"m":1}}`)},
	)
	table := rig.Table{
		Title: "Sales with items",
		Note: fmt.Sprintf("The reserve script with %d orders in a call, by their lines, and “sold out” of "+
			"`stampede serve` with %d connections, in one run. Medians of %d rounds.", callOfScript, crowdConnections, b.N),
		Head: []string{"", "a second", "÷ without items", "script, µs an order", "÷ without items"},
	}
	for _, row := range [][3]string{
		{plainOrder, plainOrder, perSecond},
		{oneLine, plainOrder, perSecond},
		{twoLines, plainOrder, perSecond},
		{soldOutSale, soldOutSale, answersASec},
		{soldOutItem, soldOutSale, answersASec},
	} {
		name, plain, figure := row[0], row[1], row[2]
		cells := []string{
			name, results.Of(name, figure).Format(rig.Count), results.Ratio(name, figure, plain, figure).Format(rig.Ratio),
			"", "",
		}
		if figure == perSecond {
			cells[3] = results.Of(name, scriptMicros).Format(rig.Ratio)
			cells[4] = results.Ratio(name, scriptMicros, plain, scriptMicros).Format(rig.Ratio)
		}
		table.Rows = append(table.Rows, cells)
	}
	rig.Put(table)
	b.ReportMetric(results.Ratio(twoLines, scriptMicros, plainOrder, scriptMicros).Median, "two-lines÷plain-script")
	b.ReportMetric(results.Ratio(soldOutItem, answersASec, soldOutSale, answersASec).Median, "item÷sale-sold-out")
}

// losers returns what creates a sale, sells its first unit, and has a crowd ask for it.
func losers(b *testing.B, s *rig.System) func(terms reservation.Terms, body string) turn {
	b.Helper()
	store := reservation.NewStore(s.Shop.Redis, s.Shop.Keys(1), reservation.StoreOptions{
		Logger: slog.New(slog.DiscardHandler),
	})
	b.Cleanup(store.Close)
	return func(terms reservation.Terms, body string) turn {
		terms.Name, terms.PerOrderLimit = "losers", 1
		sale, err := catalog.New(s.Shop.Pool, store).Create(b.Context(), terms)
		require.NoError(b, err)
		winner := reservation.Request{Sale: sale.ID, User: "winner", Quantity: 1}
		if len(terms.Items) > 0 {
			winner.Quantity, winner.Items = 0, map[string]int64{terms.Items[0].Code: 1}
		}
		answer, err := store.Reserve(b.Context(), winner)
		require.NoError(b, err)
		require.Equal(b, reservation.Reserved, answer.Verdict)
		return func(b *testing.B, _ int) rig.Values {
			load := s.Crowd(1)
			load.Connections, load.For, load.Status = crowdConnections, turnDuration(b), http.StatusConflict
			load.Request = requests(sale.ID, body)
			answers := s.Measure(load)
			require.Zero(b, answers.Others(), answers)
			return rig.Values{answersASec: answers.PerSecond()}
		}
	}
}

// requests of buyers who hold nothing, with this body.
func requests(sale uuid.UUID, body string) func(dst []byte, n uint64) []byte {
	length := fmt.Sprint("Content-Length: ", len(body))
	head := strings.Replace(rig.PurchaseHead(sale), "Content-Length: 14", length, 1) + "loser-"
	return func(dst []byte, n uint64) []byte {
		dst = strconv.AppendUint(append(dst, head...), n, 10)
		return append(append(dst, "\r\n\r\n"...), body...)
	}
}

var drawEntries = flag.Int("entries", 1_000_000, "entries of the draw in BenchmarkDraws")

// BenchmarkDraws measures a draw from the end of its entries to its offers, and its verification.
func BenchmarkDraws(b *testing.B) {
	entries := rig.Scale(b, *drawEntries, 10_000)
	results := rig.Compare(b, rig.Candidate{Name: "a draw", Turn: func(b *testing.B, _ int) rig.Values {
		return drawUnits(b, entries, rig.Scale(b, 20_000, 500))
	}})
	table := rig.Table{
		Title: "Draws",
		Note: fmt.Sprintf("A draw of %d entries. The peak of memory is that of the process that freezes and ranks: this "+
			"benchmark's. Medians of %d rounds.", entries, b.N),
		Head: []string{"freeze, s", "rank, s", "peak, MB", "offers/s", "verify, s"},
	}
	table.Rows = append(table.Rows, results.Ranges(rig.Ratio, "a draw", table.Head...))
	rig.Put(table)
}

// drawUnits draws so many units among so many entrants.
func drawUnits(b *testing.B, entries, units int) rig.Values {
	b.Helper()
	s := openShop(b)
	defer s.Close()
	sales, offerer := s.offerer(b)
	goods, err := sales.Create(b.Context(), reservation.Terms{Name: "goods", Stock: int64(units), PerOrderLimit: 1})
	require.NoError(b, err)
	list, err := sales.Create(b.Context(), reservation.Terms{
		Name: "entries", Stock: int64(entries), PerOrderLimit: 1, ClosesAt: time.Now().Add(time.Hour),
	})
	require.NoError(b, err)
	secret := sha256.Sum256([]byte("secret"))
	commitment := sha256.Sum256(secret[:])
	_, err = sales.CreateDraw(b.Context(), goods.ID, catalog.DrawTerms{
		Entries: list.ID, Freeze: time.Minute,
		Parties: []catalog.Party{{Name: "bench", Commitment: hex.EncodeToString(commitment[:])}},
	})
	require.NoError(b, err)
	s.enter(b, list.ID, entries)
	_, err = s.Pool.Exec(b.Context(), `UPDATE sales SET sold = $2, state = 'ended', closes_at = now() WHERE id = $1`,
		list.ID, entries)
	require.NoError(b, err)

	at := draws.New(s.Pool)
	clock := func(ctx context.Context, on pg.Querier) (clocks.Times, error) {
		return offerer.Catalog.Store.Times(ctx, on, 0)
	}
	resetPeak(b)
	values := rig.Values{}
	began := time.Now()
	require.NoError(b, at.Prepare(b.Context(), goods.ID, clock))
	values["freeze, s"] = time.Since(began).Seconds()
	_, err = at.Reveal(b.Context(), goods.ID, "bench", secret[:])
	require.NoError(b, err)
	began = time.Now()
	require.NoError(b, at.Prepare(b.Context(), goods.ID, clock))
	values["rank, s"] = time.Since(began).Seconds()
	values["peak, MB"] = peak(b)

	values["offers/s"] = offersPerSecond(b, units, offerer.Offer)

	file, err := os.Create(filepath.Join(b.TempDir(), "leaves"))
	require.NoError(b, err)
	defer func() { _ = file.Close() }()
	require.NoError(b, at.Leaves(b.Context(), goods.ID, file))
	bundle, err := at.Bundle(b.Context(), goods.ID)
	require.NoError(b, err)
	began = time.Now()
	report, err := draw.Verify(b.Context(), bundle, file, int64(entries)*draw.RecordBytes, nil)
	require.NoError(b, err)
	require.False(b, report.Has(draw.Broken), report)
	values["verify, s"] = time.Since(began).Seconds()
	return values
}

// BenchmarkWaitlist measures a long waiting list: its turns, and the answer to those who ask how many are before them.
func BenchmarkWaitlist(b *testing.B) {
	entries := rig.Scale(b, *drawEntries, 10_000)
	var candidates []rig.Candidate
	for _, shards := range []int{1, 8} {
		candidates = append(candidates, rig.Candidate{
			Name: fmt.Sprintf("shards: %d", shards),
			Turn: func(b *testing.B, _ int) rig.Values {
				return offerWaiting(b, shards, entries, rig.Scale(b, 20_000, 500))
			},
		})
	}
	results := rig.Compare(b, candidates...)
	table := rig.Table{
		Title: "Waiting list",
		Note: fmt.Sprintf("A waiting list of %d people. The last column is the time to read who waits, which an ingress "+
			"does for all that ask. Medians of %d rounds.", entries, b.N),
		Head: []string{"", "offers/s", "who waits, ms"},
	}
	for _, c := range candidates {
		row := append([]string{c.Name}, results.Ranges(rig.Ratio, c.Name, table.Head[1:]...)...)
		table.Rows = append(table.Rows, row)
	}
	rig.Put(table)
}

// offerWaiting offers so many returned units to so many who wait.
func offerWaiting(b *testing.B, shards, entries, units int) rig.Values {
	b.Helper()
	s := openShop(b)
	defer s.Close()
	s.keys = s.Keys(shards)
	sales, offerer := s.offerer(b)
	goods, err := sales.Create(b.Context(), reservation.Terms{
		Name: "goods", Stock: int64(units), PerOrderLimit: 1, PaymentWindow: time.Hour, Waitlist: true,
		Shards: shards,
	})
	require.NoError(b, err)
	s.enter(b, goods.EntriesID, entries)
	// As after the return of all units to a sale with none left (release.lua).
	for _, partition := range goods.Layout().All() {
		key := s.keys.Sale(partition, goods.ID)
		require.NoError(b, s.Redis.HSet(b.Context(), key, "state", "offers", "open_state", "offers").Err())
	}

	values := rig.Values{"offers/s": offersPerSecond(b, units, offerer.OfferWaiting)}
	began := time.Now()
	places, err := draws.New(s.Pool).WaitingPlaces(b.Context(), goods.ID, "")
	require.NoError(b, err)
	require.Len(b, places, entries-units)
	values["who waits, ms"] = float64(time.Since(began).Milliseconds())
	return values
}

// offerer returns a catalog of the shop, and who offers the units of its sales.
func (s shop) offerer(b *testing.B) (*catalog.Catalog, *offers.Offerer) {
	b.Helper()
	logger := slog.New(slog.DiscardHandler)
	store := reservation.NewStore(s.Redis, s.keys, reservation.StoreOptions{Logger: logger})
	b.Cleanup(store.Close)
	sales := catalog.New(s.Pool, store)
	return sales, offers.New(offers.Config{Catalog: sales, Logger: logger})
}

// offersPerSecond offers so many units.
func offersPerSecond(b *testing.B, units int, offer func(context.Context) (int, error)) float64 {
	b.Helper()
	offered := 0
	began := time.Now()
	for offered < units {
		done, err := offer(b.Context())
		require.NoError(b, err)
		offered += done
	}
	return float64(offered) / time.Since(began).Seconds()
}

// enter has so many people in the entries sale.
func (s shop) enter(b *testing.B, sale uuid.UUID, entries int) {
	b.Helper()
	_, err := s.Pool.Exec(b.Context(), `INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch,
			reserved_at, updated_at)
		SELECT (lpad(to_hex(1764000000000 + n / 100), 12, '0') || '7' || substr(hash, 1, 3) || '8' || substr(hash, 4, 11) ||
			right($1::uuid::text, 4))::uuid, $1, 'user-' || n, 1, 'confirmed', 2, n, 1, now(), now()
		FROM generate_series(1, $2::int) AS n, md5(n::text) AS hash`, sale, entries)
	require.NoError(b, err)
	_, err = s.Pool.Exec(b.Context(), "ANALYZE orders")
	require.NoError(b, err)
}

// resetPeak begins to count the peak of the memory of this process from 0.
func resetPeak(b *testing.B) {
	b.Helper()
	require.NoError(b, os.WriteFile("/proc/self/clear_refs", []byte("5"), 0))
}

// peak is the most memory that this process has had, in MB.
func peak(b *testing.B) float64 {
	b.Helper()
	status, err := os.ReadFile("/proc/self/status")
	require.NoError(b, err)
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	kb, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
	require.NoError(b, err)
	return kb / 1000
}

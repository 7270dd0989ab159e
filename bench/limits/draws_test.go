package limits

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/bench/rig"
	"stampede/draw"
	"stampede/fulfillment/offers"
	"stampede/internal/clocks"
	"stampede/internal/pg"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

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
	clock := func(ctx context.Context, on pg.Querier) (clocks.Times, error) { return offerer.Store.Times(ctx, on, 0) }
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
	return sales, offers.New(offers.Config{
		Pool: s.Pool, Redis: s.Redis, Keys: s.keys, Store: store, Catalog: sales, Logger: logger,
	})
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

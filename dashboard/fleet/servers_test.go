package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/upkeep/rebuild"
)

// saleIn is the sale in a snapshot, or an empty one.
func saleIn(s *Snapshot, id uuid.UUID) Sale {
	for _, sale := range s.Sales {
		if sale.ID == id {
			return sale
		}
	}
	return Sale{}
}

func TestSalesAreShownWithUnitsAndFunnel(t *testing.T) {
	t.Parallel()
	f, s := newFleet(t)
	plain := s.Open(t, 10)
	paid, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "to be paid", Stock: 20, PerOrderLimit: 5, PaymentWindow: time.Hour, OpensAt: time.Now().Add(-time.Hour),
		PaymentGrace: time.Minute, PaymentsPerSecond: 25, UnitPrice: 4900, Currency: "EUR",
	})
	require.NoError(t, err)
	s.Buy(t, plain, "ann")
	s.Buy(t, plain, "bob")
	s.Buy(t, paid.ID, "ann")
	s.Buy(t, paid.ID, "bob")
	testwork.Fulfil(t, s)
	s.Buy(t, plain, "cid") // not recorded yet
	require.NoError(t, s.Exec(t, "UPDATE orders SET status = 'paid' WHERE user_id = 'ann' AND sale_id = $1", paid.ID))

	snapshot := f.play(t, "both sales are counted", func(x *Snapshot) bool {
		return saleIn(x, plain).UnitsKnown && saleIn(x, plain).FunnelKnown && saleIn(x, paid.ID).UnitsKnown &&
			saleIn(x, paid.ID).FunnelKnown
	})
	require.True(t, snapshot.Postgres.Reachable)
	require.True(t, snapshot.Redis.Reachable)
	require.True(t, snapshot.SalesRead)
	require.Equal(t, paid.ID, snapshot.Sales[0].ID, "the newest first")
	shown := saleIn(snapshot, plain)
	require.Equal(t, []int64{10, 7, 1, 2}, []int64{shown.Stock, shown.Available, shown.Held, shown.Sold})
	require.Equal(t, Funnel{Accepted: 2, Confirmed: 2}, shown.Funnel)
	require.Equal(t, reservation.StateOpen, shown.State)
	require.Empty(t, shown.Shut)
	shown = saleIn(snapshot, paid.ID)
	require.Equal(t, []int64{20, 18, 1, 1}, []int64{shown.Stock, shown.Available, shown.Held, shown.Sold})
	require.Equal(t, Funnel{Accepted: 2, Confirmed: 1, Paid: 1}, shown.Funnel)
	require.Equal(t, "to be paid", shown.Name)
	require.Equal(t, []any{time.Hour, time.Minute, int64(25), int64(4900), "EUR"}, []any{
		shown.PaymentWindow, shown.PaymentGrace, shown.PaymentsPerSecond, shown.UnitPrice, shown.Currency,
	})

	points := f.History()
	require.Equal(t, SalePoint{Available: 7, Held: 1, Sold: 2, Known: true}, points[len(points)-1].Sales[plain])
}

func TestItemsAreCounted(t *testing.T) {
	t.Parallel()
	f, s := newFleet(t)
	m, l := reservation.Item{Code: "m", Name: "Medium", Stock: 4}, reservation.Item{Code: "l", Name: "Large", Stock: 8}
	sale, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "shirts", Stock: 12, PerOrderLimit: 5, Items: []reservation.Item{m, l},
	})
	require.NoError(t, err)
	_, err = s.Reserve(t.Context(), reservation.Request{
		Sale: sale.ID, User: "ann", Items: map[string]int64{"m": 1, "l": 2},
	})
	require.NoError(t, err)
	snapshot := f.play(t, "the sale is counted", func(x *Snapshot) bool { return saleIn(x, sale.ID).UnitsKnown })
	require.Equal(t, []catalog.CountedItem{{Item: m, Available: 3}, {Item: l, Available: 6}},
		saleIn(snapshot, sale.ID).Items)
}

func TestNextWaitsForNewerSnapshot(t *testing.T) {
	t.Parallel()
	f, _ := newFleet(t)
	require.Zero(t, f.Snapshot().Number)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := f.Next(ctx, 0)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	got := make(chan *Snapshot, 1)
	go func() {
		next, _ := f.Next(context.Background(), 1)
		got <- next
	}()
	f.publish(noon)
	f.publish(noon)
	require.EqualValues(t, 2, (<-got).Number)
}

func TestHistoryIsBounded(t *testing.T) {
	t.Parallel()
	f, s := newFleet(t)
	for range 3 {
		s.Open(t, 5)
	}
	f.round(t.Context())
	for i := range historyMax + 50 {
		f.publish(at(float64(i)))
	}
	points := f.History()
	require.Len(t, points, historyMax)
	require.Equal(t, at(50), points[0].At)
	require.Equal(t, at(historyMax+49), points[historyMax-1].At)
	require.Len(t, points[5].Sales, 3)
	require.Len(t, f.Snapshot().Sales, 3)
}

func TestSalesThatSellAreShownFirst(t *testing.T) {
	t.Parallel()
	f, s := newFleet(t)
	ids := make([]uuid.UUID, salesMax+2)
	for i := range ids {
		ids[i] = s.Open(t, 5)
	}
	for i, change := range map[int]string{
		0: "", 1: "state = 'paused'", 2: "closes_at = now()", 3: "state = 'ended'", 4: "retired_at = now(), state = 'ended'",
		5: "state = 'paused', opens_at = now() + interval '1 day'", 6: "closes_at = now() + interval '1 day'",
	} {
		if change != "" {
			require.NoError(t, s.Exec(t, "UPDATE sales SET "+change+" WHERE id = $1", ids[i]))
		}
	}
	require.NoError(t, s.Exec(t, "UPDATE sales SET opens_at = now() + interval '1 day' WHERE id > $1", ids[6]))
	snapshot := f.play(t, "the sales are read", func(x *Snapshot) bool { return len(x.Sales) > 0 })
	wanted := []uuid.UUID{ids[6], ids[0], ids[5], ids[1]}
	for i := len(ids) - 1; i > 6; i-- {
		wanted = append(wanted, ids[i])
	}
	var shown []uuid.UUID
	for _, sale := range snapshot.Sales {
		shown = append(shown, sale.ID)
	}
	require.Equal(t, append(wanted, ids[4]), shown)
}

// Newer sales in which nothing happens hide none of the others.
func TestSalesWhereSomethingHappensAreShownFirst(t *testing.T) {
	t.Parallel()
	f, s := newFleet(t)
	owes, unpaid, sells, asked := s.OpenPayable(t, 5), s.OpenPayable(t, 5), s.Open(t, 5), s.Open(t, 5)
	old := s.OpenPayable(t, 5)
	for _, sale := range []uuid.UUID{unpaid, sells, old} {
		s.Buy(t, sale, "ann")
	}
	testwork.Fulfil(t, s)
	for statement, sale := range map[string]uuid.UUID{
		"UPDATE order_events SET occurred_at = now() - interval '1 day' WHERE sale_id <> $1": sells,
		"UPDATE orders SET status = 'paid' WHERE sale_id = $1":                               old,
		"UPDATE sales SET state = 'ended', retired_at = now() WHERE id = $1":                 owes,
		`INSERT INTO payment_events (reference, version, type, order_id, sale_id)
			VALUES ('pi', 1, 'PaymentRefundDue', gen_random_uuid(), $1)`: owes,
	} {
		require.NoError(t, s.Exec(t, statement, sale))
	}
	for range salesMax {
		s.Open(t, 5)
	}
	f.sales.noteActive(&increase{sales: map[uuid.UUID]outcomes{asked: {}}}, time.Now())
	snapshot := f.play(t, "the sales are read", func(x *Snapshot) bool { return len(x.Sales) > 0 })
	var shown []uuid.UUID
	for _, sale := range snapshot.Sales {
		shown = append(shown, sale.ID)
	}
	require.Equal(t, []uuid.UUID{asked, sells, unpaid, owes}, shown[:4])
	require.Len(t, shown, salesMax)
	require.NotContains(t, shown, old)
}

// The clock of Redis does not matter for which server workers have verified.
func TestOtherServerShutsItsSales(t *testing.T) {
	t.Parallel()
	f := &Fleet{}
	f.records.at, f.records.servers = noon, map[int]string{0: "a"}
	sale := &catalog.CountResult{CountedSale: catalog.CountedSale{Sale: reservation.Sale{Partitions: 1}}}
	for runID, why := range map[string]string{
		"a": "", "b": "the Redis server of partition 0 is not the one that workers have verified",
	} {
		for _, ahead := range []float64{-600, 600} {
			f.sales.states = map[int]reservation.ServerState{0: {Known: true, Recorded: true, RunID: runID, Now: at(ahead)}}
			require.Equal(t, why, f.whyShut(&Snapshot{At: noon}, sale))
		}
	}
}

func TestStatusIsWhatBuyersMeet(t *testing.T) {
	t.Parallel()
	for status, sale := range map[string]Sale{
		"open":        {State: reservation.StateOpen, UnitsKnown: true, Available: 1},
		"sold out":    {State: reservation.StateOpen, UnitsKnown: true},
		"not selling": {State: reservation.StateOpen, Shut: "why", UnitsKnown: true},
		"paused":      {State: reservation.StatePaused, UnitsKnown: true},
	} {
		require.Equal(t, status, sale.Status())
	}
	require.Equal(t, "open", Sale{State: reservation.StateOpen}.Status(), "its units are unknown")

	text, err := json.Marshal(Snapshot{
		Sales: []Sale{{Terms: reservation.Terms{PaymentWindow: 15 * time.Minute}}},
		Rates: Rates{AnswerP50: time.Millisecond, OldestWaiting: time.Minute},
	})
	require.NoError(t, err)
	for _, part := range []string{
		`"payment_window_seconds":900`, `"status":""`, `"answer_p50_seconds":0.001`, `"oldest_waiting_seconds":60`,
	} {
		require.Contains(t, string(text), part)
	}
	require.NotRegexp(t, `"(payment_window|answer_p50|oldest_waiting)":`, string(text), "in nanoseconds")
}

// requireNoDelay fails if no round is faster than the time-out of what does not answer.
func requireNoDelay(t *testing.T, f *Fleet) {
	t.Helper()
	testkit.Eventually(t, time.Minute, "a round that waits for no time-out", func() bool {
		began := time.Now()
		f.round(t.Context())
		return time.Since(began) < roundTimeout/2
	})
}

// A real rebuild waits for the row of its sale, and is seen with its reason and its step.
func TestRebuildIsSeen(t *testing.T) {
	t.Parallel()
	f, s := newFleet(t)
	sale := s.Open(t, 10)
	f.play(t, "the sale is counted", func(x *Snapshot) bool { return saleIn(x, sale).UnitsKnown })
	hold := s.HoldSale(t, sale)
	r := testwork.Rebuilder(t, s)
	done := make(chan error, 1)
	go func() {
		_, err := r.Partition(context.Background(), 0, rebuild.ReasonByHand)
		done <- err
	}()
	snapshot := f.play(t, "the rebuild is seen", func(x *Snapshot) bool {
		return len(x.Rebuilds) == 1 && x.Rebuilds[0].SalesTotal == 1 && saleIn(x, sale).Shut != ""
	})
	require.Equal(t, rebuild.ReasonByHand, snapshot.Rebuilds[0].Reason)
	require.Zero(t, snapshot.Rebuilds[0].Sale)
	require.Zero(t, snapshot.Rebuilds[0].SalesDone)
	require.WithinDuration(t, time.Now(), snapshot.Rebuilds[0].Since, time.Minute)
	require.Contains(t, snapshot.Rebuilds[0].Step, "raise the epoch")
	require.Contains(t, saleIn(snapshot, sale).Shut, "is being rebuilt: raise the epoch")
	require.False(t, saleIn(snapshot, sale).UnitsKnown)

	require.NoError(t, hold.Rollback(t.Context()))
	require.NoError(t, <-done)
	f.play(t, "the rebuild is over, and the sale sells", func(x *Snapshot) bool {
		return len(x.Rebuilds) == 0 && saleIn(x, sale).Shut == "" && saleIn(x, sale).UnitsKnown
	})
}

func TestDeskIsShown(t *testing.T) {
	t.Parallel()
	f, s := newFleet(t)
	for _, statement := range []string{
		`INSERT INTO dead_letters (stream, entry_id, fields, reason, deliveries, created_at)
			VALUES ('s', '1-0', '[]', 'broken', 5, now() - interval '1 hour')`,
		`INSERT INTO audits (at, operator, broken, unchecked)
			VALUES (now() - interval '2 days', 'ann', '{S4}', '{S5}')`,
		`INSERT INTO rebuilds (id, partition, reason, process, began_at, beat_at, step, sales_done, sales_total)
			VALUES (gen_random_uuid(), 3, 'server', 'a process that died', now() - interval '1 hour', now() - interval '11 s',
				'close', 0, 0)`,
	} {
		require.NoError(t, s.Exec(t, statement))
	}
	snapshot := f.play(t, "the desk is read", func(x *Snapshot) bool { return x.Audit != nil })
	require.EqualValues(t, 1, snapshot.DeadLetters)
	require.Equal(t, []string{"S4"}, snapshot.Audit.Broken)
	require.Equal(t, []string{"S5"}, snapshot.Audit.Unchecked)
	require.Equal(t, "ann", snapshot.Audit.Operator)
	require.Empty(t, snapshot.Rebuilds, "that of a dead process")
	require.Equal(t, []string{promiseBroken.name, auditOld.name, deadLetterParked.name}, troubleNames(snapshot))
	require.WithinDuration(t, time.Now().Add(-time.Hour), snapshot.Troubles[2].Since, time.Minute)
}

func TestFunnelsAreCountedWithinTheirShare(t *testing.T) {
	t.Parallel()
	f, s := newFleet(t)
	for range 5 {
		s.Open(t, 100_000)
	}
	f.play(t, "the sales are read", func(x *Snapshot) bool { return len(x.Sales) == 5 })
	listed := f.sales.listed
	const first = 2
	listed[first].Sale.Sold = 90_000
	f.funnels = funnels{turn: true}
	require.Len(t, f.funnels.due(listed, noon), first, "a large sale is counted by itself")
	require.Nil(t, f.funnels.due(listed, noon), "the turn of the desk")
	for i, sale := range listed[:first] {
		if f.funnels.counted == nil {
			f.funnels.counted = map[uuid.UUID]countedFunnel{}
		}
		f.funnels.counted[sale.ID] = countedFunnel{at: at(float64(-i))}
	}
	require.Equal(t, []uuid.UUID{listed[first].ID}, f.funnels.due(listed, noon), "never counted before")
	f.funnels.after = at(5)
	f.funnels.turn = true
	require.Nil(t, f.funnels.due(listed, at(4)), fmt.Sprintf("it counts one %dth of the time", funnelShare))
	f.funnels.turn = true
	require.NotNil(t, f.funnels.due(listed, at(5)))
}

// The page has the state of draws, and whose units are only offered; events that no relay delivers are trouble.
func TestDrawsAndRelayAreSeenInTheServers(t *testing.T) {
	t.Parallel()
	f, s := newFleet(t)
	create := func(terms reservation.Terms) reservation.Sale {
		terms.Stock, terms.PerOrderLimit = 5, 1
		sale, err := s.Catalog.Create(t.Context(), terms)
		require.NoError(t, err)
		return sale.Sale
	}
	goods := create(reservation.Terms{Name: "goods", PaymentWindow: time.Hour})
	entries := create(reservation.Terms{Name: "entries", ClosesAt: time.Now().Add(time.Hour)})
	list := create(reservation.Terms{Name: "list", PaymentWindow: time.Hour, Waitlist: true})
	plain := create(reservation.Terms{Name: "plain"})
	_, err := s.Catalog.CreateDraw(t.Context(), goods.ID, catalog.DrawTerms{Entries: entries.ID, Freeze: time.Minute})
	require.NoError(t, err)

	all := f.play(t, "the draw", func(x *Snapshot) bool { return x.Sales != nil && saleIn(x, goods.ID).DrawState != "" })
	require.Equal(t, draws.Entering, saleIn(all, goods.ID).DrawState)
	require.True(t, saleIn(all, goods.ID).OffersOnly)
	for _, sale := range []reservation.Sale{entries, list, plain} {
		require.Empty(t, saleIn(all, sale.ID).DrawState, sale.Name)
		require.False(t, saleIn(all, sale.ID).OffersOnly, sale.Name)
	}
	require.NotContains(t, troubleNames(all), noRelay.name, "there is no target")

	s.Exec(t, "UPDATE draws SET voided_at = now(), void_reason = 'late' WHERE sale_id = $1", goods.ID)
	s.Exec(t, "UPDATE sales SET sold = 2 WHERE id = $1", list.EntriesID)
	s.Exec(t, `INSERT INTO relay_targets (name, url, secrets, allow_private, position, fence)
		VALUES ('shop', 'https://shop', '{}', false, 0, 1)`)
	all = f.play(t, "a void draw, and no relay", func(x *Snapshot) bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.unserved > 0 && saleIn(x, goods.ID).DrawState == draws.Void && saleIn(x, list.ID).OffersOnly
	})
	require.Contains(t, troubleNames(all), drawVoid.name)
	_, err = s.Catalog.End(t.Context(), goods.ID)
	require.NoError(t, err)
	f.play(t, "it is over", func(x *Snapshot) bool {
		return saleIn(x, goods.ID).DrawState == "" && !saleIn(x, goods.ID).OffersOnly &&
			!slices.Contains(troubleNames(x), drawVoid.name)
	})
}

// The orders that wait for money are counted by deadline, with the last turn of a pace, and payments over a minute.
func TestUnpaidOrdersAreShown(t *testing.T) {
	t.Parallel()
	f, s := newFleet(t)
	paced, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "paced", Stock: 50, PerOrderLimit: 1, PaymentWindow: 4 * time.Minute, PaymentsPerSecond: 1,
	})
	require.NoError(t, err)
	short, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "short", Stock: 9, PerOrderLimit: 1, PaymentWindow: 50 * time.Second,
	})
	require.NoError(t, err)
	orders := testwork.Confirm(t, s.Pool, short.ID, 4)
	testwork.Confirm(t, s.Pool, paced.ID, 30)
	var lastTurn time.Time // which does not come during the test
	require.NoError(t, s.Pool.QueryRow(t.Context(), `UPDATE orders SET pay_from = now() + interval '1 hour'
		WHERE sale_id = $1 AND pay_from = (SELECT max(pay_from) FROM orders WHERE sale_id = $1) RETURNING pay_from`,
		paced.ID).Scan(&lastTurn))
	payments := ledger.New(s.Pool)
	for _, reference := range []string{"pi_1", "pi_2"} { // one more than the order takes
		_, err := payments.Report(t.Context(), order.Money{Reference: reference, OrderID: orders[0]})
		require.NoError(t, err)
	}
	all := f.play(t, "unpaid orders", func(x *Snapshot) bool { return x.Unpaid != nil && x.Unpaid.InMinute > 0 })
	require.Equal(t, Unpaid{InMinute: 3, InFive: 3, Settled: 1. / 60, Due: 1. / 60}, *saleIn(all, short.ID).Unpaid)
	last := saleIn(all, paced.ID).Unpaid
	require.EqualValues(t, 0, last.InMinute)
	require.EqualValues(t, 30, last.InFive)
	require.WithinDuration(t, lastTurn, last.LastTurn, 0)
	require.EqualValues(t, 33, all.Unpaid.InFive)
	require.Equal(t, last.LastTurn, all.Unpaid.LastTurn)
}

func TestEntriesAreNoStock(t *testing.T) {
	t.Parallel()
	goods := uuid.Must(uuid.NewV7())
	c := catalog.CountedSale{Available: 997, Held: 1, Sold: 2, State: reservation.StateOpen}
	c.EntryFor, c.Stock = goods, 1000
	sale := NewSale(&c)
	sale.SetUnits(&c)
	require.Equal(t, []int64{3, 0}, []int64{sale.Stock, sale.Available})
	require.Equal(t, "open", sale.Status())
}

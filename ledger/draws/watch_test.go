package draws_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/draw"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/ledger/draws"
)

// The void and the late draws come first, whatever else there is, and a draw whose goods have ended is over.
func TestWatchedAreTheVoidAndLateDraws(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	var ready, late, void, over, entering drawn
	for _, d := range []*drawn{&ready, &late, &void, &over, &entering} {
		*d = newDrawIn(t, pool, 2)
	}
	ready.exec(t, "UPDATE draws SET ranked_at = now() WHERE sale_id = $1", ready.goods)
	late.exec(t, "UPDATE sales SET closes_at = now() - interval '70 seconds' WHERE id = $1", late.entries)
	void.exec(t, "UPDATE draws SET voided_at = now(), void_reason = 'late' WHERE sale_id = $1", void.goods)
	over.exec(t, "UPDATE sales SET state = 'ended' WHERE id = $1", over.goods)
	entering.exec(t, "UPDATE sales SET closes_at = now() + interval '1 hour', state = 'open' WHERE id = $1", entering.entries)

	watch := func(most int) (sales []uuid.UUID, found []draws.Watched) {
		found, err := ready.Watch(t.Context(), most)
		require.NoError(t, err)
		for _, w := range found {
			sales = append(sales, w.SaleID)
		}
		return sales, found
	}
	sales, found := watch(10)
	require.Equal(t, []uuid.UUID{void.goods, late.goods, ready.goods, entering.goods}, sales)
	sales, _ = watch(2)
	require.Equal(t, []uuid.UUID{void.goods, late.goods}, sales)
	require.Equal(t, draws.Void, found[0].State)
	require.Equal(t, "late", found[0].VoidReason)
	step, overdue, until := found[1].Next()
	require.Equal(t, draws.StepFreeze, step)
	require.InDelta(t, 40, overdue.Seconds(), 20, "after half of the freeze")
	require.InDelta(t, 110, until.Sub(found[1].At).Seconds(), 25, "three times the freeze after the end")
	_, overdue, _ = found[3].Next()
	require.Zero(t, overdue)
}

func TestNextStepOfDraw(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	at := func(seconds int) time.Time { return noon.Add(time.Duration(seconds) * time.Second) }
	party := []draw.Party{{Name: "notary"}}
	for name, test := range map[string]struct {
		of    draws.Draw
		step  draws.Step
		late  time.Duration
		until time.Time
	}{
		"entering": {of: draws.Draw{State: draws.Entering, ClosesAt: at(-90)}},
		"offering": {of: draws.Draw{State: draws.Offering, RankedAt: at(-9000)}},
		"void":     {of: draws.Draw{State: draws.Void, ClosesAt: at(-9000)}},
		"in time to freeze": {
			draws.Draw{State: draws.Freezing, ClosesAt: at(-9), Freeze: 20 * time.Second}, draws.StepFreeze, 0, at(51),
		},
		"late to freeze": {
			draws.Draw{State: draws.Freezing, ClosesAt: at(-129), Freeze: time.Hour},
			draws.StepFreeze, 9 * time.Second,
			at(3*3600 - 129),
		},
		"late to freeze, with parties": {
			draws.Draw{State: draws.Freezing, ClosesAt: at(-129), Freeze: time.Hour, Parties: party},
			draws.StepFreeze,
			9 * time.Second,
			time.Time{},
		},
		"before the round": {
			draws.Draw{State: draws.Frozen, Rounds: []int64{draw.RoundAt(at(60))}}, draws.StepBeacon, 0, time.Time{},
		},
		"after the round": {
			draws.Draw{State: draws.Frozen, Rounds: []int64{draw.RoundAt(at(-180))}},
			draws.StepBeacon, time.Minute,
			time.Time{},
		},
		"late to reveal": {
			draws.Draw{State: draws.Frozen, Parties: party, FrozenAt: at(-2000), RevealBy: at(1600)},
			draws.StepReveal,
			200 * time.Second, at(1600),
		},
		"late to rank": {
			draws.Draw{State: draws.Ranking, SeededAt: at(-301)}, draws.StepRank, time.Second, time.Time{},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := draws.Watched{Draw: test.of, At: noon}
			step, late, until := w.Next()
			require.Equal(t, test.step, step)
			require.WithinDuration(t, at(int(test.late/time.Second)), noon.Add(late), 3*time.Second) // a round is as long
			require.WithinDuration(t, test.until, until, 3*time.Second)
		})
	}
}

// Offers of the latest turns are open, expired or answered; an order that is not recorded yet is open.
func TestWatchedOffers(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	d := newDrawIn(t, pool, 2)
	list := newDrawIn(t, pool, 30)
	list.exec(t, "UPDATE draws SET kind = 'waitlist', offered = 25 WHERE sale_id = $1", list.goods)
	list.exec(t, `INSERT INTO draw_offers (sale_id, rank, place, entry_id, order_id, reason, epoch, offered_at)
		SELECT $1, n, n, id, CASE WHEN n <> 24 THEN md5(n::text)::uuid END, CASE n WHEN 24 THEN 'already-purchased' END, 1,
			now() - interval '1 hour' + n * interval '1 minute'
		FROM (SELECT id, row_number() OVER (ORDER BY id) - 1 AS n FROM orders WHERE sale_id = $2) AS entry WHERE n < 25`,
		list.goods, list.entries)
	// The ranks 0 to 4 are too old, 24 was skipped, and 23 is on its way.
	list.exec(t, `INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at,
			updated_at, due)
		SELECT md5(n::text)::uuid, $1, 'user-' || n, 1, CASE WHEN n < 14 THEN 'expired' WHEN n < 17 THEN 'paid'
			WHEN n < 19 THEN 'cancelled' ELSE 'confirmed' END, 2, n, 1, now(), now(), CASE WHEN n <> 22 THEN now() END
		FROM generate_series(0, 22) AS n`, list.goods)
	// One who had a turn left thereafter.
	list.exec(t, `UPDATE orders SET status = 'cancelled' WHERE sale_id = $1
		AND id = (SELECT entry_id FROM draw_offers WHERE sale_id = $2 AND rank = 3)`, list.entries, list.goods)
	list.exec(t, "UPDATE sales SET sold = 29 WHERE id = $1", list.entries)

	found, err := d.Watch(t.Context(), 1)
	require.NoError(t, err)
	require.Len(t, found, 2)
	require.Equal(t, d.goods, found[0].SaleID)
	require.Equal(t, draws.Offers{}, found[0].Offers)
	w := found[1]
	require.Equal(t, list.goods, w.SaleID)
	require.Equal(t, testshop.Rows(t, pool, "SELECT name FROM sales WHERE id = $1", list.goods), []string{w.Name})
	require.EqualValues(t, 5, w.Waiting)
	require.InDelta(t, 41, w.Offers.Oldest.Minutes(), 1)
	w.Offers.Oldest = 0
	require.Equal(t, draws.Offers{Open: 4, Expired: 9, Answered: 6}, w.Offers)
	step, _, _ := w.Next()
	require.Empty(t, step)
}

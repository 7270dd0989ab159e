package catalog_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/draw"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// drawable creates the goods and the entries of a draw, which may be changed before.
func drawable(
	t *testing.T, s *testshop.Shop, change func(goods, entries *reservation.Terms),
) (goods uuid.UUID, terms catalog.DrawTerms) {
	t.Helper()
	g := reservation.Terms{Name: "goods", Stock: 2, PerOrderLimit: 1, PaymentWindow: time.Minute}
	e := reservation.Terms{Name: "entries", Stock: 100, PerOrderLimit: 1, ClosesAt: time.Now().Add(time.Hour)}
	if change != nil {
		change(&g, &e)
	}
	sale, err := s.Create(t.Context(), g)
	require.NoError(t, err)
	entries, err := s.Create(t.Context(), e)
	require.NoError(t, err)
	return sale.ID, catalog.DrawTerms{Entries: entries.ID, Freeze: time.Minute}
}

func TestDrawOffersUnitsToEntrantsOnly(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	ctx := catalog.WithOperator(t.Context(), "ada")
	goods, terms := drawable(t, s, func(g, e *reservation.Terms) {
		g.ClosesAt = e.ClosesAt.Add(time.Minute + time.Second)
	})
	terms.Parties = []catalog.Party{
		{Name: "ann", Commitment: strings.Repeat("0A", 32)}, {Name: "bob", Commitment: strings.Repeat("1b", 32)},
	}
	replayed, err := s.CreateDraw(ctx, goods, terms)
	require.NoError(t, err)
	require.False(t, replayed)
	require.Equal(t, reservation.OffersOnly, s.Ask(t, goods, "eve").Verdict)
	require.Equal(t, reservation.Reserved, s.Ask(t, terms.Entries, "eve").Verdict)

	sale, err := s.Show(ctx, goods)
	require.NoError(t, err)
	require.Equal(t, reservation.StateOpen, sale.State)
	text, err := json.Marshal(sale)
	require.NoError(t, err)
	require.Contains(t, string(text), fmt.Sprintf(`"offers_only":true,"entries_sale_id":%q,"created_at"`, terms.Entries))
	var read catalog.CountedSale
	require.NoError(t, json.Unmarshal(text, &read))
	require.True(t, read.OffersOnly)
	require.Equal(t, terms.Entries, read.EntriesID)
	entries, err := s.Show(ctx, terms.Entries)
	require.NoError(t, err)
	text, err = json.Marshal(entries)
	require.NoError(t, err)
	require.NotContains(t, string(text), "offers", "a sale that is not drawn shows nothing of it")

	history, err := s.History(ctx, goods, 9)
	require.NoError(t, err)
	require.Equal(t, "draw-created", history[1].Name())
	require.Equal(t, "ada", history[1].Operator)
	require.JSONEq(t, fmt.Sprintf(`{"version": %d, "stock": 2, "entries_sale_id": %q, "freeze_seconds": 60, "parties": [
		{"name": "ann", "commitment": %q}, {"name": "bob", "commitment": %q}]}`,
		draw.Version, terms.Entries, strings.Repeat("0a", 32), strings.Repeat("1b", 32)), string(history[1].Data))
	var parties []draw.Party
	require.NoError(t, s.Pool.QueryRow(ctx, "SELECT parties FROM draws WHERE sale_id = $1", goods).Scan(&parties))
	require.Equal(t, draw.Party{Name: "bob", Commitment: []byte(strings.Repeat("\x1b", 32))}, parties[1])

	require.NoError(t, s.Exec(t, `UPDATE draws SET parties = jsonb_set(parties, '{0,secret}', '"00"')`))
	replayed, err = s.CreateDraw(ctx, goods, terms)
	require.NoError(t, err)
	require.True(t, replayed, "also after a party has revealed its secret")
	terms.Parties = terms.Parties[:1]
	_, err = s.CreateDraw(ctx, goods, terms)
	var illegal *reservation.IllegalTransitionError
	require.ErrorAs(t, err, &illegal)

	_, err = s.Pause(ctx, goods)
	require.NoError(t, err)
	require.Equal(t, reservation.Paused, s.Ask(t, goods, "eve").Verdict)
	_, err = s.Resume(ctx, goods)
	require.NoError(t, err)
	require.Equal(t, reservation.OffersOnly, s.Ask(t, goods, "eve").Verdict)
	offer := []reservation.Offer{{OrderID: order.NewOrderID(goods), UserID: "eve"}}
	answers, err := s.Offer(ctx, sale.Sale, offer)
	require.NoError(t, err)
	require.Equal(t, reservation.Reserved, answers[0].Verdict)
	_, err = s.End(ctx, goods)
	require.NoError(t, err)
	require.Equal(t, reservation.Ended, s.Ask(t, goods, "dan").Verdict)

	for _, step := range []string{"DrawFrozen", "DrawSeeded", "DrawVoided"} {
		require.NoError(t, s.Exec(t, `WITH next AS (UPDATE sales SET revision = revision + 1 WHERE id = $1 RETURNING revision)
			INSERT INTO sale_events (sale_id, revision, type, data) SELECT $1, revision, $2, '{}' FROM next`, goods, step))
	}
	published, err := s.PublishPending(ctx)
	require.NoError(t, err)
	require.Equal(t, 1, published, "Redis follows the steps of a draw")
	require.Equal(t, "8", s.SaleInRedis(t, goods)["revision"])
}

// Each draw that cannot be is refused with a sentence of its own, and nothing is changed.
func TestDrawRefusals(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 2)
	ctx := t.Context()
	items := []reservation.Item{{Code: "m", Name: "m", Stock: 1}, {Code: "l", Name: "l", Stock: 1}}
	party := func(name, commitment string) catalog.Party {
		return catalog.Party{Name: name, Commitment: strings.Repeat(commitment, 32)}
	}
	parties := func(of ...catalog.Party) func(*uuid.UUID, *catalog.DrawTerms) {
		return func(_ *uuid.UUID, d *catalog.DrawTerms) { d.Parties = of }
	}
	type change = func(goods, entries *reservation.Terms)
	type then = func(goods *uuid.UUID, d *catalog.DrawTerms)
	for name, test := range map[string]struct {
		change change
		then   then
		want   string
	}{
		"no end": {
			func(_, e *reservation.Terms) { e.ClosesAt = time.Time{} }, nil, "entries_sale_id must be a sale with closes_at",
		},
		"ended entries": {nil, func(_ *uuid.UUID, d *catalog.DrawTerms) {
			_, err := s.End(ctx, d.Entries)
			require.NoError(t, err)
		}, "entries_sale_id must be a sale that has not ended"},
		"a round in the past": {nil, func(_ *uuid.UUID, d *catalog.DrawTerms) {
			require.NoError(t, s.Exec(t, "UPDATE sales SET closes_at = now() - interval '1 day' WHERE id = $1", d.Entries))
		}, "entries_sale_id must be a sale that has not ended"},
		"many entries for one": {
			func(_, e *reservation.Terms) { e.PerOrderLimit = 2 }, nil, "entries_sale_id must be a sale with per_order_limit 1",
		},
		"entries to be paid": {
			func(_, e *reservation.Terms) { e.PaymentWindow = time.Minute }, nil,
			"entries_sale_id must be a sale without payment_window_seconds",
		},
		"entries with a price": {
			func(_, e *reservation.Terms) { e.UnitPrice, e.Currency = 1, "EUR" }, nil,
			"entries_sale_id must be a sale without unit_price",
		},
		"entries of items with a price": {
			func(_, e *reservation.Terms) {
				e.Items, e.Stock, e.Currency = []reservation.Item{{Code: "m", Name: "m", Stock: 1, UnitPrice: 1}}, 1, "EUR"
			}, nil, "entries_sale_id must be a sale without unit_price",
		},
		"other items": {
			func(g, e *reservation.Terms) {
				g.Items, g.Stock = items, 2
				e.Items, e.Stock = []reservation.Item{items[1], items[0]}, 2
			}, nil, "entries_sale_id must be a sale with the items of the one that is drawn, in the same order",
		},
		"no items": {
			func(g, _ *reservation.Terms) { g.Items, g.Stock = items, 2 }, nil,
			"entries_sale_id must be a sale with the items of the one that is drawn, in the same order",
		},
		"goods that close too early": {
			func(g, e *reservation.Terms) { g.ClosesAt = e.ClosesAt.Add(time.Minute) }, nil,
			"entries_sale_id must close, with freeze_seconds, before the sale that is drawn",
		},
		"goods in shards": {
			func(g, _ *reservation.Terms) { g.Shards = 2 }, nil, "cannot draw a sale that is in several shards",
		},
		"ended goods": {nil, func(goods *uuid.UUID, _ *catalog.DrawTerms) {
			_, err := s.End(ctx, *goods)
			require.NoError(t, err)
		}, "cannot draw a sale that is ended"},
		"held units": {nil, func(goods *uuid.UUID, _ *catalog.DrawTerms) {
			s.Buy(t, *goods, "ann")
		}, "cannot draw a sale that is sold in part: units of it are held or sold"},
		"sold units": {nil, func(goods *uuid.UUID, _ *catalog.DrawTerms) {
			require.NoError(t, s.Exec(t, "UPDATE sales SET sold = 1 WHERE id = $1", *goods))
		}, "cannot draw a sale that is sold in part: units of it are held or sold"},
		"one sale": {nil, func(goods *uuid.UUID, d *catalog.DrawTerms) {
			d.Entries = *goods
		}, "entries_sale_id must be another sale than the one that is drawn"},
		"unknown entries": {nil, func(_ *uuid.UUID, d *catalog.DrawTerms) {
			d.Entries = uuid.Must(uuid.NewV7())
		}, "entries_sale_id must be the id of a sale"},
		"unknown goods": {nil, func(goods *uuid.UUID, _ *catalog.DrawTerms) {
			*goods = uuid.Must(uuid.NewV7())
		}, reservation.ErrSaleNotFound.Error()},
		"drawn goods": {nil, func(goods *uuid.UUID, d *catalog.DrawTerms) {
			_, err := s.CreateDraw(ctx, *goods, *d)
			require.NoError(t, err)
			_, *d = drawable(t, s, nil)
		}, "cannot draw a sale that is drawn: create another sale for another draw"},
		"goods that are entries": {nil, func(goods *uuid.UUID, d *catalog.DrawTerms) {
			_, err := s.CreateDraw(ctx, *goods, *d)
			require.NoError(t, err)
			*goods = d.Entries
			_, *d = drawable(t, s, nil)
		}, "cannot draw a sale that is the entries of a draw: create another sale for another draw"},
		"used entries": {nil, func(goods *uuid.UUID, d *catalog.DrawTerms) {
			_, err := s.CreateDraw(ctx, *goods, *d)
			require.NoError(t, err)
			*goods, _ = drawable(t, s, nil)
		}, "entries_sale_id must not be part of another draw or of a waiting list"},
		"entries that are drawn": {nil, func(goods *uuid.UUID, d *catalog.DrawTerms) {
			_, err := s.CreateDraw(ctx, *goods, *d)
			require.NoError(t, err)
			d.Entries = *goods
			*goods, _ = drawable(t, s, nil)
		}, "entries_sale_id must not be part of another draw or of a waiting list"},
		"goods with a waiting list": {
			func(g, _ *reservation.Terms) { g.Waitlist = true }, nil,
			"cannot draw a sale that is sold with a waiting list: create another sale for another draw",
		},
		"a short freeze": {nil, func(_ *uuid.UUID, d *catalog.DrawTerms) {
			d.Freeze = draw.FreezeMin - time.Second
		}, "freeze_seconds must be a whole number from 10 to 86400"},
		"a long freeze": {nil, func(_ *uuid.UUID, d *catalog.DrawTerms) {
			d.Freeze = draw.FreezeMax + time.Second
		}, "freeze_seconds must be a whole number from 10 to 86400"},
		"empty parties":  {nil, parties([]catalog.Party{}...), "parties must be 1 to 16, or left out"},
		"many parties":   {nil, parties(make([]catalog.Party, 17)...), "parties must be 1 to 16, or left out"},
		"no name":        {nil, parties(party("", "0a")), "parties[0].name must be 1 to 64 characters, not only spaces"},
		"a control name": {nil, parties(party("a\n", "0a")), "parties[0].name must not contain control characters"},
		"a long name":    {nil, parties(party(strings.Repeat("ä", 33), "0a")), "parties[0].name must be at most 64 bytes"},
		"no hash": {
			nil, parties(party("ann", "0")), "parties[0].commitment must be a SHA-256 in hexadecimal, 64 digits",
		},
		"no digits": {
			nil, parties(party("ann", "0g")), "parties[0].commitment must be a SHA-256 in hexadecimal, 64 digits",
		},
		"one name": {
			nil, parties(party("ann", "0a"), party("ann", "0b")), "parties[1].name is that of another party",
		},
		"one commitment": {
			nil, parties(party("ann", "0a"), party("bob", "0A")), "parties[1].commitment is that of another party",
		},
	} {
		t.Run(name, func(t *testing.T) {
			goods, terms := drawable(t, s, test.change)
			if test.then != nil {
				test.then(&goods, &terms)
			}
			drawn := "SELECT count(*) FROM draws WHERE sale_id = $1 OR entries_id = $2"
			before := s.Count(t, drawn, goods, terms.Entries)
			_, err := s.CreateDraw(ctx, goods, terms)
			require.EqualError(t, err, test.want)
			require.Equal(t, before, s.Count(t, drawn, goods, terms.Entries))
		})
	}
}

// What a draw leaves is for everybody only if it can be: its own sale goes on, and is drawn.
func TestDrawIsNotOpened(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	ctx := t.Context()
	plain, _ := drawable(t, s, nil)
	void, terms := drawable(t, s, nil)
	_, err := s.CreateDraw(ctx, void, terms)
	require.NoError(t, err)
	require.NoError(t, s.Exec(t, "UPDATE draws SET voided_at = now(), void_reason = 'late' WHERE sale_id = $1", void))
	ended, others := drawable(t, s, nil)
	_, err = s.CreateDraw(ctx, ended, others)
	require.NoError(t, err)
	_, err = s.End(ctx, ended)
	require.NoError(t, err)
	for sale, want := range map[uuid.UUID]string{
		plain: "cannot open a sale that is not drawn",
		void: "cannot open a sale that is drawn, and its draw is void: " +
			"end it, and sell its units as another sale",
		ended: "cannot open a sale that is ended",
		terms.Entries: "cannot open a sale that is the entries of a draw: open the sale " + void.String() +
			", whose units are drawn",
		uuid.New(): reservation.ErrSaleNotFound.Error(),
	} {
		require.EqualError(t, s.OpenDraw(ctx, sale), want)
	}
	require.Zero(t, s.Count(t, "SELECT count(*) FROM sale_events WHERE type LIKE 'DrawOpen%'"))
}

// A commitment is of one draw: the secrets of another one may be known, be it that it is void.
func TestCommitmentsAreUsedOnce(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	ctx := t.Context()
	with := func(commitments ...string) (uuid.UUID, catalog.DrawTerms) {
		goods, terms := drawable(t, s, nil)
		for n, commitment := range commitments {
			terms.Parties = append(terms.Parties, catalog.Party{
				Name: fmt.Sprint("party-", n), Commitment: strings.Repeat(commitment, 32),
			})
		}
		return goods, terms
	}
	requireUsed := func(n int, goods uuid.UUID, terms catalog.DrawTerms) {
		_, err := s.CreateDraw(ctx, goods, terms)
		var invalid *order.InvalidError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, fmt.Sprintf("parties[%d].commitment", n), invalid.Field)
		require.Equal(t, fmt.Sprintf("must be that of a new secret: another draw has used %s of %q",
			terms.Parties[n].Commitment, terms.Parties[n].Name), invalid.Reason)
		require.Zero(t, s.Count(t, "SELECT count(*) FROM draws WHERE sale_id = $1", goods))
	}
	goods, terms := with("0a", "0b")
	_, err := s.CreateDraw(ctx, goods, terms)
	require.NoError(t, err)
	require.NoError(t, s.Exec(t, "UPDATE draws SET voided_at = now(), void_reason = 'late' WHERE sale_id = $1", goods))
	goods, terms = with("0c", "0b")
	requireUsed(1, goods, terms)
	terms.Parties[1].Commitment = strings.Repeat("0d", 32)
	_, err = s.CreateDraw(ctx, goods, terms)
	require.NoError(t, err, "the refused draw has used nothing")

	// A program from before this rule, and whoever brings a draw back, adds a row alone.
	require.NoError(t, s.Exec(t, `INSERT INTO draws (sale_id, entries_id, kind, parties) VALUES ($1, $2, 'draw', $3)`,
		uuid.New(), uuid.New(), []draw.Party{{Name: "old", Commitment: bytes.Repeat([]byte{0xe}, 32)}}))
	goods, terms = with("0e")
	requireUsed(0, goods, terms)

	// Of many at once one is made.
	created := make(chan error)
	for n := range 4 {
		goods, terms := with("1a", "1b")
		if n%2 == 1 {
			terms.Parties[0].Commitment, terms.Parties[1].Commitment = terms.Parties[1].Commitment, terms.Parties[0].Commitment
		}
		go func() {
			_, err := s.CreateDraw(ctx, goods, terms)
			created <- err
		}()
	}
	made := 0
	for range 4 {
		if err := <-created; err == nil {
			made++
		} else {
			require.ErrorContains(t, err, "must be that of a new secret")
		}
	}
	require.Equal(t, 1, made)
}

// Of two draws that would share a sale only one is made.
func TestDrawWaitsForOtherDrawOfItsEntries(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	goods, terms := drawable(t, s, nil)
	other := s.HoldSale(t, terms.Entries)
	created := make(chan error, 1)
	go func() {
		_, err := s.CreateDraw(t.Context(), goods, terms)
		created <- err
	}()
	s.AwaitWaiting(t, 1)
	_, err := other.Exec(t.Context(),
		"INSERT INTO draws (sale_id, entries_id, kind) VALUES ($1, $2, 'draw')", terms.Entries, uuid.New())
	require.NoError(t, err)
	require.NoError(t, other.Commit(t.Context()))
	require.ErrorContains(t, <-created, "entries_sale_id must not be part of another draw")
}

func TestWaitlistIsCreatedWithItsSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	ctx := t.Context()
	terms := reservation.Terms{
		Name: strings.Repeat("ü", order.MaxNameRunes), Stock: 1, PerOrderLimit: 1, PaymentWindow: time.Minute, Shards: 1,
		ClosesAt: time.Now().Add(time.Hour).UTC().Truncate(time.Millisecond), Waitlist: true,
	}
	sale, replayed, err := s.CreateOnce(ctx, terms, "key")
	require.NoError(t, err)
	require.False(t, replayed)
	require.Equal(t, terms, sale.Terms)
	again, replayed, err := s.CreateOnce(ctx, terms, "key")
	require.NoError(t, err)
	require.True(t, replayed)
	require.Equal(t, sale.ID, again.ID)
	require.Equal(t, sale.EntriesID, again.EntriesID)
	require.EqualValues(t, 2, s.Count(t, "SELECT count(*) FROM sales"))
	terms.Waitlist = false
	_, _, err = s.CreateOnce(ctx, terms, "key")
	require.ErrorIs(t, err, catalog.ErrIdempotencyKeyReused)

	shown, err := s.Show(ctx, sale.ID)
	require.NoError(t, err)
	require.Equal(t, sale.EntriesID, shown.EntriesID)
	text, err := json.Marshal(shown)
	require.NoError(t, err)
	require.Contains(t, string(text), `"shards":1,"waitlist":true,"state":"open"`)
	require.Contains(t, string(text), `"waiting":0,"created_at"`)
	entries, err := s.Show(ctx, sale.EntriesID)
	require.NoError(t, err)
	require.Equal(t, reservation.Terms{
		Name: strings.Repeat("ü", order.MaxNameRunes-14) + ": waiting list", Stock: order.MaxStock, PerOrderLimit: 1,
		ClosesAt: terms.ClosesAt, Shards: 1,
	}, entries.Terms)
	require.Equal(t, reservation.OffersOnly, s.Ask(t, sale.EntriesID, "bob").Verdict, "Store.Join gives places")
	goods, drawn := drawable(t, s, nil)
	_, err = s.CreateDraw(ctx, goods, drawn)
	require.NoError(t, err)
	listed, err := s.List(ctx, uuid.Nil, 10)
	require.NoError(t, err)
	require.Equal(t, []uuid.UUID{drawn.Entries, goods, sale.ID},
		[]uuid.UUID{listed[0].ID, listed[1].ID, listed[2].ID}, "not the places to wait")

	ann := s.Buy(t, sale.ID, "ann")
	require.Equal(t, reservation.SoldOut, s.Ask(t, sale.ID, "eve").Verdict)
	_, err = s.Release(ctx, []reservation.Release{{SaleID: sale.ID, OrderID: ann, UserID: "ann", Quantity: 1}})
	require.NoError(t, err)
	testkit.Eventually(t, 30*time.Second, "no ingress remembers that nothing is left", func() bool {
		return s.Ask(t, sale.ID, "eve").Verdict == reservation.OffersOnly
	})
	reopened, err := s.Reopen(ctx, sale.Sale, nil)
	require.NoError(t, err)
	require.True(t, reopened)
	testkit.Eventually(t, 30*time.Second, "everybody may buy it", func() bool {
		return s.Ask(t, sale.ID, "eve").Verdict == reservation.Reserved
	})
	reopened, err = s.Reopen(ctx, sale.Sale, nil)
	require.NoError(t, err)
	require.False(t, reopened)
	_, err = s.Reopen(ctx, entries.Sale, nil)
	require.ErrorContains(t, err, "no waiting list")
}

package fleet

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

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

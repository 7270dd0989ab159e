package rebuild_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// drawn opens a sale whose units are offered to entrants.
func drawn(t *testing.T, s *testshop.Shop, stock int64) reservation.Sale {
	t.Helper()
	entries, err := s.Create(t.Context(), reservation.Terms{
		Name: "entries", Stock: 9, PerOrderLimit: 1, ClosesAt: time.Now().Add(time.Hour),
	})
	require.NoError(t, err)
	goods := s.OpenPayable(t, stock)
	_, err = s.CreateDraw(t.Context(), goods, catalog.DrawTerms{Entries: entries.ID, Freeze: time.Minute})
	require.NoError(t, err)
	return reservation.Sale{ID: goods}
}

// offered repeats offers, and returns the verdicts.
func offered(
	t *testing.T, s *testshop.Shop, sale reservation.Sale, offers ...reservation.Offer,
) (words []reservation.Verdict) {
	t.Helper()
	answers, err := s.Offer(t.Context(), sale, offers)
	require.NoError(t, err)
	for _, a := range answers {
		words = append(words, a.Verdict)
	}
	return words
}

func offerTo(sale reservation.Sale, user string) reservation.Offer {
	return reservation.Offer{OrderID: order.NewOrderID(sale.ID), UserID: user}
}

// A rebuilt sale gives its units to entrants as before, and repeats of offers are recognized.
func TestRebuildKeepsUnitsOffered(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	open, paused := drawn(t, s, 2), drawn(t, s, 2)
	_, err := s.Catalog.Pause(t.Context(), paused.ID)
	require.NoError(t, err)
	list, err := s.Create(t.Context(), reservation.Terms{Name: "list", Stock: 2, PerOrderLimit: 1, Waitlist: true})
	require.NoError(t, err)
	require.Equal(t, reservation.Reserved, s.Ask(t, list.ID, "ann").Verdict)
	ann, bob, cid := offerTo(open, "ann"), offerTo(open, "bob"), offerTo(open, "cid")
	require.Equal(t, []reservation.Verdict{reservation.Reserved, reservation.Reserved}, offered(t, s, open, ann, bob))
	testwork.Fulfil(t, s)
	testwork.Cancel(t, ledger.New(s.Pool), ann.OrderID, "ann")
	testwork.RequireUnbroken(t, s, uuid.Nil)

	s.Flush(t)
	testwork.Rebuild(t, s)
	s.RequireSound(t)
	testwork.RequireUnbroken(t, s, uuid.Nil)
	require.Equal(t, reservation.OffersOnly, s.Ask(t, open.ID, "eve").Verdict)
	require.Equal(t, []reservation.Verdict{reservation.OrderEnded, reservation.Replayed, reservation.Reserved},
		offered(t, s, open, ann, bob, cid))
	require.Equal(t, reservation.Paused, s.Ask(t, paused.ID, "eve").Verdict)
	_, err = s.Catalog.Resume(t.Context(), paused.ID)
	require.NoError(t, err)
	require.Equal(t, reservation.OffersOnly, s.Ask(t, paused.ID, "eve").Verdict)
	require.Equal(t, reservation.OffersOnly, s.Ask(t, list.ID, "eve").Verdict, "somebody may wait")
	rebuilt, err := s.Show(t.Context(), list.ID)
	require.NoError(t, err)
	reopened, err := s.Reopen(t.Context(), rebuilt.Sale, nil)
	require.NoError(t, err)
	require.True(t, reopened)
	require.Equal(t, reservation.Reserved, s.Ask(t, list.ID, "eve").Verdict)
	testwork.Fulfil(t, s)
	testwork.RequireUnbroken(t, s, uuid.Nil)
}

package designs

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/bench/front"
)

// Every design with its stock in Redis keeps these promises to buyers who come one after another.
func TestRedisDesignsSellToSequentialBuyers(t *testing.T) {
	t.Parallel()
	for name, accepted := range map[string]front.Verdict{
		"check-set": front.Confirmed, "mutex": front.Confirmed, "setnx": front.Confirmed,
		"memory-queue": front.Reserved, "stock-stream": front.Reserved,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSale(t, 3, All[name].Guarded)
			first := openDesign[front.Design](t, s, All[name].New)
			stop := run(t, first)
			require.Equal(t, accepted, s.buy(t, first, "alice"))
			require.Equal(t, front.AlreadyPurchased, s.buy(t, first, "alice"))
			stop()

			d := openDesign[front.Design](t, s, All[name].New)
			run(t, d)
			require.Equal(t, front.AlreadyPurchased, s.buy(t, d, "alice"), "after a restart")
			bobs := s.order("bob")
			bobs.Quantity = 3
			verdict, err := d.Buy(t.Context(), bobs)
			require.NoError(t, err)
			require.Equal(t, front.SoldOut, verdict, "a restart keeps what is left: two units")
			bobs.Quantity = 2
			verdict, err = d.Buy(t.Context(), bobs)
			require.NoError(t, err)
			require.Equal(t, accepted, verdict)
			require.Equal(t, front.SoldOut, s.buy(t, d, "carol"))
			s.requireOrders(t, 2)
		})
	}
}

func TestCheckSetSellsLastUnitTwice(t *testing.T) {
	t.Parallel()
	s := newSale(t, 1, All["check-set"].Guarded)
	d := openDesign[*checkSet](t, s, newCheckSet)
	g := holdCommands(d.rdb, "set")
	alice, bob := s.startBuying(t, d, "alice"), s.startBuying(t, d, "bob")
	<-g.reached
	<-g.reached
	close(g.open)
	require.Equal(t, purchaseResult{verdict: front.Confirmed}, <-alice)
	require.Equal(t, purchaseResult{verdict: front.Confirmed}, <-bob)
	require.Equal(t, 2, s.orders(t), "orders of one unit")
}

func TestCheckSetSellsTwiceToConcurrentClicks(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, All["check-set"].Guarded)
	d := openDesign[*checkSet](t, s, newCheckSet)
	g := holdCommands(d.rdb, "set")
	first, second := s.startBuying(t, d, "alice"), s.startBuying(t, d, "alice")
	<-g.reached
	<-g.reached
	close(g.open)
	require.Equal(t, purchaseResult{verdict: front.Confirmed}, <-first)
	require.Equal(t, purchaseResult{verdict: front.Confirmed}, <-second)
	require.Equal(t, "9", s.rdb.Get(t.Context(), d.stockKey(s.id)).Val(), "both stored the same remainder")
}

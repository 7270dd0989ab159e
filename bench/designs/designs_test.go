package designs

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/bench/front"
)

// testDesigns runs a test for each design that sells and needs nothing but Redis and Postgres, once for those that are
// on the ladder in several forms. Designs that answer before the order is in Postgres accept as Reserved.
func testDesigns(t *testing.T, stock int64, test func(t *testing.T, name string, s *testSale, accepted front.Verdict)) {
	t.Parallel()
	for name, entry := range All {
		if entry.NoOrders || entry.Missing != nil || entry.Fronts > 0 || entry.Options != nil {
			continue
		}
		accepted := front.Confirmed
		if name == "memory-queue" || name == "stock-stream" {
			accepted = front.Reserved
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, name, newSale(t, stock, entry.Guarded), accepted)
		})
	}
}

func TestDesignsSellToSequentialBuyers(t *testing.T) {
	testDesigns(t, 3, func(t *testing.T, name string, s *testSale, accepted front.Verdict) {
		first := openDesign[front.Design](t, s, All[name].New)
		stop := run(t, first)
		require.Equal(t, accepted, s.buy(t, first, "alice"))
		require.Equal(t, front.AlreadyPurchased, s.buy(t, first, "alice"))
		stop()

		d := openDesign[front.Design](t, s, All[name].New)
		run(t, d)
		require.Equal(t, front.AlreadyPurchased, s.buy(t, d, "alice"), "in another process")
		buy := func(quantity int64) front.Verdict {
			o := s.order("bob")
			o.Quantity = quantity
			verdict, err := d.Buy(t.Context(), o)
			require.NoError(t, err)
			return verdict
		}
		require.Equal(t, front.SoldOut, buy(3), "another process, and refused orders, keep what is left: two units")
		require.Equal(t, accepted, buy(2))
		require.Equal(t, front.SoldOut, s.buy(t, d, "carol"))
		s.requireOrders(t, 2)
		if All[name].Guarded {
			require.Equal(t, front.AlreadyPurchased, s.buy(t, d, "alice"), "also when it is sold out")
			s.requireRows(t, 2, 3)
		}
	})
}

func TestDesignsSellStockToCrowd(t *testing.T) {
	testDesigns(t, 20, func(t *testing.T, name string, s *testSale, accepted front.Verdict) {
		if name == "check-set" {
			return // it sells more: TestCheckSetSellsLastUnitTwice
		}
		d := []front.Design{openDesign[front.Design](t, s, All[name].New)}
		if name != "mutex" { // in two processes: TestMutexOversellsInTwoProcesses
			d = append(d, openDesign[front.Design](t, s, All[name].New))
		}
		for _, process := range d {
			run(t, process)
		}
		require.Equal(t, map[front.Verdict]int{accepted: 20, front.SoldOut: 44}, s.crowd(t, 64, d...))
		s.requireOrders(t, 20)
		if All[name].Guarded {
			s.requireRows(t, 20, 20)
		}
	})
}

package designs

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/bench/front"
)

// Two buyers read the stock before one of them writes it.
func TestCheckSetSellsLastUnitTwice(t *testing.T) {
	t.Parallel()
	for name, second := range map[string]string{"two buyers": "bob", "two clicks of a buyer": "alice"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSale(t, 1, All["check-set"].Guarded)
			d := openDesign[*checkSet](t, s, newCheckSet)
			g := holdCommands(d.rdb, "set")
			results := []<-chan purchaseResult{s.startBuying(t, d, "alice"), s.startBuying(t, d, second)}
			<-g.reached
			<-g.reached
			close(g.open)
			for _, result := range results {
				require.Equal(t, purchaseResult{verdict: front.Confirmed}, <-result)
			}
			require.Equal(t, 2, s.orders(t), "orders of one unit")
			require.Equal(t, "0", s.rdb.Get(t.Context(), d.stockKey(s.id)).Val(), "both stored the same remainder")
		})
	}
}

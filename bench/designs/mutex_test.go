package designs

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/bench/front"
)

func TestMutexOversellsInTwoProcesses(t *testing.T) {
	t.Parallel()
	s := newSale(t, 1, All["mutex"].Guarded)
	here, there := openDesign[*mutex](t, s, newMutex), openDesign[*mutex](t, s, newMutex)
	g := holdCommands(here.rdb, "set")
	alice := s.startBuying(t, here, "alice")
	<-g.reached
	require.Equal(t, front.Confirmed, s.buy(t, there, "bob"))
	close(g.open)
	require.Equal(t, purchaseResult{verdict: front.Confirmed}, <-alice)
	require.Equal(t, 2, s.orders(t), "orders of one unit")
}

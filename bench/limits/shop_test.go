package limits

import (
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/bench/rig"
	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

const (
	// hugeStock is more than any turn can sell.
	hugeStock = 50_000_000
	// callGrace is how much longer than the turn its last call may take.
	callGrace = 10 * time.Second
)

// buyerSerial numbers buyers who have bought nothing yet.
var buyerSerial atomic.Uint64

// shop is a turn's own servers with a sale, for use without an ingress.
type shop struct {
	*rig.Shop
	keys reservation.Keys
	sale uuid.UUID
}

// openShop opens a shop and a sale without processes.
func openShop(b *testing.B) shop {
	b.Helper()
	on := rig.Open(b)
	store := reservation.NewStore(on.Redis, on.Keys(1), reservation.StoreOptions{Logger: slog.New(slog.DiscardHandler)})
	defer store.Close()
	sale, err := catalog.New(on.Pool, store).Create(b.Context(), reservation.Terms{
		Name: "limits", Stock: hugeStock, PerOrderLimit: 1,
	})
	require.NoError(b, err)
	return shopOf(b, on, sale.ID)
}

func shopOf(b *testing.B, on *rig.Shop, sale uuid.UUID) shop {
	b.Helper()
	require.NoError(b, lua.Reserve.Load(b.Context(), on.Redis).Err()) // calls use only its hash
	return shop{on, on.Keys(1), sale}
}

// fill reserves so many orders. Their events then wait in the stream.
func (s shop) fill(b *testing.B, orders int) {
	b.Helper()
	const batch, within = 256, time.Minute
	reserved := s.reserveAll(b, newRequests(s.sale, orders), batch, 1, within)
	require.EqualValues(b, orders, reserved)
}

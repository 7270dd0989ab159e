//go:build system

package rebuild_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
)

func TestRebuildVoidsExactlyTheLostTailOfAOF(t *testing.T) {
	t.Parallel()
	for _, recorded := range []int{0, 80, 140} { // orders in Postgres before Redis is lost
		t.Run(fmt.Sprintf("%d in Postgres", recorded), func(t *testing.T) {
			t.Parallel()
			const kept, cut = 100, 100
			s := testshop.OnOwnRedis(t, 1)
			sale := s.Open(t, 1000)
			var receipts []order.Receipt
			buy := func() {
				user := fmt.Sprintf("user-%d", len(receipts))
				r := s.Ask(t, sale, user).Reservation
				receipts = append(receipts, order.Receipt{
					OrderID: r.OrderID, SaleID: sale, User: user, Epoch: r.Epoch, Sequence: r.Sequence, Quantity: 1,
					ReservedAt: r.ReservedAt,
				})
				if len(receipts) == recorded {
					testwork.Fulfil(t, s)
				}
			}
			for range kept {
				buy()
			}
			file := appendOnlyFile(t, s)
			size := sizeOf(t, file)
			for range cut {
				buy()
			}
			s.Server.Kill()
			// Inside a command: Redis truncates the incomplete one.
			require.NoError(t, os.Truncate(file, size+(sizeOf(t, file)-size)/2+1))
			require.NoError(t, s.Server.Restart(t.Context()))
			survived := map[uuid.UUID]bool{}
			for _, event := range s.Events(t, 0) {
				survived[event.OrderID] = true
			}
			require.Greater(t, len(survived), kept)
			require.Less(t, len(survived), kept+cut)

			registry, _ := testwork.Guarded(t, s)
			testkit.Eventually(t, 30*time.Second, "the partition is rebuilt",
				func() bool { return testwork.Rebuilds(t, registry) == 1 })
			s.AwaitConfirmed(t, max(len(survived), recorded))
			testwork.AwaitRest(t, s)
			l := ledger.New(s.Pool)
			for i, receipt := range receipts {
				o, err := l.FindByReceipt(t.Context(), receipt)
				require.NoError(t, err)
				want := order.StatusConfirmed
				if !survived[receipt.OrderID] && i >= recorded {
					want = order.StatusVoided
				}
				require.Equal(t, want, o.Status, "order %d", i+1)
			}
			require.EqualValues(t, max(len(survived), recorded), testshop.Sold(t, s.Pool, sale))
			// Users whose order was lost may buy, holders of an order may not.
			for i := range receipts {
				want := reservation.Reserved
				if i < max(len(survived), recorded) {
					want = reservation.AlreadyPurchased
				}
				require.Equal(t, want, s.Ask(t, sale, fmt.Sprintf("user-%d", i)).Verdict)
			}
			s.AwaitConfirmed(t, kept+cut)
			testwork.AwaitRest(t, s)
			s.RequireSound(t)
			testwork.RequireUnbroken(t, s, sale)
		})
	}
}

// appendOnlyFile returns the file to which the Redis of the test appends.
func appendOnlyFile(t testing.TB, s *testshop.Shop) string {
	t.Helper()
	where, err := s.Rdb.ConfigGet(t.Context(), "*dir*").Result()
	require.NoError(t, err)
	found, err := filepath.Glob(filepath.Join(where["dir"], where["appenddirname"], "*.incr.aof"))
	require.NoError(t, err)
	require.Len(t, found, 1)
	return found[0]
}

func sizeOf(t testing.TB, file string) int64 {
	t.Helper()
	info, err := os.Stat(file)
	require.NoError(t, err)
	return info.Size()
}

package reservation_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

// BenchmarkReplicaAcks compares one reservation at a time with and without the confirmation of a replica.
func BenchmarkReplicaAcks(b *testing.B) {
	cluster := testkit.OwnCluster(b)
	rdb, err := connect.Ingress(cluster.URL)
	require.NoError(b, err)
	b.Cleanup(func() { _ = rdb.Close() })
	pool := testkit.Pool(b)
	for _, acks := range []int{0, 1} {
		b.Run(fmt.Sprint(acks), func(b *testing.B) {
			store := reservation.NewStore(rdb, reservation.Keys{Prefix: "stampede", Partitions: 1},
				reservation.StoreOptions{ReplicaAcks: acks, Logger: testkit.Logger(b)})
			b.Cleanup(store.Close)
			sale, err := catalog.New(pool, store).Create(b.Context(), reservation.Terms{
				Name: "test", Stock: int64(b.N), PerOrderLimit: 1,
			})
			require.NoError(b, err)
			b.ResetTimer()
			for i := range b.N {
				_, err := store.Reserve(b.Context(), reservation.Request{
					Sale: sale.ID, User: fmt.Sprintf("user-%d", i), Quantity: 1,
				})
				require.NoError(b, err)
			}
		})
	}
}

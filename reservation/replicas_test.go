package reservation_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testsale"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

// TestUnconfirmedReservationIsUnknown: with ReplicaAcks a buyer gets a reservation only when a replica has it, also by
// a retry. Refusals need no replica.
func TestUnconfirmedReservationIsUnknown(t *testing.T) {
	t.Parallel()
	h := newReplicaPair(t)
	s := testsale.NewShopOn(t, h.client(), testkit.Keys(t), reservation.StoreOptions{ReplicaAcks: 1})
	sale := s.Sale(2)
	buy := func(user string) (reservation.Answer, error) {
		return s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: user, Quantity: 1, IdempotencyKey: "key"})
	}
	buyConfirmed(s, sale.ID, "ann")
	held, err := h.atSecond.HGet(t.Context(), s.Keys.Buyers(0, sale.ID), "ann").Result()
	require.NoError(t, err, "the replica has the reservation when its buyer gets the answer")
	require.NotEmpty(t, held)

	h.cut()
	_, err = buy("bob")
	require.ErrorIs(t, err, reservation.ErrOutcomeUnknown)
	_, err = buy("bob")
	require.ErrorIs(t, err, reservation.ErrOutcomeUnknown, "a replay is not confirmed either")
	answer, err := buy("cid")
	require.NoError(t, err)
	require.Equal(t, reservation.SoldOut, answer.Verdict)

	h.mend()
	buyConfirmed(s, sale.ID, "bob")
	require.NoError(t, h.atSecond.HGet(t.Context(), s.Keys.Buyers(0, sale.ID), "bob").Err())
}

// buyConfirmed buys until the replicas confirm it: on a busy machine they may take longer than an ingress waits.
func buyConfirmed(s *testsale.Shop, sale uuid.UUID, user string) {
	s.T.Helper()
	testkit.Eventually(s.T, 30*time.Second, "the replicas confirm the order of "+user, func() bool {
		answer, err := s.Reserve(s.T.Context(),
			reservation.Request{Sale: sale, User: user, Quantity: 1, IdempotencyKey: "key"})
		if errors.Is(err, reservation.ErrOutcomeUnknown) {
			return false
		}
		require.NoError(s.T, err)
		require.Contains(s.T, []reservation.Verdict{reservation.Reserved, reservation.Replayed}, answer.Verdict)
		return true
	})
}

// TestReplicasConfirmOnCluster: the confirmation is that of the partition's own replicas.
func TestReplicasConfirmOnCluster(t *testing.T) {
	t.Parallel()
	cluster := testkit.OwnCluster(t)
	rdb, err := connect.Ingress(cluster.URL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = rdb.Close() })
	keys := reservation.Keys{Prefix: "stampede", Partitions: 1}
	s := testsale.NewShopOn(t, rdb, keys, reservation.StoreOptions{ReplicaAcks: 1})
	operator := testkit.Operate(t, cluster)
	master := operator.MasterOf(operator.SlotOf(keys.Orders(0)))
	replica := operator.Client(operator.ReplicaOf(master))
	sale := s.Sale(100)
	for i := range 20 {
		user := fmt.Sprintf("user-%d", i)
		buyConfirmed(s, sale.ID, user)
		_, err := replica.Pipelined(t.Context(), func(p redis.Pipeliner) error {
			p.ReadOnly(t.Context()) // for the connection
			p.HGet(t.Context(), keys.Buyers(0, sale.ID), user)
			return nil
		})
		require.NoError(t, err)
	}
}

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

package reservation_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
)

// One damaged buyer must not fail the other requests of its batch.
func TestDamagedBuyerDoesNotFailBatch(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 1000)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Buyers(0, sale.ID), "damaged", "?").Err())
	const buyers = 200
	errs := make([]error, buyers)
	var all sync.WaitGroup
	for i := range buyers {
		all.Go(func() {
			user := fmt.Sprint("buyer-", i)
			if i%20 == 0 {
				user = "damaged"
			}
			_, errs[i] = s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: user, Quantity: 1})
		})
	}
	all.Wait()
	failed := 0
	for i, err := range errs {
		if i%20 != 0 {
			if err != nil {
				failed++
			}
			continue
		}
		require.ErrorIs(t, err, reservation.ErrReservationDamaged)
		require.NotErrorIs(t, err, reservation.ErrUnavailable)
	}
	require.Zero(t, failed, "failed requests of %d other buyers", buyers-buyers/20)
}

// Redis does not roll back the writes of a script that fails at a command without permission.
func TestScriptWithoutPermissionWritesNothing(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	operator := testshop.NewShopOn(t, testshop.Options{Redis: testkit.Client(t, own.URL)})
	sale := operator.Sale(t, 10)
	acl := func(rules ...any) {
		t.Helper()
		require.NoError(
			t, operator.Rdb.Do(
				t.Context(), append([]any{"ACL", "SETUSER", "ingress", "on", "nopass", "~*", "&*", "+@all"}, rules...)...,
			).Err(),
		)
	}
	acl()
	o := *operator.Rdb.(*redis.Client).Options()
	o.Username, o.Password = "ingress", "any"
	rdb := testkit.Client(t, own.URL)
	rdb.Options().Username, rdb.Options().Password = o.Username, o.Password
	ingress := operator.Next(t, rdb)
	ingress.Buy(t, sale.ID, "before")

	acl("-hset") // while it sells
	_, err := ingress.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: "ann", Quantity: 1})
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	require.NotErrorIs(t, err, reservation.ErrOutcomeUnknown)
	require.Len(t, operator.Events(t, 0), 1, "a refused request has no event")
	require.EqualValues(t, 9, operator.Left(t, sale.ID))

	acl("+hset")
	ingress.Buy(t, sale.ID, "ann")
}

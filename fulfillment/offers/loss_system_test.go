//go:build system

package offers_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger/draws"
	"stampede/reservation/order"
)

// Redis is lost before the list is frozen, and again while units are offered, some of which return. Each unit goes to
// the next rank, once.
func TestDrawOutlivesLossOfRedis(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	d := newDraw(t, s, 2200, 1100)
	d.receipts = map[string]order.Receipt{user(0): d.receipts[user(0)], user(7): d.receipts[user(7)]}
	await := func(what string, is func(draws.Draw) bool) {
		t.Helper()
		testkit.Eventually(t, time.Minute, what, func() bool { return is(d.find(t)) })
	}
	testwork.FulfilAll(t, s)
	s.Flush(t)
	for range 2 {
		s.Process(t, "worker").Start()
	}
	await("the list is frozen", func(d draws.Draw) bool { return d.State == draws.Frozen })
	require.Equal(t, int64(2200), d.find(t).Entries)
	d.seed(t)
	await("some units are offered", func(d draws.Draw) bool { return d.Offered > 0 })
	s.Flush(t)
	returned := testshop.Rows(t, s.Pool, "SELECT id::text FROM orders WHERE sale_id = $1 ORDER BY id LIMIT 20", d.goods)
	for _, id := range returned {
		testwork.EndWindow(t, s.Pool, uuid.MustParse(id))
	}
	testkit.Eventually(t, time.Minute, "all units have an order again", func() bool {
		return s.Count(t, "SELECT sold FROM sales WHERE id = $1", d.goods) == 1100 &&
			s.Count(t, "SELECT count(*) FROM orders WHERE sale_id = $1 AND status = 'expired'", d.goods) == int64(len(returned))
	})
	testwork.AwaitRest(t, s)
	testwork.RequireUnbroken(t, s, uuid.Nil)
	offered := d.find(t).Offered
	require.GreaterOrEqual(t, offered, int64(1100+len(returned)))
	require.Len(t, d.verify(t).Offers, int(offered))
}

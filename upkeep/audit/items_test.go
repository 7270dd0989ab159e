package audit_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// itemsScene is a sale of 10 m, at most 3 of them in an order, and 8 l, with an order in each status. Ann has 2 m and
// 1 l.
type itemsScene struct {
	*testshop.Shop
	sale uuid.UUID
	ann  uuid.UUID // her order
}

func newItemsScene(t testing.TB) itemsScene {
	t.Helper()
	s := itemsScene{Shop: testshop.NewShop(t)}
	sale, err := s.Create(t.Context(), reservation.Terms{
		Name: "shirts", Stock: 18, PerOrderLimit: 4, PaymentWindow: testshop.PaymentWindow, Currency: "EUR",
		Items: []reservation.Item{
			{Code: "m", Name: "Medium", Stock: 10, UnitPrice: 1000, PerOrderLimit: 3},
			{Code: "l", Name: "Large", Stock: 8, UnitPrice: 2000},
		},
	})
	require.NoError(t, err)
	s.sale = sale.ID
	orders := ledger.New(s.Pool)
	s.ann = s.basket(t, "ann", map[string]int64{"m": 2, "l": 1})
	paid := s.basket(t, "bob", map[string]int64{"l": 2})
	cancelled := s.basket(t, "cho", map[string]int64{"m": 1})
	expired := s.basket(t, "dan", map[string]int64{"m": 1, "l": 3})
	testwork.Fulfil(t, s.Shop)
	testwork.Pay(t, orders, paid, "bob", "pi")
	testwork.Cancel(t, orders, cancelled, "cho")
	testwork.ReleaseUnits(t, s.Shop)
	testwork.EndWindow(t, s.Pool, expired)
	testwork.Expire(t, s.Shop)
	return s
}

// basket reserves items with an idempotency key, and returns the id of the order.
func (s itemsScene) basket(t testing.TB, user string, items map[string]int64) uuid.UUID {
	t.Helper()
	answer, err := s.Reserve(t.Context(), reservation.Request{
		Sale: s.sale, User: user, Items: items, IdempotencyKey: fmt.Sprint("l", items["l"]),
	})
	require.NoError(t, err)
	require.Equal(t, reservation.Reserved, answer.Verdict)
	return answer.Reservation.OrderID
}

func (s itemsScene) key() string { return s.Keys.Sale(0, s.sale) }

// reserved replaces a part of Ann's reservation in Redis.
func (s itemsScene) reserved(t testing.TB, old, text string) {
	t.Helper()
	before := s.Rdb.HGet(t.Context(), s.Keys.Buyers(0, s.sale), "ann").Val()
	require.Contains(t, before, old)
	forged := strings.Replace(before, old, text, 1)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Buyers(0, s.sale), "ann", forged).Err())
}

func TestAuditOfBasketsPassesEveryPromise(t *testing.T) {
	t.Parallel()
	s := newItemsScene(t)
	report := testwork.RequireUnbroken(t, s.Shop, s.sale)
	require.False(t, report.Unchecked(), testwork.Text(t, report))
	require.Contains(t, testwork.Text(t, report), "      18 = 9 available + 7 held + 2 sold   sale "+s.sale.String()+
		" shirts\n        10 = 7 available + 3 held + 0 sold   m\n        8 = 2 available + 4 held + 2 sold   l\n")
	_, err := s.Rename(t.Context(), s.sale, catalog.Names{Items: map[string]string{"m": "M"}})
	require.NoError(t, err)
	testwork.RequireUnbroken(t, s.Shop, s.sale)
	testshop.Exec(t, s.Pool, "UPDATE sales SET published_revision = 1 WHERE id = $1", s.sale)
	testwork.RequireUnbroken(t, s.Shop, s.sale) // a new name that Redis has not heard of is a known change
	testwork.ReleaseUnits(t, s.Shop)
	s.basket(t, "dan", map[string]int64{"l": 4})
	require.Equal(t, "S3", testwork.Broken(testwork.Audit(t, s.Shop, s.sale)), "the order is in transit")
	testwork.Fulfil(t, s.Shop)
	testwork.RequireUnbroken(t, s.Shop, uuid.Nil)
	require.Equal(t, "2,7 9", testwork.SoldItems(t, s.Pool, s.sale))
}

// broken lists the promises that the corruption breaks. No other may be broken.
func TestAuditReportsEachCorruptionOfItems(t *testing.T) {
	t.Parallel()
	inRedis := func(do func(ctx context.Context, s itemsScene) redis.Cmder) func(testing.TB, itemsScene) {
		return func(t testing.TB, s itemsScene) { require.NoError(t, do(t.Context(), s).Err()) }
	}
	set := func(values ...any) func(testing.TB, itemsScene) {
		return inRedis(func(ctx context.Context, s itemsScene) redis.Cmder { return s.Rdb.HSet(ctx, s.key(), values...) })
	}
	unset := func(field string) func(testing.TB, itemsScene) {
		return inRedis(func(ctx context.Context, s itemsScene) redis.Cmder { return s.Rdb.HDel(ctx, s.key(), field) })
	}
	exec := func(statements ...string) func(testing.TB, itemsScene) {
		return func(t testing.TB, s itemsScene) {
			for _, statement := range statements {
				require.NoError(t, s.Exec(t, statement))
			}
		}
	}
	reserved := func(old, text string) func(testing.TB, itemsScene) {
		return func(t testing.TB, s itemsScene) { s.reserved(t, old, text) }
	}
	for name, c := range map[string]struct {
		corrupt func(testing.TB, itemsScene)
		broken  string
		says    string // "$ann" stands for her order's id
		left    string // the remedies that Reconcile does not apply
	}{
		"more of an item sold than its stock": {
			exec("ALTER TABLE sale_items DROP CONSTRAINT sale_items_not_oversold",
				"UPDATE sale_items SET stock = CASE code WHEN 'm' THEN 1 ELSE 17 END"),
			"S1 S4 DB", "2 units of the item m are sold of a stock of 1", "guard operator",
		},
		"fewer than 0 of an item left": {
			set("left.a", -1, "left.b", 10), "S1 S4", "Redis has -1 units of the item m left", "",
		},
		"units of one item left as another": {
			set("left.a", 6, "left.b", 3), "S4", "the item m has 6 units available, 3 held and 0 sold of a stock of 10", "",
		},
		"units of an item missing": {
			set("left.a", 6, "left", 8), "S4", "the item m has 6 units available, 3 held and 0 sold of a stock of 10", "",
		},
		"left is not the sum": {
			set("left", 8), "S4", "Redis has 8 of 18 units left, and 9 of 18 of all items together", "",
		},
		"stock of an item in Redis": {
			set("stock.a", 11, "stock.b", 7), "S4", "the stock of the item m is 10 in Postgres and 11 in Redis", "",
		},
		"stock in Redis is not the sum": {
			set("stock.a", 11), "S4", "Redis has 9 of 18 units left, and 9 of 19 of all items together", "",
		},
		"sold of an item": {
			exec("UPDATE sale_items SET sold = sold - 1 WHERE code = 'm'"),
			"S4", "sold of the item m is 1, the live orders hold 2 units, and the events come to 2", "",
		},
		"sold of one item as another": {
			exec("UPDATE sale_items SET sold = CASE code WHEN 'm' THEN 3 ELSE 2 END"),
			"S4", "sold of the item l is 2, the live orders hold 3 units, and the events come to 3", "",
		},
		"sold is not the sum": {
			exec("UPDATE sales SET sold = sold + 1"), "S4", "sold is 6, and that of all items together 5", "",
		},
		"other lines of a reservation": {
			reserved(" a2b1 ", " a1b2 "),
			"S4", "order $ann, user ann: the reservation of ann for 3 (a1b2) units is the order of ann for 3 (a2b1)", "",
		},
		"lines of an unknown item": {
			reserved(" a2b1 ", " a2c1 "), "S4", "user ann: the reservation in Redis is damaged: ", "",
		},
		"lines in the wrong order": {
			reserved(" a2b1 ", " b1a2 "), "S4", "user ann: the reservation in Redis is damaged: ", "",
		},
		"a quantity for lines": {
			reserved(" a2b1 ", " 3 "), "S4", "user ann: the reservation in Redis is damaged: ", "",
		},
		"lines of the order's row": {
			exec("UPDATE orders SET lines = 'a1b2' WHERE user_id = 'ann'"),
			"S4 S5", "order $ann, user ann: the order's row is not what its log says: lines is a1b2 and not a2b1",
			"rebuild projections",
		},
		"lines of an ended order": {
			inRedis(func(ctx context.Context, s itemsScene) redis.Cmder {
				ended := s.Rdb.HGetAll(ctx, s.Keys.Ended(0, s.sale)).Val()
				for name, text := range ended {
					ended[name] = strings.Replace(text, " a1", " b1", 1)
				}
				return s.Rdb.HSet(ctx, s.Keys.Ended(0, s.sale), ended)
			}),
			"S7", "user cho: the order is cancelled, and Redis has another record of its idempotency key", "",
		},
		"codes":                   {set("items", "m xl"), "S7", `its items are "m xl" in Redis and "m l" in Postgres`, ""},
		"no codes":                {unset("items"), "S7", `its items are "" in Redis and "m l" in Postgres`, ""},
		"limit of an item":        {set("limit.a", 4), "S7", "another limit of the item m than Postgres: 4 and not 3", ""},
		"no limit of an item":     {unset("limit.a"), "S7", "another limit of the item m than Postgres: 0 and not 3", ""},
		"a limit of another item": {set("limit.b", 1), "S7", "another limit of the item l than Postgres: 1 and not 0", ""},
		"limit of an order":       {set("limit", 5), "S7", "limit is 5 and not 4", ""},
		"limit for old versions":  {set("per_order_limit", 4), "S7", "per_order_limit is 4 and not 0", ""},
		"no field of an item": {
			unset("left.b"), "S4 S7", "its fields in Redis are damaged: left.b is missing", "",
		},
		"a field that is no number": {
			set("stock.b", "8x"), "S4 S7", `its fields in Redis are damaged: stock.b is "8x"`, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newItemsScene(t)
			testwork.RequireUnbroken(t, s.Shop, uuid.Nil)
			c.corrupt(t, s)
			report := testwork.Audit(t, s.Shop, s.sale)
			text := testwork.Text(t, report)
			require.Equal(t, c.broken, testwork.Broken(report), text)
			require.False(t, report.Unchecked(), text)
			require.Contains(t, text, strings.ReplaceAll(c.says, "$ann", s.ann.String()))
			testwork.RequireMended(t, s.Shop, s.sale, c.left)
		})
	}
}

// Forged rows do not stop the audit.
func TestAuditReportsForgedRowsOfItems(t *testing.T) {
	t.Parallel()
	for _, damage := range []string{
		"UPDATE sale_items SET stock = 9223372036854775807",
		"UPDATE sale_items SET sold = stock",
		"UPDATE sale_items SET item = upper(item)",
		"UPDATE sale_items SET code = 'x' WHERE code = 'm'",
		"UPDATE sale_items SET per_order_limit = 9223372036854775807",
		"DELETE FROM sale_items WHERE code = 'l'",
		"DELETE FROM sale_items",
		"UPDATE sales SET items = 0, currency = NULL",
		"UPDATE sales SET items = 3",
		"UPDATE sales SET stock = 20",
		"UPDATE orders SET lines = NULL",
		"UPDATE orders SET lines = 'a99999999999999999999'",
		"UPDATE orders SET lines = 'a2a2a2 ä'",
		"UPDATE order_events SET lines = NULL WHERE version = 3",
		"UPDATE order_events SET lines = 'a3'",
		"UPDATE order_events SET lines = 'z3'",
		"UPDATE order_events SET lines = 'b99999999999999999999'",
	} {
		t.Run(damage, func(t *testing.T) {
			t.Parallel()
			s := newItemsScene(t)
			require.NoError(t, s.Exec(t, damage))
			report := testwork.Audit(t, s.Shop, uuid.Nil)
			require.True(t, report.Broken(), testwork.Text(t, report))
			require.False(t, report.Unchecked(), testwork.Text(t, report))
			testwork.Reconcile(t, s.Shop)
		})
	}
}

// The events of lost orders are appended again, each in the form of its sale: with lines or without.
func TestReconcileRecordsLostBaskets(t *testing.T) {
	t.Parallel()
	s := newItemsScene(t)
	testwork.ReleaseUnits(t, s.Shop)
	plain := s.Open(t, 5)
	baskets := []uuid.UUID{
		s.basket(t, "eve", map[string]int64{"m": 3, "l": 1}), s.basket(t, "fay", map[string]int64{"m": 1}),
	}
	single := s.Buy(t, plain, "eve")
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Orders(0)).Err())
	text := testwork.Text(t, testwork.Audit(t, s.Shop, s.sale))
	require.Contains(t, text, fmt.Sprintf("order %s, user eve: the order was accepted and is not in Postgres", baskets[0]))
	testwork.RequireMended(t, s.Shop, uuid.Nil, "")
	for id, lines := range map[uuid.UUID]order.Lines{baskets[0]: "a3b1", baskets[1]: "a1", single: ""} {
		recorded := testwork.Order(t, s.Pool, id)
		require.Equal(t, []any{order.StatusConfirmed, lines}, []any{recorded.Status, recorded.Lines})
	}
	require.Equal(t, "6,4 10", testwork.SoldItems(t, s.Pool, s.sale))
}

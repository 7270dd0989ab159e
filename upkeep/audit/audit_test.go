package audit_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
	"stampede/upkeep/audit"
)

func TestMain(m *testing.M) { testwork.Main(m) }

func TestAuditOfCorrectSalePassesEveryPromise(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 1500)
	other := s.Open(t, 5)
	s.Crowd(t, sale, 1200)
	s.Buy(t, other, "alice")
	testwork.Fulfil(t, s)
	s.Buy(t, other, "bob")

	report := testwork.Audit(t, s, sale)
	require.Equal(t, "S3", testwork.Broken(report), "the order of bob is in transit:\n%s", testwork.Text(t, report))
	testwork.Fulfil(t, s)
	report = testwork.RequireUnbroken(t, s, uuid.Nil)
	require.Equal(t, fmt.Sprintf(`S1  nothing is oversold                kept    1,202 units sold of 1,505
S2  one live order per buyer and sale  kept    1,202 live orders, 0 rejected
S3  every accepted order has an end    kept    1,202 buyers in Redis, 1,202 orders in Postgres, 0 entries waiting `+
		`in 1 stream
S4  stock = available + held + sold    kept    1,505 = 303 + 0 + 1,202; the events replayed come to 1,202 sold
      1,500 = 300 available + 0 held + 1,200 sold   sale %s test
      5 = 3 available + 0 held + 2 sold   sale %s test
S5  nothing is lost or doubled         kept    2,404 events of 1,202 orders, 1,202 places given out
S7  Redis is whole and up to date      kept    2 of 2 sales in Redis
S8  no money is lost                   kept    0 payments = 0 settled + 0 due for refund + 0 refunded + 0 waiting
DB  Postgres has all its guards        kept    %[3]d of %[3]d constraints and indexes hold
`, sale, other, report.Guards), testwork.Text(t, report))
	require.Len(t, testwork.Audit(t, s, sale).Sales, 1)
}

func TestAuditCountsUnreleasedUnitsAsHeld(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.OpenPayable(t, 50)
	require.Equal(t, 40, s.Crowd(t, sale, 40))
	orders := ledger.New(s.Pool)
	var overdue []uuid.UUID
	for i, out := range testwork.Fulfil(t, s) {
		var err error
		switch reserved := out.Event; {
		case i < 10:
			_, err = orders.Pay(t.Context(), reserved.OrderID, reserved.UserID, "pi")
		case i < 17:
			_, err = orders.Cancel(t.Context(), reserved.OrderID, reserved.UserID)
		case i < 20:
			overdue = append(overdue, reserved.OrderID)
		}
		require.NoError(t, err)
	}
	testwork.EndWindow(t, s.Pool, overdue...)
	testwork.Expire(t, s)

	equation := func(available, held, sold int64) {
		t.Helper()
		report := testwork.RequireUnbroken(t, s, sale)
		figures := report.Sales[0]
		require.Equal(t, []int64{available, held, sold}, []int64{figures.Available, figures.Held, figures.Sold})
		require.EqualValues(t, 30, figures.ReplayedUnits)
		require.EqualValues(t, 20, figures.UnpaidUnits)
		shown, err := s.Catalog.Show(t.Context(), sale)
		require.NoError(t, err)
		require.EqualValues(t, 10, shown.Sold)
		text := testwork.Text(t, report)
		for _, line := range []string{
			"10 units sold and 20 to be paid, of 50",
			fmt.Sprintf("50 = %d + %d + 10; the events replayed come to 30 sold or to be paid", shown.Available, shown.Held),
			fmt.Sprintf("50 = %d available + %d held + 10 sold   sale", shown.Available, shown.Held),
		} {
			require.Contains(t, text, line)
		}
	}
	equation(10, 10, 30)
	// One release is in Redis: its worker died before it deleted the row.
	var first reservation.Release
	require.NoError(t, s.Pool.QueryRow(t.Context(),
		"SELECT sale_id, order_id, user_id FROM releases LIMIT 1").Scan(&first.SaleID, &first.OrderID, &first.UserID))
	_, err := s.Store.Release(t.Context(), []reservation.Release{first})
	require.NoError(t, err)
	equation(11, 9, 30)
	testwork.ReleaseUnits(t, s)
	equation(20, 0, 30)
}

// broken lists the promises that the corruption breaks. No other may be broken.
func TestAuditReportsEachCorruption(t *testing.T) {
	t.Parallel()
	type scene struct {
		*testshop.Shop
		sale  uuid.UUID
		order uuid.UUID // of user-7
	}
	exec := func(query string) func(testing.TB, scene) {
		return func(t testing.TB, s scene) {
			query := strings.NewReplacer("$order", "'"+s.order.String()+"'", "$sale", "'"+s.sale.String()+"'").Replace(query)
			for _, statement := range strings.Split(query, ";") {
				require.NoError(t, s.Exec(t, statement))
			}
		}
	}
	inRedis := func(do func(ctx context.Context, s scene) redis.Cmder) func(testing.TB, scene) {
		return func(t testing.TB, s scene) { require.NoError(t, do(t.Context(), s).Err()) }
	}
	saleKey := func(s scene) string { return s.Keys.Sale(0, s.sale) }
	buyersKey := func(s scene) string { return s.Keys.Buyers(0, s.sale) }

	// cancelled is a cancellation without its release.
	const cancelled = `UPDATE orders SET status = 'cancelled', version = 3, updated_at = now() WHERE id = $order;
		INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
		SELECT id, 3, 'OrderCancelled', sale_id, user_id, quantity, updated_at FROM orders WHERE id = $order;
		UPDATE sales SET sold = sold - 1 WHERE id = $sale`

	for _, c := range []struct {
		name    string
		corrupt func(testing.TB, scene)
		broken  string
		says    string // "$order" stands for the order's id
		left    string // the remedies that Reconcile does not apply
	}{
		{
			"more sold than the stock",
			exec(`ALTER TABLE sales DROP CONSTRAINT sales_not_oversold; UPDATE sales SET stock = 29 WHERE id = $sale`),
			"S1 S4 DB", "30 units are sold of a stock of 29", "guard operator",
		},
		{
			"fewer than 0 units left in Redis",
			inRedis(func(ctx context.Context, s scene) redis.Cmder { return s.Rdb.HSet(ctx, saleKey(s), "left", -1) }),
			"S1 S4", "Redis has -1 units left", "",
		},
		{
			"a second live order of a user",
			exec(`DROP INDEX orders_one_live_per_user; UPDATE orders SET user_id = 'user-8' WHERE id = $order; UPDATE ` +
				`order_events SET user_id = 'user-8' WHERE order_id = $order`),
			"S2 S4 DB", "user user-8: the user has 2 live orders in the sale", "rebuild guard operator",
		},
		{
			"an order lost with its events and its count",
			exec(`DELETE FROM order_events WHERE order_id = $order; DELETE FROM orders WHERE id = $order; UPDATE sales SET sold
				= sold - 1 WHERE id = $sale`),
			"S3", "order $order, user user-7: the order was accepted and is not in Postgres", "",
		},
		{
			"an order lost in Postgres and Redis",
			func(t testing.TB, s scene) {
				exec(`DELETE FROM order_events WHERE order_id = $order; DELETE FROM orders WHERE id = $order; UPDATE sales SET sold
					= sold - 1 WHERE id = $sale`)(t, s)
				require.NoError(t, s.Rdb.HDel(t.Context(), buyersKey(s), "user-7").Err())
				require.NoError(t, s.Rdb.HIncrBy(t.Context(), saleKey(s), "left", 1).Err())
			},
			"S5", "of the sale was given out and no order has it", "operator",
		},
		{
			"an unknown buyer",
			inRedis(func(ctx context.Context, s scene) redis.Cmder {
				return s.Rdb.HSet(ctx, buyersKey(s), "ghost", order.CompactID(order.NewOrderID(s.sale))+" 1 5 1a0c2d3e4f5")
			}),
			"S3 S4 S5", "user ghost: the order was accepted and is not in Postgres", "operator",
		},
		{
			"an order without an outcome",
			exec(`UPDATE order_events SET type = 'OrderReserved' WHERE order_id = $order; DELETE FROM orders WHERE id = $order;
				UPDATE sales SET sold = sold - 1 WHERE id = $sale`),
			"S3 S5", "order $order, user user-7: the log of the order has an impossible history: OrderReserved", "projections operator",
		},
		{
			"a pending entry",
			func(t testing.TB, s scene) {
				s.Buy(t, s.sale, "late")
				require.NoError(t, s.Rdb.XReadGroup(t.Context(),
					&redis.XReadGroupArgs{
						Group: reservation.Group, Consumer: "c", Streams: []string{s.Keys.Orders(0), ">"},
						Block: -1,
					}).Err())
			},
			"S3", "1 unfinished entry in", "worker",
		},
		{
			"a parked dead letter",
			func(t testing.TB, s scene) {
				err := deadletter.NewStore(s.Pool, s.Rdb, s.Store).Park(t.Context(),
					stream.Entry{Stream: s.Keys.Orders(0), ID: "1-1"}, fmt.Errorf("rubbish"))
				require.NoError(t, err)
			},
			"S3", "waits for a decision: rubbish", "dlq",
		},
		{
			"a wrong counter",
			exec(`UPDATE sales SET sold = sold - 1 WHERE id = $sale`),
			"S4", "sold is 29, the live orders hold 30 units, and the events come to 30", "",
		},
		{
			"units missing in Redis",
			inRedis(func(ctx context.Context, s scene) redis.Cmder { return s.Rdb.HIncrBy(ctx, saleKey(s), "left", -2) }),
			"S4", "2 of 40 units are missing: 8 available, 0 held, 30 sold", "",
		},
		{
			"different stock in Redis",
			inRedis(func(ctx context.Context, s scene) redis.Cmder { return s.Rdb.HSet(ctx, saleKey(s), "stock", 41) }),
			"S4", "the stock is 40 in Postgres and 41 in Redis", "",
		},
		{
			"a reservation missing in Redis",
			inRedis(func(ctx context.Context, s scene) redis.Cmder { return s.Rdb.HDel(ctx, buyersKey(s), "user-7") }),
			"S4", "order $order, user user-7: the order is confirmed and Redis has no reservation of it", "",
		},
		{
			"a rejected order whose unit is still taken",
			exec(`UPDATE orders SET status = 'rejected', reason = 'sold-out' WHERE id = $order; UPDATE order_events SET type =
				'OrderRejected', data = data || '{"reason": "sold-out"}' WHERE order_id = $order; UPDATE sales SET sold =
				sold - 1 WHERE id = $sale`),
			"S4", "order $order, user user-7: the order is rejected and its units are still taken in Redis", "",
		},
		{
			"a cancelled order whose unit is still taken, without a release",
			exec(cancelled),
			"S4", "order $order, user user-7: the order is cancelled and its units are still taken in Redis", "",
		},
		{
			"a release of a live order",
			exec(`INSERT INTO releases SELECT id, sale_id, user_id, quantity FROM orders WHERE id = $order`),
			"S4", "order $order, user user-7: a release is pending, and the order is confirmed", "",
		},
		{
			"a release of a missing order",
			exec(`INSERT INTO releases VALUES ('01900000-0000-7000-8000-000000000000', $sale, 'ghost', 1)`),
			"S4",
			"order 01900000-0000-7000-8000-000000000000, user ghost: a release is pending, and the order is missing", "",
		},
		{
			"a cancelled order that is counted as sold",
			exec(cancelled + `; UPDATE sales SET sold = sold + 1 WHERE id = $sale; INSERT INTO releases SELECT id, sale_id, ` +
				`user_id, quantity FROM orders WHERE id = $order`),
			"S4", "sold is 30, the live orders hold 29 units, and the events come to 29", "",
		},
		{
			"an expiry only in the log",
			exec(`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
				SELECT id, 3, 'OrderExpired', sale_id, user_id, quantity, now() FROM orders WHERE id = $order`),
			"S4 S5", "not what its log says: status is confirmed and not expired, version is 2 and not 3, updated_at is", "projections",
		},
		{
			"a damaged reservation",
			inRedis(func(ctx context.Context, s scene) redis.Cmder {
				return s.Rdb.HSet(ctx, buyersKey(s), "user-7", "rubbish")
			}),
			"S4", `user user-7: the reservation in Redis is damaged: "rubbish"`, "",
		},
		{
			"a user that Postgres cannot hold",
			inRedis(func(ctx context.Context, s scene) redis.Cmder {
				return s.Rdb.HSet(ctx, buyersKey(s), "gh\x00st\xff\x1b", order.CompactID(uuid.New())+" 1 5 1a0c2d3e4f5")
			}),
			"S4", `user "gh�st�\x1b": the reservation in Redis is damaged: "`, "",
		},
		{
			"a reservation that Postgres cannot hold",
			func(t testing.TB, s scene) {
				text := s.Rdb.HGet(t.Context(), buyersKey(s), "user-7").Val()
				require.NoError(t, s.Rdb.HSet(t.Context(), buyersKey(s), "user-7", text+"\x00\xff").Err())
			},
			"S4", `user user-7: the reservation in Redis is damaged: "`, "",
		},
		{
			"a reservation of the year 10,000 with too many units",
			func(t testing.TB, s scene) {
				require.NoError(t, s.Rdb.HSet(t.Context(), buyersKey(s), "user-7",
					order.CompactID(s.order)+" 1 7 7fffffffffffffff").Err())
				require.NoError(t, s.Rdb.HSet(t.Context(), buyersKey(s), "ghost",
					order.CompactID(uuid.New())+" 9223372036854775807 8 1a0c2d3e4f5").Err())
			},
			"S4", `user ghost: the reservation in Redis is damaged: "`, "",
		},
		{
			"too many units left in Redis",
			inRedis(func(ctx context.Context, s scene) redis.Cmder {
				return s.Rdb.HSet(ctx, saleKey(s), "left", "9223372036854775807")
			}),
			"S4 S7", "its fields in Redis are damaged: ", "",
		},
		{
			"a gap in an order's log",
			exec(`UPDATE order_events SET version = 3 WHERE order_id = $order AND version = 2`),
			"S5", "order $order, user user-7: the log of the order has 1 of the versions from 2 to 3", "operator",
		},
		{
			"an order row lost",
			exec(`DELETE FROM orders WHERE id = $order`),
			"S3 S4 S5", "order $order, user user-7: the order has events and no row", "projections",
		},
		{
			"a live order without its reservation",
			exec(`UPDATE order_events SET reserved_at = NULL WHERE order_id = $order`),
			"S5", "order $order, user user-7: the log of the order has no reservation", "operator",
		},
		{
			"an order without events",
			exec(`DELETE FROM order_events WHERE order_id = $order`),
			"S4 S5", "order $order, user user-7: the order is confirmed and has no events", "projections operator",
		},
		{
			"a row that the log contradicts",
			exec(`UPDATE orders SET status = 'paid' WHERE id = $order`),
			"S5 S8", "the order's row is not what its log says: status is paid and not confirmed", "projections",
		},
		{
			"two orders at one place",
			func(t testing.TB, s scene) {
				var place int64
				require.NoError(t, s.Pool.QueryRow(t.Context(), "SELECT sequence FROM orders WHERE id = $1", s.order).Scan(&place))
				to := place%30 + 1
				exec(fmt.Sprintf(`UPDATE orders SET sequence = %d WHERE id = $order`, to))(t, s)
				text := s.Rdb.HGet(t.Context(), buyersKey(s), "user-7").Val()
				text = strings.Replace(text, fmt.Sprintf(" 1 %d ", place), fmt.Sprintf(" 1 %d ", to), 1)
				require.NoError(t, s.Rdb.HSet(t.Context(), buyersKey(s), "user-7", text).Err())
			},
			"S5", "of the sale belongs to 2 orders:", "projections operator",
		},
		{
			"a deadline that the log lacks",
			exec(`UPDATE orders SET due = '2035-11-25' WHERE id = $order`),
			"S5", "due is 2035-11-25 ", "projections",
		},
		{
			"a wrong last place",
			exec(`UPDATE sales SET last_sequence = 7 WHERE id = $sale`),
			"S4", "the last place of a confirmed order is 7 in the sale, and 30 among its orders", "",
		},
		{
			"a reservation of another time",
			func(t testing.TB, s scene) {
				text := s.Rdb.HGet(t.Context(), buyersKey(s), "user-7").Val()
				at := text[:len(text)-1] + map[bool]string{true: "b", false: "a"}[strings.HasSuffix(text, "a")]
				require.NoError(t, s.Rdb.HSet(t.Context(), buyersKey(s), "user-7", at).Err())
			},
			"S4", "order $order, user user-7: the reservation is of ", "",
		},
		{
			"a reservation with another key",
			func(t testing.TB, s scene) {
				text := s.Rdb.HGet(t.Context(), buyersKey(s), "user-7").Val() + ":" + strings.Repeat("A", order.FingerprintChars)
				require.NoError(t, s.Rdb.HSet(t.Context(), buyersKey(s), "user-7", text).Err())
			},
			"S4", "order $order, user user-7: the reservation and the order have different idempotency keys", "",
		},
		{
			"keys with a time limit",
			func(t testing.TB, s scene) {
				for _, key := range []string{saleKey(s), buyersKey(s), s.Keys.Orders(0), s.Keys.Sales(0)} {
					require.True(t, s.Rdb.Expire(t.Context(), key, time.Hour).Val(), key)
				}
			},
			"S7", "somebody has given it a time limit (TTL)", "",
		},
		{
			"Redis emptied",
			inRedis(func(ctx context.Context, s scene) redis.Cmder {
				return s.Rdb.Del(ctx, saleKey(s), buyersKey(s), s.Keys.Orders(0))
			}),
			"S4 S7", "Redis has lost the sale", "",
		},
		{
			"Redis in another epoch",
			inRedis(func(ctx context.Context, s scene) redis.Cmder { return s.Rdb.HSet(ctx, saleKey(s), "epoch", 2) }),
			"S7", "Redis has the stock of epoch 2, Postgres is in epoch 1", "",
		},
		{
			"different definition in Redis",
			inRedis(func(ctx context.Context, s scene) redis.Cmder {
				return s.Rdb.HSet(ctx, saleKey(s), "state", "paused", "opens_at_ms", 1, "closes_at_ms", 2, "per_order_limit", 3,
					"payment_window_s", 4, "revision", 5)
			}),
			"S7",
			"state is paused and not open, opens_at_ms is 1 and not 0, closes_at_ms is 2 and not 0, per_order_limit is 3 and " +
				"not 10, payment_window_s is 4 and not 0, revision is 5 and not 1", "",
		},
		{
			"Redis set back",
			func(t testing.TB, s scene) {
				var user string
				require.NoError(t, s.Pool.QueryRow(t.Context(), "SELECT user_id FROM orders WHERE sequence = 30").Scan(&user))
				require.NoError(t, s.Rdb.HDel(t.Context(), buyersKey(s), user).Err())
				require.NoError(t, s.Rdb.HSet(t.Context(), saleKey(s), "sequence", 29, "left", 11).Err())
			},
			"S4 S7", "Redis has given out 29 places, and Postgres has an order at place 30: Redis was set back", "",
		},
		{
			"a sale's key of a wrong type",
			func(t testing.TB, s scene) {
				require.NoError(t, s.Rdb.Del(t.Context(), saleKey(s)).Err())
				require.NoError(t, s.Rdb.Set(t.Context(), saleKey(s), "x", 0).Err())
			},
			"S4 S7", "its key in Redis has a wrong type", "",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := scene{Shop: testshop.NewShop(t)}
			s.sale = s.Open(t, 40)
			require.Equal(t, 29, s.Crowd(t, s.sale, 29))
			s.Buy(t, s.sale, "user-29") // who has the last place is known
			for _, out := range testwork.Fulfil(t, s.Shop) {
				if out.Event.UserID == "user-7" {
					s.order = out.Event.OrderID
				}
			}
			testwork.RequireUnbroken(t, s.Shop, uuid.Nil)
			c.corrupt(t, s)
			report := testwork.Audit(t, s.Shop, s.sale)
			text := testwork.Text(t, report)
			require.Equal(t, c.broken, testwork.Broken(report), text)
			require.Contains(t, text, strings.ReplaceAll(c.says, "$order", s.order.String()))
			testwork.RequireMended(t, s.Shop, s.sale, c.left)
		})
	}
}

func TestAuditWaitsUntilSaleIsAtRest(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 500)
	s.Crowd(t, sale, 500)
	require.Equal(t, "S3", testwork.Broken(testwork.Audit(t, s, sale)))
	testwork.Work(t, testwork.Config(t, s))
	report, err := audit.Run(t.Context(), audit.Config{
		Catalog: s.Catalog, Sale: sale,
		Wait: 30 * time.Second,
	})
	require.NoError(t, err)
	require.False(t, report.Broken(), testwork.Text(t, report))
	require.EqualValues(t, 500, report.Sales[0].LiveUnits)
}

func TestAuditBoundsFindingsAndCountsTheRest(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 100)
	s.Crowd(t, sale, 50)
	testwork.Fulfil(t, s)
	require.NoError(t, s.Exec(t, "UPDATE orders SET status = 'paid'"))
	report := testwork.Audit(t, s, sale)
	require.EqualValues(t, 50, report.Promise("S5").Found)
	require.Len(t, report.Promise("S5").Findings, audit.FindingsShown)
	require.Contains(t, testwork.Text(t, report), "… and 40 more")
	encoded, err := json.Marshal(report)
	require.NoError(t, err)
	require.Contains(t, string(encoded), `"live_units":50`)
	require.Contains(t, string(encoded), `"sale_id":"`+sale.String()+`"`)
}

func TestAuditRejectsUnknownSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	_, err := audit.Run(t.Context(), audit.Config{Catalog: s.Catalog, Sale: uuid.New()})
	require.ErrorIs(t, err, reservation.ErrSaleNotFound)
	report := testwork.Audit(t, s, uuid.Nil)
	require.False(t, report.Broken(), "an empty shop breaks no promise")
}

// BenchmarkAudit audits a sale of 100,000 orders.
func BenchmarkAudit(b *testing.B) {
	s := testshop.NewShop(b)
	const orders = 100_000
	sale := s.Open(b, orders)
	for i := 0; i < orders; i += 1000 {
		var wg sync.WaitGroup
		for j := range 1000 {
			wg.Go(func() {
				request := reservation.Request{Sale: sale, User: fmt.Sprintf("user-%d", i+j), Quantity: 1}
				if _, err := s.Store.Reserve(context.Background(), request); err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
		testwork.Fulfil(b, s)
	}
	for b.Loop() {
		report := testwork.Audit(b, s, sale)
		if report.Broken() || report.Sales[0].LiveOrders != orders {
			b.Fatal(testwork.Text(b, report))
		}
	}
}

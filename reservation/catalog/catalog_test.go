package catalog_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

func TestCreateOpensSaleWithTerms(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	terms := reservation.Terms{
		Name: "Schuhe, 50 % günstiger", Stock: 10, PerOrderLimit: 3,
		OpensAt:       time.Now().Add(-time.Hour).UTC().Truncate(time.Millisecond),
		ClosesAt:      time.Now().Add(time.Hour).UTC().Truncate(time.Millisecond),
		PaymentWindow: 15 * time.Minute, Shards: 1,
	}
	sale, err := s.Create(t.Context(), terms)
	require.NoError(t, err)
	require.Equal(t, terms, sale.Terms)
	require.Equal(t, reservation.StateOpen, sale.State)
	require.Equal(t, []int64{10, 0, 0}, []int64{sale.Available, sale.Held, sale.Sold})

	shown, err := s.Show(t.Context(), sale.ID)
	require.NoError(t, err)
	require.Equal(t, sale, shown)

	s.Buy(t, sale.ID, "ann")
	shown, err = s.Show(t.Context(), sale.ID)
	require.NoError(t, err)
	require.Equal(t, []int64{9, 1, 0}, []int64{shown.Available, shown.Held, shown.Sold},
		"accepted, but not yet recorded in Postgres")
}

func TestCreateRejectsInvalidTerms(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	good := reservation.Terms{Name: "n", Stock: 1, PerOrderLimit: 1}
	for field, spoil := range map[string]func(*reservation.Terms){
		"name":                   func(x *reservation.Terms) { x.Name = "" },
		"name ":                  func(x *reservation.Terms) { x.Name = strings.Repeat("n", 201) },
		"name  ":                 func(x *reservation.Terms) { x.Name = "a\x00b" },
		"name   ":                func(x *reservation.Terms) { x.Name = "a\u0085b" },
		"name    ":               func(x *reservation.Terms) { x.Name = " \u00a0\u2003\u3000" },
		"name     ":              func(x *reservation.Terms) { x.Name = "\u200b\u2060\u00ad\u3164\u034f\ufe0f\u2800\u202e" },
		"stock":                  func(x *reservation.Terms) { x.Stock = 0 },
		"stock ":                 func(x *reservation.Terms) { x.Stock = order.MaxStock + 1 },
		"per_order_limit":        func(x *reservation.Terms) { x.PerOrderLimit = 0 },
		"opens_at":               func(x *reservation.Terms) { x.OpensAt = time.Date(1960, 1, 1, 0, 0, 0, 0, time.UTC) },
		"closes_at ":             func(x *reservation.Terms) { x.ClosesAt = time.Unix(0, 0) },
		"closes_at  ":            func(x *reservation.Terms) { x.ClosesAt = time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC) },
		"closes_at":              func(x *reservation.Terms) { x.OpensAt = time.Now(); x.ClosesAt = x.OpensAt },
		"closes_at   ":           func(x *reservation.Terms) { x.ClosesAt = time.Now().Add(-time.Second) },
		"payment_window_seconds": func(x *reservation.Terms) { x.PaymentWindow = time.Millisecond },
	} {
		terms := good
		spoil(&terms)
		_, err := s.Create(t.Context(), terms)
		var invalid *order.InvalidError
		require.ErrorAs(t, err, &invalid, field)
		require.Equal(t, strings.TrimSpace(field), invalid.Field)
	}
	_, _, err := s.CreateOnce(t.Context(), good, "a\tb")
	require.ErrorAs(t, err, new(*order.InvalidError))
	sales, err := s.List(t.Context(), uuid.Nil, 10)
	require.NoError(t, err)
	require.Empty(t, sales)
	sale := s.Open(t, 1)
	_, err = s.Restock(t.Context(), sale, 1, "a\tb")
	require.ErrorAs(t, err, new(*order.InvalidError))
	require.EqualValues(t, 1, s.Left(t, sale))
}

func TestSalesAreListedNewestFirstInPages(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	var ids []uuid.UUID
	for range 5 {
		ids = append([]uuid.UUID{s.Sale(t, 1).ID}, ids...)
	}
	var listed []uuid.UUID
	after := uuid.Nil
	for {
		page, err := s.List(t.Context(), after, 2)
		require.NoError(t, err)
		if len(page) == 0 {
			break
		}
		for _, sale := range page {
			listed = append(listed, sale.ID)
		}
		after = listed[len(listed)-1]
	}
	require.Equal(t, ids, listed)
}

func TestOperatorChangesAreIdempotent(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	ctx := t.Context()
	sale := s.Sale(t, 5)

	type action func(context.Context, uuid.UUID) (catalog.CountedSale, error)
	does := func(do action, want reservation.State) catalog.CountedSale {
		t.Helper()
		first, err := do(ctx, sale.ID)
		require.NoError(t, err)
		require.Equal(t, want, first.State)
		again, err := do(ctx, sale.ID)
		require.NoError(t, err)
		require.Equal(t, first, again, "a repeat gets the same answer")
		require.Equal(t, string(want), s.Rdb.HGet(ctx, s.Keys.Sale(0, sale.ID), "state").Val())
		return first
	}
	does(s.Pause, reservation.StatePaused)
	does(s.Resume, reservation.StateOpen)

	restocked, err := s.Restock(ctx, sale.ID, 3, "delivery-1")
	require.NoError(t, err)
	require.EqualValues(t, 8, restocked.Available)
	again, err := s.Restock(ctx, sale.ID, 3, "delivery-1")
	require.NoError(t, err)
	require.Equal(t, restocked, again)
	_, err = s.Restock(ctx, sale.ID, 4, "delivery-1")
	require.ErrorIs(t, err, catalog.ErrIdempotencyKeyReused)

	ended := does(s.End, reservation.StateEnded)
	require.EqualValues(t, 5, ended.Revision, "created, paused, resumed, restocked, ended")

	left, paused := s.Sale(t, 5), s.Sale(t, 5)
	require.NoError(t, pausing(t, s, paused.ID))
	_, err = s.Pool.Exec(ctx, "UPDATE sales SET closes_at = now() WHERE id IN ($1, $2)", left.ID, paused.ID)
	require.NoError(t, err)
	for over, id := range map[string]uuid.UUID{
		"ended": sale.ID, "closed while open": left.ID, "closed while paused": paused.ID,
	} {
		for name, illegal := range map[string]func(testing.TB, *testshop.Shop, uuid.UUID) error{
			"pause": pausing, "resume": resuming, "restock": restocking(1),
		} {
			var transition *reservation.IllegalTransitionError
			require.ErrorAs(t, illegal(t, s, id), &transition, "%s a sale that %s", name, over)
			require.Equal(t, reservation.IllegalTransitionError{Action: name, State: reservation.StateEnded}, *transition)
		}
		require.NoError(t, ending(t, s, id))
	}
	for _, units := range []int64{0, -order.MaxStock - 1, order.MaxStock + 1} {
		_, err := s.Restock(ctx, sale.ID, units, "")
		var invalid *order.InvalidError
		require.ErrorAs(t, err, &invalid)
	}

	for _, unknown := range []uuid.UUID{uuid.New(), uuid.Nil} {
		for _, do := range []action{s.Show, s.Pause, s.Resume, s.End} {
			_, err := do(ctx, unknown)
			require.ErrorIs(t, err, reservation.ErrSaleNotFound)
		}
	}
}

func TestSaleStateFollowsItsTimes(t *testing.T) {
	t.Parallel()
	now := time.Now()
	sale := reservation.Sale{
		State: reservation.StateOpen,
		Terms: reservation.Terms{OpensAt: now, ClosesAt: now.Add(time.Minute)},
	}
	require.Equal(t, reservation.StateScheduled, sale.StateAt(now.Add(-time.Second)))
	require.Equal(t, reservation.StateOpen, sale.StateAt(now))
	require.Equal(t, reservation.StateEnded, sale.StateAt(now.Add(time.Minute)))
	sale.State = reservation.StatePaused
	require.Equal(t, reservation.StatePaused, sale.StateAt(now.Add(-time.Second)))
	require.Equal(t, reservation.StateEnded, sale.StateAt(now.Add(time.Minute)))
}

func TestUnpublishedChangesArePublishedInOrder(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: testkit.Client(t, own.URL)})
	ctx := t.Context()
	known := s.Sale(t, 5)

	own.Kill()
	created, err := s.Create(ctx, reservation.Terms{Name: "created in an outage", Stock: 7, PerOrderLimit: 1})
	require.NoError(t, err, "the sale is recorded, and opens when Redis is back")
	require.EqualValues(t, 7, created.Available)
	_, err = s.Pause(ctx, known.ID)
	require.ErrorIs(t, err, catalog.ErrNotInForce, "the operator gets the delay as an error")
	_, err = s.Restock(ctx, known.ID, 2, "")
	require.ErrorIs(t, err, catalog.ErrNotInForce)
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	_, err = s.PublishPending(ctx)
	require.Error(t, err)

	require.NoError(t, own.Restart(ctx))
	_, err = s.PublishPending(ctx)
	require.ErrorIs(t, err, reservation.ErrUnavailable, "the server may have lost data")
	testkit.VerifyServer(t, s.Pool, s.Store, 0)
	published := 0
	testkit.Eventually(t, 30*time.Second, "both sales are published", func() bool {
		n, _ := s.PublishPending(ctx) // go-redis refuses to dial for a moment
		published += n
		return published == 2
	})
	s.Buy(t, created.ID, "ann")
	require.Equal(t, reservation.Paused, s.Ask(t, known.ID, "ann").Verdict)
	require.EqualValues(t, 7, s.Left(t, known.ID))

	published, err = s.PublishPending(ctx)
	require.NoError(t, err)
	require.Zero(t, published)
}

func TestPublishDoesNotRefillLostSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 5)
	s.Buy(t, sale.ID, "ann")
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Sale(0, sale.ID), s.Keys.Buyers(0, sale.ID)).Err())
	_, err := s.Restock(t.Context(), sale.ID, 1, "")
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	require.Zero(t, s.Rdb.Exists(t.Context(), s.Keys.Sale(0, sale.ID)).Val())
}

// The operator calls another ingress than the two that remember the sale.
func TestOperatorChangesReachEveryIngressWithinASecond(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		// before prepares the sale. With a stock of 1 the ingresses remember it as sold out.
		stock  int64
		before func(t testing.TB, s *testshop.Shop, sale uuid.UUID) error
		does   func(t testing.TB, s *testshop.Shop, sale uuid.UUID) error
		want   reservation.Verdict
	}{
		"pause":                     {5, nil, pausing, reservation.Paused},
		"pause when sold out":       {1, nil, pausing, reservation.Paused},
		"resume":                    {5, pausing, resuming, reservation.Reserved},
		"end":                       {5, nil, ending, reservation.Ended},
		"end when sold out":         {1, nil, ending, reservation.Ended},
		"end when paused":           {5, pausing, ending, reservation.Ended},
		"restock up when sold out":  {1, nil, restocking(3), reservation.Reserved},
		"restock down to the taken": {5, nil, restocking(-4), reservation.SoldOut},
		"restock up after that":     {5, restocking(-4), restocking(3), reservation.Reserved},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, _ := testshop.SoldOutShop(t) // on its own Redis, which counts no other calls
			sale := s.Sale(t, c.stock).ID
			s.Buy(t, sale, "ann")
			if c.before != nil {
				require.NoError(t, c.before(t, s, sale))
			}
			ingresses := []*testshop.Shop{s.Next(t, s.Rdb), s.Next(t, s.Rdb)}
			for _, ingress := range ingresses {
				require.Equal(t, reservation.AlreadyPurchased, ingress.Ask(t, sale, "ann").Verdict, "it has looked up the sale")
				if s.Left(t, sale) == 0 {
					ingress.RememberSoldOut(t, sale)
				}
			}
			require.NoError(t, c.does(t, s, sale))
			changed := time.Now()
			for i, ingress := range ingresses {
				for {
					asked := time.Now()
					if ingress.Ask(t, sale, []string{"bob", "cid"}[i]).Verdict == c.want {
						break
					}
					require.Less(t, asked.Sub(changed), time.Second)
				}
			}
		})
	}
}

func pausing(t testing.TB, s *testshop.Shop, sale uuid.UUID) error {
	_, err := s.Pause(t.Context(), sale)
	return err
}

func resuming(t testing.TB, s *testshop.Shop, sale uuid.UUID) error {
	_, err := s.Resume(t.Context(), sale)
	return err
}

func ending(t testing.TB, s *testshop.Shop, sale uuid.UUID) error {
	_, err := s.End(t.Context(), sale)
	return err
}

func restocking(units int64) func(testing.TB, *testshop.Shop, uuid.UUID) error {
	return func(t testing.TB, s *testshop.Shop, sale uuid.UUID) error {
		_, err := s.Restock(t.Context(), sale, units, "")
		return err
	}
}

// Units that Redis lost belong to no buyer, so they must not be counted as held.
func TestCountRefusesSaleThatAwaitsRebuild(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, other := s.Sale(t, 10), s.Sale(t, 5)
	s.Buy(t, sale.ID, "ann")
	unknown := func() {
		t.Helper()
		_, err := s.Show(t.Context(), sale.ID)
		require.ErrorIs(t, err, reservation.ErrUnavailable)
		_, err = s.List(t.Context(), uuid.Nil, 10)
		require.ErrorIs(t, err, reservation.ErrUnavailable)
		_, err = s.Pause(t.Context(), sale.ID)
		require.ErrorIs(t, err, catalog.ErrNotInForce)
		counted, err := s.Show(t.Context(), other.ID)
		require.NoError(t, err)
		require.EqualValues(t, 5, counted.Available)
	}
	key := s.Keys.Sale(0, sale.ID)
	require.NoError(t, s.Rdb.Copy(t.Context(), key, key+"-kept", 0, false).Err())
	_, err := s.CloseSale(t.Context(), sale.ID, 0, testshop.Token, 0)
	require.NoError(t, err)
	unknown()
	require.NoError(t, s.Rdb.Del(t.Context(), key).Err())
	unknown()
	_, err = s.CloseSale(t.Context(), sale.ID, 0, testshop.Token, 0)
	require.NoError(t, err)
	unknown()

	require.NoError(t, s.Rdb.Rename(t.Context(), key+"-kept", key).Err())
	_, err = s.PublishPending(t.Context())
	require.NoError(t, err)
	sales, err := s.List(t.Context(), uuid.Nil, 10)
	require.NoError(t, err)
	require.Len(t, sales, 2)
	require.Equal(t, []int64{10, 9, 1, 0}, []int64{sales[1].Stock, sales[1].Available, sales[1].Held, sales[1].Sold})
	require.Equal(t, reservation.StatePaused, sales[1].State, "the recorded change is published")
}

// Operators may delete the keys of ended sales to free memory.
func TestEndedSaleIsCountedWithoutRedis(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 10)
	_, err := s.End(t.Context(), sale.ID)
	require.NoError(t, err)
	require.NoError(t, s.Exec(t, "UPDATE sales SET sold = 3 WHERE id = $1", sale.ID))
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Sale(0, sale.ID)).Err())
	sales, err := s.List(t.Context(), uuid.Nil, 10)
	require.NoError(t, err)
	require.Equal(t, []int64{10, 7, 0, 3}, []int64{sales[0].Stock, sales[0].Available, sales[0].Held, sales[0].Sold})
}

func TestMain(m *testing.M) { testkit.Main(m, testkit.WithRedisInMemory()) }

// sizes are the terms of a sale of a shirt in two sizes.
func sizes() reservation.Terms {
	return reservation.Terms{
		Name: "shirt", Stock: 5, PerOrderLimit: 4, Currency: "EUR", Items: []reservation.Item{
			{Code: "m", Name: "Medium", Stock: 3, UnitPrice: 1290, PerOrderLimit: 2},
			{Code: "l", Name: "Large", Stock: 2, UnitPrice: 1490},
		},
	}
}

func TestSaleWithItemsIsCreatedOnce(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	ctx := t.Context()
	sale, replayed, err := s.CreateOnce(ctx, sizes(), "drop-1")
	require.NoError(t, err)
	require.False(t, replayed)
	m, l := sizes().Items[0], sizes().Items[1]
	require.Equal(t, []catalog.CountedItem{{Item: m, Available: 3}, {Item: l, Available: 2}}, sale.Items)
	require.Equal(t, []string{
		`SaleWithItemsCreated {"items": [{"code": "m", "name": "Medium", "stock": 3, "unit_price": 1290, "per_order_limit": 2}, ` +
			`{"code": "l", "name": "Large", "stock": 2, "unit_price": 1490}], "stock": 5}`,
	}, saleEvents(t, s.Pool, sale.ID))
	var letters string
	require.NoError(t, s.Pool.QueryRow(ctx,
		"SELECT string_agg(item || code || stock, ' ' ORDER BY item) FROM sale_items WHERE sale_id = $1", sale.ID).Scan(&letters))
	require.Equal(t, "am3 bl2", letters)

	_, err = s.Pool.Exec(ctx, "UPDATE sale_items SET stock = 9 WHERE sale_id = $1", sale.ID)
	require.NoError(t, err)
	again, replayed, err := s.CreateOnce(ctx, sizes(), "drop-1")
	require.NoError(t, err)
	require.True(t, replayed)
	require.Equal(t, sale, again, "as it was created")
	for name, change := range map[string]func(*reservation.Terms){
		"stock of the items": func(x *reservation.Terms) { x.Items[0].Stock, x.Items[1].Stock = 2, 3 },
		"order of the items": func(x *reservation.Terms) { x.Items[0], x.Items[1] = x.Items[1], x.Items[0] },
		"price of an item":   func(x *reservation.Terms) { x.Items[1].UnitPrice++ },
		"no items":           func(x *reservation.Terms) { x.Items, x.Currency = nil, "" },
	} {
		other := sizes()
		change(&other)
		_, _, err := s.CreateOnce(ctx, other, "drop-1")
		require.ErrorIs(t, err, catalog.ErrIdempotencyKeyReused, name)
	}
	changes, err := s.History(ctx, sale.ID, 1)
	require.NoError(t, err)
	require.Equal(t, "created", changes[0].Name())
}

func TestSaleWithItemsIsShown(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, err := s.Create(t.Context(), sizes())
	require.NoError(t, err)
	text, err := json.Marshal(sale)
	require.NoError(t, err)
	require.Contains(t, string(text), `"items":[{"code":"m","name":"Medium","stock":3,"unit_price":1290,"per_order_limit":2,`+
		`"available":3},{"code":"l","name":"Large","stock":2,"unit_price":1490,"available":2}]`)
	var read catalog.CountedSale
	require.NoError(t, json.Unmarshal(text, &read))
	require.Equal(t, sale.Items, read.Items)
	require.Equal(t, sale.Terms.Items, read.Terms.Items)

	// Without its keys an ended sale is counted in Postgres.
	_, err = s.End(t.Context(), sale.ID)
	require.NoError(t, err)
	_, err = s.Pool.Exec(t.Context(), "UPDATE sale_items SET sold = 1 WHERE sale_id = $1 AND code = 'l'", sale.ID)
	require.NoError(t, err)
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Sale(0, sale.ID)).Err())
	shown, err := s.Show(t.Context(), sale.ID)
	require.NoError(t, err)
	require.Equal(t, []int64{3, 1}, []int64{shown.Items[0].Available, shown.Items[1].Available})
}

func TestRenamedSaleKeepsEverythingElse(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	ctx := t.Context()
	created, _, err := s.CreateOnce(ctx, sizes(), "drop-1")
	require.NoError(t, err)
	shirt := "T-shirt"
	to := catalog.Names{Sale: &shirt, Items: map[string]string{"l": "Very large", "m": "Medium"}}
	renamed, err := s.Rename(ctx, created.ID, to)
	require.NoError(t, err)
	want := created
	want.Name, want.Revision, want.Terms.Items, want.Items = shirt, 2, renamed.Terms.Items, renamed.Items
	require.Equal(t, want, renamed)
	m, l := sizes().Items[0], sizes().Items[1]
	l.Name = "Very large"
	require.Equal(t, []catalog.CountedItem{{Item: m, Available: 3}, {Item: l, Available: 2}}, renamed.Items)
	again, err := s.Rename(ctx, created.ID, to)
	require.NoError(t, err)
	require.Equal(t, renamed, again, "a repeat changes nothing")

	// Later changes keep the names.
	_, err = s.RestockItems(ctx, created.ID, map[string]int64{"m": 4}, "")
	require.NoError(t, err)
	_, err = s.RestockItems(ctx, created.ID, map[string]int64{"l": -1}, "")
	require.NoError(t, err)
	tee := "Tee"
	now, err := s.Rename(ctx, created.ID, catalog.Names{Sale: &tee})
	require.NoError(t, err)
	require.Equal(t, []string{tee, "Medium", "Very large"}, []string{now.Name, now.Items[0].Name, now.Items[1].Name})
	require.Equal(t, []int64{8, 7, 1}, []int64{now.Stock, now.Items[0].Stock, now.Items[1].Stock})
	require.Equal(t, `SaleRenamed {"name": "T-shirt", "items": [`+
		`{"code": "m", "name": "Medium", "stock": 3, "unit_price": 1290, "per_order_limit": 2}, `+
		`{"code": "l", "name": "Very large", "stock": 2, "unit_price": 1490}], `+
		`"item_names": {"l": "Very large", "m": "Medium"}, "previous_name": "shirt"}`, saleEvents(t, s.Pool, created.ID)[1])

	same, replayed, err := s.CreateOnce(ctx, sizes(), "drop-1")
	require.NoError(t, err)
	require.True(t, replayed)
	created.Revision = same.Revision
	require.Equal(t, created, same, "as it was created")
	other := sizes()
	other.Name = tee
	_, _, err = s.CreateOnce(ctx, other, "drop-1")
	require.ErrorIs(t, err, catalog.ErrIdempotencyKeyReused)
}

// A name that could not be published is shown, and later changes do not wait for a rebuild.
func TestRenameIsPublishedLater(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedSale(t, 8, 4)
	name := "autumn"
	s.Rdb.HSet(t.Context(), s.Keys.Sale(sale.Layout().Partition(2), sale.ID), "epoch", 9)
	_, err := s.Rename(t.Context(), sale.ID, catalog.Names{Sale: &name})
	require.ErrorIs(t, err, catalog.ErrNotInForce)
	s.Rdb.HSet(t.Context(), s.Keys.Sale(sale.Layout().Partition(2), sale.ID), "epoch", 1)
	published, err := s.PublishPending(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, published)
	paused, err := s.Pause(t.Context(), sale.ID)
	require.NoError(t, err)
	require.Equal(t, []any{name, reservation.StatePaused}, []any{paused.Name, paused.State})
}

package fulfillment_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
	"stampede/upkeep/rebuild"
)

const (
	modelSteps    = 100 // of each sale
	modelUsers    = 8
	modelPerOrder = 3
	modelPerFirst = 2 // units of the first of several items
)

var modelSales = testkit.Soak(10)

// Random steps on real servers have the results of the model. After a failure rapid prints the seed and searches for a
// shorter sequence with the same failure.
func TestRandomSaleMatchesModel(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	world := &modelWorld{Shop: s, t: t, ledger: ledger.New(s.Pool), done: map[string]int{}}
	world.startWorker()
	testkit.PlaySales(t, modelSales, world.playSale)
	steps := 0
	for _, n := range world.done {
		steps += n
	}
	t.Logf("%d sales, %d steps: %v", world.sales, steps, world.done)
	require.GreaterOrEqual(t, steps, world.sales*modelSteps, "the steps of an interrupted sale count as well")
	if !testkit.EnoughForRareSteps(t, world.sales, modelSales) {
		return
	}
	for _, step := range (&modelRun{}).steps() {
		require.Positive(t, world.done[step.name], step.name)
	}
}

// modelWorld is shared by the sales of all checks.
type modelWorld struct {
	*testshop.Shop
	t      *testing.T
	ledger *ledger.Ledger
	stop   func()
	sales  int            // finished
	done   map[string]int // steps, by their name
}

func (w *modelWorld) startWorker() {
	config := testwork.Config(w.t, w.Shop)
	config.SweepInterval, config.GuardInterval = 5*time.Millisecond, 20*time.Millisecond
	w.stop = testwork.Work(w.t, config)
}

// modelRun is one sale and its model.
type modelRun struct {
	*modelWorld
	*rapid.T
	model
	sale uuid.UUID
	past []reservation.Request
}

func (w *modelWorld) playSale(rt *rapid.T) {
	ctx := context.Background()
	terms := reservation.Terms{Name: "model", PerOrderLimit: modelPerOrder, PaymentWindow: time.Hour}
	stock := []int64{rapid.Int64Range(3, 12).Draw(rt, "stock")}
	items := rapid.Bool().Draw(rt, "items")
	if items {
		stock = rapid.SliceOfN(rapid.Int64Range(1, 5), 3, 3).Draw(rt, "stocks")
		for i, units := range stock {
			terms.Items = append(terms.Items, reservation.Item{Code: order.ItemLetter(i), Name: "item", Stock: units})
		}
		terms.Items[0].PerOrderLimit = modelPerFirst
	}
	terms.Stock = sum(stock)
	sale, err := w.Catalog.Create(ctx, terms)
	require.NoError(rt, err)
	r := &modelRun{modelWorld: w, T: rt, sale: sale.ID, model: model{
		items: items, stock: stock, state: reservation.StateOpen,
		orders: map[uuid.UUID]modelOrder{}, holds: map[string]uuid.UUID{},
	}}
	// A failed earlier check may have left Redis empty.
	r.awaitOpen(ctx, func() error { return nil })
	steps := r.steps()
	var weighted []int
	for i, step := range steps {
		weighted = append(weighted, slices.Repeat([]int{i}, step.weight)...)
	}
	for range modelSteps {
		step := steps[rapid.SampledFrom(weighted).Draw(rt, "step")]
		rt.Log(step.name)
		step.do(ctx)
		r.compare(ctx)
		w.done[step.name]++
	}
	_, err = w.Catalog.End(ctx, r.sale)
	require.NoError(rt, err)
	w.sales++
}

// modelStep is something that can happen to a sale, with its weight in the draw.
type modelStep struct {
	name   string
	weight int
	do     func(context.Context)
}

// steps returns all steps. The most valuable ones are first and last, because rapid draws those more often.
func (r *modelRun) steps() []modelStep {
	return []modelStep{
		{"reserve", 30, r.reserveNew},
		{"pay", 12, r.pay},
		{"cancel", 12, r.cancel},
		{"withdraw", 8, r.withdraw},
		{"restock", 6, r.restock},
		{"expire", 3, r.expire},
		{"rebuild", 2, r.rebuild},
		{"lose all", 1, r.loseAll},
		{"lose unseen orders", 1, r.loseUnseen},
		{"pause", 5, r.pause},
		{"resume", 8, r.resume},
		{"retry", 15, r.retry},
	}
}

func (r *modelRun) reserveNew(ctx context.Context) {
	user := rapid.IntRange(1, modelUsers).Draw(r.T, "user")
	key := rapid.SampledFrom([]string{"", "a", "b", "c", "d"}).Draw(r.T, "key")
	request := reservation.Request{Sale: r.sale, User: fmt.Sprintf("user-%d", user), IdempotencyKey: key}
	if r.items {
		request.Items = r.drawItems(modelPerOrder)
	} else {
		request.Quantity = rapid.Int64Range(1, modelPerOrder+1).Draw(r.T, "quantity")
	}
	r.request(ctx, request)
}

// drawItems draws up to so many units of some items, by code.
func (r *modelRun) drawItems(most int64) map[string]int64 {
	items := map[string]int64{}
	for _, i := range rapid.SampledFrom([][]int{{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}, {0, 1, 2}}).Draw(r.T, "items") {
		items[order.ItemLetter(i)] = rapid.Int64Range(1, most).Draw(r.T, "units")
	}
	return items
}

func (r *modelRun) retry(ctx context.Context) {
	if len(r.past) > 0 {
		r.request(ctx, rapid.SampledFrom(r.past).Draw(r.T, "request"))
	}
}

func (r *modelRun) request(ctx context.Context, request reservation.Request) uuid.UUID {
	want, existing := r.verdict(request)
	var answer reservation.Answer
	r.eventually("an ingress no longer remembers the sale as sold out", func() (current bool) {
		// No other ingress remembers the sale as sold out, so the sale can be bought without a pause.
		err := r.Rdb.HDel(ctx, r.Keys.Sale(0, r.sale), "quiet_since_ms", "quiet.a", "quiet.b", "quiet.c").Err()
		require.NoError(r.T, err)
		answer, err = r.Store.Reserve(ctx, request)
		require.NoError(r.T, err)
		return answer.Verdict != reservation.SoldOut || r.wantsSoldOut(request) || want == reservation.SoldOut
	})
	if answer.Verdict == reservation.SoldOut && r.wantsSoldOut(request) && existing == uuid.Nil &&
		want != reservation.KeyReused {
		want = reservation.SoldOut // an ingress that remembers the sale as sold out has no other answer
	}
	require.Equal(r.T, want, answer.Verdict)
	switch want {
	case reservation.Reserved:
		r.past = append(r.past, request)
		r.reserve(request, answer.Reservation.OrderID)
	case reservation.OrderEnded:
		require.Equal(r.T, r.orders[existing].status, answer.Status)
		fallthrough
	case reservation.Replayed, reservation.AlreadyPurchased:
		require.Equal(r.T, existing, answer.Reservation.OrderID)
		require.Equal(r.T, r.orders[existing].quantity, answer.Reservation.Quantity)
		require.Equal(r.T, r.orders[existing].lines, answer.Reservation.Lines)
	}
	if want != reservation.Reserved {
		return uuid.Nil
	}
	return answer.Reservation.OrderID
}

// anyOrder returns an order of the sale, or an unknown one.
func (r *modelRun) anyOrder() (id uuid.UUID, o modelOrder, known bool) {
	ids := slices.SortedFunc(maps.Keys(r.orders), func(a, b uuid.UUID) int { return slices.Compare(a[:], b[:]) })
	i := rapid.IntRange(-1, len(ids)-1).Draw(r.T, "order")
	if i < 0 {
		return order.NewOrderID(r.sale), modelOrder{user: "user-1"}, false
	}
	return ids[i], r.orders[ids[i]], true
}

func (r *modelRun) pay(ctx context.Context) {
	id, o, known := r.anyOrder()
	reference := rapid.SampledFrom([]string{"x", "y"}).Draw(r.T, "reference")
	_, err := r.ledger.Pay(ctx, id, o.user, reference)
	switch {
	case !known:
		require.ErrorIs(r.T, err, order.ErrNotFound)
	case o.status == order.StatusExpired:
		require.ErrorIs(r.T, err, order.ErrExpired)
	case o.status == order.StatusPaid && o.reference == reference:
		require.NoError(r.T, err)
	case o.status != order.StatusConfirmed:
		require.ErrorIs(r.T, err, order.ErrIllegalTransition)
	default:
		require.NoError(r.T, err)
		r.step(id, order.StatusPaid, reference)
	}
}

func (r *modelRun) cancel(ctx context.Context) {
	id, o, known := r.anyOrder()
	_, err := r.ledger.Cancel(ctx, id, o.user)
	switch {
	case !known:
		require.ErrorIs(r.T, err, order.ErrNotFound)
	case o.status == order.StatusExpired:
		require.ErrorIs(r.T, err, order.ErrExpired)
	case o.status == order.StatusCancelled:
		require.NoError(r.T, err)
	case o.status != order.StatusConfirmed:
		require.ErrorIs(r.T, err, order.ErrIllegalTransition)
	default:
		require.NoError(r.T, err)
		r.step(id, order.StatusCancelled, "")
	}
}

// withdraw cancels an order for an operator, also a paid one.
func (r *modelRun) withdraw(ctx context.Context) {
	id, o, known := r.anyOrder()
	cancelled, err := r.ledger.Withdraw(ctx, id, "the model says so", "ann")
	switch {
	case !known:
		require.ErrorIs(r.T, err, order.ErrNotFound)
	case o.status == order.StatusCancelled:
		require.NoError(r.T, err)
		require.Equal(r.T, o.version, cancelled.Version)
	case !o.status.Live():
		require.ErrorIs(r.T, err, order.ErrIllegalTransition)
	default:
		require.NoError(r.T, err)
		require.Equal(r.T, o.reference, cancelled.PaymentReference)
		r.step(id, order.StatusCancelled, o.reference)
	}
}

// expire advances the clock of deadlines by two hours, more than the payment window.
func (r *modelRun) expire(ctx context.Context) {
	_, err := r.Pool.Exec(ctx, "UPDATE pulse SET lost = lost - interval '2 hours', seen_at = now()")
	require.NoError(r.T, err)
	for id, o := range r.orders {
		if o.status == order.StatusConfirmed {
			r.step(id, order.StatusExpired, "")
		}
	}
}

func (r *modelRun) restock(ctx context.Context) {
	added := make([]int64, len(r.stock))
	var err error
	if r.items {
		units, sign := r.drawItems(4), rapid.SampledFrom([]int64{1, -1}).Draw(r.T, "sign")
		for i := range added {
			code := order.ItemLetter(i)
			if added[i] = sign * units[code]; added[i] != 0 {
				units[code] = added[i]
			}
		}
		_, err = r.Catalog.RestockItems(ctx, r.sale, units, "")
	} else {
		added[0] = rapid.Int64Range(-6, 6).Filter(func(n int64) bool { return n != 0 }).Draw(r.T, "units")
		_, err = r.Catalog.Restock(ctx, r.sale, added[0], "")
	}
	left, to := r.left(), slices.Clone(r.stock)
	refused := false
	for i, units := range added {
		to[i] += units
		refused = refused || units < 0 && left[i]+units < 0
	}
	if refused || sum(to) < 1 {
		require.Error(r.T, err)
		require.NotErrorIs(r.T, err, reservation.ErrUnavailable)
		return
	}
	require.NoError(r.T, err)
	r.stock = to
}

func (r *modelRun) pause(ctx context.Context) {
	_, err := r.Catalog.Pause(ctx, r.sale)
	require.NoError(r.T, err)
	r.state = reservation.StatePaused
}

func (r *modelRun) resume(ctx context.Context) {
	_, err := r.Catalog.Resume(ctx, r.sale)
	require.NoError(r.T, err)
	r.state = reservation.StateOpen
}

// rebuild rebuilds an intact sale, as an operator might.
func (r *modelRun) rebuild(ctx context.Context) {
	r.awaitOpen(ctx, func() error {
		_, err := testwork.Rebuilder(r.t, r.modelWorld.Shop).Sale(ctx, r.sale, "model")
		return err
	})
}

// loseAll deletes everything in Redis after all orders are in Postgres. The worker detects the loss.
func (r *modelRun) loseAll(ctx context.Context) {
	r.emptyRedis(ctx)
	r.awaitOpen(ctx, func() error { return nil })
}

// loseUnseen deletes orders in Redis that no worker has read.
func (r *modelRun) loseUnseen(ctx context.Context) {
	r.stop()
	var unseen []uuid.UUID
	for user := 1; user <= modelUsers; user++ {
		if _, holds := r.holds[fmt.Sprintf("user-%d", user)]; holds {
			continue
		}
		request := reservation.Request{Sale: r.sale, User: fmt.Sprintf("user-%d", user), Quantity: 1}
		if r.items {
			request.Quantity, request.Items = 0, map[string]int64{order.ItemLetter(user % len(r.stock)): 1}
		}
		id := r.request(ctx, request)
		if _, accepted := r.orders[id]; accepted {
			unseen = append(unseen, id)
		}
	}
	r.emptyRedis(ctx)
	r.startWorker()
	r.lose(unseen)
	r.awaitOpen(ctx, func() error { return nil })
}

func (r *modelRun) emptyRedis(ctx context.Context) {
	names, err := r.Rdb.Keys(ctx, r.Keys.Prefix+":*").Result()
	require.NoError(r.T, err)
	require.NoError(r.T, r.Rdb.Unlink(ctx, names...).Err())
}

// awaitOpen repeats do until it succeeds, and waits until the sale is open.
func (r *modelRun) awaitOpen(ctx context.Context, do func() error) {
	r.eventually("the rebuild succeeds", func() bool {
		err := do()
		require.True(r.T, err == nil || errors.Is(err, rebuild.ErrRunning), "%v", err)
		return err == nil
	})
	r.eventually("the sale is open again", func() bool {
		var epoch int64
		require.NoError(r.T, r.Pool.QueryRow(ctx, "SELECT epoch FROM sales WHERE id = $1", r.sale).Scan(&epoch))
		inRedis, err := r.Rdb.HGet(ctx, r.Keys.Sale(0, r.sale), "epoch").Int64()
		require.True(r.T, err == nil || errors.Is(err, redis.Nil), "%v", err)
		server, err := r.Store.Inspect(ctx, 0)
		require.NoError(r.T, err)
		return server.Known && inRedis == epoch
	})
}

func (r *modelRun) eventually(what string, cond func() bool) {
	testkit.Eventually(failThrough{r.t, r.T}, 2*time.Minute, what, cond)
}

// failThrough is a testing.TB that fails a check of rapid instead of the whole test.
type failThrough struct {
	testing.TB
	check *rapid.T
}

func (f failThrough) Fatalf(format string, args ...any) { f.check.Fatalf(format, args...) }

// modelRow is an order as Postgres has it.
type modelRow struct {
	ID                      uuid.UUID
	User, Status, Reference string
	Quantity                int64
	Version                 int
	Lines                   string
}

// compare waits until nothing is in progress and compares both servers with the model.
func (r *modelRun) compare(ctx context.Context) {
	r.eventually("nothing is in progress", func() bool { return r.rests(ctx) })
	rows, _ := r.Pool.Query(ctx,
		`SELECT id, user_id, status, coalesce(payment_reference, ''), quantity, version, coalesce(lines, '')
		FROM orders WHERE sale_id = $1`, r.sale)
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[modelRow])
	require.NoError(r.T, err)
	orders := map[uuid.UUID]modelOrder{}
	for _, row := range found {
		orders[row.ID] = modelOrder{
			row.User, r.orders[row.ID].key, row.Reference, row.Quantity, order.Lines(row.Lines), order.Status(row.Status),
			row.Version,
		}
	}
	require.Equal(r.T, r.orders, orders)

	buyers, err := r.Rdb.HGetAll(ctx, r.Keys.Buyers(0, r.sale)).Result()
	require.NoError(r.T, err)
	holds := map[string]uuid.UUID{}
	for user, text := range buyers {
		held, _, err := order.ParseReservation(text)
		require.NoError(r.T, err)
		holds[user] = held.OrderID
		require.Equal(r.T, r.orders[held.OrderID].lines, held.Lines)
	}
	require.Equal(r.T, r.holds, holds)

	counted, err := r.Catalog.Show(ctx, r.sale)
	require.NoError(r.T, err)
	require.Equal(r.T, r.state, counted.State)
	stock, left := sum(r.stock), sum(r.left())
	require.Equal(r.T, []int64{
		stock, left, r.units(order.StatusConfirmed), r.units(order.StatusPaid), stock - left,
	},
		[]int64{
			counted.Stock, counted.Available, counted.Held, counted.Sold, counted.Sale.Sold,
		}, "stock, available, held, sold, and live units")
	if !r.items {
		return
	}
	want, sold := make([][3]int64, len(r.stock)), make([][3]int64, len(counted.Items))
	rows, _ = r.Pool.Query(ctx, "SELECT sold FROM sale_items WHERE sale_id = $1 ORDER BY item", r.sale)
	live, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(r.T, err)
	for i, left := range r.left() {
		want[i] = [3]int64{r.stock[i], left, r.stock[i] - left}
		sold[i] = [3]int64{counted.Items[i].Stock, counted.Items[i].Available, live[i]}
	}
	require.Equal(r.T, want, sold, "stock, available, and live units of each item")
}

// rests is true when every accepted order is in Postgres, no order is overdue, and every change is published to Redis.
func (r *modelRun) rests(ctx context.Context) bool {
	waiting, err := stream.ReadBacklog(ctx, r.Rdb, r.Keys.Orders(0), reservation.Group)
	require.NoError(r.T, err)
	n, known := waiting.Waiting()
	var undone int64
	require.NoError(r.T, r.Pool.QueryRow(ctx, `SELECT
		(SELECT count(*) FROM releases)
		+ (SELECT count(*) FROM orders, pulse WHERE status = 'confirmed' AND due <= least(seen_at, now()) - lost)
		+ (SELECT count(*) FROM sales WHERE published_revision < revision)`).Scan(&undone))
	return known && n == 0 && undone == 0
}

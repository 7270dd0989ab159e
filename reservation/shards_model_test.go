package reservation_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

const (
	shardSteps     = 50 // of each sale
	shardUsers     = 60
	shardIngresses = 3
)

var shardSales = testkit.Soak(12)

// Random steps over one sale: purchases, returns, restocks and moves of units, by ingresses that are killed between any
// two calls or lose answers, and calls that arrive late and twice. After each step every unit is in one place. After
// a failure rapid prints the seed and searches for a shorter sequence with the same failure.
func TestRandomShardedSaleKeepsEveryUnit(t *testing.T) {
	t.Parallel()
	world := &shardWorld{t: t, Shop: testshop.NewShardedShop(t), done: map[string]int{}}
	for range shardIngresses {
		rdb, wire := testshop.Wired(t, testkit.RedisURL(t))
		world.clients, world.wires = append(world.clients, rdb), append(world.wires, wire)
	}
	testkit.PlaySales(t, shardSales, world.playSale)
	t.Logf("%d sales: %v", world.sales, world.done)
	if !testkit.EnoughForRareSteps(t, world.sales, shardSales) {
		return
	}
	for _, step := range (&shardRun{}).steps() {
		require.Positive(t, world.done[step.name], step.name)
	}
	for _, rare := range []string{"killed", "lossy", "sold out", "taken", "units on their way", "offered"} {
		require.Positive(t, world.done[rare], rare)
	}
}

// shardWorld is shared by the sales of all checks.
type shardWorld struct {
	t              testing.TB
	*testshop.Shop // a worker that nothing happens to
	clients        []*redis.Client
	wires          []*testshop.Wire
	sales          int            // finished
	done           map[string]int // steps and what came of them, by their name
}

// shardRun is one sale.
type shardRun struct {
	*shardWorld
	*rapid.T
	sale      reservation.Sale
	ingresses []*testshop.Shop
	places    map[int64]uuid.UUID // orders by their place
	orders    int
}

func (w *shardWorld) playSale(rt *rapid.T) {
	ctx := context.Background()
	shards := rapid.IntRange(2, 8).Draw(rt, "shards")
	created, err := w.Create(ctx, reservation.Terms{
		Name: "test", PerOrderLimit: 10, Shards: shards, Stock: rapid.Int64Range(2, 16).Draw(rt, "stock"),
		Waitlist: rapid.Bool().Draw(rt, "waitlist"),
	})
	require.NoError(rt, err)
	r := &shardRun{
		shardWorld: w, T: rt, sale: created.Sale, ingresses: make([]*testshop.Shop, shardIngresses),
		places: map[int64]uuid.UUID{},
	}
	for i, wire := range w.wires {
		wire.Forget()
		r.restart(i)
	}
	defer func() {
		for _, ingress := range r.ingresses {
			ingress.Close()
		}
	}()
	steps := r.steps()
	var weighted []int
	for i, step := range steps {
		weighted = append(weighted, slices.Repeat([]int{i}, step.weight)...)
	}
	for range shardSteps {
		step := steps[rapid.SampledFrom(weighted).Draw(rt, "step")]
		rt.Log(step.name)
		step.do(ctx)
		r.compare(ctx)
		w.done[step.name]++
	}
	r.sellRest(ctx)
	w.sales++
}

// restart replaces the process of an ingress.
func (r *shardRun) restart(i int) {
	if r.ingresses[i] != nil {
		r.ingresses[i].Close()
	}
	r.wires[i].Set(nil)
	r.ingresses[i] = r.Next(r.t, r.clients[i])
}

type shardStep struct {
	name   string
	weight int
	do     func(context.Context)
}

// steps returns all steps. The most valuable ones are first and last, because rapid draws those more often.
func (r *shardRun) steps() []shardStep {
	return []shardStep{
		{"buy", 40, r.buy},
		{"release", 25, r.release},
		{"restock", 12, r.restock},
		{"pause", 2, r.pause},
		{"resume", 10, r.resume},
		{"help", 3, r.help},
		{"wait a second", 5, r.waitSecond},
		{"offer", 8, r.offer},
		{"reopen", 4, r.reopen},
		{"late calls", 15, r.lateCalls},
	}
}

// through does something at an ingress. Sound is false if calls or answers were lost meanwhile; a killed ingress is
// replaced.
func (r *shardRun) through(do func(ingress *testshop.Shop, sound bool)) {
	i := rapid.IntRange(0, shardIngresses-1).Draw(r.T, "ingress")
	switch rapid.SampledFrom([]string{"sound", "sound", "lossy", "killed"}).Draw(r.T, "wire") {
	case "sound":
		do(r.ingresses[i], true)
	case "killed":
		r.done["killed"]++
		r.wires[i].Set(testshop.KilledAfter(r.uniform(3 * len(r.now()))))
		do(r.ingresses[i], false)
		r.restart(i)
	case "lossy":
		r.done["lossy"]++
		r.wires[i].Set(testshop.Losing(r.uniform(20), r.uniform(20), r.uniform(20)))
		do(r.ingresses[i], false)
		r.wires[i].Set(nil)
	}
}

func (r *shardRun) buy(ctx context.Context) {
	request := reservation.Request{
		Sale: r.sale.ID, User: r.user(), Quantity: rapid.Int64Range(1, 3).Draw(r.T, "quantity"),
	}
	if r.orders++; rapid.Bool().Draw(r.T, "key") {
		request.IdempotencyKey = fmt.Sprint("key-", r.orders)
	}
	r.through(func(ingress *testshop.Shop, sound bool) { r.request(ctx, ingress, request, sound) })
}

// user draws a user: often one without an order, in the shard that has the least left.
func (r *shardRun) user() string {
	user := func(i int) string { return fmt.Sprint("user-", i%shardUsers) }
	i := r.uniform(shardUsers)
	if now := r.now(); r.uniform(2) == 0 {
		poorest := slices.IndexFunc(now, func(shard shardNow) bool { return shard.left == now.least() })
		for range shardUsers {
			_, holds := now[poorest].holders[user(i)]
			if !holds && r.sale.Layout().ShardOf(user(i)) == poorest {
				break
			}
			i++
		}
	}
	return user(i)
}

// uniform draws a number below n. The numbers that rapid draws are mostly small ones.
func (r *shardRun) uniform(n int) int {
	return rand.New(rand.NewPCG(0, rapid.Uint64().Draw(r.T, "random"))).IntN(n)
}

func (r *shardRun) request(ctx context.Context, ingress *testshop.Shop, request reservation.Request, sound bool) {
	before := r.now()
	shard := &before[r.sale.Layout().ShardOf(request.User)]
	answer, err := ingress.Reserve(ctx, request)
	require.GreaterOrEqual(r.T, r.now().offered(), before.offered(), "a purchase takes no unit of those who wait")
	if err != nil {
		require.False(r.T, sound, "%v", err)
		return
	}
	held, holds := shard.holders[request.User]
	switch {
	case holds && r.sale.Waitlist && answer.Verdict == reservation.SoldOut:
		// A unit that has just returned is offered before an ingress forgets that nothing was left (lua/reserve.lua).
		require.Zero(r.T, before.forSale())
		return
	case holds:
		require.Equal(r.T, reservation.AlreadyPurchased, answer.Verdict)
		require.Equal(r.T, held.OrderID, answer.Reservation.OrderID)
		return
	case shard.isPaused():
		if before.forSale() > 0 || answer.Verdict != reservation.SoldOut { // which is remembered for a moment
			require.Equal(r.T, reservation.Paused, answer.Verdict)
		}
	case shard.offers:
		if before.forSale() > 0 || answer.Verdict != reservation.SoldOut { // as above
			require.Equal(r.T, reservation.OffersOnly, answer.Verdict)
		}
	case request.Quantity <= before.forSale() && answer.Verdict != reservation.Replayed:
		require.Equal(r.T, reservation.Reserved, answer.Verdict, "%d are for sale: %+v", before.forSale(), before)
	case answer.Verdict == reservation.SoldOut: // otherwise a second has passed since units returned
		r.done["sold out"]++
	}
	if answer.Verdict == reservation.Reserved {
		require.Equal(r.T, answer.Reservation.OrderID, r.now()[r.sale.Layout().ShardOf(request.User)].
			holders[request.User].OrderID)
	}
}

func (r *shardRun) release(ctx context.Context) {
	var releases []reservation.Release
	for _, shard := range r.now() {
		for user, held := range shard.holders {
			releases = append(releases, reservation.Release{
				SaleID: r.sale.ID, OrderID: held.OrderID, UserID: user, Quantity: held.Quantity, Status: order.StatusCancelled,
			})
		}
	}
	if len(releases) == 0 {
		return
	}
	slices.SortFunc(releases, func(a, b reservation.Release) int { return slices.Compare(a.OrderID[:], b.OrderID[:]) })
	first := rapid.IntRange(0, len(releases)-1).Draw(r.T, "order")
	releases = releases[first:min(len(releases), first+rapid.IntRange(1, 3).Draw(r.T, "orders"))]
	r.through(func(ingress *testshop.Shop, sound bool) {
		results, err := ingress.Release(ctx, releases)
		if sound {
			require.NoError(r.T, err)
			for _, result := range results {
				require.Equal(r.T, reservation.Released, result)
			}
		}
	})
}

func (r *shardRun) restock(ctx context.Context) {
	units := rapid.Int64Range(1, 8).Draw(r.T, "units")
	if r.uniform(2) == 0 {
		units = -max(1, r.now().left()+int64(r.uniform(5)-2)) // about as many as can be removed
	}
	r.through(func(ingress *testshop.Shop, sound bool) {
		if !sound {
			_, _ = ingress.Restock(ctx, r.sale.ID, units, "")
			return
		}
		r.publish(ctx)
		before := r.now()
		restocked, err := ingress.Restock(ctx, r.sale.ID, units, "")
		var invalid *order.InvalidError
		var tooLow *catalog.TakenError
		switch stock := before.left() + before.taken() + units; {
		case stock < 1:
			require.ErrorAs(r.T, err, &invalid)
		case stock < before.taken():
			require.ErrorAs(r.T, err, &tooLow)
			require.Equal(r.T, before.taken(), tooLow.Taken)
			require.Equal(r.T, before.left(), r.now().left(), "all is put back")
			r.done["taken"]++
		default:
			require.NoError(r.T, err)
			require.Equal(r.T, stock, restocked.Stock)
			require.Equal(r.T, before.left()+units, r.now().left())
		}
	})
}

func (r *shardRun) pause(ctx context.Context) {
	r.operate(func(ingress *testshop.Shop) error { _, err := ingress.Pause(ctx, r.sale.ID); return err })
}

func (r *shardRun) resume(ctx context.Context) {
	r.operate(func(ingress *testshop.Shop) error { _, err := ingress.Resume(ctx, r.sale.ID); return err })
}

func (r *shardRun) operate(do func(*testshop.Shop) error) {
	r.through(func(ingress *testshop.Shop, sound bool) {
		var illegal *reservation.IllegalTransitionError
		if err := do(ingress); sound && !errors.As(err, &illegal) {
			require.NoError(r.T, err)
		}
	})
}

func (r *shardRun) help(ctx context.Context) {
	r.through(func(ingress *testshop.Shop, sound bool) {
		if err := ingress.HelpUnits(ctx, r.sale.ID, r.sale.Layout(), r.sale.Epoch); sound {
			require.NoError(r.T, err)
			require.Zero(r.T, r.now().moving())
		}
	})
}

// waitSecond lets a second pass for the units that have returned, and for what the ingresses remember.
func (r *shardRun) waitSecond(ctx context.Context) {
	for i := range r.ingresses {
		r.restart(i)
	}
	for shard, at := range r.now() {
		if at.quiet {
			key := r.Keys.Sale(r.sale.Layout().Partition(shard), r.sale.ID)
			require.NoError(r.T, r.Rdb.HSet(ctx, key, "quiet_since_ms", 0).Err())
		}
	}
}

// lateCalls repeats calls that any ingress has made, or was killed before.
func (r *shardRun) lateCalls(context.Context) {
	calls := r.wires[rapid.IntRange(0, shardIngresses-1).Draw(r.T, "ingress")].Calls()
	for range min(len(calls), rapid.IntRange(1, 4).Draw(r.T, "calls")) {
		testshop.Repeat(r.T, r.Rdb, calls[r.uniform(len(calls))])
	}
}

// publish completes the changes that were interrupted, as a worker does.
func (r *shardRun) publish(ctx context.Context) {
	_, err := r.PublishPending(ctx)
	require.NoError(r.T, err)
}

func (r *shardRun) now() saleNow { return lookNow(r.T, r.Shop, r.sale) }

// compare holds the shards against the stock in Postgres.
func (r *shardRun) compare(ctx context.Context) {
	now, layout := r.now(), r.sale.Layout()
	now.requireWhole(r.T, layout, r.stock(ctx, now))
	if now.moving() > 0 {
		r.done["units on their way"]++
	}
	for _, shard := range now {
		for held := range maps.Values(shard.holders) {
			first, given := r.places[held.Sequence]
			require.True(r.T, !given || first == held.OrderID, "place %d was given out twice", held.Sequence)
			r.places[held.Sequence] = held.OrderID
		}
	}
}

// stock is the stock that the shards must have: that of Postgres, without what a change has added there and not yet
// in each shard, or has removed in some shards and not yet there.
func (r *shardRun) stock(ctx context.Context, now saleNow) (stock int64) {
	const unpublished = `SELECT s.stock, e.revision, e.type = 'SaleLowering', coalesce((e.data ->> 'units')::bigint, 0),
		EXISTS (SELECT FROM sale_events AS f WHERE f.sale_id = s.id AND (f.data ->> 'lowering')::bigint = e.revision)
		FROM sales AS s LEFT JOIN sale_events AS e
		ON e.sale_id = s.id AND e.revision > s.published_revision AND e.type IN ('SaleLowering', 'SaleRestocked')
		WHERE s.id = $1`
	rows, _ := r.Pool.Query(ctx, unpublished, r.sale.ID)
	var revision, units *int64
	var lowering, granted *bool
	var missing int64
	_, err := pgx.ForEachRow(rows, []any{&stock, &revision, &lowering, &units, &granted}, func() error {
		for shard, at := range now {
			var removed int64
			switch {
			case revision == nil || *lowering && *granted:
			case *lowering:
				_, _ = fmt.Sscanf(at.restocked, fmt.Sprintf("%d %d restocked -%%d", r.sale.Epoch, *revision), &removed)
				missing += removed
			case at.revision < *revision:
				missing += r.sale.Layout().Share(*units, shard)
			}
		}
		return nil
	})
	require.NoError(r.T, err)
	return stock - missing
}

// sellRest sells all units that are left, which no interrupted step may hold back.
func (r *shardRun) sellRest(ctx context.Context) {
	r.publish(ctx)
	if _, err := r.Resume(ctx, r.sale.ID); err != nil {
		var illegal *reservation.IllegalTransitionError
		require.ErrorAs(r.T, err, &illegal)
	}
	require.NoError(r.T, r.HelpUnits(ctx, r.sale.ID, r.sale.Layout(), r.sale.Epoch))
	if r.sale.Waitlist {
		_, err := r.Reopen(ctx, r.sale, nil)
		require.NoError(r.T, err)
	}
	r.waitSecond(ctx)
	for i := range r.now().left() {
		r.request(ctx, r.ingresses[i%shardIngresses], reservation.Request{
			Sale: r.sale.ID, User: fmt.Sprint("last-", i), Quantity: 1,
		}, true)
	}
	require.Zero(r.T, r.now().left())
	r.compare(ctx)
	r.request(ctx, r.ingresses[0], reservation.Request{Sale: r.sale.ID, User: "late", Quantity: 1}, true)
}

// shardNow is one shard in Redis.
type shardNow struct {
	stock, left, revision int64
	quiet, offers         bool
	state, restocked      string
	given, got            []int64
	holders               map[string]order.Reservation
}

func (s shardNow) isPaused() bool { return s.state == string(reservation.StatePaused) }

// saleNow is all shards of a sale at one moment.
type saleNow []shardNow

// lookNow reads all shards in one transaction.
func lookNow(t require.TestingT, s *testshop.Shop, sale reservation.Sale) (now saleNow) {
	layout := sale.Layout()
	hashes, buyers := make([]*redis.MapStringStringCmd, layout.Shards), make([]*redis.MapStringStringCmd, layout.Shards)
	var clock *redis.TimeCmd
	_, err := s.Rdb.TxPipelined(context.Background(), func(p redis.Pipeliner) error {
		clock = p.Time(context.Background())
		for shard := range hashes {
			partition := layout.Partition(shard)
			hashes[shard] = p.HGetAll(context.Background(), s.Keys.Sale(partition, sale.ID))
			buyers[shard] = p.HGetAll(context.Background(), s.Keys.Buyers(partition, sale.ID))
		}
		return nil
	})
	require.NoError(t, err)
	for shard := range hashes {
		fields := hashes[shard].Val()
		number := func(name string) int64 {
			n, err := strconv.ParseInt(fields[name], 10, 64)
			if fields[name] != "" {
				require.NoError(t, err)
			}
			return n
		}
		one := shardNow{
			stock: number("stock"), left: number("left"), revision: number("revision"), state: fields["state"],
			restocked: fields["restocked"], holders: map[string]order.Reservation{},
			quiet:  clock.Val().UnixMilli()-number("quiet_since_ms") < 1000,
			offers: fields["open_state"] == string(reservation.StateOffers),
		}
		for other := range layout.Shards {
			one.given = append(one.given, number("given:"+strconv.Itoa(other)))
			one.got = append(one.got, number("got:"+strconv.Itoa(other)))
		}
		for user, text := range buyers[shard].Val() {
			held, _, err := order.ParseReservation(text)
			require.NoError(t, err)
			one.holders[user] = held
		}
		now = append(now, one)
	}
	return now
}

// taken is the number of units that buyers hold.
func (now saleNow) taken() (units int64) {
	for _, shard := range now {
		for held := range maps.Values(shard.holders) {
			units += held.Quantity
		}
	}
	return units
}

// left is the number of units that nobody holds, with those on their way.
func (now saleNow) left() (units int64) {
	for _, shard := range now {
		units += shard.left
	}
	return units + now.moving()
}

// forSale is the number of units that can be sold now.
func (now saleNow) forSale() (units int64) {
	for _, shard := range now {
		if !shard.quiet && !shard.offers {
			units += shard.left
		}
	}
	return units + now.movingTo(func(taker shardNow) bool { return !taker.offers })
}

// offered is the number of units that are offered to those who wait.
func (now saleNow) offered() (units int64) {
	for _, shard := range now {
		if shard.offers {
			units += shard.left
		}
	}
	return units
}

// least is the lowest number of units left in a shard.
func (now saleNow) least() int64 {
	return slices.MinFunc(now, func(a, b shardNow) int { return cmp.Compare(a.left, b.left) }).left
}

// moving is the number of units on their way.
func (now saleNow) moving() (units int64) { return now.movingTo(func(shardNow) bool { return true }) }

func (now saleNow) movingTo(isCounted func(taker shardNow) bool) (units int64) {
	for from, giver := range now {
		for to, taker := range now {
			if isCounted(taker) {
				units += giver.given[to] - taker.got[from]
			}
		}
	}
	return units
}

// requireWhole fails the test unless these shards have this stock together, and no unit twice.
func (now saleNow) requireWhole(t require.TestingT, layout reservation.Layout, stock int64) {
	require.Equal(t, stock, now.left()+now.taken(), "stock = left + taken + on their way: %+v", now)
	places := map[int64]string{}
	for at, shard := range now {
		require.GreaterOrEqual(t, shard.left, int64(0))
		require.Equal(t, shard.stock, shard.left+now[at:at+1].taken(), "shard %d: %+v", at, shard)
		for from, giver := range now {
			require.GreaterOrEqual(t, giver.given[at], shard.got[from], "from %d to %d", from, at)
		}
		for user, held := range shard.holders {
			require.Equal(t, at, layout.ShardOf(user), user)
			require.EqualValues(t, at, (held.Sequence-1)%int64(layout.Shards), user)
			require.Empty(t, places[held.Sequence], "place %d of %s", held.Sequence, user)
			places[held.Sequence] = user
		}
	}
}

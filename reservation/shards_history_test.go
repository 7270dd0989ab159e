package reservation_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/retry"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

const (
	historyIngresses = 3
	historyBuyers    = 6 // of each ingress
	historyRequests  = 20
	historyRefusals  = 3 // until a buyer leaves
)

var historySales = testkit.Soak(8)

// refusal is a request that got the answer that too little is left.
type refusal struct {
	sale       catalog.CountedSale
	user       string
	units      int64
	begun, end time.Time
}

// Many buyers and several ingresses, whose calls are delayed, lost, cut off and repeated. Redis logs every write, so
// all states of the sales are known: no unit is lost or doubled in any, and for each request that was refused there is
// one, while it was in progress, in which too few units were for sale.
func TestEveryRefusalWasTrueAtAnInstant(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	keys := testkit.Keys(t)
	keys.Partitions = 8
	shop := testshop.NewShopOn(t, testshop.Options{Redis: testkit.Client(t, own.URL), Keys: keys})
	log := recordWrites(t, shop, own.URL)
	var ingresses []*testshop.Shop
	var wires []*testshop.Wire
	for range historyIngresses {
		rdb, wire := testshop.Wired(t, own.URL)
		wire.Set(unreliable())
		ingresses, wires = append(ingresses, shop.Next(t, rdb)), append(wires, wire)
	}
	var mu sync.Mutex
	var refused []refusal
	var reserved int
	var failed []error
	for n := range historySales {
		sale := shop.ShardedSale(t, rand.Int64N(40)+10, n%7+2)
		log.watch(sale)
		var crowd sync.WaitGroup
		for i, ingress := range ingresses {
			for buyer := range historyBuyers {
				crowd.Go(func() {
					for request, refusals := 0, 0; request < historyRequests && refusals < historyRefusals; request++ {
						r := reservation.Request{
							Sale: sale.ID, User: fmt.Sprintf("user-%d-%d-%d", i, buyer, request), Quantity: rand.Int64N(3) + 1,
						}
						begun := time.Now()
						answer, err := ingress.Reserve(context.Background(), r)
						end := time.Now()
						mu.Lock()
						switch {
						case err != nil:
							failed = append(failed, err)
						case answer.Verdict == reservation.SoldOut:
							refused = append(refused, refusal{sale, r.User, r.Quantity, begun, end})
							refusals++
						default:
							reserved++
						}
						mu.Unlock()
						if err == nil && answer.Verdict == reservation.Reserved && rand.IntN(3) > 0 {
							_, _ = ingress.Release(context.Background(), []reservation.Release{{
								SaleID: sale.ID, OrderID: answer.Reservation.OrderID, UserID: r.User, Quantity: r.Quantity,
							}})
						}
					}
				})
			}
		}
		done := make(chan struct{})
		var ghost sync.WaitGroup
		ghost.Go(func() { repeatLate(shop.Rdb, wires, done) })
		crowd.Wait()
		close(done)
		ghost.Wait()
	}
	t.Logf("%d reserved, %d refused, %d failed", reserved, len(refused), len(failed))
	require.NotEmpty(t, failed)
	require.Greater(t, reserved, 10*historySales)
	require.Greater(t, len(refused), 10*historySales)
	log.end(t)
	for _, sale := range log.sales {
		sale.requireWhole(t)
	}
	var wrong int
	for _, r := range refused {
		if least := log.sales[r.sale.ID].least(r.begun, r.end); least >= r.units {
			wrong++
			t.Errorf("sale=%s user=%s wanted %d for %v and was refused; %d or more were for sale all the time",
				r.sale.ID, r.user, r.units, r.end.Sub(r.begun), least)
		}
	}
}

// unreliable is the fate of the calls on a bad network: some are late, some are lost, and at times all.
func unreliable() func() testshop.Fate {
	cut := 0
	return func() testshop.Fate {
		switch chance := rand.IntN(1000); {
		case cut > 0:
			cut--
			return testshop.Lost
		case chance < 2:
			cut = rand.IntN(20)
			return testshop.Lost
		case chance < 7:
			return testshop.Lost
		case chance < 12:
			return testshop.Unanswered
		case chance < 300:
			return testshop.Late
		}
		return testshop.Passes
	}
}

// repeatLate repeats calls of the ingresses at any later time.
func repeatLate(rdb redis.UniversalClient, wires []*testshop.Wire, done <-chan struct{}) {
	for retry.Pause(time.Duration(rand.IntN(int(2*time.Millisecond))), done) {
		if calls := wires[rand.IntN(len(wires))].Calls(); len(calls) > 0 {
			_ = rdb.Do(context.Background(), calls[rand.IntN(len(calls))]...).Err()
		}
	}
}

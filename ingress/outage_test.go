//go:build system

package ingress

import (
	"context"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// silence has Redis accept commands and answer none, until speak is called or the test ends.
func silence(t *testing.T, r *localserver.Redis) (speak func()) {
	t.Helper()
	require.NoError(t, syscall.Kill(r.Pid(), syscall.SIGSTOP))
	speak = sync.OnceFunc(func() { _ = syscall.Kill(r.Pid(), syscall.SIGCONT) })
	t.Cleanup(speak)
	return speak
}

// More buyers wait than two calls of the script take. All are answered at the same time, and those whose
// answer says that nothing was reserved hold nothing after Redis has read all commands.
func TestPurchasesFailTogetherWhileRedisIsSilent(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := openShopOn(t, onRedis(t, own))
	sale := s.sale(reservation.Terms{Stock: 10_000})
	s.buy(sale, "", as("first")).is(http.StatusAccepted)
	speak := silence(t, own)

	const buyers = 800
	answers := make([]reply, buyers)
	var crowd sync.WaitGroup
	began := time.Now()
	for i := range answers {
		crowd.Go(func() { answers[i] = s.buy(sale, "", as("buyer-"+strconv.Itoa(i))) })
	}
	crowd.Wait()
	require.Less(
		t,
		time.Since(began),
		2*(reservation.DefaultWaitMax+reservation.DefaultCallTimeout),
		"no call queues behind one that is not answered",
	)

	speak()
	testkit.Eventually(t, 30*time.Second, "the sale goes on", func() bool {
		return s.buy(sale, "", as("last")).status == http.StatusAccepted
	})
	held := s.stock(sale).Buyers
	said := map[string]int{}
	for i, r := range answers {
		require.Equal(t, "1", r.header.Get("Retry-After"))
		if p := r.json(); p["type"] == "/problems/overloaded" {
			require.Contains(t, r.isProblem(http.StatusServiceUnavailable, "overloaded")["detail"], "Nothing was reserved")
			require.NotContains(t, held, "buyer-"+strconv.Itoa(i))
			said["nothing was reserved"]++
		} else {
			require.Contains(t, r.isProblem(http.StatusServiceUnavailable, "outcome-unknown")["detail"], "outcome is unknown")
			said["unknown"]++
		}
	}
	require.NotZero(t, said["nothing was reserved"], said)
	require.NotZero(t, said["unknown"], said)
}

// The order is not in Postgres yet.
func TestShowOrderFailsOnceWhileRedisIsSilent(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	asked := new(reservedCounter)
	s := openShopOn(t, onRedis(t, own),
		func(c *Config) {
			asked.Reservations = c.Reservations
			c.Reservations = asked
		})
	path, _ := s.order(s.sale(reservation.Terms{Stock: 10}), "ada")
	s.get(path, as("ada")).is(http.StatusOK)
	silence(t, own)

	before, began := asked.lookups.Load(), time.Now()
	s.get(path, as("ada")).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	require.EqualValues(t, 1, asked.lookups.Load()-before)
	require.Less(t, time.Since(began), reservation.DefaultCallTimeout, "the tries of the client take as long")
}

// lookupCounter counts lookups in Postgres.
type lookupCounter struct {
	Orders
	lookups atomic.Int64
}

func (g *lookupCounter) Order(ctx context.Context, id uuid.UUID) (order.Order, error) {
	g.lookups.Add(1)
	return g.Orders.Order(ctx, id)
}

// The server finds out by itself, and answers with what Redis holds.
func TestSilentPostgresOpensBreaker(t *testing.T) {
	t.Parallel()
	asked := new(lookupCounter)
	s := openShop(t, func(c *Config) {
		asked.Orders = c.Orders
		c.Orders = asked
	})
	sale := s.sale(reservation.Terms{Stock: 2})
	path, _ := s.order(sale, "ada")
	look := func() {
		for {
			r := s.get(path, as("ada"))
			if r.status == http.StatusServiceUnavailable && t.Context().Err() == nil {
				continue // on a busy machine Redis may not answer in time either
			}
			require.Equal(t, "reserved", r.is(http.StatusOK)["status"])
			return
		}
	}
	unlock := s.lock("orders")
	testkit.Eventually(t, 30*time.Second, "the breaker is open", func() bool {
		look()
		return s.server.orders.postgres.isOpen.Load()
	})
	before := asked.lookups.Load()
	for range 1000 {
		look()
	}
	require.Equal(t, before, asked.lookups.Load(), "requests waited for Postgres")

	unlock()
	testkit.Eventually(t, 30*time.Second, "the breaker is closed", func() bool {
		before := asked.lookups.Load()
		look()
		return asked.lookups.Load() > before
	})
}

// The lookup for all waiters times out; a query for one order does not.
func TestFailedBatchLookupDoesNotOpenBreaker(t *testing.T) {
	t.Parallel()
	together := new(slowTogether)
	s := openShop(t, func(c *Config) {
		together.Orders = c.Orders
		c.Orders = together
	})
	together.pool = s.pool
	sale := s.sale(reservation.Terms{Stock: 2})
	path, _ := s.confirm(sale, "ada")
	answered := s.inBackground(func() reply { return s.buy(sale, "", as("bob"), prefer("wait=12")) })
	for waits := true; waits; {
		select {
		case r := <-answered:
			r.is(http.StatusAccepted)
			waits = false
		default:
			require.Equal(t, "confirmed", s.get(path, as("ada")).is(http.StatusOK)["status"])
		}
	}
	require.GreaterOrEqual(t, together.failed.Load(), int64(2))
}

package ingress

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

func prefer(preference string) reqHeader { return reqHeader{"Prefer", preference} }

// inBackground makes a request whose answer comes later. If a check of the request fails, so does the test.
func (s *shop) inBackground(ask func() reply) <-chan reply {
	answered := make(chan reply, 1)
	go func() {
		r := reply{t: s.t}
		defer func() { answered <- r }() // a failed check ends the goroutine
		r = ask()
	}()
	return answered
}

// awaitWaiting waits until n requests wait for orders.
func (s *shop) awaitWaiting(n int64) {
	s.t.Helper()
	testkit.Eventually(s.t, 20*time.Second, fmt.Sprintf("%d purchases wait", n), func() bool {
		s.server.waiters.mu.Lock()
		defer s.server.waiters.mu.Unlock()
		waiting := int64(0)
		for _, w := range s.server.waiters.byOrder {
			for ; w != nil; w = w.next {
				waiting++
			}
		}
		return waiting == n
	})
}

// recordReserved records the user's order as a worker would, without announcing it.
func (s *shop) recordReserved(sale uuid.UUID, user string, refuse string) {
	s.t.Helper()
	var text string
	testkit.Eventually(s.t, 20*time.Second, user+" holds a reservation", func() (there bool) {
		var err error
		text, err = s.rdb.HGet(s.t.Context(), s.keys.Buyers(s.keys.Partition(sale), sale), user).Result()
		return err == nil
	})
	held, key, err := order.ParseReservation(text)
	require.NoError(s.t, err)
	event := []order.OrderReserved{{
		OrderID: held.OrderID, SaleID: sale, UserID: user, Quantity: held.Quantity, Epoch: 1, Sequence: held.Sequence,
		ReservedAt: held.ReservedAt, KeyFingerprint: key,
	}}
	if refuse == "" {
		_, err = s.ledger.Record(s.t.Context(), event)
	} else {
		_, err = s.ledger.Refuse(s.t.Context(), event, refuse)
	}
	require.NoError(s.t, err)
}

func TestWaitReturnsConfirmedOrder(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	s.startWorker()
	sale := s.sale(pricedTerms)
	r := s.buy(sale, `{"quantity":2}`, as("ada"), withKey("k"), prefer("respond-async, wait=20"))
	view := r.is(http.StatusCreated)
	require.Equal(t, "wait=20", r.header.Get("Preference-Applied"))
	require.Equal(t, "/v1/orders/"+view["order_id"].(string), r.header.Get("Location"))
	receipt := view["receipt"].(string)
	require.True(t, strings.HasSuffix(r.body, `,"receipt":"`+receipt+"\"}\n"), r.body)
	require.Equal(
		t, []any{"confirmed", 2.0, "ada", 2.0}, []any{view["status"], view["version"], view["user_id"], view["quantity"]},
	)
	s.showsTerms(view, 2580)
	delete(view, "receipt")
	require.Equal(t, view, s.get(withReceipt(r.header.Get("Location"), receipt), as("ada")).is(http.StatusOK))
	require.Zero(t, s.server.waitSlots.taken.Load())
	require.Zero(t, s.server.inFlight.taken())

	again := s.buy(sale, `{"quantity":2}`, as("ada"), withKey("k"), prefer("wait=20"))
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
	require.Equal(t, r.body, again.body)
	require.Equal(t, http.StatusCreated, again.status)
	// Without waiting it is 202, with the version that was shown before.
	now := s.buy(sale, `{"quantity":2}`, as("ada"), withKey("k"))
	require.Equal(t, []any{"confirmed", receipt}, []any{now.is(http.StatusAccepted)["status"], now.json()["receipt"]})
	require.Empty(t, now.header.Get("Preference-Applied"))
}

func TestWaitTimesOutWithAccepted(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	for preference, applied := range map[string]string{
		"wait=1": "wait=1", "wait=0": "wait=0", "wait=abc": "", "return=minimal": "",
	} {
		r := s.buy(sale, "", as(strings.ReplaceAll(preference, "=", "-")), prefer(preference))
		require.Equal(t, "reserved", r.is(http.StatusAccepted)["status"], preference)
		require.NotEmpty(t, r.json()["receipt"])
		require.Equal(t, applied, r.header.Get("Preference-Applied"), preference)
	}
	answered := s.inBackground(func() reply { return s.buy(sale, "", as("capped"), prefer("wait=999")) })
	s.awaitWaiting(1)
	s.recordReserved(sale, "capped", "")
	r := <-answered
	r.is(http.StatusCreated)
	require.Equal(t, "wait=30", r.header.Get("Preference-Applied"))
	// A refused purchase does not wait.
	s.buy(sale, "", as("capped"), prefer("wait=30")).isProblem(http.StatusConflict, "already-purchased")
}

func TestWaitReturnsRejection(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	for user, c := range map[string]struct {
		reason string
		status int
		slug   string
	}{
		"late":  {order.RejectedSoldOut, http.StatusConflict, "sold-out"},
		"twice": {order.RejectedAlreadyPurchased, http.StatusConflict, "already-purchased"},
		"other": {"an operator discarded it", http.StatusConflict, "order-ended"},
	} {
		answered := s.inBackground(func() reply { return s.buy(sale, "", as(user), prefer("wait=20")) })
		s.awaitWaiting(1)
		s.recordReserved(sale, user, c.reason)
		r := <-answered
		p := r.isProblem(c.status, c.slug)
		require.Equal(t, p["order_id"] == nil, r.header.Get("Location") == "")
	}
	answered := s.inBackground(func() reply { return s.buy(sale, "", as("void"), prefer("wait=20")) })
	s.awaitWaiting(1)
	s.raiseEpoch(sale)
	s.recordReserved(sale, "void", "")
	(<-answered).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
}

// Redis still holds the units of the order.
func TestReplayReturnsEndedOrderBeforeRelease(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	for _, status := range []order.Status{
		order.StatusCancelled, order.StatusExpired, order.StatusPaid,
	} {
		user := string(status)
		first := s.buy(sale, "", as(user), withKey("k"))
		s.recordReserved(sale, user, "")
		path := first.header.Get("Location")
		switch status {
		case order.StatusCancelled:
			s.post(path+"/cancel", "", as(user)).is(http.StatusOK)
		case order.StatusPaid:
			s.post(path+"/pay", `{"reference":"pi_1"}`, as(user)).is(http.StatusOK)
		default:
			_, err := s.pool.Exec(t.Context(), "UPDATE orders SET status = 'expired', version = 3 WHERE user_id = $1", user)
			require.NoError(t, err)
		}
		again := s.buy(sale, "", as(user), withKey("k"), prefer("wait=20"))
		if status == order.StatusPaid {
			require.Equal(t, "paid", again.is(http.StatusCreated)["status"])
			continue
		}
		p := again.isProblem(http.StatusConflict, "order-ended")
		require.Equal(t, []any{path, user}, []any{again.header.Get("Location"), p["order_status"]})
		require.Empty(t, again.header.Get("Retry-After"))
	}
}

// No worker announces the order.
func TestWaitReturnsVoidedOrder(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	for user, over := range map[string]bool{"voided": true, "undecided": false} {
		sale := s.sale(reservation.Terms{Stock: 10})
		answered := s.inBackground(func() reply { return s.buy(sale, "", as(user), prefer("wait=3")) })
		s.awaitWaiting(1)
		s.loseReservations(sale)
		if !over {
			require.Equal(t, "reserved", (<-answered).is(http.StatusAccepted)["status"])
			continue
		}
		s.raiseEpoch(sale)
		r := <-answered
		require.Contains(t, r.isProblem(http.StatusServiceUnavailable, "sale-unavailable")["detail"], "was lost")
		require.Empty(t, r.header.Get("Location"))
	}
	// An order that Redis holds is not lost, whatever the epoch.
	sale := s.sale(reservation.Terms{Stock: 10})
	s.raiseEpoch(sale)
	s.buy(sale, "", as("held"), prefer("wait=1")).is(http.StatusAccepted)
	require.Zero(t, s.server.inFlight.taken())
}

// slowToFind is a Redis that finds reservations slowly.
type slowToFind struct {
	Reservations
	looking, go_ chan struct{}
}

func (r slowToFind) FindReserved(ctx context.Context, id uuid.UUID, user string) (order.Order, error) {
	r.looking <- struct{}{}
	<-r.go_
	return r.Reservations.FindReserved(ctx, id, user)
}

// An operator can pause a sale while waits time out.
func TestWaitTakesNoOperatorSlot(t *testing.T) {
	t.Parallel()
	slow := slowToFind{looking: make(chan struct{}), go_: make(chan struct{})}
	s := openShop(t, func(c *Config) {
		c.MaxInFlight = 16 // one slot is for operators
		slow.Reservations, c.Reservations = c.Reservations, &slow
	})
	sale := s.sale(reservation.Terms{Stock: 10})
	answered := s.inBackground(func() reply { return s.buy(sale, "", as("ann"), prefer("wait=1")) })
	<-slow.looking
	paused := s.post("/v1/sales/"+sale.String()+"/pause", "", operator)
	close(slow.go_)
	paused.is(http.StatusOK)
	(<-answered).is(http.StatusAccepted)
}

func TestWaitEndsWhenClientLeaves(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t, func(c *Config) { c.MaxWaiting, c.MaxInFlight = 2, 1 })
	sale := s.sale(reservation.Terms{Stock: 10})
	conns := []net.Conn{s.dial(), s.dial()}
	for i, conn := range conns {
		_, err := conn.Write([]byte(s.head(sale, fmt.Sprint("user-", i), "Prefer: wait=30\r\n")))
		require.NoError(t, err)
		s.awaitWaiting(int64(i + 1))
	}
	require.Zero(t, s.server.inFlight.taken(), "a waiting purchase takes no slot in flight")
	// No slot to wait in is free: the answer comes immediately.
	r := s.buy(sale, "", as("third"), prefer("wait=30"))
	r.is(http.StatusAccepted)
	require.Empty(t, r.header.Get("Preference-Applied"))
	require.Contains(t, s.get("/metrics").body, "stampede_waiting_requests 2\n")
	for _, conn := range conns {
		require.NoError(t, conn.Close())
	}
	s.awaitWaiting(0)
	testkit.Eventually(t, 30*time.Second, "the slots are free", func() bool {
		return s.server.waitSlots.taken.Load() == 0
	})
}

// counter returns the value of a metric of the server.
func (s *shop) counter(name string) float64 {
	s.t.Helper()
	for line := range strings.Lines(s.get("/metrics").body) {
		var value float64
		if _, err := fmt.Sscanf(line, name+" %g\n", &value); err == nil {
			return value
		}
	}
	s.t.Fatalf("no metric %s", name)
	return 0
}

// Whatever happens to the stream of outcomes, waiting purchases are looked up.
func TestWaitSurvivesLostMessages(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	stream := s.keys.Outcomes(0)
	announce := func(fields ...string) {
		t.Helper()
		require.NoError(t, s.rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: stream, Values: fields}).Err())
	}
	for user, spoil := range map[string]func(){
		"no-message":  func() {},
		"bad-entry":   func() { announce("foo", "bar") },
		"bad-payload": func() { announce("_watermill_message_uuid", "x", "payload", "{") },
		"deleted":     func() { require.NoError(t, s.rdb.Del(t.Context(), stream).Err()) },
		"no-stream": func() {
			require.NoError(t, s.rdb.Del(t.Context(), stream).Err())
			require.NoError(t, s.rdb.Set(t.Context(), stream, "x", 0).Err())
		},
	} {
		answered := s.inBackground(func() reply { return s.buy(sale, "", as(user), prefer("wait=20")) })
		s.awaitWaiting(1)
		spoil()
		s.recordReserved(sale, user, "")
		(<-answered).is(http.StatusCreated)
		require.NoError(t, s.rdb.Del(t.Context(), stream).Err())
	}
	// The stream is read again.
	s.startWorker()
	before := s.counter("stampede_outcome_messages_total")
	n := 0
	testkit.Eventually(t, 20*time.Second, "messages are read again", func() bool {
		n++
		s.buy(s.sale(reservation.Terms{Stock: 1}), "", as("ada"), prefer("wait=20")).is(http.StatusCreated)
		return s.counter("stampede_outcome_messages_total") > before
	})
}

// A server without announcements looks orders up.
func TestWaitWithoutOutcomes(t *testing.T) {
	t.Parallel()
	s := openShop(t, func(c *Config) { c.Outcomes = nil })
	sale := s.sale(reservation.Terms{Stock: 10})
	s.startWorker()
	s.buy(sale, "", as("ada"), prefer("wait=20")).is(http.StatusCreated)
}

func TestStopAnswersWaitingPurchases(t *testing.T) {
	t.Parallel()
	s, stop, ended := runShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	answered := s.inBackground(func() reply { return s.buy(sale, "", as("ada"), prefer("wait=30")) })
	s.awaitWaiting(1)
	began := time.Now()
	stop()
	(<-answered).is(http.StatusAccepted)
	require.NoError(t, <-ended)
	require.Less(t, time.Since(began), s.server.config.DrainTimeout)
}

// A worker may announce an order before its request begins to wait.
func TestWaitersRememberAnnouncements(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	_, id := s.confirm(sale, "ada")
	h := newOrderWaiters(s.ledger.FindOrders, prometheus.NewCounter(prometheus.CounterOpts{Name: "lookups"}))
	h.notify([]order.OrderOutcome{{OrderID: id, Status: order.StatusConfirmed, Version: 2}})
	knows, w := h.add(id, 2, false), h.add(id, 1, false)
	defer h.remove(knows)
	defer h.remove(w)
	require.Contains(t, h.due, id, "it is looked up immediately, not when it is overdue")
	require.Len(t, h.wake, 1)
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { h.run(ctx) })
	defer running.Wait()
	defer stop()
	select {
	case o := <-w.updates:
		require.Equal(t, order.StatusConfirmed, o.Status)
	case <-time.After(20 * time.Second):
		t.Fatal("the order was not looked up")
	}
	require.Empty(t, knows.updates)

	// Old announcements are forgotten, and memory is bounded.
	for range 5 {
		outcomes := make([]order.OrderOutcome, rememberedMin)
		for i := range outcomes {
			outcomes[i] = order.OrderOutcome{OrderID: uuid.New(), Version: 2}
		}
		h.notify(outcomes)
	}
	require.LessOrEqual(t, len(h.young)+len(h.old), 2*rememberedMin)
	require.NotContains(t, h.young, id)
	require.NotContains(t, h.old, id)
}

func TestWaitersShareOneOrder(t *testing.T) {
	t.Parallel()
	found := make(chan []uuid.UUID, 10)
	o := order.Order{ID: uuid.New(), Status: order.StatusConfirmed, Version: 2}
	h := newOrderWaiters(func(_ context.Context, ids []uuid.UUID) ([]order.Order, error) {
		found <- ids
		return []order.Order{o}, nil
	}, prometheus.NewCounter(prometheus.CounterOpts{Name: "lookups"}))
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { h.run(ctx) })
	defer running.Wait()
	defer stop()
	waiters := []*waiter{
		h.add(o.ID, 1, false),
		h.add(o.ID, 0, false),
		h.add(o.ID, 1, false),
		h.add(o.ID, 2, false),
	}
	h.remove(waiters[2])
	h.notify([]order.OrderOutcome{{OrderID: o.ID, Version: 2}})
	require.Equal(t, []uuid.UUID{o.ID}, <-found)
	require.Equal(t, o, <-waiters[0].updates)
	require.Equal(t, o, <-waiters[1].updates)
	for _, w := range []*waiter{waiters[0], waiters[3], waiters[1]} {
		h.remove(w)
	}
	require.True(t, h.isEmpty())
	require.Empty(t, waiters[2].updates, "it was removed")
	require.Empty(t, waiters[3].updates, "it has seen the version")
}

// isEnded checks that a purchase was answered with its ended order.
func (r reply) isEnded(id uuid.UUID, status order.Status) {
	r.t.Helper()
	p := r.isProblem(http.StatusConflict, "order-ended")
	require.Equal(r.t, "/v1/orders/"+id.String(), r.header.Get("Location"))
	require.Empty(r.t, r.header.Get("Idempotency-Replayed"), "before and after the units are released")
	require.Equal(r.t, []any{id.String(), string(status)}, []any{p["order_id"], p["order_status"]})
}

// awaitReleased waits until Redis has released the units of the user's order.
func (s *shop) awaitReleased(sale uuid.UUID, user string) {
	s.t.Helper()
	testkit.Eventually(s.t, 20*time.Second, "the units of "+user+" are back", func() bool {
		held, err := s.rdb.HExists(s.t.Context(), s.keys.Buyers(s.keys.Partition(sale), sale), user).Result()
		require.NoError(s.t, err)
		return !held
	})
}

func TestReplayNeverPurchasesAgainAfterOrderEnded(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	other := openShopOn(t, s.on)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	orders := map[order.Status]uuid.UUID{}
	everyReplayIsEnded := func() {
		t.Helper()
		for status, id := range orders {
			user := string(status)
			for _, ingress := range []*shop{s, other} {
				ingress.buy(sale, "", as(user), withKey("k")).isEnded(id, status)
				ingress.buy(sale, "", as(user), withKey("k"), prefer("wait=20")).isEnded(id, status)
			}
		}
	}
	paths := map[order.Status]string{}
	for status, refused := range map[order.Status]string{
		order.StatusCancelled: "", order.StatusExpired: "",
		order.StatusRejected: order.RejectedSoldOut,
	} {
		user := string(status)
		paths[status], orders[status], _ = s.purchased(sale, user, withKey("k"))
		s.recordReserved(sale, user, refused)
	}
	s.cancel(paths[order.StatusCancelled], as("cancelled")).is(http.StatusOK)
	expired := orders[order.StatusExpired]
	delete(orders, order.StatusExpired) // a worker has to expire it
	everyReplayIsEnded()                // the units are not released yet

	s.overdue(expired)
	s.startWorker()
	s.awaitStatus(paths[order.StatusExpired], "expired", order.StatusExpired)
	orders[order.StatusExpired] = expired
	everyReplayIsEnded()
	for status := range orders {
		s.awaitReleased(sale, string(status))
	}
	everyReplayIsEnded()
	s.buy(sale, `{"quantity":2}`, as("cancelled"), withKey("k")).
		isProblem(http.StatusUnprocessableEntity, "idempotency-key-reused")

	// A purchase with a new key, or without one, succeeds. The old key still returns its own order.
	s.buy(sale, "", as("cancelled"), withKey("another")).is(http.StatusAccepted)
	s.buy(sale, "", as("expired")).is(http.StatusAccepted)
	s.buy(sale, "", as("another"), withKey("k")).is(http.StatusAccepted)
	everyReplayIsEnded()
	_, err := s.catalog.Pause(t.Context(), sale)
	require.NoError(t, err)
	everyReplayIsEnded()
}

// Only Postgres knows that an order has ended until Redis releases its units.
func TestReplayMayBeBehindWhilePostgresIsSlow(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, id, _ := s.purchased(sale, "ada", withKey("k"))
	again := s.buy(sale, "", as("ada"), withKey("k"))
	require.NotContains(t, again.is(http.StatusAccepted), "may_be_behind", "Postgres does not have it yet")
	s.recordReserved(sale, "ada", "")

	unlock := s.lock("orders")
	behind := s.buy(sale, "", as("ada"), withKey("k"))
	require.Equal(t, true, behind.is(http.StatusAccepted)["may_be_behind"])
	require.Equal(t, "true", behind.header.Get("Idempotency-Replayed"))
	unlock()
	testkit.Eventually(t, 20*time.Second, "Postgres is queried again", func() bool {
		return s.cancel(path, as("ada")).status == http.StatusOK
	})
	testkit.Eventually(t, 20*time.Second, "the end is known", func() bool {
		return s.buy(sale, "", as("ada"), withKey("k")).status == http.StatusConflict
	})
	s.buy(sale, "", as("ada"), withKey("k")).isEnded(id, order.StatusCancelled)
}

package ingress

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/draw"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

// A buyer waits, sees how many are before, is offered the unit that returns, and leaves.
func TestWaitingListOfSale(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	created := s.post("/v1/sales", `{"name":"Shoe","stock":1,"payment_window_seconds":3600,"waitlist":true}`, operator).
		is(http.StatusCreated)
	require.Equal(t, []any{true, 0.0}, []any{created["waitlist"], created["waiting"]})
	sale := uuid.MustParse(created["id"].(string))
	path := "/v1/sales/" + sale.String() + "/waitlist"
	s.post(path, "", as("ada")).isProblem(http.StatusConflict, "not-sold-out")
	s.get(path, as("ada")).isProblem(http.StatusNotFound, "waitlist-not-found")
	s.post(path+"/leave", "", as("ada")).isProblem(http.StatusNotFound, "waitlist-not-found")
	bought := s.buy(sale, "", as("holder"))
	bought.is(http.StatusAccepted)
	s.post(path, "", as("holder")).isProblem(http.StatusConflict, "already-purchased")
	s.post(path, `{"quantity":1}`, as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
	s.post(path, "").isProblem(http.StatusUnauthorized, "unauthorized")

	join := func(user, key string) map[string]any {
		return s.post(path, "{}", as(user), withKey(key)).is(http.StatusAccepted)
	}
	first := join("ada", "k")
	require.Equal(t, 1.0, first["place"])
	again := s.post(path, "", as("ada"))
	require.Equal(t, first, again.is(http.StatusAccepted), "a repeat, also without the key")
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
	require.Equal(t, []any{"waiting", sale.String()}, []any{first["state"], first["sale_id"]})
	entry := first["entry_order_id"].(string)
	require.Equal(t, "waiting", s.get(path, as("ada")).is(http.StatusOK)["state"], "from Redis")
	s.get("/v1/orders/"+entry+"?receipt="+first["receipt"].(string), as("ada")).is(http.StatusOK)
	var entries uuid.UUID
	err := s.pool.QueryRow(t.Context(), "SELECT entries_id FROM draws WHERE sale_id = $1", sale).Scan(&entries)
	require.NoError(t, err)
	s.buy(entries, "", as("eve")).isProblem(http.StatusConflict, "offers-only")
	for place, user := range []string{"bob", "cid"} {
		require.Equal(t, float64(place+2), join(user, user)["place"])
	}

	s.startWorker()
	seen := func(user string) map[string]any { return s.get(path, as(user)).is(http.StatusOK) }
	testkit.Eventually(t, 20*time.Second, "all are counted", func() bool { return seen("cid")["before"] == 2.0 })
	testkit.Eventually(t, 20*time.Second, "the sale shows it", func() bool {
		return s.get("/v1/sales/" + sale.String()).is(http.StatusOK)["waiting"] == 3.0
	})
	// It is an order without a price, and says what it is for.
	shown := s.get("/v1/orders/"+entry, as("ada")).is(http.StatusOK)
	require.Equal(t, []any{"place", sale.String()}, []any{shown["kind"], shown["entry_for"]})
	listed := s.get("/v1/orders?limit=1", as("ada")).is(http.StatusOK)["orders"].([]any)[0].(map[string]any)
	require.Equal(t, []any{entry, sale.String()}, []any{listed["order_id"], listed["entry_for"]})
	for _, query := range []string{"?user=ada", "?sale=" + entries.String(), "?user=ada&sale=" + entries.String()} {
		listed := s.get("/v1/admin/orders"+query, operator).is(http.StatusOK)["orders"].([]any)
		require.Equal(t, sale.String(), listed[len(listed)-1].(map[string]any)["entry_for"], query)
	}
	require.Equal(t, sale.String(), s.get("/v1/admin/orders/"+entry, operator).is(http.StatusOK)["entry_for"])
	ordinary := s.get(bought.header.Get("Location"), as("holder")).is(http.StatusOK)
	require.Equal(t, "order", ordinary["kind"])
	require.NotContains(t, ordinary, "entry_for")
	// Money for it goes back.
	p := s.post(paymentsPath, `{"reference":"`+newReference()+`","order_id":"`+entry+`"}`, operator).is(http.StatusOK)
	require.Equal(t, []any{"refund_due", "nothing-to-pay"}, []any{p["state"], p["reason"]})

	left := s.post(path+"/leave", "", as("bob")).is(http.StatusOK)
	require.Equal(t, []any{"left", 2.0}, []any{left["state"], left["place"]})
	require.Equal(t, left, s.post(path+"/leave", "", as("bob")).is(http.StatusOK))
	testkit.Eventually(t, 20*time.Second, "one less is before", func() bool { return seen("cid")["before"] == 1.0 })

	s.cancel(bought.header.Get("Location"), as("holder")).is(http.StatusOK)
	returned := time.Now()
	testkit.Eventually(t, 20*time.Second, "ada has the unit", func() bool { return seen("ada")["state"] == "offered" })
	t.Logf("the unit was offered within %v", time.Since(returned))
	offered := seen("ada")["order_id"].(string)
	again = s.post(path, "", as("ada"))
	require.Equal(t, []any{"offered", entry, offered}, []any{
		again.is(http.StatusAccepted)["state"], again.json()["entry_order_id"], again.json()["order_id"],
	}, "who had a turn does not wait")
	s.buy(sale, "", as("eve")).isProblem(http.StatusConflict, "offers-only")
	testkit.Eventually(t, 20*time.Second, "it is an order", func() bool {
		return s.get("/v1/orders/"+offered, as("ada")).is(http.StatusOK)["status"] == string(order.StatusConfirmed)
	})
	require.Equal(t, "offer", s.get("/v1/orders/"+offered, as("ada")).is(http.StatusOK)["kind"])
	require.Equal(t, "waiting", seen("cid")["state"])

	testkit.Eventually(t, 20*time.Second, "bob's place is free", func() bool {
		return s.post(path, "", as("bob"), withKey("bob")).status == http.StatusConflict
	})
	s.post(path, "", as("bob"), withKey("bob")).isProblem(http.StatusConflict, "order-ended")
	require.Equal(t, 4.0, join("bob", "again")["place"])
	require.Equal(t, "waiting", seen("bob")["state"])
	s.post("/v1/sales/"+sale.String()+"/end", "", operator).is(http.StatusOK)
	require.Equal(t, "over", seen("cid")["state"])
	s.post(path, "", as("dan")).isProblem(http.StatusGone, "sale-ended")

	plain := s.openSizes().String()
	s.post("/v1/sales/"+plain+"/waitlist", "", as("ada")).isProblem(http.StatusNotFound, "waitlist-not-found")
	s.post("/v1/sales/"+uuid.NewString()+"/waitlist", "", as("ada")).isProblem(http.StatusNotFound, "sale-not-found")
}

// Whether a buyer still waits is what Postgres says, also while Redis has another view of the place.
func TestJoinWaitingListAgain(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 1, PerOrderLimit: 1, PaymentWindow: time.Hour, Waitlist: true})
	path := "/v1/sales/" + sale.String() + "/waitlist"
	s.buy(sale, "", as("holder")).is(http.StatusAccepted)
	entries := map[string]string{}
	for _, user := range []string{"ada", "bob"} {
		entries[user] = s.post(path, "", as(user)).is(http.StatusAccepted)["entry_order_id"].(string)
	}
	s.startWorker()
	testkit.Eventually(t, 20*time.Second, "bob is in Postgres", func() bool {
		return s.get(path, as("bob")).is(http.StatusOK)["before"] == 1.0
	})
	testshop.Exec(t, s.pool, "UPDATE orders SET status = 'cancelled' WHERE id = $1", entries["ada"]) // Redis knows nothing
	left := s.post(path, "", as("ada"), withKey("new"))
	require.Equal(t, entries["ada"], left.isProblem(http.StatusConflict, "order-ended")["order_id"])
	require.Equal(t, "1", left.header.Get("Retry-After"))
	testshop.Exec(t, s.pool, "UPDATE orders SET status = 'paid' WHERE id = $1", entries["bob"])
	require.Equal(t, "waiting", s.post(path, "", as("bob")).is(http.StatusAccepted)["state"])
	testkit.Eventually(t, 20*time.Second, "a paid entry waits", func() bool {
		return s.get(path, as("bob")).is(http.StatusOK)["before"] == 0.0
	})
	seen := s.get(path, as("bob")).is(http.StatusOK)
	require.Equal(t, []any{"waiting", entries["bob"]}, []any{seen["state"], seen["entry_order_id"]})
}

// Who cannot buy now is not sent to buy.
func TestWaitingListOfSaleThatDoesNotSell(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	terms := reservation.Terms{Stock: 1, PerOrderLimit: 1, PaymentWindow: time.Hour, Waitlist: true}
	paused := "/v1/sales/" + s.sale(terms).String()
	s.post(paused+"/pause", "", operator).is(http.StatusOK)
	s.post(paused+"/waitlist", "", as("ada")).isProblem(http.StatusConflict, "sale-paused")
	terms.OpensAt = time.Now().Add(time.Hour)
	later := "/v1/sales/" + s.sale(terms).String()
	p := s.post(later+"/waitlist", "", as("ada")).isProblem(http.StatusConflict, "sale-not-open")
	require.NotEmpty(t, p["opens_at"])
}

// Who asks waits for a reading only if what was read before is too old, and no longer than a moment.
func TestWaitingListsAreReadInBackground(t *testing.T) {
	t.Parallel()
	reads, read := make(chan struct{}), []int64{2, 3, 5}
	lists := waitingLists{
		start: func(f func(context.Context)) { go f(t.Context()) },
		read: func(context.Context, waitingFor) ([]int64, error) {
			<-reads
			return read, nil
		},
	}
	sale := waitingFor{sale: uuid.New()}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	isKnown := func(ctx context.Context) bool { _, known := lists.get(ctx, sale); return known }
	require.False(t, isKnown(over), "it takes too long")
	reads <- struct{}{}
	require.True(t, isKnown(t.Context()))
	require.Len(t, read, lists.places)
	age := func(d time.Duration) {
		lists.mu.Lock()
		defer lists.mu.Unlock()
		lists.lists[sale].began = time.Now().Add(-d)
	}
	age(waitingMaxAge + waitingMaxAge/2)
	require.True(t, isKnown(over), "it is read again meanwhile")
	age(time.Hour)
	require.False(t, isKnown(over), "it is too old")
	read = make([]int64, draws.WaitingPlacesMax)
	reads <- struct{}{}
	require.True(t, isKnown(t.Context()))
	for _, other := range []waitingFor{{sale: uuid.New()}, {sale.sale, "b"}} {
		go func() { reads <- struct{}{} }()
		_, known := lists.get(t.Context(), other)
		require.True(t, known)
	}
	require.Equal(t, []int{1, draws.WaitingPlacesMax}, []int{len(lists.lists), lists.places}, "the others are forgotten")
}

// Who leaves while a unit is on its way hears of it. The place is left when nothing can come any more.
func TestLeaveWaitingListWhileUnitComes(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 1, PerOrderLimit: 1, PaymentWindow: time.Hour, Waitlist: true})
	path := "/v1/sales/" + sale.String() + "/waitlist"
	bought := s.buy(sale, "", as("holder"))
	entry := uuid.MustParse(s.post(path, "", as("ada")).is(http.StatusAccepted)["entry_order_id"].(string))
	s.startWorker()
	s.awaitStatus(bought.header.Get("Location"), "holder", order.StatusConfirmed)
	testkit.Eventually(t, 20*time.Second, "ada is in Postgres", func() bool {
		return s.get(path, as("ada")).is(http.StatusOK)["before"] == 0.0
	})
	worker, err := s.pool.Begin(t.Context()) // of another worker, which dies
	require.NoError(t, err)
	defer func() { _ = worker.Rollback(context.Background()) }()
	require.NoError(t, worker.QueryRow(t.Context(), sql.DrawsLock, sale).Scan(nil))
	s.cancel(bought.header.Get("Location"), as("holder")).is(http.StatusOK)
	unit := reservation.Offer{OrderID: order.NewOrderID(sale), UserID: "ada", Key: reservation.OfferKey(entry)}
	testkit.Eventually(t, 20*time.Second, "it offers the unit", func() bool {
		answers, err := s.store.Offer(t.Context(), reservation.Sale{ID: sale}, []reservation.Offer{unit})
		return err == nil && answers[0].Verdict == reservation.Reserved
	})
	want := []any{"offered", unit.OrderID.String()}
	for range 2 {
		left := s.post(path+"/leave", "", as("ada")).is(http.StatusOK)
		require.Equal(t, want, []any{left["state"], left["order_id"]})
	}
	seen := s.get(path, as("ada")).is(http.StatusOK)
	require.Equal(t, want, []any{seen["state"], seen["order_id"]})
}

// In a sale with items a buyer waits for one of them, in its own list.
func TestWaitingListsOfItems(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	created := s.post("/v1/sales", `{"name":"Shoe","payment_window_seconds":3600,"waitlist":true,"per_order_limit":2,
		"items":[{"code":"m","name":"M","stock":1},{"code":"l","name":"L","stock":1}]}`, operator).is(http.StatusCreated)
	sale := created["id"].(string)
	orders, path := "/v1/sales/"+sale+"/orders", "/v1/sales/"+sale+"/waitlist"
	join := func(item, user string) reply { return s.post(path, `{"item":"`+item+`"}`, as(user)) }
	bought := s.post(orders, `{"items":{"m":1}}`, as("holder"))
	bought.is(http.StatusAccepted)
	for _, body := range []string{"", "{}"} {
		p := s.post(path, body, as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
		require.Contains(t, p["detail"], "item must say for which one, such as m")
	}
	require.Equal(t, "xl", join("xl", "ada").isProblem(http.StatusUnprocessableEntity, "unknown-item")["item"])
	join("l", "ada").isProblem(http.StatusConflict, "not-sold-out")
	s.post(orders, `{"items":{"l":1}}`, as("other")).is(http.StatusAccepted)
	for place, of := range [][]string{{"m", "ada"}, {"l", "bob"}, {"m", "cid"}} {
		joined := join(of[0], of[1]).is(http.StatusAccepted)
		require.Equal(t, []any{float64(place + 1), of[0], "waiting"}, []any{joined["place"], joined["item"], joined["state"]})
	}
	again := join("l", "ada")
	require.Equal(t, "m", again.is(http.StatusAccepted)["item"], "ada waits for m")
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))

	s.startWorker()
	seen := func(user string) map[string]any { return s.get(path, as(user)).is(http.StatusOK) }
	for user, before := range map[string]float64{"ada": 0, "bob": 0, "cid": 1} {
		testkit.Eventually(t, 20*time.Second, "all are counted", func() bool { return seen(user)["before"] == before })
	}
	s.cancel(bought.header.Get("Location"), as("holder")).is(http.StatusOK)
	testkit.Eventually(t, 20*time.Second, "ada has the unit", func() bool { return seen("ada")["state"] == "offered" })
	require.Equal(t, "m", seen("ada")["item"])
	p := s.post(orders, `{"items":{"m":1,"l":1}}`, as("eve")).isProblem(http.StatusConflict, "offers-only")
	require.Equal(t, []any{"m"}, p["items"])
	require.Equal(t, "waiting", seen("bob")["state"])
	left := s.post(path+"/leave", "", as("cid")).is(http.StatusOK)
	require.Equal(t, []any{"left", "m"}, []any{left["state"], left["item"]})
}

// fillList gives the draw a frozen list of so many chunks, and returns its length.
func (d drawn) fillList(chunks int) int64 {
	d.t.Helper()
	testshop.Exec(d.t, d.pool, `INSERT INTO draw_chunks (sale_id, chunk, first_id, records, ids, hash)
		SELECT $1, n, gen_random_uuid(), decode(repeat('00', 33 * 1024), 'hex'), decode(repeat('00', 16 * 1024), 'hex'),
			decode(repeat('00', 32), 'hex') FROM generate_series(0, $2::int - 1) AS n`, d.goods, chunks)
	testshop.Exec(d.t, d.pool, `UPDATE draws SET entries = 1024 * $2::bigint, root = decode(repeat('00', 32), 'hex'),
		frozen_at = now() WHERE sale_id = $1`, d.goods, chunks)
	testshop.Exec(d.t, d.pool, `WITH sale AS (UPDATE sales SET revision = revision + 1 WHERE id = $1 RETURNING id, revision)
		INSERT INTO sale_events (sale_id, revision, type) SELECT id, revision, 'DrawFrozen' FROM sale`, d.goods)
	testkit.Eventually(d.t, 10*time.Second, "the list is known", func() bool {
		return d.get(d.path).is(http.StatusOK)["root"] != nil
	})
	return int64(chunks) * 1024 * draw.RecordBytes
}

// download sends a request for the list, of which it reads the head.
func (d drawn) download(from string) *http.Response {
	d.t.Helper()
	slow := d.dial()
	slow.sends("GET " + d.path + "/leaves HTTP/1.1\r\nHost: shop\r\nX-Forwarded-For: " + from + "\r\n\r\n")
	res, err := http.ReadResponse(slow.answers, nil)
	require.NoError(d.t, err)
	return res
}

// A client that does not read keeps no connection of Postgres, no other client out, and takes no more than its places.
func TestSlowDownloadsHoldNothing(t *testing.T) {
	t.Parallel()
	s := openShop(t, behindProxy, func(c *Config) { c.AddressStreams = 1 })
	d := s.prepareDraw()
	d.create("").is(http.StatusCreated)
	size := d.fillList(1000)
	res := d.download("192.0.2.1")
	require.Equal(t, size, res.ContentLength)
	for i := range directMax {
		other := d.download(fmt.Sprint("192.0.2.", i+2))
		require.Equal(t, http.StatusOK, other.StatusCode)
	}
	testkit.Eventually(t, 10*time.Second, "no connection is taken", func() bool {
		return s.pool.Stat().AcquiredConns() == 0
	})
	require.Len(t, d.get(d.path+"/leaves").body, int(size), "a further one gets it whole")
	own := fromAddress("192.0.2.1")
	p := d.get(d.path+"/bundle", own).isProblem(http.StatusTooManyRequests, "rate-limited")
	require.Contains(t, p["detail"], "downloads")
	n, err := io.Copy(io.Discard, res.Body)
	require.NoError(t, err)
	require.Equal(t, size, n)
	testkit.Eventually(t, 10*time.Second, "its place is free", func() bool {
		return d.get(d.path+"/bundle", own).status == http.StatusOK
	})
	downloads := &s.server.limits.downloads.all
	for downloads.acquire() {
	}
	d.get(d.path+"/leaves").isProblem(http.StatusServiceUnavailable, "overloaded")
}

// A list is read from Postgres once, and then as often as somebody likes, in few parts.
func TestListIsReadOnce(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	d := s.prepareDraw()
	d.create("").is(http.StatusCreated)
	size := d.fillList(100)
	whole := d.get(d.path + "/leaves")
	require.Len(t, whole.body, int(size))
	testshop.Exec(t, s.pool, "DELETE FROM draw_chunks WHERE sale_id = $1", d.goods)
	for ranges, status := range map[string]int{
		"0-0": http.StatusPartialContent, "1-2,8-9,77000-77001,990000-990000": http.StatusPartialContent,
		"1-2,8-9,77000-77001,990000-990000,4-4": http.StatusOK, "-1": http.StatusPartialContent,
		strings.Repeat("5-5,", 2000) + "5-5": http.StatusOK,
		fmt.Sprintf("%d-", size):             http.StatusRequestedRangeNotSatisfiable,
	} {
		part := d.get(d.path+"/leaves", reqHeader{"Range", "bytes=" + ranges})
		require.Equal(t, status, part.status, ranges)
		if status == http.StatusOK {
			require.Equal(t, whole.body, part.body)
		}
	}
}

// A list that lacks a part does not look like one, and is read again by who asks again.
func TestListThatLacksPartBreaksOff(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	d := s.prepareDraw()
	d.create("").is(http.StatusCreated)
	size := d.fillList(200)
	testshop.Exec(t, s.pool, "CREATE TABLE kept AS SELECT * FROM draw_chunks WHERE chunk >= 150")
	testshop.Exec(t, s.pool, "DELETE FROM draw_chunks WHERE chunk >= 150")
	res := d.download("192.0.2.1")
	_, err := io.Copy(io.Discard, res.Body)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	testshop.Exec(t, s.pool, "INSERT INTO draw_chunks SELECT * FROM kept")
	require.Len(t, d.get(d.path+"/leaves").body, int(size))

	// Without a disk it is read from Postgres, by few at a time.
	s.server.draws.files.drop(s.server.draws.files.byName[fmt.Sprintf("leaves of %s %x", d.goods, make([]byte, 32))])
	s.server.draws.files.fail(os.ErrPermission)
	require.Len(t, d.get(d.path+"/leaves").body, int(size))
	require.Equal(t, http.StatusOK, d.get(d.path+"/bundle").status)
	for s.server.draws.direct.acquire() {
	}
	d.get(d.path+"/leaves").isProblem(http.StatusServiceUnavailable, "overloaded")
}

func TestDownloadOfSlowClientIsCutOff(t *testing.T) {
	t.Parallel()
	part, results := make([]byte, 1<<20), make(chan error, 2)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		anHourAgo := time.Now().Add(-time.Hour)
		for _, read := range []int64{3600 * downloadRate, 0} {
			_, err := (&fileWriter{w, anHourAgo, read}).Write(part)
			results <- err
		}
	}))
	defer server.Close()
	res, err := http.Get(server.URL) //nolint:noctx // of this test
	require.NoError(t, err)
	require.NoError(t, <-results)
	require.ErrorIs(t, <-results, os.ErrDeadlineExceeded)
	_ = res.Body.Close()
}

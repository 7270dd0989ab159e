package ingress

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

func TestPurchaseIsAccepted(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})

	before := time.Now().Add(-time.Second)
	r := s.buy(sale, `{"quantity":2}`, as("ada"))
	order := r.is(http.StatusAccepted)
	id, err := uuid.Parse(order["order_id"].(string))
	require.NoError(t, err)
	require.Equal(t, "/v1/orders/"+id.String(), r.header.Get("Location"))
	require.Empty(t, r.header.Get("Idempotency-Replayed"))
	at, err := time.Parse(time.RFC3339, order["reserved_at"].(string))
	require.NoError(t, err)
	require.WithinRange(t, at, before, time.Now().Add(time.Second))
	require.NotEmpty(t, order["receipt"])
	delete(order, "reserved_at")
	delete(order, "receipt")
	require.Equal(t, map[string]any{
		"order_id": id.String(), "sale_id": sale.String(), "status": "reserved", "quantity": 2.0,
	}, order)

	now := s.stock(sale)
	require.Equal(t, "8", now.Sale["left"])
	require.EqualValues(t, 1, now.Orders)
	require.Contains(t, now.Buyers["ada"], base64.RawURLEncoding.EncodeToString(id[:]))
}

func TestPurchaseWithoutQuantityIsForOne(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	for user, body := range map[string]string{"nothing": "", "empty": "{}", "spaces": " { } "} {
		require.EqualValues(t, 1, s.buy(sale, body, as(user)).is(http.StatusAccepted)["quantity"], user)
	}
	chunked := s.ask(http.MethodPost, ordersPath(sale), struct{ *bytes.Reader }{bytes.NewReader(nil)}, as("chunked"))
	require.EqualValues(t, 1, chunked.is(http.StatusAccepted)["quantity"])
}

func TestReplayGivesTheSameAnswer(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	first := s.buy(sale, `{"quantity":2}`, as("ada"), withKey("k-1"))
	first.is(http.StatusAccepted)
	left := s.stock(sale)

	again := s.buy(sale, ` {"quantity": 2}`, as("ada"), withKey("k-1"))
	again.is(http.StatusAccepted)
	require.Equal(t, first.body, again.body)
	require.Equal(t, first.header.Get("Location"), again.header.Get("Location"))
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))

	s.buy(sale, `{"quantity":1}`, as("ada"), withKey("k-1")).
		isProblem(http.StatusUnprocessableEntity, "idempotency-key-reused")
	other := s.buy(sale, `{"quantity":2}`, as("ada"), withKey("k-2"))
	mine := other.isProblem(http.StatusConflict, "already-purchased")
	require.Equal(t, first.header.Get("Location"), other.header.Get("Location"))
	require.Equal(t, first.is(http.StatusAccepted)["order_id"], mine["order_id"])
	require.Equal(t, left, s.stock(sale))
}

func TestPurchaseRefusals(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	soon := time.Now().Add(90 * time.Second).Truncate(time.Millisecond)
	scheduled := s.sale(reservation.Terms{Stock: 1, OpensAt: soon})
	distant := s.sale(reservation.Terms{Stock: 1, OpensAt: soon.Add(48 * time.Hour)})
	paused := s.sale(reservation.Terms{Stock: 1})
	_, err := s.catalog.Pause(t.Context(), paused)
	require.NoError(t, err)
	ended := s.sale(reservation.Terms{Stock: 1})
	_, err = s.catalog.End(t.Context(), ended)
	require.NoError(t, err)
	closed := s.sale(reservation.Terms{Stock: 1, ClosesAt: time.Now().Add(time.Hour)})
	require.NoError(t, s.rdb.HSet(t.Context(), s.keys.Sale(s.keys.Partition(closed), closed), "closes_at_ms", 1).Err())
	soldOut := s.sale(reservation.Terms{Stock: 1})
	s.buy(soldOut, "", as("winner")).is(http.StatusAccepted)
	few := s.sale(reservation.Terms{Stock: 1})
	offered := s.sale(reservation.Terms{Stock: 1})
	entries := s.sale(reservation.Terms{Stock: 9, PerOrderLimit: 1, ClosesAt: time.Now().Add(time.Hour)})
	_, err = s.catalog.CreateDraw(t.Context(), offered, catalog.DrawTerms{Entries: entries, Freeze: time.Minute})
	require.NoError(t, err)

	for name, test := range map[string]struct {
		sale   uuid.UUID
		body   string
		status int
		slug   string
	}{
		"not open yet":         {scheduled, "", http.StatusConflict, "sale-not-open"},
		"paused":               {paused, "", http.StatusConflict, "sale-paused"},
		"offered":              {offered, "", http.StatusConflict, "offers-only"},
		"ended by an operator": {ended, "", http.StatusGone, "sale-ended"},
		"closing time is over": {closed, "", http.StatusGone, "sale-ended"},
		"sold out":             {soldOut, "", http.StatusConflict, "sold-out"},
		"fewer left":           {few, `{"quantity":2}`, http.StatusConflict, "sold-out"},
		"over the limit":       {few, `{"quantity":3}`, http.StatusUnprocessableEntity, "quantity-over-limit"},
		"unknown sale":         {uuid.Must(uuid.NewV7()), "", http.StatusNotFound, "sale-not-found"},
	} {
		before := s.stock(test.sale)
		for range 2 { // once from Redis, once from the memory of the process
			s.buy(test.sale, test.body, as("ada")).isProblem(test.status, test.slug)
		}
		require.Equal(t, before, s.stock(test.sale), name)
	}

	r := s.buy(scheduled, "", as("ada"))
	opens, err := time.Parse(time.RFC3339, r.json()["opens_at"].(string))
	require.NoError(t, err)
	require.WithinDuration(t, soon, opens, 0)
	wait, err := strconv.Atoi(r.header.Get("Retry-After"))
	require.NoError(t, err)
	require.InDelta(t, 90, wait, 30)
	require.Equal(t, "3600", s.buy(distant, "", as("ada")).header.Get("Retry-After"))
	require.EqualValues(t, 2, s.buy(few, `{"quantity":3}`, as("ada")).json()["limit"])
}

func TestRetryAfterIsNeverZero(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for wait, want := range map[time.Duration]int{
		-time.Hour: 1, 0: 1, time.Millisecond: 1, time.Second: 1, time.Second + 1: 2, 59 * time.Minute: 3540,
		1000 * time.Hour: 3600,
	} {
		require.Equal(t, want, secondsUntil(now.Add(wait), now), wait)
	}
}

// Neither stock nor stream nor buyers change.
func TestPurchaseRejectsInvalidRequests(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	long := strings.Repeat("k", 256)
	huge := `{"quantity":1,"x":"` + strings.Repeat("x", 1<<20) + `"}`

	for name, test := range map[string]struct {
		body    string
		headers []reqHeader
		status  int
		slug    string
		detail  string
	}{
		"no user":           {`{}`, nil, 401, "unauthorized", "X-User-Id"},
		"empty user":        {`{}`, []reqHeader{as("")}, 400, "invalid-request", "user id"},
		"user with braces":  {`{}`, []reqHeader{as("{0}")}, 400, "invalid-request", "user id"},
		"user with a space": {`{}`, []reqHeader{as("a b")}, 400, "invalid-request", "user id"},
		"user not ASCII":    {`{}`, []reqHeader{as("é")}, 400, "invalid-request", "user id"},
		"user too long":     {`{}`, []reqHeader{as(strings.Repeat("u", 129))}, 400, "invalid-request", "user id"},
		"user twice":        {`{}`, []reqHeader{as("ada"), as("bob")}, 400, "invalid-request", "once"},
		"key empty":         {`{}`, []reqHeader{as("ada"), withKey("")}, 400, "invalid-request", "Idempotency-Key"},
		"key too long":      {`{}`, []reqHeader{as("ada"), withKey(long)}, 400, "invalid-request", "Idempotency-Key"},
		"key not ASCII":     {`{}`, []reqHeader{as("ada"), withKey("schlüssel")}, 400, "invalid-request", "Idempotency-Key"},
		"key with a space":  {`{}`, []reqHeader{as("ada"), withKey("a b")}, 400, "invalid-request", "Idempotency-Key"},
		"key twice": {
			`{}`, []reqHeader{as("ada"), withKey("a"), withKey("a")}, 400, "invalid-request", "Idempotency-Key",
		},
		"quantity 0":         {`{"quantity":0}`, nil, 400, "invalid-request", "quantity"},
		"quantity -1":        {`{"quantity":-1}`, nil, 400, "invalid-request", "quantity"},
		"quantity -0":        {`{"quantity":-0}`, nil, 400, "invalid-request", "quantity"},
		"quantity 1.5":       {`{"quantity":1.5}`, nil, 400, "invalid-request", "quantity"},
		"quantity 1.0":       {`{"quantity":1.0}`, nil, 400, "invalid-request", "quantity"},
		"quantity 1e2":       {`{"quantity":1e2}`, nil, 400, "invalid-request", "quantity"},
		"quantity as text":   {`{"quantity":"3"}`, nil, 400, "invalid-request", "quantity"},
		"quantity null":      {`{"quantity":null}`, nil, 400, "invalid-request", "quantity"},
		"quantity true":      {`{"quantity":true}`, nil, 400, "invalid-request", "quantity"},
		"quantity as a list": {`{"quantity":[1]}`, nil, 400, "invalid-request", "quantity"},
		"quantity 01":        {`{"quantity":01}`, nil, 400, "invalid-request", "JSON"},
		"quantity NaN":       {`{"quantity":NaN}`, nil, 400, "invalid-request", "JSON"},
		"quantity 0x10":      {`{"quantity":0x10}`, nil, 400, "invalid-request", "JSON"},
		"over the limit":     {`{"quantity":3}`, nil, 422, "quantity-over-limit", "2"},
		"far over the limit": {`{"quantity":1000001}`, nil, 422, "quantity-over-limit", "2"},
		"2^53+1":             {`{"quantity":9007199254740993}`, nil, 422, "quantity-over-limit", "2"},
		"2^64+1":             {`{"quantity":18446744073709551617}`, nil, 422, "quantity-over-limit", "2"},
		"a thousand digits":  {`{"quantity":` + strings.Repeat("9", 1000) + `}`, nil, 422, "quantity-over-limit", "2"},
		"quantity twice":     {`{"quantity":1,"quantity":1}`, nil, 400, "invalid-request", "quantity"},
		"twice by escapes":   {`{"quantity":1,"\u0071uantity":1}`, nil, 400, "invalid-request", "quantity"},
		"trailing brace":     {`{"quantity":1}}`, nil, 400, "invalid-request", "JSON"},
		"not closed":         {`{"quantity":1`, nil, 400, "invalid-request", "JSON"},
		"no value":           {`{"quantity":}`, nil, 400, "invalid-request", "JSON"},
		"comment":            {`{"quantity":1/**/}`, nil, 400, "invalid-request", "JSON"},
		"body of 1 MB":       {huge, nil, 413, "body-too-large", "4096"},
		"deep":               {strings.Repeat(`{"a":`, 800), nil, 400, "invalid-request", ""},
	} {
		before := s.stock(sale)
		headers := test.headers
		if headers == nil && test.slug != "unauthorized" {
			headers = []reqHeader{as("ada")}
		}
		r := s.buy(sale, test.body, headers...)
		require.Equal(t, test.status, r.status, "%s: %s", name, r.body)
		require.Contains(t, r.isProblem(test.status, test.slug)["detail"], test.detail, name)
		require.Equal(t, before, s.stock(sale), name)
	}
	s.buy(sale, `{"quantity":1`+strings.Repeat(" ", 4096-14)+`}`, as("ada")).is(http.StatusAccepted)
}

func TestPurchaseRequiresJSON(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 100})
	for _, good := range []string{
		"application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF-8",
	} {
		sent := reqHeader{"Content-Type", good}
		s.ask(http.MethodPost, ordersPath(sale), strings.NewReader(`{}`), as(uuid.NewString()), sent).is(http.StatusAccepted)
	}
	before := s.stock(sale)
	for _, bad := range [][]reqHeader{
		nil,
		{{"Content-Type", ""}},
		{{"Content-Type", "text/plain"}},
		{{"Content-Type", "application/json; charset=latin1"}},
		{{"Content-Type", "application/problem+json"}},
		{{"Content-Type", "application/x-www-form-urlencoded"}},
		{{"Content-Type", "application/json"}, {"Content-Type", "text/plain"}},
		{{"Content-Type", "application/json"}, {"Content-Encoding", "gzip"}},
	} {
		s.ask(http.MethodPost, ordersPath(sale), strings.NewReader(`{}`), append(bad, as("ada"))...).
			isProblem(http.StatusUnsupportedMediaType, "unsupported-media-type")
	}
	require.Equal(t, before, s.stock(sale))
}

func TestCrowdGetsExactlyTheStock(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	const buyers, units = 300, 20
	sale := s.sale(reservation.Terms{Stock: units})
	statuses := make([]int, buyers)
	var crowd sync.WaitGroup
	for i := range buyers {
		crowd.Go(func() { statuses[i] = s.buy(sale, "", as("buyer-"+strconv.Itoa(i))).status })
	}
	crowd.Wait()
	count := map[int]int{}
	for _, status := range statuses {
		count[status]++
	}
	require.Equal(t, map[int]int{http.StatusAccepted: units, http.StatusConflict: buyers - units}, count)
	require.EqualValues(t, units, s.stock(sale).Orders)
}

// FuzzUnits compares the fast parsers with the strict decoder. A leading space keeps a body from the fast parsers;
// the decoder skips it.
func FuzzUnits(f *testing.F) {
	for _, body := range []string{
		`{"quantity":1}`, `{"quantity": 2}`, `{"quantity":1000001}`, `{"quantity":9007199254740993}`,
		`{"quantity":99999999999999999999999}`,
		`{"quantity":0}`, `{"quantity":01}`, `{"quantity":-1}`, `{"quantity":1.5}`, `{"quantity":1e2}`, `{"quantity":"3"}`,
		`{"quantity":null}`,
		`{"quantity":}`, `{"quantity": }`, `{"quantity":1}}`, `{"quantity":1 }`, `{"quantity":  1}`, `{"quantity":1`,
		`{"quantity":`, `{}`, ` `, `null`,
		`{"items":{"m":1}}`, `{"items":{"m":1,"l":2}}`, `{"items":{"size-42.5":9007199254740993}}`, `{"items":{"m":1} }`,
		`{"items":{}}`, `{"items":{"m":0}}`, `{"items":{"m":-1}}`, `{"items":{"m":1.5}}`, `{"items":{"m":1,"m":1}}`,
		`{"items":{"M":1}}`, `{"items":{"a b":1}}`, `{"items":{"":1}}`, `{"items":{"m":"1"}}`, `{"items":{"m":1}`,
		`{"items":{"m":1,}}`, `{"items":{"m":1}}}`, `{"items":{"m":1},"quantity":1}`, `{"quantity":1,"items":{"m":1}}`,
		`{"items":null}`, `{"items":[]}`, `{"items":{"m":1},"items":{"l":1}}`, `{"items":{"\u006d":1}}`, `{"items":{"m":{}}}`,
		`{"items":{` + strings.Repeat(`"m":1,`, order.MaxItems) + `"l":1}}`, `{"items":{` + itemsOf(order.MaxItems) + `}}`,
		`{"items":{` + itemsOf(order.MaxItems+1) + `}}`,
		`{"quantity":1,"quantity":1}`, `{"Quantity":1}`, "{\"quantity\":1\x00}", "{\"quantity\":\xff}",
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		if len(body) == 0 {
			return
		}
		fast, items, errFast := parseUnits(body)
		decoded, decodedItems, errDecoded := parseUnits(append([]byte{' '}, body...))
		require.Equal(t, errDecoded == nil, errFast == nil, "fast: %v, decoded: %v", errFast, errDecoded)
		require.Equal(t, decoded, fast)
		require.Equal(t, decodedItems, items)
		all := append(slices.Collect(maps.Values(items)), fast)
		if items != nil {
			require.Zero(t, fast)
			require.LessOrEqual(t, len(items), order.MaxItems)
			all = all[:len(items)]
			require.NotEmpty(t, all)
		}
		for _, units := range all {
			if errFast == nil {
				require.Positive(t, units)
				require.LessOrEqual(t, units, int64(order.MaxPerOrder+1))
			}
		}
	})
}

// itemsOf returns the members of so many items.
func itemsOf(n int) string {
	members := make([]string, n)
	for i := range members {
		members[i] = fmt.Sprintf(`"item-%d":1`, i)
	}
	return strings.Join(members, ",")
}

func TestUnitsOfItems(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]map[string]int64{
		`{"items":{"m":1,"l":2}}`:       {"m": 1, "l": 2},
		`{"items": {"m": 1 , "l": 2} }`: {"m": 1, "l": 2},
		`{"items":{"M":1}}`:             {"M": 1}, // no sale has it
	} {
		quantity, items, err := parseUnits([]byte(body))
		require.NoError(t, err, body)
		require.Zero(t, quantity)
		require.Equal(t, want, items)
	}
	for _, body := range []string{
		`{"items":{}}`, `{"items":null}`, `{"items":[]}`, `{"items":{"m":0}}`, `{"items":{"m":-1}}`, `{"items":{"m":1.5}}`,
		`{"items":{"m":null}}`, `{"items":{"":1}}`, `{"items":{"m":1e1}}`, `{"items":{"m":1,"m":1}}`,
		`{"items":{"m":1},"quantity":1}`,
		`{"items":{` + itemsOf(order.MaxItems+1) + `}}`,
	} {
		_, _, err := parseUnits([]byte(body))
		require.Error(t, err, body)
	}
}

// A sale that has left Redis is answered as before, by Postgres: repeats get their orders, and everybody else hears
// that it has ended.
func TestRetiredSaleIsAnsweredAsBefore(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, id, _ := s.purchased(sale, "ann", withKey("k"))
	other, _, _ := s.purchased(sale, "bob")
	cancelled, cancelledID, _ := s.purchased(sale, "cid", withKey("c"))
	s.startWorker(func(c *fulfillment.WorkerConfig) { c.RetireAfter = time.Millisecond })
	s.awaitStatus(cancelled, "cid", order.StatusConfirmed)
	s.cancel(cancelled, as("cid")).is(http.StatusOK)
	s.awaitReleased(sale, "cid")
	s.post("/v1/sales/"+sale.String()+"/end", "", operator).is(http.StatusOK)

	purchases := map[string]func() reply{
		"a repeat":              func() reply { return s.buy(sale, "", as("ann"), withKey("k")) },
		"a repeat that waits":   func() reply { return s.buy(sale, "", as("ann"), withKey("k"), prefer("wait=5")) },
		"another key":           func() reply { return s.buy(sale, "", as("ann"), withKey("k2")) },
		"no key":                func() reply { return s.buy(sale, "", as("bob")) },
		"another quantity":      func() reply { return s.buy(sale, `{"quantity":2}`, as("ann"), withKey("k")) },
		"a repeat of one ended": func() reply { return s.buy(sale, "", as("cid"), withKey("c")) },
		"the ended one again":   func() reply { return s.buy(sale, "", as("cid"), withKey("c2")) },
		"a stranger":            func() reply { return s.buy(sale, "", as("eve")) },
		"a stranger with a key": func() reply { return s.buy(sale, "", as("eve"), withKey("k")) },
	}
	before := map[string]reply{}
	answers := func(when string) {
		t.Helper()
		for what, ask := range purchases {
			got := ask()
			require.Equal(t, before[what].status, got.status, "%s %s: %s", when, what, got.body)
			require.Equal(t, before[what].header.Get("Location"), got.header.Get("Location"), "%s %s", when, what)
			require.Equal(t, before[what].header.Get("Idempotency-Replayed"), got.header.Get("Idempotency-Replayed"), what)
			require.Equal(t, withoutRequestID(before[what].body), withoutRequestID(got.body), "%s %s", when, what)
		}
	}
	for _, paid := range []string{path, other} {
		s.awaitStatus(paid, map[string]string{path: "ann", other: "bob"}[paid], order.StatusConfirmed)
	}
	require.Zero(t, countRows(s, "SELECT count(*) FROM sales WHERE retired_at IS NOT NULL"), "orders await payment")
	s.pay(path, "pi", as("ann")).is(http.StatusOK)
	for what, ask := range purchases {
		before[what] = ask()
	}
	before["a repeat"].is(http.StatusAccepted)
	before["a stranger"].isProblem(http.StatusGone, "sale-ended")
	before["a repeat of one ended"].isEnded(cancelledID, order.StatusCancelled)
	answers("while Redis has the buyers,")
	s.pay(other, "pi", as("bob")).is(http.StatusOK)
	testkit.Eventually(t, 20*time.Second, "the sale has left Redis", func() bool {
		return s.rdb.Exists(t.Context(), s.keys.Buyers(s.keys.Partition(sale), sale)).Val() == 0
	})
	answers("when it is retired,")
	s.awaitUnits(sale, 8, 0, 2)
	require.Equal(t, "ended", s.get("/v1/sales/" + sale.String()).is(http.StatusOK)["state"])
	require.Equal(t, id.String(), s.get(path, as("ann")).is(http.StatusOK)["order_id"])
	s.post("/v1/sales/"+sale.String()+"/restock", `{"units":5}`, operator).
		isProblem(http.StatusConflict, "illegal-transition")
	s.post("/v1/sales/"+sale.String()+"/end", "", operator).is(http.StatusOK)

	p := s.keys.Partition(sale)
	require.NoError(t, s.rdb.Del(t.Context(), s.keys.Sale(p, sale)).Err())
	require.NoError(t, s.rdb.SRem(t.Context(), s.keys.Sales(p), sale.String()).Err())
	answers("when its keys are deleted,")
	fresh := openShopOn(t, s.on) // it has never seen the sale
	fresh.buy(sale, "", as("eve")).isProblem(http.StatusGone, "sale-ended")
	require.Equal(t, before["a repeat"].status, fresh.buy(sale, "", as("ann"), withKey("k")).status)
	s.buy(uuid.Must(uuid.NewV7()), "", as("ann")).isProblem(http.StatusNotFound, "sale-not-found")

	unlock := s.lock("orders")
	s.buy(sale, "", as("eve")).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	unlock()
	testkit.Eventually(t, 20*time.Second, "it answers again", func() bool {
		return s.buy(sale, "", as("eve")).status == http.StatusGone
	})
}

func countRows(s *shop, query string) (n int) {
	s.t.Helper()
	require.NoError(s.t, s.pool.QueryRow(s.t.Context(), query).Scan(&n))
	return n
}

// withoutRequestID returns the body of a problem without the member that differs in each answer.
func withoutRequestID(body string) string {
	text, _, _ := strings.Cut(body, `,"request_id":`)
	return text
}

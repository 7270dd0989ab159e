package ingress

import (
	"bytes"
	"encoding/base64"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/reservation"
	"stampede/reservation/catalog"
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

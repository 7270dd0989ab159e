package ingress

import (
	"encoding/base64"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/reservation"
)

// One buyer has 45 orders, mixed with those of another.
func TestListOrdersPages(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	require.Equal(t, map[string]any{"orders": []any{}}, s.get("/v1/orders", as("ada")).is(http.StatusOK))
	s.get("/v1/orders").isProblem(http.StatusUnauthorized, "unauthorized")

	var want []any
	for i := range 45 {
		terms := reservation.Terms{Stock: 2}
		if i%3 == 0 {
			terms.PaymentWindow = 10 * time.Minute
		}
		sale := s.sale(terms)
		path, _ := s.confirm(sale, "ada")
		switch {
		case i%6 == 0:
			s.pay(path, "r-1", as("ada")).is(http.StatusOK)
		case i%9 == 0:
			s.cancel(path, as("ada")).is(http.StatusOK)
		}
		if i%4 == 0 {
			s.confirm(sale, "bob")
		}
		want = append(want, map[string]any(s.get(path, as("ada")).is(http.StatusOK)))
	}
	slices.Reverse(want) // newest first

	walk := func(user, query string, sizes ...int) (got []any) {
		t.Helper()
		next := ""
		for i, size := range sizes {
			r := s.get("/v1/orders?"+query+next, as(user))
			page := r.is(http.StatusOK)
			require.Equal(t, "no-store", r.header.Get("Cache-Control"))
			require.Len(t, page["orders"], size)
			got = append(got, page["orders"].([]any)...)
			cursor, more := page["next_cursor"].(string)
			require.Equal(t, i < len(sizes)-1, more, "page %d", i)
			next = "&cursor=" + cursor
		}
		return got
	}
	require.Equal(t, want, walk("ada", "", 20, 20, 5))
	require.Equal(t, want, walk("ada", "limit=45", 45))
	require.Equal(t, want, walk("ada", "limit=44", 44, 1))
	require.Equal(t, want, walk("ada", "limit=100", 45))
	require.Equal(t, want[:3], walk("ada", "limit=1", slices.Repeat([]int{1}, 45)...)[:3])
	require.Len(t, walk("bob", "limit=5", 5, 5, 2), 12)
	require.Empty(t, walk("eve", "", 0))

	// A cursor keeps its place when there are new orders, and shows no other buyer's orders.
	first := s.get("/v1/orders", as("ada")).is(http.StatusOK)
	s.confirm(s.sale(reservation.Terms{Stock: 1}), "ada")
	second := s.get("/v1/orders?cursor="+first["next_cursor"].(string), as("ada")).is(http.StatusOK)
	require.Equal(t, want[20:40], second["orders"])
	others := s.get("/v1/orders?limit=100&cursor="+first["next_cursor"].(string), as("bob")).is(http.StatusOK)
	for _, order := range others["orders"].([]any) {
		require.Equal(t, "bob", order.(map[string]any)["user_id"])
	}

	// An order that only Redis knows is not in the list yet.
	s.order(s.sale(reservation.Terms{Stock: 1}), "ada")
	require.Len(t, s.get("/v1/orders?limit=100", as("ada")).is(http.StatusOK)["orders"], 46)
}

// A client with a misspelled cursor would read the first page forever.
func TestListsRejectInvalidPages(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	good := cursorAfter(uuid.Must(uuid.NewV7()))
	strayBits := good[:21] + string(good[21]+1) // stray bits after the 16 bytes, which a lenient decoder drops
	for _, list := range []string{"/v1/orders", "/v1/sales"} {
		s.get(list+"?limit=1&cursor="+good, as("ada")).is(http.StatusOK)
		for _, cursor := range []string{
			"x", "!", good + "=", good + "==", good[:21], good + "A", good + "\n", good[:10] + "\n" + good[10:], strayBits,
			uuid.NewString(), cursorAfter(uuid.Nil), cursorAfter(uuid.New()),
			base64.RawURLEncoding.EncodeToString([]byte("fifteen bytes..")),
			strings.Repeat("A", 4000), "\x00", "\xff", "{}",
		} {
			p := s.get(list+"?cursor="+url.QueryEscape(cursor), as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
			require.Contains(t, p["detail"], "cursor", cursor)
		}
		for _, limit := range []string{"0", "101", "-1", "x", "1.5", "99999999999999999999", "+"} {
			p := s.get(list+"?limit="+limit, as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
			require.Contains(t, p["detail"], "limit", limit)
		}
		for query, detail := range map[string]string{
			"after=" + good: "after", "next=" + good: "next", "before=" + good: "before", "Cursor=" + good: "Cursor",
			"page=2": "page", "=1": "not known",
			"cursor=" + good + "&cursor=" + good: "once", "limit=1&limit=1": "once", "cursor=%zz": "query",
			"cursor=" + good + ";limit=1":    "query",
			strings.Repeat("y", 1000) + "=1": "yyy…",
		} {
			p := s.get(list+"?"+query, as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
			require.Contains(t, p["detail"], detail, query)
		}
	}
}

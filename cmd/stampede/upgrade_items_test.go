//go:build system && upgrade

package main

import (
	"fmt"
	"net/http"
	"strconv"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// sellItems sells baskets through an ingress of the new version while a worker of the old one, which does not know
// items, reads the stream. Remove it when the old version knows them.
func (u *upgrade) sellItems() {
	t := u.t
	const baskets = 5
	u.run(u.new, "migrate", "up") // a rollout begins with it
	worker := u.work(u.old, "worker")
	ingress := u.ingress(u.new)
	shirts := u.createSale(`{"name":"shirts","per_order_limit":3,"items":[{"code":"m","name":"M","stock":12},` +
		`{"code":"l","name":"L","stock":12}]}`)
	plain := u.createSale(`{"name":"plain","stock":12}`)
	bought := make([]upgradedOrder, baskets)
	for i := range bought {
		require.Equal(t, http.StatusAccepted, u.buy(shirts, i, `{"items":{"m":2,"l":1}}`, &bought[i]))
		require.Equal(t, http.StatusAccepted, u.buy(plain, i, "", &upgradedOrder{}))
	}
	parked := func(replays int) int {
		return u.count("SELECT count(*) FROM dead_letters WHERE status = 'parked' AND replays = $1", replays)
	}
	testkit.Eventually(t, within, "the old worker has made dead letters of the baskets, and recorded the others",
		func() bool { return parked(0) == baskets && u.confirmed(worker) == baskets })
	require.Equal(t, baskets, u.count("SELECT count(*) FROM order_events"), "no row of a basket")

	// An ingress of the old version sells nothing of the sale.
	u.remove(u.urls[ingress])
	oldIngress := u.ingress(u.old)
	for body, problem := range map[string]string{
		"": "quantity-over-limit", `{"quantity":1}`: "quantity-over-limit", `{"items":{"m":1}}`: "invalid-request",
	} {
		var refused upgradedOrder
		u.buy(shirts, baskets, body, &refused)
		require.Equal(t, "/problems/"+problem, refused.Type, body)
	}
	u.remove(u.urls[oldIngress])
	u.add(u.urls[ingress], u.new.name)

	letters := u.runJSON(exitOK, "dlq", "list")
	require.Len(t, letters, baskets)
	replay := func(letter map[string]any) { u.run(u.new, "dlq", "replay", fmt.Sprint(letter["id"])) }
	replay(letters[0])
	testkit.Eventually(t, within, "the old worker makes a dead letter again", func() bool { return parked(1) == 1 })
	u.replaceWorker(worker, u.old, u.new, "worker")
	for _, letter := range letters {
		replay(letter)
	}
	for i, b := range bought {
		testkit.Eventually(t, within, "the new worker records each basket", func() bool {
			var shown upgradedOrder
			status := u.send(t.Context(), http.MethodGet, "/v1/orders/"+b.Order, u.bearer(userOf(i)), "", &shown)
			return status == http.StatusOK && shown.Status == "confirmed" &&
				assert.Equal(t, map[string]int{"m": 2, "l": 1}, shown.Items)
		})
	}
	require.Zero(t, u.count("SELECT count(*) FROM dead_letters WHERE status = 'parked'"))
	require.NotContains(t, u.run(u.new, "audit", "--wait=60s"), "BROKEN")
}

func userOf(i int) string { return "buyer-" + strconv.Itoa(i) }

func (u *upgrade) buy(sale uuid.UUID, buyer int, body string, into *upgradedOrder) int {
	path := "/v1/sales/" + sale.String() + "/orders"
	return u.send(u.t.Context(), http.MethodPost, path, u.bearer(userOf(buyer)), body, into)
}

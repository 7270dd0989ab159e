package dashboard

import (
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testwork"
	"stampede/reservation/order"
)

// One box finds orders, sales, users and payments, from every page.
func TestOneBoxFindsAll(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	sale := d.sale("Midnight <b>Drop", 50)
	bought := d.Buy(t, sale, "ann-7")
	for i := range hitsMax + 1 {
		d.Buy(t, sale, fmt.Sprintf("bob-%d", i))
		d.report(order.Money{Reference: fmt.Sprintf("pi_9_%d", i), OrderID: bought})
	}
	testwork.FulfilAll(t, d.Shop)
	d.report(order.Money{Reference: "pi_3Qx", OrderID: bought, Amount: 4900, Currency: "EUR"})
	b := d.as("vic")
	find := func(text string) (shown string) {
		_, shown = b.get("/find?q=" + url.QueryEscape(text))
		return shown
	}
	for _, page := range []string{"/", "/sales", "/refunds", "/audit", "/docs/runbook", "/none"} {
		_, shown := b.get(page)
		require.Contains(t, shown, `<form class="find" role="search" action="/find">`, page)
	}
	require.Regexp(t, `<code class="id">`+bought.String(), find(" "+strings.ToUpper(bought.String())+" "))
	require.Contains(t, find(sale.String()), "<h1><bdi>Midnight &lt;b&gt;Drop")
	require.Regexp(t, `(?s)Found for.*>Sales<.*/sales/`+sale.String()+`.*Midnight &lt;b&gt;Drop`, find("night <B>"))
	require.Regexp(t, `(?s)>Payments<.*<code>pi_3Qx</code>.*49\.00 EUR.*/orders/`+bought.String(), find("pi_3Q"))
	require.Regexp(t, `(?s)>Orders<.*/orders/`+bought.String()+`.*ann-7`, find("ann-7"))
	shown := find("bob-")
	require.Equal(t, hitsMax, strings.Count(shown, `User"><bdi>bob-`))
	more := regexp.MustCompile(`href="(/orders\?[^"]*)">More orders`).FindStringSubmatch(shown)
	require.NotNil(t, more)
	require.Contains(t, find("pi_9"), "There are more: write more of the reference.")
	for _, text := range []string{uuid.NewString(), "none", "%", "\x00", "\xff", hostile, strings.Repeat("x", 2000)} {
		status, shown := b.get("/find?q=" + url.QueryEscape(text))
		require.Equal(t, http.StatusOK, status, "%q", text)
		require.Contains(t, shown, "There is nothing like it in Postgres.", "%q", text)
		require.NotContains(t, shown, "<script>document")
	}
	require.Contains(t, find(""), "Write something in the box")
}

// Sales are found by a part of their name, and by state, page after page.
func TestSalesAreFiltered(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	var ids []uuid.UUID
	for i := range salesOnPage + 5 {
		ids = append(ids, d.sale(fmt.Sprintf("Autumn %03d", i), 5))
	}
	_, err := d.Shop.Catalog.Pause(t.Context(), ids[1])
	require.NoError(t, err)
	_, err = d.Shop.Catalog.End(t.Context(), ids[2])
	require.NoError(t, err)
	d.sale("Winter", 5)
	b := d.as("vic")
	rows := func(path string) []string {
		_, shown := b.get(path)
		var names []string
		for _, m := range regexp.MustCompile(`<bdi>((?:Autumn|Winter)[^<]*)</bdi></a>`).FindAllStringSubmatch(shown, -1) {
			names = append(names, m[1])
		}
		return names
	}
	require.Equal(t, []string{"Autumn 007"}, rows("/sales?name=N+007"))
	require.Equal(t, []string{"Autumn 001"}, rows("/sales?state=paused"))
	require.Equal(t, []string{"Autumn 002"}, rows("/sales?name=autumn&state=ended"))
	require.Empty(t, rows("/sales?name=winter&state=paused"))
	require.Empty(t, rows("/sales?state=x"))
	require.Equal(t, "Winter", rows("/sales")[0])
	first := rows("/sales?name=autumn")
	require.Len(t, first, salesOnPage)
	_, shown := b.get("/sales?name=autumn")
	next := regexp.MustCompile(`href="(/sales\?[^"]*)">Older sales`).FindStringSubmatch(shown)
	require.NotNil(t, next)
	require.Equal(t, []string{"Autumn 004", "Autumn 003", "Autumn 002", "Autumn 001", "Autumn 000"},
		rows(strings.ReplaceAll(next[1], "&amp;", "&")))
}

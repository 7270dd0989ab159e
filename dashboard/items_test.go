package dashboard

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/dashboard/fleet"
	"stampede/internal/test/testwork"
	"stampede/reservation"
)

// sizes creates a sale with items.
func (d *testDesk) sizes() uuid.UUID {
	d.t.Helper()
	sale, err := d.Shop.Catalog.Create(d.t.Context(), reservation.Terms{
		Name: "shirts", Stock: 12, PerOrderLimit: 5, PaymentWindow: time.Hour, Currency: "EUR", Items: []reservation.Item{
			{Code: "m", Name: "Medium <b>", Stock: 4, UnitPrice: 1290},
			{Code: "l", Name: "Large", Stock: 8, UnitPrice: 1490, PerOrderLimit: 2},
		},
	})
	require.NoError(d.t, err)
	return sale.ID
}

// basket buys items for a user.
func (d *testDesk) basket(sale uuid.UUID, user string, items map[string]int64) (id uuid.UUID) {
	d.t.Helper()
	answer, err := d.Reserve(d.t.Context(), reservation.Request{Sale: sale, User: user, Items: items})
	require.NoError(d.t, err)
	require.Equal(d.t, reservation.Reserved, answer.Verdict)
	return answer.Reservation.OrderID
}

func TestItemsAreShown(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sizes()
	o := d.basket(id, "ann", map[string]int64{"m": 1, "l": 2})
	b := d.as("vic")
	page := "/sales/" + id.String()
	_, shown := b.get(page)
	require.Regexp(t, `Medium &lt;b&gt;</bdi>.*<code>m</code>.*s-taken" height="10" rx="3" width="25.00%".*`+
		`item.0.available">3<.*item.0.stock">4<.*12\.90 EUR`, shown)
	require.Contains(t, shown, `<dt>items</dt><dd><bdi>4 × m, 8 × l</bdi>`)
	require.Regexp(t, `Large.*<code>l</code>, 2 an order<.*width="25.00%".*item.1.available">6<.*`+
		`item.1.stock">8<.*14\.90 EUR`, shown)

	// They follow as the figures of the sale do.
	d.show(id)
	f := b.follow("")
	first, ok := f.next()
	require.True(t, ok)
	require.Equal(t, "3", first.data.V[id.String()+".item.0.available"])
	require.Equal(t, "3 × m, 6 × l", first.data.V[id.String()+".items"])
	_, shown = b.get("/")
	require.Contains(t, shown, `<span class="sub left"><span data-live="`+id.String()+`.items">3 × m, 6 × l<`)
	d.basket(id, "bob", map[string]int64{"m": 3})
	d.show(id)
	second, ok := f.next()
	require.True(t, ok)
	require.Equal(t, []string{"0", "100.00%"}, []string{
		second.data.V[id.String()+".item.0.available"], second.data.V[id.String()+".item.0.taken.width"],
	})
	require.NotContains(t, second.data.V, id.String()+".item.1.available")
	require.Equal(t, "gone: m · 6 × l", second.data.V[id.String()+".items"])
	_, shown = b.get("/sales")
	require.Contains(t, shown, `<span class="sub left"><span>gone: m · 6 × l</span>`)
	d.fleet.publish(func(s *fleet.Snapshot) {
		sale := s.Sales[0]
		sale.UnitsKnown = false
		s.Sales = []fleet.Sale{sale}
	})
	_, shown = b.get(page)
	require.Contains(t, shown, `item.0.available">–<`)
	_, shown = b.get("/")
	require.Contains(t, shown, `.items">–<`)

	_, shown = b.get("/orders/" + o.String() + "?user=ann")
	require.Contains(t, shown, `<dd>3<span class="sub">1 × m, 2 × l</span></dd>`)
	testwork.FulfilAll(t, d.Shop)
	_, shown = b.get("/orders/" + o.String())
	require.Contains(t, shown, `<dd>3<span class="sub">1 × m, 2 × l</span></dd>`)
	require.Contains(t, shown, "42.70 EUR")
	_, shown = b.get("/orders?sale=" + id.String())
	require.Contains(t, shown, `3<span class="sub">3 × m</span></td>`)
}

func TestRestockFormOfItemsTakesEffectOnce(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sizes()
	d.basket(id, "ann", map[string]int64{"m": 3, "l": 1})
	b := d.as("ann")
	page := "/sales/" + id.String()
	_, shown := b.get(page)
	require.Equal(t, 2, strings.Count(shown, `name="units.`))
	require.NotContains(t, shown, `name="units"`)
	key := regexp.MustCompile(`name="key" value="([^"]+)"`).FindStringSubmatch(shown)[1]
	for range 2 {
		_, shown = b.post(page+"/restock", "key", key, "units.m", " 20 ", "units.l", "")
		require.Contains(t, shown, "20 units of m were added: its stock is 24.")
	}
	for _, units := range []string{"", "0", "x", "1.5", "99999999999999999999"} {
		_, shown = b.post(page+"/restock", "key", uuid.NewString(), "units.m", units)
		require.Contains(t, shown, "Restock takes a whole number of units", units)
	}
	_, shown = b.post(page+"/restock", "key", "chosen", "units.m", "5")
	require.Contains(t, shown, "The form is damaged")
	_, shown = b.post(page+"/restock", "key", uuid.NewString(), "units.m", "-22", "units.l", "-1")
	require.Contains(t, shown, "So many units cannot be removed: 3 × m are taken")
	_, shown = b.post(page+"/restock", "key", uuid.NewString(), "units.m", "-1", "units.l", "-2")
	require.Contains(t, shown, "1 units of m were removed: its stock is 23. 2 units of l were removed: its stock is 6.")
	require.Equal(t, []int64{23, 6}, []int64{d.shown(id).Items[0].Stock, d.shown(id).Items[1].Stock})
	change := details([]byte(`{"item_units": {"m": 20, "l": -3}, "item_taken": {"l": 2}}`))
	require.Equal(t, []detail{
		{Name: "item taken", Value: "2 × l"}, {Name: "item units", Value: "20 × m, -3 × l"},
	}, change)
	change = details([]byte(`{"items": [{"code": "m", "name": "Medium", "stock": 20}], "item_names": {"m": "Medium"}}`))
	require.Equal(t, []detail{{Name: "item names", Value: `{"m": "Medium"}`}}, change)
}

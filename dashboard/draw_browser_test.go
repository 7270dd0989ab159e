//go:build browser

package dashboard

import (
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/dashboard/fleet"
	"stampede/internal/test/testbrowser"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
)

// An open page of a draw follows it from the entries to the offers, and keeps its layout.
func drawIsFollowed(t *testing.T, browser *testbrowser.Browser) {
	desk := openDesk(t)
	d := desk.draw(300, 60)
	repeat(t, func() { d.fleet.publish(func(*fleet.Snapshot) {}) })
	b := browser.Open(t)
	logIn(desk, b, "vic")
	b.Go(d.url + "/sales/" + d.entries.String())
	b.Click(".head a[href$='/draw']")
	b.Shows(".draw h2", "entering People enter")
	b.CheckLayout("draw-entering")
	d.freeze()
	b.Shows(".draw h2", "frozen The list is frozen")
	b.Shows(".draw pre", "stampede draw reveal")
	b.CheckLayout("draw-frozen")
	for party := range partySecrets {
		d.reveal(party)
	}
	_, err := ledger.New(d.Shop.Pool).Withdraw(t.Context(), d.cancelNext(), "a mistake", "ada")
	require.NoError(t, err)
	d.offer(61)
	b.Shows(".legend.ranks", "offered, not paid 60")
	for rank := 1; rank < 40; rank++ {
		if rank%7 == 0 {
			_, err := ledger.New(d.Shop.Pool).Withdraw(t.Context(), d.orderOf("order_id", rank), "a mistake", "ada")
			require.NoError(t, err)
			continue
		}
		d.report(order.Money{Reference: d.orderOf("entry_id", rank).String(), OrderID: d.orderOf("order_id", rank)})
	}
	testwork.ReleaseUnits(t, d.Shop)
	d.offer(66)
	b.Shows(".legend.ranks", "paid 34")
	b.Shows(".legend.ranks", "expired or cancelled 5")
	b.Shows(".draw tbody th", "65")
	b.Until(`document.querySelector(".plot path").getBBox().height > 0`, "a bar")
	b.CheckLayout("draw-offering")
}

//go:build browser

package main

import (
	"net/http"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// Who waits is offered the shirt that returns, and not who asks at that second.
func TestBuyerWaitsForShirt(t *testing.T) {
	t.Parallel()
	sale, err := shared.dev.createWaitlist(t.Context(), 1, time.Hour)
	require.NoError(t, err)
	r := rigOf(t, sale)
	require.Equal(t, http.StatusAccepted, r.buyAs("bob"))
	b := r.openAs("ada", "404", "409") // to join again at once is too early at first
	b.Shows("#buy", "Wait for a shirt")
	b.Click("#buy")
	b.Shows("#line-text", "You wait for a shirt. The next one is yours.")
	b.Run(chromedp.Reload())
	b.Shows("#line-text", "The next one is yours.")
	b.CheckLayout("18-waiting")
	status, _ := r.call("cem", http.MethodPost, "/v1/sales/"+sale+"/waitlist", "")
	require.Equal(t, http.StatusAccepted, status)
	b.Click("#leave")
	b.Shows("#buy", "Wait for a shirt")
	b.Click("#buy")
	b.Shows("#line-text", "1 before you.")
	status, _ = r.call("cem", http.MethodPost, "/v1/sales/"+sale+"/waitlist/leave", "")
	require.Equal(t, http.StatusOK, status)
	b.Shows("#line-text", "The next one is yours.")
	r.cancel("bob")
	b.Shows("#order-text", "Confirmed")
	b.Shows("#pay-by", "Pay within 59:")
	b.CheckLayout("19-offered")
	b.Click("#cancel")
	b.Shows("#order-text", "Its shirts go to those who wait.")
}

// The story of a draw: enter, see the proof, be offered a shirt, pay it.
func TestEntrantIsDrawnAndPays(t *testing.T) {
	t.Parallel()
	d, err := shared.dev.createDraw(t.Context(), 4, 12*time.Second, time.Hour)
	require.NoError(t, err)
	r := rigOf(t, d.goods)
	require.NoError(t, d.enter(t.Context(), 3, func(user string) (string, error) { return r.shop.token(user + r.suffix) }))
	b := r.openAs("ada", "503")
	b.Shows("#countdown", "Entries close in 0:")
	b.Shows("#stock-text", "4 shirts are drawn")
	b.Shows("#buy", "Enter the draw")
	b.CheckLayout("12-draw")
	b.Run(chromedp.DoubleClick(chromedp.CSS("#buy")), chromedp.Reload())
	b.Shows("#draw-text", "You are in.")
	b.CheckLayout("13-draw-entered")
	looks := r.network.countDraw()
	b.Shows("#draw-text", "The list is frozen. The parties reveal their secrets")
	b.Shows("#draw-facts", "from 0 to 3")
	b.CheckLayout("14-draw-frozen")
	r.eventually("the page looks at the draw again", func() bool { return looks.draw.Load() > 3 })
	require.EqualValues(t, 1, looks.proof.Load(), "who waits asks for no proof again and again")

	require.NoError(t, d.reveal(t.Context()))
	b.Shows("#draw-text", "A shirt was offered to you")
	b.Shows("#draw-facts", "Rank")
	b.Click("#verify")
	b.Shows("#verified", "The list could not be looked up. Try again.")
	b.Click("#verify")
	b.Shows("#verified", "Verified: your entry is at place")
	b.Shows("#pay-by", "Pay within 59:")
	b.CheckLayout("15-draw-offered")
	b.Click("#pay")
	b.Click("#capture")
	b.Shows("#order-text", "Paid")
	b.Shows("#history-list", "Entry in the draw")
	b.CheckLayout("16-draw-paid")
	require.Len(t, r.orders("ada"), 2, "the entry, and the shirt")
}

// An entry that was cancelled before the end is no part of the draw.
func TestEntrantOutsideTheListIsTold(t *testing.T) {
	t.Parallel()
	d, err := shared.dev.createDraw(t.Context(), 1, 8*time.Second, time.Hour)
	require.NoError(t, err)
	r := rigOf(t, d.goods)
	b := r.openAs("ada", "404")
	b.Click("#buy")
	b.Shows("#draw-text", "You are in.")
	path := "/v1/admin/orders/" + r.onlyOrder("ada")["order_id"].(string) + "/cancel"
	require.NoError(t, d.ask(t.Context(), http.MethodPost, path, d.admin, map[string]string{"reason": "a bot"}, nil))
	b.Shows("#draw-text", "Your entry is not in the list: it is cancelled.")
	b.CheckLayout("17-draw-missing")
}

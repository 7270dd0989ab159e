//go:build browser

package main

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testbrowser"
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
	b.Shows("#sale-state", "SOLD OUT, WITH A WAITING LIST")
	b.Click("#buy")
	b.Shows("#line-text", "You wait for a shirt. The next one is yours.")
	b.Shows("#history-list", "on the waiting list")
	b.Run(chromedp.Reload())
	b.Shows("#line-text", "The next one is yours.")
	b.CheckLayout("18-waiting")
	status, _ := r.call("cem", http.MethodPost, "/v1/sales/"+sale+"/waitlist", "")
	require.Equal(t, http.StatusAccepted, status)
	b.Click("#leave")
	b.Shows("#history-list", "left")
	b.Shows("#buy", "Wait for a shirt")
	b.Click("#buy")
	b.Shows("#line-text", "1 before you.")
	status, _ = r.call("cem", http.MethodPost, "/v1/sales/"+sale+"/waitlist/leave", "")
	require.Equal(t, http.StatusOK, status)
	b.Shows("#line-text", "The next one is yours.")
	r.cancel("bob")
	b.Shows("#order-text", "Confirmed")
	b.Shows("#pay-by", "Pay within 59:")
	b.Shows("#history-list", "offered a shirt")
	b.CheckLayout("19-offered")
	b.Click("#cancel")
	b.Shows("#order-text", "Cancelled. Its shirt goes to the next who waits, or back on sale.")
	b.Shows("#sale-state", "ON SALE NOW") // nobody waits any more
	b.Shows("#buy", "Buy")
}

// Who waits for one size is offered it, and buys the others as usual. The page of a buyer that is behind still has the
// size as one that is left.
func TestBuyerWaitsForSize(t *testing.T) {
	t.Parallel()
	sale, err := shared.dev.createWaitlist(t.Context(), 0, time.Hour, newSizes(1)...)
	require.NoError(t, err)
	r := rigOf(t, sale)
	posts := func(user, path, body string, want int) {
		t.Helper()
		status, answer := r.call(user, http.MethodPost, "/v1/sales/"+sale+path, body)
		require.Equal(t, want, status, answer)
	}
	b := r.openAs("ada", "network", "blocked by CORS policy")
	pick := func(code, n string) { b.Run(chromedp.SetValue(chromedp.CSS("#sizes [name="+code+"]"), n)) }
	pick("m", "1")
	b.Shows("#buy", "Buy for €39")
	r.network.disturb(func(w http.ResponseWriter, q *http.Request) bool {
		switch {
		case q.URL.Path == "/v1/sales/"+sale || q.URL.Path == "/v1/sales/"+sale+"/events":
			w.WriteHeader(http.StatusServiceUnavailable)
			return true
		case isPurchase(q): // others are faster
			posts("bob", "/orders", `{"items":{"m":1}}`, http.StatusAccepted)
			posts("cem", "/waitlist", `{"item":"m"}`, http.StatusAccepted)
			posts("dan", "/waitlist", `{"item":"m"}`, http.StatusAccepted)
			r.cancel("bob")
			r.eventually("cem is offered the shirt", func() bool {
				_, place := r.call("cem", http.MethodGet, "/v1/sales/"+sale+"/waitlist", "")
				return place["state"] == "offered"
			})
		}
		return false
	})
	r.network.cutStreams()
	b.Click("#buy")
	b.Shows("#status", "Those who wait come first for Medium: nothing was bought. You can wait, too.")
	b.Shows("#buy", "Medium is gone")
	b.Shows("#sizes label:nth-of-type(2) .left", "waiting list")
	pick("s", "1")
	pick("m", "wait")
	b.Shows("#buy", "Wait for Medium")
	b.Until(`document.querySelector("#sizes [name=s]").value === "0"`, "one size at a time")
	b.CheckLayout("22-size-to-wait-for")
	r.network.disturb(nil)
	b.Click("#buy")
	b.Shows("#line-text", "You wait for size Medium. 1 before you.")
	b.Shows("#history-list", "Place on the waiting list, Medium")
	b.Shows("#sizes label:nth-of-type(1) .left", "1 left")
	b.CheckLayout("23-size-waited-for")
	posts("dan", "/waitlist/leave", "", http.StatusOK)
	b.Shows("#line-text", "The next one is yours.")
	_, place := r.call("cem", http.MethodGet, "/v1/sales/"+sale+"/waitlist", "")
	status, _ := r.call("cem", http.MethodPost, "/v1/orders/"+place["order_id"].(string)+"/cancel", "")
	require.Equal(t, http.StatusOK, status)
	b.Shows("#order-text", "Confirmed")
	b.Shows("#order-what", "1 × Medium, €39")
	b.Click("#cancel")
	b.Shows("#order-text", "Cancelled.")
	pick("xl", "1")
	buysAgain(b)
	b.Shows("#order-what", "1 × Extra large, €45")
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
	b.Shows("#stock-text", "To be drawn: 4 shirts")
	b.Shows("#buy", "Enter the draw")
	b.CheckLayout("12-draw")
	b.Run(chromedp.DoubleClick(chromedp.CSS("#buy")))
	b.Until(`document.querySelector("#draw-text").innerText.startsWith("You are in.") &&
		document.querySelector("#history-list").innerText.includes("entered")`, "the entry, before the list is fixed")
	b.Run(chromedp.Reload())
	b.Shows("#draw-text", "You are in.")
	b.CheckLayout("13-draw-entered")
	looks := r.network.countDraw()
	b.Shows("#draw-text", "The list is fixed. Each party reveals its secret now")
	b.Shows("#draw-facts", "of 4 in the list")
	b.Click("#draw-verify summary")
	b.Shows("#witness", "This page has kept what is public before the draw.")
	b.Shows("#verify-commands", "curl -o frozen.json http")
	b.CheckLayout("14-draw-frozen")
	r.eventually("the page looks at the draw again", func() bool { return looks.draw.Load() > 3 })
	require.EqualValues(t, 1, looks.proof.Load(), "who waits asks for no proof again and again")

	require.NoError(t, d.reveal(t.Context()))
	b.Shows("#draw-text", "A shirt was offered to you: see the order below.")
	b.Run(chromedp.Reload()) // the witness is kept
	b.Shows("#draw-facts", "Your rank")
	b.Click("#verify")
	b.Shows("#verified", "The list could not be looked up. Try again.")
	b.Click("#verify")
	b.Shows("#verified", "Verified: your entry is in the list that was published before the draw")
	b.Click("#draw-verify summary")
	b.Shows("#witness", "before the draw")
	said := runShown(t, b)
	require.Contains(t, said, "before the seed existed") // of the check of the witness
	require.NotContains(t, said, "UNCHECKED")
	b.Shows("#pay-by", "Pay within 59:")
	b.CheckLayout("15-draw-offered")
	b.Click("#pay")
	b.Click("#capture")
	b.Shows("#order-text", "Paid")
	b.Shows("#draw-text", "A shirt was offered to you, and you have paid for it.")
	b.Shows("#history-list", "Entry in the draw")
	b.CheckLayout("16-draw-paid")
	require.Len(t, r.orders("ada"), 2, "the entry, and the shirt")
}

// In a draw of sizes an entry has one. Until the entries close it can be given up, also in another browser, and made
// again.
func TestEntrantPicksSizeAndLeaves(t *testing.T) {
	t.Parallel()
	d, err := shared.dev.createDraw(t.Context(), 0, 20*time.Second, time.Hour, newSizes(2)...)
	require.NoError(t, err)
	r := rigOf(t, d.goods)
	require.NoError(t, d.enter(t.Context(), 3, func(user string) (string, error) { return r.shop.token(user + r.suffix) }))
	b := r.openAs("ada", "404", "409")
	pick := func(code string) { b.Run(chromedp.SetValue(chromedp.CSS("#sizes [name="+code+"]"), "1")) }
	b.Shows("#stock-text", "To be drawn: 6 shirts")
	b.Shows("#sizes label:nth-of-type(1) .left", "2 to be drawn")
	b.Shows("#buy", "Pick a size")
	pick("m")
	pick("xl")
	b.Until(`document.querySelector("#sizes [name=m]").value === "0"`, "an entry has one size")
	b.CheckLayout("24-draw-sizes")
	b.Click("#buy")
	b.Shows("#draw-facts", "Extra large")
	r.cancel("ada")
	b.Run(chromedp.Reload())
	b.Shows("#status", "Your entry was cancelled. Until the entries close you may enter again.")
	pick("m")
	b.Click("#buy")
	b.Shows("#draw-facts", "Medium")
	b.Click("#leave-draw")
	b.Shows("#status", "You have left the draw. Until the entries close you may enter again.")
	pick("s")
	b.Click("#buy")
	b.Shows("#draw-facts", "Small")
	b.Shows("#history-list", "Entry in the draw, Small")
	b.CheckLayout("25-draw-entered-again")
	var entries []string
	for _, o := range r.orders("ada") {
		entries = append(entries, fmt.Sprint(o["items"], " ", o["status"]))
	}
	require.Equal(t, []string{"map[s:1] confirmed", "map[m:1] cancelled", "map[xl:1] cancelled"}, entries)

	require.NoError(t, d.reveal(t.Context()))
	b.Shows("#draw-text", "A shirt was offered to you: see the order below.")
	b.Shows("#order-what", "1 × Small, €39")
	b.Shows("#draw-facts", "in your size")
	b.Click("#verify")
	b.Shows("#verified", "Verified: your entry is in the list that was published before the draw")
	b.CheckLayout("26-draw-size-offered")
}

// The entries close between the click and the cancellation.
func TestEntrantWhoLeavesTooLateStays(t *testing.T) {
	t.Parallel()
	d, err := shared.dev.createDraw(t.Context(), 1, 8*time.Second, time.Hour)
	require.NoError(t, err)
	r := rigOf(t, d.goods)
	r.network.disturb(func(_ http.ResponseWriter, q *http.Request) bool {
		if path.Base(q.URL.Path) == "cancel" {
			r.eventually("the entries are closed", func() bool {
				_, now := r.call("ada", http.MethodGet, d.path(), "")
				return now["state"] != "entering"
			})
		}
		return false
	})
	b := r.openAs("ada", "409")
	b.Click("#buy")
	b.Click("#leave-draw")
	b.Shows("#status", "The entries are closed: your entry stays in.")
	b.Shows("#draw-text", "The list is fixed.")
}

// runShown runs the commands that the page shows, as a stranger does, and returns what they print.
func runShown(t *testing.T, b *testbrowser.Tab) string {
	t.Helper()
	stampede, err := filepath.Abs(*program)
	require.NoError(t, err)
	commands := testbrowser.Evaluate[string](b, `document.querySelector("#verify-commands").textContent`)
	shell := exec.CommandContext(t.Context(), "sh", "-euc", commands)
	shell.Dir = t.TempDir()
	shell.Env = append(os.Environ(), "PATH="+filepath.Dir(stampede)+":"+os.Getenv("PATH"))
	said, err := shell.CombinedOutput()
	require.NoError(t, err, "%s", said)
	return string(said)
}

// An offer that nobody pays is over, and the page says so. Without a witness, or with another list than that of the
// witness, it says that, too.
func TestEndedOfferIsSaid(t *testing.T) {
	t.Parallel()
	d, err := shared.dev.createDraw(t.Context(), 1, 8*time.Second, 2*time.Second)
	require.NoError(t, err)
	r := rigOf(t, d.goods)
	b := r.openAs("ada")
	b.Click("#buy")
	require.NoError(t, d.reveal(t.Context())) // as soon as it may be: the page has looked before
	b.Shows("#draw-text", "A shirt was offered to you. That is over: it was not paid in time.")
	b.Shows("#sale-state", "DRAWN: ALL OFFERS ARE MADE")
	b.Shows("#draw-facts", "1st of 1")
	b.Until(`document.querySelector("#order-text").innerText === "Expired: it was not paid in time."`, "nobody gets it")
	b.Click("#verify")
	b.Shows("#verified", "that was published before the draw, and the random number makes you 1st of 1.")

	const witness = `localStorage["frozen " + (await (await fetch("/config")).json()).sale]`
	forged := `(async () => (` + witness + ` = ` + witness + `.replace(/"root":"../, '"root":"--'), true))()`
	testbrowser.Evaluate[bool](b, forged)
	b.Run(chromedp.Reload())
	b.Click("#verify")
	b.Shows("#verified", "It cannot be verified: the list has another root than the one that was published.")
	testbrowser.Evaluate[bool](b, `(async () => delete `+witness+`)()`)
	b.Run(chromedp.Reload())
	b.Click("#draw-verify summary")
	b.Shows("#witness", "This page has no witness")
	b.CheckLayout("21-draw-no-witness")
	require.Contains(t, runShown(t, b), "UNCHECKED")
}

// What the shop says once anybody may know the seed is no witness, whether it says the seed or not.
func TestWitnessIsFromBeforeTheSeed(t *testing.T) {
	t.Parallel()
	r, b := newRig(t, 1, 0, time.Hour), shared.browser.Open(t)
	b.Go(r.origin)
	for draw, want := range map[string]bool{
		`{root: "ab", frozen_at: "x"}`:                                   true,
		`{root: "ab", frozen_at: "x", round_at: "2026-11-29T12:00:01Z"}`: true,
		`{root: "ab", frozen_at: "x", round_at: "2026-11-29T12:00:00Z"}`: false,
		`{root: "ab", frozen_at: "x", seed: "cd"}`:                       false,
		`{root: "ab"}`:     false,
		`{frozen_at: "x"}`: false,
		`{root: "ab", frozen_at: "x", round_at: "2026-11-29T12:00:01Z", seed: "cd"}`: false,
	} {
		script := `import("/draw.js").then((m) => m.isWitness(` + draw + `, Date.parse("2026-11-29T12:00:00Z")))`
		require.Equal(t, want, testbrowser.Evaluate[bool](b, script), draw)
	}
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
	b.Shows("#draw-text", "Your entry is not in the list: it was cancelled.")
	b.CheckLayout("17-draw-missing")
}

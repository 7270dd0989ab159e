//go:build browser

package main

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testbrowser"
)

func TestBuyerWaitsBuysAndPays(t *testing.T) {
	t.Parallel()
	r := newRig(t, 20, 6*time.Second, time.Hour)
	b := r.openAs("ada", "/orders\n") // the click may come a moment before the opening
	b.Shows("#countdown", "Opens in 0:0")
	b.Shows("#buy", "Not open yet")
	b.Run(chromedp.SetValue(chromedp.CSS("#quantity"), "2"))
	b.CheckLayout("1-waiting")
	b.Shows("#sale-state", "ON SALE NOW")
	b.Shows("#buy", "Buy")
	b.Run(chromedp.DoubleClick(chromedp.CSS("#buy")), chromedp.Reload())
	b.Shows("#order-text", "Confirmed")
	b.Shows("#pay-by", "Pay within 59:")
	b.Shows("#stock-text", "18 of 20 shirts left")
	b.Shows("#history-list", "confirmed")
	b.CheckLayout("2-confirmed")
	o := r.onlyOrder("ada")

	b.Shows("#pay", "Pay €98")
	b.Click("#pay")
	b.Shows("#capture", "Pay 98.00 EUR")
	b.CheckLayout("3-provider")
	b.Click("#capture")
	b.Shows("#order-text", "Paid")
	b.Shows("#status", "See you in the front row!")
	b.Shows("#payments", "Paid with pay_")
	b.Shows("#history-list", "paid")
	b.CheckLayout("4-paid")
	paid := r.onlyOrder("ada")
	require.Equal(t, []any{"paid", o["order_id"]}, []any{paid["status"], paid["order_id"]})
	b.Shows("#payments", paid["payment_reference"].(string))
	for _, key := range r.network.keys() {
		require.Equal(t, r.network.keys()[0], key)
	}
}

// The answer to the click comes when the page is gone.
func TestReloadDuringPurchaseBuysOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t, 20, 0, time.Hour)
	b := r.openAs("ada", "network")
	release := r.network.holdPurchases()
	b.Until(`!document.querySelector("#buy").disabled`, "the button can be clicked")
	testbrowser.Evaluate[bool](b, `(e => { e.click(); e.click(); return true })(document.querySelector("#buy"))`)
	r.eventually("the purchase is on its way", func() bool { return len(r.network.keys()) == 1 })
	b.Shows("#buy", "Buying")
	b.Run(chromedp.Reload())
	r.eventually("the page repeats it", func() bool { return len(r.network.keys()) == 2 })
	release()
	b.Shows("#order-text", "Confirmed")
	r.onlyOrder("ada")
	keys := r.network.keys()
	require.Equal(t, keys[0], keys[1], "the key has survived the reload")
	b.Shows("#stock-text", "19 of 20 shirts left")
}

func TestTwoTabsBuyOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t, 20, 0, time.Hour)
	b := r.openAs("ada", "network")
	release := r.network.holdPurchases()
	b.Click("#buy")
	r.eventually("the purchase is on its way", func() bool { return len(r.network.keys()) == 1 })
	second := b.Beside()
	second.Go(r.origin)
	r.eventually("the other tab joins in", func() bool { return len(r.network.keys()) == 2 })
	release()
	second.Shows("#order-text", "Confirmed")
	b.Shows("#order-text", "Confirmed")
	r.onlyOrder("ada")
	require.Equal(t, r.network.keys()[0], r.network.keys()[1])
}

// The purchase is decided, and its answer is lost.
func TestLostAnswerIsAskedForAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t, 20, 0, time.Hour)
	b := r.openAs("ada", "network")
	var broken atomic.Bool
	broken.Store(true)
	r.network.disturb(func(_ http.ResponseWriter, q *http.Request) bool {
		if !isPurchase(q) || !broken.Load() {
			return false
		}
		r.network.proxy.ServeHTTP(httptest.NewRecorder(), q)
		panic(http.ErrAbortHandler)
	})
	b.Click("#buy")
	b.Shows("#status", "we do not know whether the order was taken")
	broken.Store(false)
	b.Shows("#order-text", "Confirmed")
	r.onlyOrder("ada")
	keys := r.network.keys()
	require.GreaterOrEqual(t, len(keys), 2) // Chromium itself repeats what a kept connection has lost
	for _, key := range keys {
		require.Equal(t, keys[0], key)
	}
}

func TestBuyerPaysFromTheTurnOn(t *testing.T) {
	t.Parallel()
	r := newPacedRig(t, 50, 1, 0, time.Hour)
	for n := range 12 { // so that the turn is not over before the page has shown it
		require.Equal(t, http.StatusAccepted, r.buyAs(fmt.Sprintf("bob%d", n)))
	}
	b := r.openAs("ada")
	b.Click("#buy")
	b.Shows("#pay-by", "It is held for you. You can pay from ")
	b.Until(`document.querySelector("#pay").disabled`, "nothing can be paid yet")
	b.CheckLayout("8-turn")
	from, err := time.Parse(time.RFC3339, r.onlyOrder("ada")["pay_from"].(string))
	require.NoError(t, err)
	b.Shows("#pay-by", "Pay within ")
	b.Click("#pay")
	b.Shows("#capture", "Pay 49.00 EUR")
	require.False(t, time.Now().Before(from))
	b.Click("#capture")
	b.Shows("#payments", "Paid with pay_")
	require.Equal(t, []string{"settled "}, r.payments("ada"))
}

func TestLatePaymentIsDueForRefund(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		window time.Duration
		end    func(r *rig)
		status string
		want   string
		due    string
	}{
		"expired": {
			2 * time.Second, func(*rig) {}, "expired", "the order had expired before", "order-expired",
		},
		"cancelled": {
			time.Hour, func(r *rig) { r.cancel("ada") }, "cancelled", "the order was cancelled", "order-cancelled",
		},
		"paid twice": {
			time.Hour, func(r *rig) { r.payByPhone("ada") }, "paid", "paid by another payment", "already-paid",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, 20, 0, test.window)
			b := r.openAs("ada")
			b.Click("#buy")
			b.Click("#pay")
			b.Shows("#capture", "Pay 49.00 EUR")
			r.onlyOrder("ada")
			test.end(r)
			r.eventually("the order is "+test.status, func() bool { return r.onlyOrder("ada")["status"] == test.status })
			b.Click("#capture")
			b.Shows("#status", test.want)
			b.Shows("#history-list", test.status)
			require.Contains(t, r.payments("ada"), "refund_due "+test.due)
			if name == "expired" {
				b.CheckLayout("5-refund-due")
			}
		})
	}
}

func TestForgedWebhookIsRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, 20, 0, time.Hour)
	require.Equal(t, http.StatusAccepted, r.buyAs("ada"))
	body := []byte(`{"type":"charge.captured","charge":"pay_x","order":"` + r.onlyOrder("ada")["order_id"].(string) +
		`","amount":4900,"currency":"EUR"}`)
	at := func(ago time.Duration) string { return strconv.FormatInt(time.Now().Add(-ago).Unix(), 10) }
	secret := r.shop.provider.secret
	for name, signature := range map[string]string{
		"none":        "",
		"other key":   "time=" + at(0) + "; sha256=" + sign(at(0), body, []byte("guessed")),
		"other time":  "time=" + at(0) + "; sha256=" + sign(at(time.Minute), body, secret),
		"other body":  "time=" + at(0) + "; sha256=" + sign(at(0), append(body, ' '), secret),
		"replayed":    "time=" + at(6*time.Minute) + "; sha256=" + sign(at(6*time.Minute), body, secret),
		"from future": "time=" + at(-6*time.Minute) + "; sha256=" + sign(at(-6*time.Minute), body, secret),
	} {
		q := httptest.NewRequest(http.MethodPost, "/webhooks/payments", bytes.NewReader(body))
		q.Header.Set("Piggy-Signature", signature)
		answer := httptest.NewRecorder()
		r.shop.handler().ServeHTTP(answer, q)
		require.Equal(t, http.StatusUnauthorized, answer.Code, name)
	}
	require.Empty(t, r.payments("ada"))
}

// The shop's call to pay is lost on its way back, so the provider delivers its webhook again.
func TestLostPaymentIsRepeated(t *testing.T) {
	t.Parallel()
	r := newRig(t, 20, 0, time.Hour)
	b := r.openAs("ada", "network")
	b.Click("#buy")
	b.Click("#pay")
	var tries atomic.Int32
	looked := make(chan struct{})
	r.network.disturb(func(_ http.ResponseWriter, q *http.Request) bool {
		if q.URL.Path != "/v1/payments" || tries.Add(1) > 3 {
			return false
		}
		<-looked
		r.network.proxy.ServeHTTP(httptest.NewRecorder(), q)
		panic(http.ErrAbortHandler)
	})
	b.Click("#capture")
	b.Shows("#order-text", "Confirmed. Your payment is on its way to the shop.")
	b.Until(`!document.querySelector("#pay").checkVisibility()`, "it cannot be paid twice")
	close(looked)
	b.Shows("#payments", "Paid with pay_")
	r.eventually("the webhook is taken", func() bool { return tries.Load() > 3 }) // settled by the first, lost answer
	require.Equal(t, "paid", r.onlyOrder("ada")["status"])
	require.Equal(t, []string{"settled "}, r.payments("ada"))
}

func TestCancelledOrderCanBeBoughtAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1, 0, time.Hour)
	b := r.openAs("ada", "network")
	b.Click("#buy")
	b.Click("#cancel")
	b.Shows("#order-text", "Cancelled")
	buysAgain(b) // as soon as the shirt is back
	require.Len(t, r.orders("ada"), 2)
	keys := r.network.keys()
	require.NotEqual(t, keys[0], keys[len(keys)-1])
}

func TestSoldOutIsSaid(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1, 0, time.Hour)
	b := r.openAs("ada", "network")
	r.network.disturb(func(_ http.ResponseWriter, q *http.Request) bool {
		if isPurchase(q) { // somebody is faster
			require.Equal(t, http.StatusAccepted, r.buyAs("bob"))
		}
		return false
	})
	b.Click("#buy")
	b.Shows("#status", "Too late: no shirt was left. Shirts may come back")
	b.Shows("#sale-state", "SOLD OUT")
	b.Shows("#buy", "Sold out")
	b.Shows("#stock-text", "No shirts left right now")
	b.CheckLayout("6-sold-out")
	r.network.disturb(nil)
	r.cancel("bob")
	b.Shows("#sale-state", "ON SALE NOW")
	buysAgain(b)
	r.onlyOrder("ada")
}

// A size that is gone is greyed on open pages; a buyer who was too slow is told what went, and gets both sizes or none.
func TestBuyerPicksTwoSizes(t *testing.T) {
	t.Parallel()
	sizes := newSizes(2)
	sizes[1].Stock = 1
	r := newPacedRig(t, 0, 0, 0, time.Hour, sizes...)
	buys := func(user, items string) {
		t.Helper()
		status, _ := r.call(user, http.MethodPost, "/v1/sales/"+r.sale+"/orders", `{"items":`+items+`}`)
		require.Equal(t, http.StatusAccepted, status)
	}
	b := r.openAs("ada", "/orders\n")
	pick := func(code, n string) { b.Run(chromedp.SetValue(chromedp.CSS("#sizes [name="+code+"]"), n)) }
	b.Shows("#buy", "Pick a size")
	b.Shows("#unit-price", "from €39")
	for n, cost := range []string{"€39", "€39", "€45"} {
		b.Shows(fmt.Sprintf("#sizes label:nth-of-type(%d) .cost", n+1), cost)
	}
	pick("m", "1")
	b.Shows("#buy", "Buy for €39")
	buys("bob", `{"s":2}`)
	since := time.Now()
	b.Shows("#sizes label.gone:nth-of-type(1)", "gone")
	require.Less(t, time.Since(since), 2*time.Second)
	b.Until(`document.querySelector("#sizes select").disabled`, "it cannot be picked")
	pick("xl", "1")
	b.Shows("#buy", "Buy for €84")
	b.Until(`document.querySelector("#sizes [name=xl]").options[2].disabled`, "an order has two shirts")
	b.CheckLayout("9-sizes")

	r.network.disturb(func(_ http.ResponseWriter, q *http.Request) bool {
		if isPurchase(q) { // somebody is faster
			buys("cem", `{"m":1}`)
		}
		return false
	})
	b.Click("#buy")
	b.Shows("#status", "Too late: 1 × Medium had just gone, so nothing was bought. Left then: 2 × Extra large.")
	b.Shows("#buy", "Medium is gone")
	b.Until(`document.querySelector("#buy").disabled`, "no order without it")
	b.CheckLayout("10-size-gone")
	r.network.disturb(nil)
	pick("m", "0")
	b.Shows("#buy", "Buy for €45")
	r.cancel("cem")
	b.Shows("#sizes label:nth-of-type(2) .left", "1 left")
	pick("m", "1")
	buysAgain(b)
	b.Shows("#order-what", "Tour shirt, 1 × Medium, 1 × Extra large, €84")
	b.Shows("#history-list", "Tour shirt, 1 × Medium, 1 × Extra large, €84")
	b.Shows("#pay", "Pay €84")
	b.CheckLayout("11-size-bought")
	require.Equal(t, map[string]any{"m": 1.0, "xl": 1.0}, r.onlyOrder("ada")["items"])
}

// buysAgain clicks until there is a shirt: one that comes back is shown before Redis has it.
func buysAgain(b *testbrowser.Tab) {
	b.Until(`(() => {
		const buy = document.querySelector("#buy");
		if (buy.checkVisibility() && !buy.disabled) buy.click();
		return document.querySelector("#order-text").innerText.includes("Confirmed");
	})()`, "an order")
}

func TestPausedSaleIsSaid(t *testing.T) {
	t.Parallel()
	r := newRig(t, 5, 0, time.Hour)
	b := r.openAs("ada", "network")
	var once sync.Once
	r.network.disturb(func(_ http.ResponseWriter, q *http.Request) bool {
		if isPurchase(q) {
			once.Do(func() { r.operate("pause") })
		}
		return false
	})
	b.Click("#buy")
	b.Shows("#status", "The sale was paused just before: nothing was bought.")
	b.Shows("#buy", "Paused")
	b.Shows("#sale-state", "PAUSED")
	r.operate("resume")
	b.Click("#buy")
	b.Shows("#order-text", "Confirmed")
	r.onlyOrder("ada")
}

// Nothing is left to buy in a sale that is over, and nothing goes back on sale.
func TestEndedSaleIsSaid(t *testing.T) {
	t.Parallel()
	r := newPacedRig(t, 0, 0, 0, time.Hour, newSizes(2)...)
	b := r.openAs("ada")
	b.Run(chromedp.SetValue(chromedp.CSS("#sizes [name=m]"), "1"))
	b.Click("#buy")
	b.Shows("#order-text", "Confirmed")
	r.operate("end")
	b.Shows("#sale-state", "SALE OVER")
	r.cancel("ada")
	b.Shows("#order-text", "Cancelled.")
	b.Shows("#buy", "Sale over")
	b.Until(`!document.querySelector("#stock").checkVisibility() && !document.querySelector("#sizes").checkVisibility()`,
		"no shirts")
	b.Until(`document.querySelector("#order-text").innerText === "Cancelled."`, "nothing else")
	b.CheckLayout("20-ended")
}

// An order of a sale without a payment window is final, and no step to pay is shown.
func TestFinalOrderHasNothingToPay(t *testing.T) {
	t.Parallel()
	r := newRig(t, 5, 0, 0)
	b := r.openAs("ada")
	b.Click("#buy")
	b.Shows("#order-text", "Confirmed. It is yours.")
	b.Until(`["#step-paid", "#pay", "#pay-by"].every((s) => !document.querySelector(s).checkVisibility())`, "nothing to pay")
	require.NotContains(t, r.onlyOrder("ada"), "expires_at")
}

func TestRateLimitIsWaitedFor(t *testing.T) {
	t.Parallel()
	r := newRig(t, 50, 0, time.Hour)
	b := r.openAs("cyd", "network")
	r.network.disturb(func(_ http.ResponseWriter, q *http.Request) bool {
		// The bucket of this user is empty when the first purchase arrives.
		for len(r.network.keys()) == 1 && isPurchase(q) {
			status, _ := r.callOnce("cyd", http.MethodPost, "/v1/sales/"+r.sale+"/orders", `{"quantity":100}`)
			if status == http.StatusTooManyRequests {
				break
			}
		}
		return false
	})
	b.Click("#buy")
	b.Shows("#status", "Too many requests: nothing was bought")
	b.Shows("#order-text", "Confirmed")
	r.onlyOrder("cyd")
	keys := r.network.keys()
	require.Equal(t, keys[0], keys[len(keys)-1])
}

// The order changes while its stream is broken, and once more while the ticket of the stream is refused.
func TestOrderIsFollowedOverBrokenStreams(t *testing.T) {
	t.Parallel()
	r := newRig(t, 5, 0, time.Hour)
	var (
		mu      sync.Mutex
		tickets []string
		refuse  bool
	)
	r.network.disturb(func(w http.ResponseWriter, q *http.Request) bool {
		if !isOrderStream(q) {
			return false
		}
		mu.Lock()
		defer mu.Unlock()
		ticket := q.URL.Query().Get("ticket")
		old := len(tickets) > 0 && ticket == tickets[0]
		tickets = append(tickets, ticket)
		if refuse && old { // as after a minute
			query := q.URL.Query()
			query.Set("ticket", "expired")
			q.URL.RawQuery = query.Encode()
		}
		return false
	})
	b := r.openAs("ada", "network")
	b.Click("#buy")
	b.Shows("#order-text", "Confirmed")
	seen := func() []string {
		mu.Lock()
		defer mu.Unlock()
		return append([]string(nil), tickets...)
	}
	r.network.cutStreams()
	r.eventually("EventSource reconnects by itself", func() bool { return len(seen()) == 2 })
	require.Equal(t, seen()[0], seen()[1], "with the same ticket")
	mu.Lock()
	refuse = true
	mu.Unlock()
	r.network.cutStreams()
	r.eventually("the page has another ticket", func() bool { return len(seen()) > 3 })
	require.NotEqual(t, seen()[0], seen()[len(seen())-1])
	r.payByPhone("ada")
	b.Shows("#order-text", "Paid")
}

func TestHistoryHasPages(t *testing.T) {
	t.Parallel()
	r := newRig(t, 5, 0, time.Hour)
	for range 7 {
		sale, err := shared.dev.createSale(t.Context(), 5, 0, 0, time.Hour)
		require.NoError(t, err)
		status, _ := r.call("dora", http.MethodPost, "/v1/sales/"+sale+"/orders", "")
		require.Equal(t, http.StatusAccepted, status)
	}
	r.eventually("all orders are in Postgres", func() bool { return len(r.orders("dora")) == 7 })
	b := r.openAs("dora")
	b.Until(`document.querySelectorAll("#history-list li").length === 5`, "five orders")
	b.Click("#history-more")
	b.Until(`document.querySelectorAll("#history-list li").length === 7`, "seven orders")
	b.Until(`!document.querySelector("#history-more").checkVisibility()`, "no more")
	b.CheckLayout("7-history")
}

// The API refuses scripts of an origin that is not listed: the browser keeps its answer, and sends no purchase at all.
func TestForeignOriginIsRefused(t *testing.T) {
	t.Parallel()
	r, b := newRig(t, 5, 0, time.Hour), shared.browser.Open(t, "network", "blocked by CORS policy")
	foreign := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write([]byte("<!doctype html><link rel=icon href=data:,><title>another shop</title>"))
	}))
	t.Cleanup(foreign.Close)
	const script = `(async (api, sale, token) => {
		const headers = {Authorization: "Bearer " + token, "Idempotency-Key": "k"};
		const say = (p) => p.then((r) => "status " + r.status, (e) => e.name);
		return [
			await say(fetch(api + "/v1/sales")),
			await say(fetch(api + "/v1/sales/" + sale + "/orders", {method: "POST", headers})),
			await new Promise((done) => {
				const s = new EventSource(api + "/v1/sales/" + sale + "/events");
				s.onerror = () => done("refused"); s.addEventListener("sale", () => done("opened"));
			}),
		].join();
	})`
	tries := func() string {
		return testbrowser.Evaluate[string](b,
			script+"("+quote(r.network.url)+","+quote(r.sale)+","+quote(r.token("ada"))+")")
	}
	b.Go(foreign.URL)
	require.Equal(t, "TypeError,TypeError,refused", tries())
	require.Empty(t, r.network.keys(), "a purchase was sent")
	b.Go(r.origin + "/icon.svg")
	require.Equal(t, "status 200,status 202,opened", tries())
}

// The pattern that docs/http-api.md gives for browsers is run as it is printed there.
func TestDocumentedPatternWorks(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/http-api.md")
	require.NoError(t, err)
	found := regexp.MustCompile("(?s)```js\n(.*?)```").FindSubmatch(text)
	require.NotNil(t, found)
	r, b := newRig(t, 5, 0, time.Hour), shared.browser.Open(t, "network")
	status, o := r.call("ada", http.MethodPost, "/v1/sales/"+r.sale+"/orders", "")
	require.Equal(t, http.StatusAccepted, status)
	r.onlyOrder("ada")
	b.Go(r.origin + "/icon.svg")
	testbrowser.Evaluate[int](b, string(found[1])+`
		globalThis.seen = [];
		watchOrder(`+quote(r.network.url)+","+quote(o["order_id"].(string))+`, async () => `+quote(r.token("ada"))+`,
			(o) => seen.push(o.status)).then(() => seen.push("over")); 0`)
	b.Until(`seen.includes("confirmed")`, "the order as it is")
	refused := make(chan struct{})
	first := sync.OnceFunc(func() { close(refused) })
	r.network.disturb(func(w http.ResponseWriter, q *http.Request) bool {
		if !isOrderStream(q) || q.Header.Get("Last-Event-ID") == "" {
			return false
		}
		q.URL.RawQuery = "ticket=expired"
		first()
		return false
	})
	r.network.cutStreams()
	<-refused
	r.payByPhone("ada")
	b.Until(`seen.at(-1) === "over" && seen.at(-2) === "paid"`, "the change behind another ticket, and the end")
}

func quote(text string) string { return `"` + strings.ReplaceAll(text, `"`, `\"`) + `"` }

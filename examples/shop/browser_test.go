package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

func TestBuyerWaitsBuysAndPays(t *testing.T) {
	t.Parallel()
	r, b := newRig(t, 20, 6*time.Second, time.Hour), openTab(t)
	b.signIn(r, "ada")
	b.shows("#countdown", "Opens in 0:0")
	b.shows("#buy", "Not open yet")
	b.run(chromedp.SetValue(chromedp.CSS("#quantity"), "2"))
	b.screenshot("1-waiting")
	b.shows("#sale-state", "ON SALE NOW")
	b.shows("#buy", "Buy")
	b.run(chromedp.DoubleClick(chromedp.CSS("#buy")), chromedp.Reload())
	b.shows("#order-text", "Confirmed")
	b.shows("#pay-by", "Pay within 59:")
	b.shows("#stock-text", "18 of 20 seats left")
	b.shows("#history-list", "confirmed")
	b.screenshot("2-confirmed")
	o := r.onlyOrder("ada")

	b.shows("#pay", "Pay €98")
	b.click("#pay")
	b.shows("#capture", "Pay €98")
	b.screenshot("3-provider")
	b.click("#capture")
	b.shows("#order-text", "Paid")
	b.shows("#status", "See you in the front row!")
	b.shows("#payments", "Paid with pay_")
	b.shows("#history-list", "paid")
	b.screenshot("4-paid")
	paid := r.onlyOrder("ada")
	require.Equal(t, []any{"paid", o["order_id"]}, []any{paid["status"], paid["order_id"]})
	require.Contains(t, b.text("#payments"), paid["payment_reference"])
	for _, key := range r.network.keys() {
		require.Equal(t, r.network.keys()[0], key)
	}
	b.isCleanBut("/orders") // the click may have come a moment before the opening
}

// The answer to the click comes when the page is gone.
func TestReloadDuringPurchaseBuysOnce(t *testing.T) {
	t.Parallel()
	r, b := newRig(t, 20, 0, time.Hour), openTab(t)
	b.signIn(r, "ada")
	release := make(chan struct{})
	r.network.disturb(func(_ http.ResponseWriter, q *http.Request) bool {
		if isPurchase(q) {
			<-release
		}
		return false
	})
	b.until(`!document.querySelector("#buy").disabled`, "the button can be clicked")
	evaluate[bool](b, `(e => { e.click(); e.click(); return true })(document.querySelector("#buy"))`)
	r.eventually("the purchase is on its way", func() bool { return len(r.network.keys()) == 1 })
	b.shows("#buy", "Buying")
	b.run(chromedp.Reload())
	r.eventually("the page repeats it", func() bool { return len(r.network.keys()) == 2 })
	close(release)
	b.shows("#order-text", "Confirmed")
	r.onlyOrder("ada")
	keys := r.network.keys()
	require.Equal(t, keys[0], keys[1], "the key has survived the reload")
	b.shows("#stock-text", "19 of 20 seats left")
}

func TestTwoTabsBuyOnce(t *testing.T) {
	t.Parallel()
	r, b := newRig(t, 20, 0, time.Hour), openTab(t)
	b.signIn(r, "ada")
	release := make(chan struct{})
	r.network.disturb(func(_ http.ResponseWriter, q *http.Request) bool {
		if isPurchase(q) {
			<-release
		}
		return false
	})
	b.click("#buy")
	r.eventually("the purchase is on its way", func() bool { return len(r.network.keys()) == 1 })
	second := b.beside()
	second.run(chromedp.Navigate(r.origin))
	r.eventually("the other tab joins in", func() bool { return len(r.network.keys()) == 2 })
	close(release)
	second.shows("#order-text", "Confirmed")
	b.shows("#order-text", "Confirmed")
	r.onlyOrder("ada")
	require.Equal(t, r.network.keys()[0], r.network.keys()[1])
}

// The shop has decided, and nobody hears of it.
func TestLostAnswerIsAskedForAgain(t *testing.T) {
	t.Parallel()
	r, b := newRig(t, 20, 0, time.Hour), openTab(t)
	b.signIn(r, "ada")
	var broken atomic.Bool
	broken.Store(true)
	r.network.disturb(func(_ http.ResponseWriter, q *http.Request) bool {
		if !isPurchase(q) || !broken.Load() {
			return false
		}
		r.network.proxy.ServeHTTP(httptest.NewRecorder(), q)
		panic(http.ErrAbortHandler)
	})
	b.click("#buy")
	b.shows("#status", "we do not know whether the order was taken")
	broken.Store(false)
	b.shows("#order-text", "Confirmed")
	r.onlyOrder("ada")
	keys := r.network.keys()
	require.GreaterOrEqual(t, len(keys), 2) // Chromium itself repeats what a kept connection has lost
	for _, key := range keys {
		require.Equal(t, keys[0], key)
	}
}

func TestLatePaymentIsRefunded(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		window time.Duration
		end    func(r *rig, path string)
		status string
		want   string
	}{
		"expired":   {2 * time.Second, func(*rig, string) {}, "expired", "the order had expired before"},
		"cancelled": {time.Hour, cancelByAPI, "cancelled", "the order was cancelled or refused before"},
		"paid twice": {time.Hour, func(r *rig, path string) {
			status, _ := r.call("ada", http.MethodPost, path+"/pay", `{"reference":"by-phone"}`)
			require.Equal(r.t, http.StatusOK, status)
		}, "paid", "paid by another payment"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, b := newRig(t, 20, 0, test.window), openTab(t)
			b.signIn(r, "ada")
			b.click("#buy")
			b.click("#pay")
			b.shows("#capture", "Pay €49")
			path := "/v1/orders/" + r.onlyOrder("ada")["order_id"].(string)
			test.end(r, path)
			r.eventually("the order is "+test.status, func() bool { return r.onlyOrder("ada")["status"] == test.status })
			b.click("#capture")
			b.shows("#status", test.want)
			b.shows("#history-list", test.status)
			made := r.shop.payments.of("ada" + r.suffix)
			require.Len(t, made, 1)
			require.Equal(t, "refunded", made[0].Status)
			charged, _ := r.shop.provider.find(made[0].ID)
			require.Equal(t, "refunded", charged.Status)
			if name == "expired" {
				b.screenshot("5-refunded")
			}
			b.isCleanBut("nothing")
		})
	}
}

// The shop's call to pay is lost on its way back, so the provider delivers its webhook again.
func TestLostPaymentIsRepeated(t *testing.T) {
	t.Parallel()
	r, b := newRig(t, 20, 0, time.Hour), openTab(t)
	b.signIn(r, "ada")
	b.click("#buy")
	b.click("#pay")
	var tries atomic.Int32
	r.network.disturb(func(_ http.ResponseWriter, q *http.Request) bool {
		if !strings.HasSuffix(q.URL.Path, "/pay") || tries.Add(1) > 3 {
			return false
		}
		r.network.proxy.ServeHTTP(httptest.NewRecorder(), q)
		panic(http.ErrAbortHandler)
	})
	b.click("#capture")
	b.shows("#payments", "Paid with pay_")
	require.Greater(t, tries.Load(), int32(3))
	require.Equal(t, "paid", r.onlyOrder("ada")["status"])
	require.Equal(t, "paid", r.shop.payments.of("ada" + r.suffix)[0].Status)
}

func cancelByAPI(r *rig, path string) {
	status, _ := r.call("ada", http.MethodPost, path+"/cancel", "")
	require.Equal(r.t, http.StatusOK, status)
}

func TestCancelledOrderCanBeBoughtAgain(t *testing.T) {
	t.Parallel()
	r, b := newRig(t, 1, 0, time.Hour), openTab(t)
	b.signIn(r, "ada")
	b.click("#buy")
	b.click("#cancel")
	b.shows("#order-text", "Cancelled")
	b.buys() // as soon as the seat is back
	require.Len(t, r.orders("ada"), 2)
	keys := r.network.keys()
	require.NotEqual(t, keys[0], keys[len(keys)-1])
}

func TestSoldOutIsSaid(t *testing.T) {
	t.Parallel()
	r, b := newRig(t, 1, 0, time.Hour), openTab(t)
	b.signIn(r, "ada")
	r.network.disturb(func(_ http.ResponseWriter, q *http.Request) bool {
		if isPurchase(q) { // somebody is faster
			require.Equal(t, http.StatusAccepted, r.buyAs("bob"))
		}
		return false
	})
	b.click("#buy")
	b.shows("#status", "Sold out. Seats may come back")
	b.shows("#buy", "Sold out")
	b.shows("#stock-text", "No seats left right now")
	b.screenshot("6-sold-out")
	r.network.disturb(nil)
	path := "/v1/orders/" + r.onlyOrder("bob")["order_id"].(string)
	status, _ := r.call("bob", http.MethodPost, path+"/cancel", "")
	require.Equal(t, http.StatusOK, status)
	b.buys()
	r.onlyOrder("ada")
}

// buys clicks until there is a seat: one that comes back is shown before Redis has it.
func (b *tab) buys() {
	b.t.Helper()
	b.until(`(() => {
		const buy = document.querySelector("#buy");
		if (buy.checkVisibility() && !buy.disabled) buy.click();
		return document.querySelector("#order-text").innerText.includes("Confirmed");
	})()`, "an order")
}

func TestPausedSaleIsSaid(t *testing.T) {
	t.Parallel()
	r, b := newRig(t, 5, 0, time.Hour), openTab(t)
	b.signIn(r, "ada")
	operate := func(what string) {
		_, err := shared.dev.operate(t.Context(), "/v1/sales/"+r.sale+"/"+what, nil)
		require.NoError(t, err)
	}
	var once sync.Once
	r.network.disturb(func(_ http.ResponseWriter, q *http.Request) bool {
		if isPurchase(q) {
			once.Do(func() { operate("pause") })
		}
		return false
	})
	b.click("#buy")
	b.shows("#status", "The sale is paused")
	b.shows("#buy", "Paused")
	operate("resume")
	b.click("#buy")
	b.shows("#order-text", "Confirmed")
	r.onlyOrder("ada")
}

func TestRateLimitIsWaitedFor(t *testing.T) {
	t.Parallel()
	r, b := newRig(t, 50, 0, time.Hour), openTab(t)
	b.signIn(r, "cyd")
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
	b.click("#buy")
	b.shows("#status", "Too many requests: nothing was bought")
	b.shows("#order-text", "Confirmed")
	r.onlyOrder("cyd")
	keys := r.network.keys()
	require.Equal(t, keys[0], keys[len(keys)-1])
}

// The order changes while its stream is broken, and once more while the ticket of the stream is refused.
func TestOrderIsFollowedOverBrokenStreams(t *testing.T) {
	t.Parallel()
	r, b := newRig(t, 5, 0, time.Hour), openTab(t)
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
	b.signIn(r, "ada")
	b.click("#buy")
	b.shows("#order-text", "Confirmed")
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
	path := "/v1/orders/" + r.onlyOrder("ada")["order_id"].(string)
	status, _ := r.call("ada", http.MethodPost, path+"/pay", `{"reference":"by-phone"}`)
	require.Equal(t, http.StatusOK, status)
	b.shows("#order-text", "Paid")
}

func TestHistoryHasPages(t *testing.T) {
	t.Parallel()
	r, b := newRig(t, 5, 0, time.Hour), openTab(t)
	for range 7 {
		sale, err := shared.dev.createSale(t.Context(), 5, 0, time.Hour)
		require.NoError(t, err)
		status, _ := r.call("dora", http.MethodPost, "/v1/sales/"+sale+"/orders", "")
		require.Equal(t, http.StatusAccepted, status)
	}
	r.eventually("all orders are in Postgres", func() bool { return len(r.orders("dora")) == 7 })
	b.signIn(r, "dora")
	b.until(`document.querySelectorAll("#history-list li").length === 5`, "five orders")
	b.click("#history-more")
	b.until(`document.querySelectorAll("#history-list li").length === 7`, "seven orders")
	b.until(`!document.querySelector("#history-more").checkVisibility()`, "no more")
	b.screenshot("7-history")
	b.isCleanBut("nothing")
}

// The API refuses scripts of an origin that is not listed: the browser keeps its answer, and sends no purchase at all.
func TestForeignOriginIsRefused(t *testing.T) {
	t.Parallel()
	r, b := newRig(t, 5, 0, time.Hour), openTab(t)
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
		return evaluate[string](b, script+"("+quote(r.network.url)+","+quote(r.sale)+","+quote(r.token("ada"))+")")
	}
	b.mu.Lock()
	b.expected = "blocked by CORS policy"
	b.mu.Unlock()
	b.run(chromedp.Navigate(foreign.URL))
	require.Equal(t, "TypeError,TypeError,refused", tries())
	require.Empty(t, r.network.keys(), "a purchase was sent")
	b.run(chromedp.Navigate(r.origin + "/icon.svg"))
	require.Equal(t, "status 200,status 202,opened", tries())
}

// The pattern that docs/http-api.md gives for browsers is run as it is printed there.
func TestDocumentedPatternWorks(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/http-api.md")
	require.NoError(t, err)
	found := regexp.MustCompile("(?s)```js\n(.*?)```").FindSubmatch(text)
	require.NotNil(t, found)
	r, b := newRig(t, 5, 0, time.Hour), openTab(t)
	status, o := r.call("ada", http.MethodPost, "/v1/sales/"+r.sale+"/orders", "")
	require.Equal(t, http.StatusAccepted, status)
	path := "/v1/orders/" + o["order_id"].(string)
	r.onlyOrder("ada")
	b.run(chromedp.Navigate(r.origin + "/icon.svg"))
	evaluate[int](b, string(found[1])+`
		globalThis.seen = [];
		watchOrder(`+quote(r.network.url)+","+quote(o["order_id"].(string))+`, async () => `+quote(r.token("ada"))+`,
			(o) => seen.push(o.status)).then(() => seen.push("over")); 0`)
	b.until(`seen.includes("confirmed")`, "the order as it is")
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
	status, _ = r.call("ada", http.MethodPost, path+"/pay", `{"reference":"by-phone"}`)
	require.Equal(t, http.StatusOK, status)
	b.until(`seen.at(-1) === "over" && seen.at(-2) === "paid"`, "the change behind another ticket, and the end")
}

func quote(text string) string { return `"` + strings.ReplaceAll(text, `"`, `\"`) + `"` }

//go:build browser

package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/format"
	"stampede/internal/test/testbrowser"
	"stampede/internal/test/testkit"
	"stampede/reservation"
)

// hostileName is a name that breaks out of HTML, of attributes, and of its line.
const hostileName = `<script>document.title="X"</script>"><img src=x onerror=alert(1)> ` + "\u202egnp.exe"

// TestDashboardInBrowser shows real processes to a real browser.
func TestDashboardInBrowser(t *testing.T) {
	b := testbrowser.Start(t)
	for name, test := range map[string]func(*testing.T, *testbrowser.Browser){
		"Minute": dashboardShowsTheMinute, "Keyboard": dashboardByKeyboard, "Attacks": dashboardUnderAttack,
		"WithoutScript": dashboardWithoutScript,
	} {
		t.Run(name, func(t *testing.T) { t.Parallel(); test(t, b) })
	}
}

// dashboard starts a dashboard that watches these processes, and returns it with its URL.
func (s *shop) dashboard(watched ...string) (*testkit.Cmd, string) {
	s.t.Helper()
	c := s.command("dashboard", "--addr=127.0.0.1:0")
	c.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
	for i := range watched {
		watched[i] += "/metrics"
	}
	c.Setenv("STAMPEDE_SCRAPE", strings.Join(watched, ","))
	c.Start()
	return c, "http://" + loggedAddr(c, "dashboard listens")
}

func logIn(b *testbrowser.Tab, url string) {
	b.Go(url + "/login")
	b.Until(`document.activeElement.id === "token"`, "the focus on the token")
	b.Type(adminToken + "\r")
	b.Shows(".who", "Log out")
}

// figureOf is a number of a page.
func figureOf(key string) string {
	return fmt.Sprintf(`Number(document.querySelector("[data-live='%s']").textContent.replaceAll(",", ""))`, key)
}

func dashboardShowsTheMinute(t *testing.T, browser *testbrowser.Browser) {
	s := newShop(t)
	first, one := s.serve()
	_, two := s.serve()
	worker := s.worker("worker")
	worker.Start()
	desk, url := s.dashboard(one, two, "http://"+loggedAddr(worker, "metrics are served"))
	sale := s.sale(one, 100_000)
	b := browser.Open(t)
	logIn(b, url)
	b.Shows("[data-fragment=sales]", "test")
	b.Until(`document.querySelectorAll("[data-fragment=processes] .good").length === 3`, "three processes")

	// A purchase is on the page within two seconds of its answer. A busy machine may take longer for some of them.
	available := fmt.Sprintf("[data-live='%s.available']", sale)
	b.Shows(available, "100,000")
	testbrowser.Evaluate[bool](b, fmt.Sprintf(`(window.seen = {}, new MutationObserver(() => {
		window.seen[document.querySelector(%q).textContent] ??= Date.now();
	}).observe(document.body, {subtree: true, childList: true, characterData: true}), true)`, available))
	const soon, tries = 2 * time.Second, 30
	best := time.Hour
	for try := 1; try <= tries && best > soon; try++ {
		s.buy(one, sale, fmt.Sprint("ann-", try))
		bought, left := time.Now(), format.Count(int64(100_000-try))
		b.Until(fmt.Sprintf(`window.seen[%q]`, left), "the unit that is gone")
		best = min(best, time.UnixMilli(testbrowser.Evaluate[int64](b, fmt.Sprintf(`window.seen[%q]`, left))).Sub(bought))
	}
	t.Logf("a purchase is shown after %s", best.Round(time.Millisecond))
	require.Less(t, best, soon)

	// Both ingresses are in one figure.
	stop := make(chan struct{})
	buyers := make(chan struct{})
	go func() {
		defer close(buyers)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(40 * time.Millisecond):
			}
			if s.tryBuy(one, sale, fmt.Sprint("one-", i)) != nil || s.tryBuy(two, sale, fmt.Sprint("two-", i)) != nil {
				return
			}
		}
	}()
	b.Until(fmt.Sprintf(`((all, one, two) => one > 0 && two > 0 && all > 1.4 * Math.max(one, two))(%s, %s, %s)`,
		figureOf("all.offered"), figureOf("process.0.per_second"), figureOf("process.1.per_second")),
		"the sum of two ingresses")
	close(stop)
	<-buyers

	// A killed one is shown as gone, and none of its figures as zero.
	first.Kill()
	b.Shows("[data-fragment=processes] tr:first-child", "● gone")
	b.Until(`document.querySelector("[data-live='process.0.per_second']").textContent === "–"`, "no figure of it")
	b.Shows("#troubles", "What to do")
	b.Shows("[data-fragment=processes] tr:nth-child(2)", "✓ up")

	// Without the dashboard the figures are old, and the page says so.
	require.True(t, desk.Stop().Success(), "with an open stream")
	b.Expect("net::ERR_")
	b.Shows("#stale", "Stale since")

	// Another one in its place has no sessions: the page asks for a login, and comes back.
	again := s.command("dashboard", "--addr="+strings.TrimPrefix(url, "http://"))
	again.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
	again.Start()
	b.Expect("401")
	b.Until(`document.activeElement.id === "token"`, "the login")
	b.Type(adminToken + "\r")
	b.Shows(".who", "Log out")
}

// Log in, open a sale, pause and resume it, and never touch a mouse.
func dashboardByKeyboard(t *testing.T, browser *testbrowser.Browser) {
	s := newShop(t)
	_, ingress := s.serve()
	_, url := s.dashboard(ingress)
	sale := s.createSale(ingress, reservation.Terms{Name: hostileName, Stock: 10})
	b := browser.Open(t)
	b.Scheme("dark")
	logIn(b, url)
	b.Shows("[data-fragment=sales]", "document.title")
	require.Equal(t, "Overview · Stampede", testbrowser.Evaluate[string](b, `document.title`))
	require.Zero(t, testbrowser.Evaluate[int](b, `document.querySelectorAll("main script, main img").length`))
	tabTo := func(what string) {
		t.Helper()
		for range 60 {
			b.Type("\t")
			if testbrowser.Evaluate[bool](b, `(() => {
				const e = document.activeElement, o = getComputedStyle(e);
				if (e === document.body) return false;
				const ring = e.matches("input[type=radio]") ? getComputedStyle(e.parentElement) : o;
				if (ring.outlineStyle === "none" || parseFloat(ring.outlineWidth) < 2) throw new Error("no visible focus: " + e.outerHTML);
				return (e.textContent || e.name).includes(`+fmt.Sprintf("%q", what)+`);
			})()`) {
				return
			}
		}
		t.Fatalf("the focus does not come to %s", what)
	}
	tabTo("Skip to the content")
	tabTo("document.title")
	b.Type("\r")
	b.Shows("h1", "document.title")
	b.Shows(".badge", "open")
	tabTo("Pause")
	b.Type("\r")
	b.Shows(".banner.good", "The sale is paused")
	b.Shows(".badge", "paused")
	b.Shows("[aria-labelledby=h-history]", "paused")
	tabTo("Resume")
	b.Type("\r")
	b.Shows(".banner.good", "The sale is resumed")
	b.Shows(".badge", "open")
	tabTo("End this sale for ever")
	b.Type("\r")
	tabTo("name")
	b.Type("something else\r")
	b.Shows("main .banner.bad", "That is not the name of this sale")
	output := s.ends(exitOK, "sale", "show", sale.String())
	require.Contains(t, output, "open")

	// Dark is dark, and every text has contrast.
	require.Equal(t, "rgb(16, 20, 26)", testbrowser.Evaluate[string](b, `getComputedStyle(document.body).backgroundColor`))
	for _, scheme := range []string{"dark", "light"} {
		b.Scheme(scheme)
		require.Empty(t, testbrowser.Evaluate[[]string](b, pale), scheme)
	}
}

// pale lists texts with less contrast than WCAG 2 AA wants: 4.5 to 1, or 3 to 1 for large ones.
const pale = `(() => {
	const rgb = (c) => (c.match(/[\d.]+/g) ?? []).map(Number);
	const light = ([r, g, b]) => { const f = (v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; return .2126 * f(r) + .7152 * f(g) + .0722 * f(b); };
	const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c.length === 3 || c[3] === 1) return c; } return [255, 255, 255]; };
	const out = [];
	for (const e of document.body.querySelectorAll("*")) {
		if (!e.checkVisibility() || e.closest(".sr, .skip, svg, :disabled") || ![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
		const s = getComputedStyle(e), a = light(rgb(s.color)), b = light(behind(e));
		const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05), large = parseFloat(s.fontSize) >= 24 || parseFloat(s.fontSize) >= 18.66 && s.fontWeight >= 700;
		if (ratio < (large ? 3 : 4.5)) out.push(e.textContent.trim().slice(0, 30) + " " + ratio.toFixed(2));
	}
	return out;
})()`

// A page of another origin sends the form of a logged-in operator, and asks for the stream.
func dashboardUnderAttack(t *testing.T, browser *testbrowser.Browser) {
	s := newShop(t)
	_, ingress := s.serve()
	_, url := s.dashboard(ingress)
	sale := s.sale(ingress, 10)
	evil := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = fmt.Fprintf(w, `<!doctype html><link rel=icon href=data:,><title>evil</title>
			<form method=post action="%s/sales/%s/pause"><button>Win a prize</button></form><iframe src="%[1]s/"></iframe>`, url, sale)
	}))
	t.Cleanup(evil.Close)
	b := browser.Open(t)
	logIn(b, url)
	b.Expect("frame-ancestors")
	b.Expect("chrome-error")
	b.Expect("CORS")
	b.Expect("net::ERR_")
	b.Expect("403")
	b.Go(evil.URL)
	require.Equal(t, "TypeError", testbrowser.Evaluate[string](b, `fetch("`+url+`/history?of=all").then(r => "status " + r.status, e => e.name)`))
	b.Click("button")
	b.Shows("body", "another origin. Nothing was done.")
	output := s.ends(exitOK, "sale", "show", sale.String())
	require.Contains(t, output, "open")
	b.Go(url + "/sales/" + sale.String())
	b.Shows(".badge", "open")

	// What somebody gets into a page does not run.
	b.Expect("Content Security Policy")
	b.Expect("violates the following")
	b.Expect("/sales/x")
	require.Equal(t, "still", testbrowser.Evaluate[string](b, `new Promise((done) => {
		window.ran = "still";
		const script = document.createElement("script");
		script.textContent = "window.ran = 'ran'";
		document.body.append(script);
		document.body.insertAdjacentHTML("beforeend", "<img src=x onerror=\"window.ran = 'ran'\">");
		setTimeout(() => done(window.ran), 200);
	})`))
}

func dashboardWithoutScript(t *testing.T, browser *testbrowser.Browser) {
	s := newShop(t)
	_, ingress := s.serve()
	_, url := s.dashboard(ingress)
	sale := s.sale(ingress, 40)
	b := browser.Open(t)
	b.WithoutScript()
	logIn(b, url)
	b.Shows("[data-fragment=sales]", "test") // it loads itself again until it has looked
	b.Shows("[data-fragment=sales]", "40")
	b.Go(url + "/sales/" + sale.String())
	b.Shows(".units", "40")
	b.Click("form[action$=pause] button")
	b.Shows(".banner.good", "The sale is paused")
	b.CheckLayout("without-script")
}

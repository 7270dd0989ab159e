//go:build browser

// Package testbrowser gives tests a headless Chromium, with a profile of its own for each tab. A missing one fails the
// test.
package testbrowser

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// within is how long a test waits for something that must happen, on a busy machine.
const within = 60 * time.Second

var screenshots = flag.String("screenshots", "", "a folder for screenshots of the pages")

// Browser is a Chromium.
type Browser struct{ ctx context.Context }

// Start starts a browser for a test and its subtests.
func Start(t testing.TB) *Browser {
	t.Helper()
	browser, stop, err := Launch()
	require.NoError(t, err)
	t.Cleanup(stop)
	return browser
}

// Launch starts a browser for all tests of a package.
func Launch() (browser *Browser, stop func(), err error) {
	path, err := find()
	if err != nil {
		return nil, nil, err
	}
	profile, err := os.MkdirTemp("", "stampede-chromium-")
	if err != nil {
		return nil, nil, err
	}
	allocator, closeAllocator := chromedp.NewExecAllocator(context.Background(),
		chromedp.ExecPath(path), chromedp.UserDataDir(profile), chromedp.Headless, chromedp.NoFirstRun,
		chromedp.DisableGPU, chromedp.NoSandbox, // root has no sandbox, and all pages are ours
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true))
	ctx, closeBrowser := chromedp.NewContext(allocator)
	stop = func() {
		closeBrowser()
		closeAllocator()
		_ = os.RemoveAll(profile)
	}
	if err := chromedp.Do(ctx); err != nil {
		stop()
		return nil, nil, fmt.Errorf("start %s: %w", path, err)
	}
	return &Browser{ctx}, stop, nil
}

func find() (string, error) {
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("these tests need Chromium: sh tools/setup.sh chromium")
}

// Tab is a tab of the browser, with a profile of its own.
type Tab struct {
	t   testing.TB
	ctx context.Context

	noScript bool

	mu sync.Mutex
	// errors are what a developer would see in red.
	errors []string
	// expected are parts of messages that are no errors to this test.
	expected []string
}

// Open opens a tab. When the test ends its console must have been empty, except for messages with one of the expected
// texts: "network" is in all answers that are no success. The text of a message ends with its URL and a line feed.
func (browser *Browser) Open(t testing.TB, expected ...string) *Tab {
	t.Helper()
	return open(t, browser.ctx, expected, chromedp.WithNewBrowserContext())
}

// Beside opens another tab with the same profile.
func (b *Tab) Beside() *Tab {
	b.t.Helper()
	return open(b.t, b.ctx, b.expected)
}

func open(t testing.TB, parent context.Context, expected []string, options ...chromedp.ContextOption) *Tab {
	t.Helper()
	ctx, closeTab := chromedp.NewContext(parent, options...)
	b := &Tab{t: t, ctx: ctx, expected: expected}
	// This starts the tab, which ends with the context of its first call: no other call may come before.
	messages := chromedp.Console(ctx)
	var reading sync.WaitGroup
	reading.Go(func() {
		for m, err := range messages {
			if err != nil {
				return
			}
			b.take(m)
		}
	})
	t.Cleanup(func() {
		closeTab()
		reading.Wait()
		require.Empty(t, b.errors, "the console")
	})
	b.Resize(1280)
	return b
}

func (b *Tab) take(m chromedp.ConsoleMessage) {
	b.mu.Lock()
	defer b.mu.Unlock()
	text := m.Source + " " + m.String() + " " + m.URL + "\n"
	for _, expected := range b.expected {
		if strings.Contains(text, expected) {
			return
		}
	}
	b.errors = append(b.errors, text)
}

// Expect allows messages of the console with this text.
func (b *Tab) Expect(text string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expected = append(b.expected, text)
}

// Resize sets the width of the window; a narrow one is a phone.
func (b *Tab) Resize(width int64) {
	b.t.Helper()
	b.do(func(ctx context.Context) error {
		_, err := chromedp.Call(ctx, emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{
			Width: width, Height: 900, DeviceScaleFactor: 1, Mobile: width < 500,
		})
		return err
	})
}

// Scheme sets light or dark.
func (b *Tab) Scheme(scheme string) {
	b.t.Helper()
	b.do(func(ctx context.Context) error {
		_, err := chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
			Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
		})
		return err
	})
}

// Zone sets the time zone.
func (b *Tab) Zone(name string) {
	b.t.Helper()
	b.do(func(ctx context.Context) error {
		_, err := chromedp.Call(ctx, emulation.SetTimezoneOverride, emulation.SetTimezoneOverrideParams{TimezoneID: name})
		return err
	})
}

// WithoutScript switches scripts of pages off.
func (b *Tab) WithoutScript() {
	b.t.Helper()
	b.noScript = true
	b.do(func(ctx context.Context) error {
		_, err := chromedp.Call(ctx, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{
			Value: true,
		})
		return err
	})
}

func (b *Tab) do(f func(context.Context) error) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, within)
	defer cancel()
	require.NoError(b.t, f(ctx))
}

// Go loads a page.
func (b *Tab) Go(url string) { b.t.Helper(); b.Run(chromedp.Navigate(url)) }

// Run runs actions.
func (b *Tab) Run(actions ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, within)
	defer cancel()
	if err := chromedp.Do(ctx, actions...); err != nil {
		b.fail(err)
	}
}

// Type types keys where the focus is.
func (b *Tab) Type(keys string) { b.t.Helper(); b.Run(chromedp.KeyEvent(keys)) }

// Evaluate returns the value of an expression; of a promise, what it comes to.
func Evaluate[T any](b *Tab, expression string) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, within)
	defer cancel()
	value, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		b.fail(err)
	}
	return value
}

// fail shows what the page looked like.
func (b *Tab) fail(err error) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, 5*time.Second)
	defer cancel()
	text, _ := chromedp.Run(ctx, chromedp.Evaluate[string](`location.href + "\n" + document.body.innerText`))
	b.mu.Lock()
	defer b.mu.Unlock()
	b.t.Fatalf("%v; the page says:\n%s\nconsole: %q", err, text, b.errors)
}

// Shows waits until the first element is visible with this text in it.
func (b *Tab) Shows(selector, want string) {
	b.t.Helper()
	b.Until(fmt.Sprintf(`(e => e && e.checkVisibility() && e.innerText.includes(%q))(document.querySelector(%q))`,
		want, selector), selector+" shows "+want)
}

// Until waits until an expression is true.
func (b *Tab) Until(expression, what string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, within)
	defer cancel()
	var err error
	// A page that is being loaded has no answer yet.
	for ctx.Err() == nil {
		var holds bool
		holds, err = chromedp.Run(ctx, chromedp.Evaluate[bool](`Boolean(`+expression+`)`))
		if err == nil && holds {
			return
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	b.fail(fmt.Errorf("not seen within %s: %s (%w)", within, what, err))
}

// Click clicks when the element can be clicked.
func (b *Tab) Click(selector string) {
	b.t.Helper()
	b.Until(fmt.Sprintf(`(e => e && e.checkVisibility() && !e.disabled)(document.querySelector(%q))`, selector),
		selector+" can be clicked")
	b.Run(chromedp.Click(chromedp.CSS(selector)))
}

// Screenshot stores a picture of the whole page as it is, if -screenshots names a folder.
func (b *Tab) Screenshot(name string) {
	b.t.Helper()
	if *screenshots == "" {
		return
	}
	b.do(func(ctx context.Context) error {
		picture, err := chromedp.Run(ctx, chromedp.FullScreenshot(100))
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(*screenshots, name+".png"), picture, 0o600)
	})
}

// faults lists what is wrong with the layout of a page: a horizontal scroll, parts outside of the window, and texts and
// controls that lie on each other. A region that scrolls by itself may be wider within.
const faults = `(() => {
	const out = [], width = document.documentElement.clientWidth, say = (e) => e.tagName.toLowerCase() +
		(e.className && typeof e.className === "string" ? "." + e.className : "") + " " + JSON.stringify(e.textContent.trim().slice(0, 30));
	if (document.documentElement.scrollWidth > width)
		out.push("the page is " + document.documentElement.scrollWidth + " wide in a window of " + width);
	const within = (e, s) => e.closest(s);
	const boxes = [];
	for (const e of document.body.querySelectorAll("*")) {
		if (!e.checkVisibility() || within(e, ".sr, .skip, svg, .scroll, .book pre, .book table") || e.closest("label > input[type=radio]") ||
			e.matches(".spans input")) continue;
		const leaf = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || e.matches("button, input, textarea, select");
		if (!leaf) continue;
		for (const r of e.getClientRects()) {
			if (r.width < 1 || r.height < 1) continue;
			if (r.left < -0.5 || r.right > width + 0.5) out.push(say(e) + " is outside: " + r.left + " to " + r.right);
			boxes.push([e, r]);
		}
		if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth && getComputedStyle(e).overflowX !== "visible" && !e.matches("input, textarea, select"))
			out.push(say(e) + " is cut off");
	}
	for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
		const [a, r] = boxes[i], [b, s] = boxes[j];
		if (a === b || a.contains(b) || b.contains(a)) continue;
		const w = Math.min(r.right, s.right) - Math.max(r.left, s.left), h = Math.min(r.bottom, s.bottom) - Math.max(r.top, s.top);
		if (w > 2 && h > 4) out.push(say(a) + " lies on " + say(b));
	}
	return out;
})()`

// widths are those of a phone, a tablet and a desk.
var widths = []int64{360, 768, 1280}

// CheckLayout fails the test for faults of the layout in every width and scheme, and takes the pictures.
func (b *Tab) CheckLayout(name string) {
	b.t.Helper()
	for _, scheme := range []string{"light", "dark"} {
		b.Scheme(scheme)
		for _, width := range widths {
			b.Resize(width)
			if !b.noScript { // there are no frames to wait for
				Evaluate[bool](b, `new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))`)
			}
			if found := Evaluate[[]string](b, faults); len(found) > 0 {
				b.t.Errorf("%s, %s, %d wide:\n  %s", name, scheme, width, strings.Join(found[:min(len(found), 12)], "\n  "))
			}
			b.Screenshot(fmt.Sprintf("%s-%s-%d", name, scheme, width))
		}
	}
	b.Resize(1280)
	b.Scheme("light")
}

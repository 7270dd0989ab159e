//go:build system

package main

import (
	"encoding/base64"
	"encoding/json"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	verifier "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/crowd"
	"stampede/internal/test/testkit"
)

// webhookShop takes signed events, and drops repeats by their id.
type webhookShop struct {
	url, secretFile string

	mu sync.Mutex
	// versions are those of each order or sale, in the order of their first arrival.
	versions map[string][]string
	types    map[string]int
	seen     map[string]struct{}
	refused  []error
}

func newWebhookShop(t *testing.T) *webhookShop {
	t.Helper()
	secret := "whsec_" + base64.StdEncoding.EncodeToString([]byte(strings.Repeat("k", 32)))
	verify, err := verifier.NewWebhook(secret)
	require.NoError(t, err)
	w := &webhookShop{
		versions: map[string][]string{}, types: map[string]int{}, seen: map[string]struct{}{},
		secretFile: filepath.Join(t.TempDir(), "secret"),
	}
	require.NoError(t, os.WriteFile(w.secretFile, []byte(secret+"\n"), 0o600))
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err == nil {
			err = verify.Verify(body, r.Header)
		}
		w.take(r.Header.Get("webhook-id"), body, err)
		rw.WriteHeader(http.StatusNoContent)
	}))
	t.Cleanup(server.Close)
	w.url = server.URL + "/hook?token=hidden"
	return w
}

func (w *webhookShop) take(id string, body []byte, err error) {
	var e struct{ ID, Type, Subject string }
	if err == nil {
		err = json.Unmarshal(body, &e)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.refused = append(w.refused, err)
		return
	}
	if _, repeat := w.seen[id]; repeat {
		return
	}
	w.seen[id] = struct{}{}
	subject, version, _ := strings.Cut(id, ".")
	w.versions[subject] = append(w.versions[subject], version)
	w.types[e.Type]++
}

func (w *webhookShop) counts() map[string]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.types)
}

func (s *shop) relay() *testkit.Cmd {
	s.t.Helper()
	c := s.command("relay", "run")
	c.Setenv("STAMPEDE_METRICS_ADDR", "127.0.0.1:0")
	return c
}

// A crowd buys while two relays are killed at random instants: the shop receives the events of each order in order.
func TestKilledRelaysTellShopOfEveryOrder(t *testing.T) {
	t.Parallel()
	const stock, crowdSize = 1500, 2000
	s := newShop(t)
	_, url := s.serve()
	s.worker("worker").Start()
	hook := newWebhookShop(t)
	status, out := s.run("relay", "add", "shop", hook.url, "--secret-file", hook.secretFile, "--allow-private")
	require.Equal(t, exitOK, status, out)
	relays := []*testkit.Cmd{s.relay(), s.relay()}
	for _, r := range relays {
		r.Start()
	}
	sale := s.sale(url, stock)
	buyers, verifier := s.crowd(crowd.Config{URLs: []string{url}, Sale: sale, Buyers: crowdSize, Over: 2 * time.Second})
	var running sync.WaitGroup
	running.Go(func() { buyers.Run(t.Context()) })
	for range 4 {
		<-time.After(time.Duration(rand.IntN(700)) * time.Millisecond)
		i := rand.IntN(2)
		relays[i].Kill()
		relays[i] = s.relay()
		relays[i].Start()
	}
	running.Wait()
	s.requireKept(buyers, verifier, sale, stock)
	testkit.Eventually(t, within, "all events", func() bool {
		return hook.counts()["stampede.order.confirmed"] >= stock
	})
	require.Equal(t, map[string]int{"stampede.order.confirmed": stock, "stampede.sale.created": 1}, hook.counts())
	require.Empty(t, hook.refused)
	for subject, versions := range hook.versions {
		require.True(t, slices.IsSorted(versions), subject)
	}
	var orders int
	require.NoError(t, s.pool.QueryRow(t.Context(), "SELECT count(*) FROM orders WHERE id::text = ANY ($1)",
		slices.Collect(maps.Keys(hook.versions))).Scan(&orders))
	require.Equal(t, stock, orders)
}

func TestRelayCommands(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	hook := newWebhookShop(t)
	run := func(want int, args ...string) string {
		t.Helper()
		status, out := s.run(append([]string{"relay"}, args...)...)
		require.Equal(t, want, status, out)
		require.NotContains(t, out, "hidden")
		require.NotContains(t, out, "a2tr", "the secret")
		return out
	}
	short := filepath.Join(t.TempDir(), "short")
	require.NoError(t, os.WriteFile(short, []byte("whsec_c2hvcnQ=\n"), 0o600))
	address := file(t, hook.url+"\n")
	for want, args := range map[string][]string{
		"either a URL":         {"add", "shop"},
		"a --url-file":         {"add", "shop", hook.url, "--url-file", address},
		"is empty":             {"add", "shop", "--url-file", file(t, "")},
		"visible ASCII":        {"add", "shop", "--url-file", file(t, hook.url+"\n"+hook.url)},
		"--secret-file":        {"add", "shop", hook.url, "--allow-private"},
		"--allow-private":      {"add", "shop", hook.url, "--secret-file", hook.secretFile},
		"24 to 64 bytes":       {"add", "shop", "https://shop.example/", "--secret-file", short},
		"no such file":         {"add", "shop", "https://shop.example/", "--secret-file", short + "x"},
		"for webhooks only":    {"add", "shop", "stdout", "--secret-file", short},
		"cannot name a target": {"add", "Shop", "stdout"},
		"want https://":        {"add", "shop", "ftp://hidden@shop.example"},
		"no place in the log":  {"add", "shop", "stdout", "--from", "yesterday"},
	} {
		require.Contains(t, run(exitUsage, args...), want)
	}
	for _, args := range [][]string{
		{"pause", "shop"}, {"resume", "shop"}, {"remove", "shop"}, {"replay", "shop", "--from=now"},
	} {
		require.Contains(t, run(exitFailed, args...), "target shop: there is no such target")
	}
	run(exitUsage, "replay", "shop")
	run(exitUsage, "replay", "shop", "--from=now", "--after=x")

	require.Contains(t, run(exitOK, "add", "shop", hook.url, "--secret-file", hook.secretFile, "--allow-private"),
		"target shop gets the events after position 0")
	require.Contains(t,
		run(exitOK, "add", "shop", "--url-file", address, "--secret-file", hook.secretFile, "--allow-private"),
		"has its new settings and 1 secrets")
	require.Contains(t, run(exitFailed, "add", "shop", "stdout"), "another URL")
	run(exitOK, "add", "lines", "stdout", "--from", "start")
	_, url := s.serve()
	sale := s.sale(url, 10)
	r := s.relay()
	r.Start()
	r.WaitOutput(within, `"id":"`+sale.String()+`.r1"`) // a line on its standard output
	testkit.Eventually(t, within, "the event", func() bool { return hook.counts()["stampede.sale.created"] == 1 })
	metrics := "http://" + loggedAddr(r, "metrics are served")
	testkit.Eventually(t, within, "metrics at rest", func() bool {
		shown := scrape(t, metrics)
		return slices.Contains(shown, `stampede_relay_deliveries_total{target="shop"} 1`) &&
			slices.Contains(shown, `stampede_relay_lag_events{target="shop"} 0`) &&
			slices.Contains(shown, `stampede_relay_failures_total{target="lines"} 0`) &&
			slices.Contains(shown, `stampede_relay_target_state{state="active",target="lines"} 1`)
	})
	for _, line := range scrape(t, metrics) {
		assert.NotContains(t, line, "hidden")
	}
	run(exitOK, "pause", "shop")
	require.Regexp(t, `shop +paused +1 +0 +0s +0 +- +- +http://127.0.0.1:\d+/hook\?…`, run(exitOK, "list"))
	var listed struct {
		Name, State, URL  string
		Position, Secrets int
		LagEvents         int `json:"lag_events"`
	}
	lines := strings.Split(strings.TrimSpace(run(exitOK, "list", "--output=json")), "\n")
	require.Len(t, lines, 2)
	require.NoError(t, json.Unmarshal([]byte(lines[1]), &listed))
	require.Equal(t, "shop paused", listed.Name+" "+listed.State)
	require.Equal(t, 1, listed.Position)
	require.Equal(t, 1, listed.Secrets)
	run(exitOK, "replay", "shop", "--from", sale.String()+".r1")
	run(exitOK, "resume", "shop")
	testkit.Eventually(t, within, "the repeat", func() bool {
		return slices.Contains(scrape(t, metrics), `stampede_relay_deliveries_total{target="shop"} 2`)
	})
	require.Contains(t, run(exitOK, "replay", "shop", "--after", sale.String()+".r1"), "position 1")
	run(exitOK, "remove", "shop")
	testkit.Eventually(t, within, "no series of a removed target", func() bool {
		return !strings.Contains(strings.Join(scrape(t, metrics), "\n"), `target="shop"`)
	})
	require.NotContains(t, r.Output(), "hidden")
	require.True(t, r.Stop().Success(), r.Output())
}

//go:build system

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
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

	"github.com/google/uuid"
	verifier "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/loadgen"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
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
	buyers, verifier := s.crowd(loadgen.Config{
		URLs: []string{url}, Sale: sale, Buyers: crowdSize, Arrivals: loadgen.Evenly(2 * time.Second),
	})
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

// drandAnswer is what drand answers for the round that the tests know.
const drandAnswer = `{"round":657413,"randomness":"fc1873a13f3545aeade8401532ef5519920652eee6b0d2b19ca12643b87b3587",` +
	`"signature":"` + testshop.BeaconSignature + `"}`

// raffle is a draw of 5 units with 50 entries, which are open for a time, on an ingress and two workers.
type raffle struct {
	*shop
	url, goods, entries string
	folder, kept        string            // kept is a file from before the seed
	receipts            map[string]string // by user
}

func openRaffle(t *testing.T, open time.Duration, createFlags ...string) *raffle {
	t.Helper()
	s := newShop(t)
	_, url := s.serve()
	s.worker("one").Start()
	s.worker("two").Start()
	r := &raffle{shop: s, url: url, folder: t.TempDir(), receipts: map[string]string{}}
	r.goods = s.createSale(url, reservation.Terms{Name: "shoe", Stock: 5, PaymentWindow: time.Hour}).String()
	r.entries = s.createSale(url, reservation.Terms{
		Name: "entries", Stock: 1000, PerOrderLimit: 1, ClosesAt: time.Now().Add(open),
	}).String()
	create := append([]string{"draw", "create", r.goods, "--entries=" + r.entries}, createFlags...)
	created := r.over(exitOK, create...)
	require.Equal(t, created, s.ends(exitOK, create...), "a repeat, on the databases")
	for n := range 50 {
		user := fmt.Sprint("user-", n)
		status, text := call(t, http.MethodPost, url+"/v1/sales/"+r.entries+"/orders", "", "X-User-ID", user)
		require.Equal(t, http.StatusAccepted, status, text)
		var entered struct{ Receipt string }
		require.NoError(t, json.Unmarshal([]byte(text), &entered))
		r.receipts[user] = entered.Receipt
	}
	return r
}

// over runs a command through the ingress.
func (r *raffle) over(want int, args ...string) string {
	r.t.Helper()
	status, out, output := remote(r.t, r.url, adminToken, args...)
	require.Equal(r.t, want, status, "%v: %s", args, output)
	if want != exitOK {
		return output
	}
	return out
}

// await waits until the status of the draw has all these lines.
func (r *raffle) await(lines ...string) {
	r.t.Helper()
	testkit.Eventually(r.t, within, strings.Join(lines, ", "), func() bool {
		var have []string
		for line := range strings.Lines(r.over(exitOK, "draw", "status", r.goods)) {
			have = append(have, strings.Join(strings.Fields(line), " "))
		}
		return !slices.ContainsFunc(lines, func(line string) bool { return !slices.Contains(have, line) })
	})
}

// keep keeps what the ingress says of a draw without a seed, as anybody can, once that has this part.
func (r *raffle) keep(part string) {
	r.t.Helper()
	var text string
	testkit.Eventually(r.t, within, part, func() bool {
		var status int
		status, text = call(r.t, http.MethodGet, r.url+"/v1/sales/"+r.goods+"/draw", "")
		require.Equal(r.t, http.StatusOK, status, text)
		return strings.Contains(text, part)
	})
	r.kept = filepath.Join(r.t.TempDir(), "frozen.json")
	require.NoError(r.t, os.WriteFile(r.kept, []byte(text), 0o600))
}

// proof is the part of an entry, as the ingress tells it.
func (r *raffle) proof(user string) (p struct {
	Rank    int
	Outcome string
	OrderID uuid.UUID `json:"order_id"`
},
) {
	r.t.Helper()
	status, text := call(r.t, http.MethodGet, r.url+"/v1/sales/"+r.goods+"/draw/proof?receipt="+r.receipts[user], "")
	require.Equal(r.t, http.StatusOK, status, text)
	require.NoError(r.t, json.Unmarshal([]byte(text), &p))
	return p
}

// verify verifies the draw from files, without any server: those that an ingress sends, and those from the databases.
// Then the winners pay.
func (r *raffle) verify() {
	r.t.Helper()
	var lists [2][]byte
	for i, run := range []func(int, ...string) string{r.over, r.ends} {
		bundle, leaves := filepath.Join(r.folder, fmt.Sprint("bundle", i)), filepath.Join(r.folder, fmt.Sprint("leaves", i))
		run(exitOK, "draw", "status", r.goods, "--bundle="+bundle, "--leaves="+leaves)
		for user, receipt := range r.receipts {
			r.verifyFiles(bundle, leaves, user, receipt)
		}
		var err error
		lists[i], err = os.ReadFile(leaves)
		require.NoError(r.t, err)
	}
	assert.True(r.t, bytes.Equal(lists[0], lists[1]))
	files, err := os.ReadDir(r.folder)
	require.NoError(r.t, err)
	assert.Len(r.t, files, 4, "and no part of one")

	won := 0
	for user := range r.receipts {
		if p := r.proof(user); p.Outcome == "offered" {
			won++
			paid := ask(r.t, http.MethodPost, r.url+"/v1/orders/"+p.OrderID.String()+"/pay", user, `{"reference":"pi"}`)
			assert.Equal(r.t, http.StatusOK, paid.HTTP)
		}
	}
	assert.Equal(r.t, 5, won)
	require.Error(r.t, r.tryBuy(r.url, uuid.MustParse(r.goods), "a plain buyer"))
}

func (r *raffle) verifyFiles(bundle, leaves, user, receipt string) {
	r.t.Helper()
	var out, errs bytes.Buffer
	args := []string{
		"draw", "verify", "--bundle=" + bundle, "--leaves=" + leaves, "--receipt=" + receipt, "--frozen=" + r.kept,
	}
	assert.Equal(r.t, exitOK, run(args, &out, &errs), "%s%s", out.String(), errs.String())
	assert.Contains(r.t, out.String(), "5 offered and 0 skipped")
	p, outcome := r.proof(user), "not offered"
	if p.Outcome == "offered" {
		outcome = p.Outcome
	}
	assert.Contains(r.t, out.String(), fmt.Sprintf("rank %d of 50; %s", p.Rank, outcome))
}

// From the entries to paid orders, with a seed of parties, through an ingress.
func TestDrawOfParties(t *testing.T) {
	t.Parallel()
	secrets := map[string]string{"ann": strings.Repeat("01", 32), "a: notary": strings.Repeat("02", 32)}
	var flags []string
	for name, secret := range secrets {
		raw, err := hex.DecodeString(secret)
		require.NoError(t, err)
		flags = append(flags, fmt.Sprintf("--party=%s:%x", name, sha256.Sum256(raw)))
	}
	slices.Sort(flags)
	r := openRaffle(t, 15*time.Second, flags...)
	output := r.over(exitUnknown, "draw", "status", r.goods, "--bundle="+filepath.Join(r.folder, "early"))
	assert.Contains(t, output, "The list of the entries is not frozen yet")
	for _, run := range []func(int, ...string) string{r.over, r.ends} {
		early := run(exitFailed, "draw", "reveal", r.goods, "--party=ann", "--secret="+secrets["ann"])
		assert.Contains(t, early, "the list of the entries is not frozen yet: the secret was not sent")
	}
	r.await("state frozen", "entries 50")
	r.keep(`"root"`)
	assert.Contains(t, r.over(exitUsage, "draw", "reveal", r.goods, "--party=ann", "--secret=00"), "secret must be")
	assert.Contains(t, r.over(exitUsage, "draw", "reveal", r.goods, "--party=ann", "--secret=xy"), "not hexadecimal")
	output = r.over(exitOK, "draw", "reveal", r.goods, "--party=ann", "--secret="+secrets["ann"])
	assert.Contains(t, output, "revealed 0101")
	reveal := r.command("draw", "reveal", r.goods, "--party=a: notary", "--secret=-")
	secret := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(secret, []byte(secrets["a: notary"]+"\n"), 0o600))
	reveal.FromShell("exec <" + secret)
	reveal.Start()
	require.Equal(t, exitOK, reveal.Wait(within).ExitCode(), reveal.Output())
	r.await("state offering", "offered 5", "last rank 4")
	r.verify()
	r.ends(exitOK, "audit", "--wait=30s")
	for _, run := range []func(int, ...string) string{r.over, r.ends} {
		run(exitFailed, "draw", "status", r.entries)
	}
}

// The same with a round of drand, which comes as drand has answered.
func TestDrawOfRound(t *testing.T) {
	t.Parallel()
	r := openRaffle(t, time.Hour, "--freeze=60s")
	testshop.Exec(t, r.pool, "UPDATE sales SET closes_at = now() - interval '1 second' WHERE id = $1", r.entries)
	r.await("state frozen", "entries 50")
	answer := filepath.Join(t.TempDir(), "drand.json")
	require.NoError(t, os.WriteFile(answer, []byte(drandAnswer), 0o600))
	beacon := []string{"draw", "beacon", r.goods, "--file=" + answer}
	assert.Contains(t, r.over(exitUsage, beacon...), "the seed of the draw is that of round")
	assert.Contains(t, r.ends(exitFailed, beacon...), "the seed of the draw is that of round")
	r.ends(exitUsage, "draw", "beacon", r.goods, "--round=1")
	r.ends(exitUsage, "draw", "beacon", r.goods, "--round=1", "--signature=xy")
	r.ends(exitUsage, "draw", "beacon", r.goods, "--file=/dev/null")
	// The signature of a round of these days is not known: the draw becomes one of another time.
	testshop.MoveDrawToRound(t, r.pool, uuid.MustParse(r.goods))
	r.keep("657413")
	const seed = "fc1873a13f3545aeade8401532ef5519920652eee6b0d2b19ca12643b87b3587"
	assert.Contains(t, r.over(exitOK, beacon...), seed)
	assert.Contains(t, r.ends(exitOK, beacon...), seed, "a repeat, on the databases")
	r.await("offered 5")
	r.verify()
	for _, run := range []func(int, ...string) string{r.over, r.ends} {
		assert.Regexp(t, `what is left +for everybody when each rank had its turn`, run(exitOK, "draw", "open", r.goods))
	}
}

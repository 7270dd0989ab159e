//go:build system && upgrade

package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/loadgen"
	"stampede/internal/retry"
	"stampede/internal/test/testkit"
	"stampede/stream"
)

const jwtSecret = "the secret of the tests, 32 bytes or more"

// version is one of the two versions that run side by side.
type version struct {
	name    string
	program string // "" for this tree, which is the test binary
}

// TestRollingUpgrade replaces the processes of one version by those of the next, one after the other, while a crowd
// buys.
func TestRollingUpgrade(t *testing.T) {
	// Always the same folder for this checkout: then Go finds there what it has compiled before.
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	folder := filepath.Join(os.TempDir(), fmt.Sprintf("stampede-upgrade-%x", sha256.Sum256([]byte(root)))[:40])
	require.NoError(t, os.RemoveAll(folder))
	require.NoError(t, os.Mkdir(folder, 0o700))
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	tree := version{name: "tree"}
	old := version{name: previous(t)}
	old.program = build(t, folder, "previous", func(to string) { unpack(t, old.name, to) })
	t.Run("from the previous version to this tree", func(t *testing.T) { newUpgrade(t, old, tree).roll() })
	t.Run("items, which the previous version does not know", func(t *testing.T) { newUpgrade(t, old, tree).sellItems() })
	t.Run("from this tree to one with another schema and other scripts", func(t *testing.T) {
		next := build(t, folder, "next", func(to string) {
			copyTree(t, to)
			change(t, to)
		})
		newUpgrade(t, tree, version{"next", next}).roll()
	})
}

// previous returns the last tag, or else the commit in testdata.
func previous(t *testing.T) (name string) {
	t.Helper()
	if tag, err := exec.Command("git", "describe", "--tags", "--abbrev=0", "HEAD^").Output(); err == nil {
		return strings.TrimSpace(string(tag))
	}
	text, err := os.ReadFile("testdata/previous")
	require.NoError(t, err)
	commit := regexp.MustCompile(`(?m)^[0-9a-f]{40}$`).FindString(string(text))
	out, err := exec.Command("git", "merge-base", "--is-ancestor", commit, "HEAD").CombinedOutput()
	require.NoError(t, err, "testdata/previous must name an ancestor of HEAD, and git its history: %s", out)
	return commit
}

func unpack(t *testing.T, commit, to string) {
	t.Helper()
	shell(t, "../..", fmt.Sprintf("git archive %s | tar -x -C %s", commit, to))
}

func copyTree(t *testing.T, to string) {
	t.Helper()
	shell(t, "../..", "git ls-files -z --cached --others --exclude-standard | "+
		"while IFS= read -r -d '' f; do [ ! -f \"$f\" ] || printf '%s\\0' \"$f\"; done | tar -c --null -T - | tar -x -C "+to)
}

// change gives the tree in a folder what a later version may have: a migration that adds, and other scripts.
func change(t *testing.T, folder string) {
	t.Helper()
	scripts, err := filepath.Glob(folder + "/lua/*.lua")
	require.NoError(t, err)
	require.NotEmpty(t, scripts)
	for _, script := range scripts {
		text, err := os.ReadFile(script)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(script, append(text, "-- of the next version\n"...), 0o600))
	}
	const begin, timeout = "-- +goose Up\n", "SET LOCAL lock_timeout = '3s';\n"
	for name, up := range map[string]string{
		"99997_next": begin + "CREATE TABLE next_version (id bigint PRIMARY KEY);\n" +
			timeout + "ALTER TABLE sales ADD COLUMN next_note text;\n",
		"99998_next": begin + timeout + "ALTER TABLE order_events ADD COLUMN next_note text NOT NULL DEFAULT '';\n",
		"99999_next": begin + timeout + "ALTER TABLE orders ADD COLUMN next_note text;\n",
	} {
		require.NoError(t, os.WriteFile(folder+"/sql/migrations/"+name+".sql", []byte(up+"-- +goose Down\n"), 0o600))
	}
}

// build builds the program of a tree in a folder of its own.
func build(t *testing.T, folder, name string, fill func(to string)) (program string) {
	t.Helper()
	began := time.Now()
	source := filepath.Join(folder, name)
	require.NoError(t, os.Mkdir(source, 0o700))
	fill(source)
	program = filepath.Join(folder, "stampede-"+name)
	shell(t, source, "go build -o "+program+" ./cmd/stampede")
	t.Logf("built in %v", time.Since(began).Round(time.Second))
	return program
}

func shell(t *testing.T, folder, command string) {
	t.Helper()
	cmd := exec.Command("bash", "-o", "pipefail", "-c", command)
	cmd.Dir = folder
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s: %s", command, out)
}

// upgrade is an installation whose processes are replaced.
type upgrade struct {
	*shop
	*balancer
	old, new version
	urls     map[*testkit.Cmd]string
	recorded map[string]int // orders, by the version of the workers that ended
}

const shardsOfUpgrade = 4

func newUpgrade(t *testing.T, from, to version) *upgrade {
	t.Helper()
	u := &upgrade{
		shop: newShop(t), balancer: newBalancer(t), old: from, new: to, urls: map[*testkit.Cmd]string{},
		recorded: map[string]int{},
	}
	u.redisURL, u.keys.Partitions = testkit.OwnRedis(t).URL, shardsOfUpgrade
	_, err := u.pool.Exec(t.Context(), "DROP SCHEMA public CASCADE; CREATE SCHEMA public")
	require.NoError(t, err)
	u.pool.Reset()
	return u
}

func (u *upgrade) command(v version, args ...string) *testkit.Cmd {
	u.t.Helper()
	c := u.shop.command(args...)
	c.Setenv(otherProgram, v.program)
	return c
}

func (u *upgrade) run(v version, args ...string) string {
	u.t.Helper()
	c := u.command(v, args...)
	c.Start()
	require.Zero(u.t, c.Wait(within).ExitCode(), c.Output())
	return c.Output()
}

// ingress starts an ingress and waits until the balancer sends it requests.
func (u *upgrade) ingress(v version) *testkit.Cmd {
	u.t.Helper()
	c := u.command(v, "serve")
	for name, value := range map[string]string{
		"STAMPEDE_STOP_DELAY": "1s", "STAMPEDE_USER_RATE": "0", "STAMPEDE_AUTH": "jwt", "STAMPEDE_JWT_SECRET": jwtSecret,
		"STAMPEDE_BUYER_PAY":   "on",
		"STAMPEDE_ADMIN_TOKEN": adminToken, "STAMPEDE_HTTP_ADDR": "127.0.0.1:0",
	} {
		c.Setenv(name, value)
	}
	c.Start()
	url := "http://" + loggedAddr(c, "ingress listens")
	u.urls[c] = url
	u.add(url, v.name)
	testkit.Eventually(u.t, within, "the ingress is ready", func() bool {
		for _, b := range u.all() {
			if b.url == url && u.isReady(u.t.Context(), url) {
				return true
			}
		}
		return false
	})
	return c
}

// consumers are names of two workers, of which each reads a part of the partitions.
func (u *upgrade) consumers() (names [2]string) {
	for n := 0; ; n += 2 {
		names = [2]string{fmt.Sprint("worker-", n), fmt.Sprint("worker-", n+1)}
		shares := make(map[string]int)
		for p := range u.keys.Partitions {
			shares[stream.First(u.keys.Orders(p), names[:])]++
		}
		if len(shares) == len(names) {
			return names
		}
	}
}

// work starts a worker and waits until it is ready.
func (u *upgrade) work(v version, consumer string) *testkit.Cmd {
	u.t.Helper()
	c := u.command(v, "work")
	c.Setenv("STAMPEDE_CONSUMER", consumer)
	c.Setenv("STAMPEDE_METRICS_ADDR", "127.0.0.1:0")
	c.Setenv("STAMPEDE_MIN_IDLE", "2s")
	c.Start()
	url := "http://" + loggedAddr(c, "metrics are served")
	u.urls[c] = url
	testkit.Eventually(u.t, within, "the worker is ready", func() bool { return u.isReady(u.t.Context(), url) })
	return c
}

// confirmed is how many orders a worker has recorded.
func (u *upgrade) confirmed(worker *testkit.Cmd) (n int) {
	u.t.Helper()
	for _, line := range scrape(u.t, u.urls[worker]) {
		if count, found := strings.CutPrefix(line, `stampede_orders_total{outcome="confirmed"} `); found {
			n, _ = strconv.Atoi(count)
		}
	}
	return n
}

// replace stops a process in an orderly way and then starts its successor.
func (u *upgrade) replaceIngress(old *testkit.Cmd, v version) *testkit.Cmd {
	u.t.Helper()
	require.Zero(u.t, old.Stop().ExitCode(), old.Output())
	u.remove(u.urls[old])
	return u.ingress(v)
}

func (u *upgrade) replaceWorker(old *testkit.Cmd, is, v version, consumer string) *testkit.Cmd {
	u.t.Helper()
	u.recorded[is.name] += u.confirmed(old)
	require.Zero(u.t, old.Stop().ExitCode(), old.Output())
	return u.work(v, consumer)
}

// sideBySide waits until ingresses and workers of both versions have handled orders at the same time.
func (u *upgrade) sideBySide(workers ...*testkit.Cmd) {
	u.t.Helper()
	const orders = 100
	before := map[string]int{u.old.name: u.acceptedBy(u.old.name), u.new.name: u.acceptedBy(u.new.name)}
	for v, n := range before {
		testkit.Eventually(u.t, within, v+" accepts orders", func() bool { return u.acceptedBy(v) > n+orders })
	}
	for _, w := range workers {
		n := u.confirmed(w)
		testkit.Eventually(u.t, within, "each worker records orders", func() bool { return u.confirmed(w) > n+orders })
	}
}

func (u *upgrade) roll() {
	t := u.t
	u.run(u.old, "migrate", "up")
	ingresses := []*testkit.Cmd{u.ingress(u.old), u.ingress(u.old)}
	names := u.consumers()
	workers := []*testkit.Cmd{u.work(u.old, names[0]), u.work(u.old, names[1])}
	relay := u.command(u.old, "relay", "run")
	relay.Setenv("STAMPEDE_METRICS_ADDR", "127.0.0.1:0")
	relay.Start()
	hook := newWebhookShop(t)
	u.run(u.old, "relay", "add", "shop", hook.url, "--secret-file", hook.secretFile, "--allow-private")

	sale := u.createSale(`{"name":"crowd","stock":100000,"shards":4}`)
	const perSecond = 150
	over := 10 * time.Minute // longer than this takes; the crowd is ended
	buyers, verifier := u.crowd(loadgen.Config{
		URLs: []string{u.balancer.url}, Sale: sale, Buyers: perSecond * int(over/time.Second),
		Arrivals: loadgen.Evenly(over), DoubleClicks: 0.2,
		Auth: loadgen.JWTAuth{Secret: []byte(jwtSecret)},
	})
	customers := &customers{upgrade: u, sale: u.createSale(`{"name":"payers","stock":100000,"payment_window_seconds":600,` +
		`"shards":4}`)}
	crowding, endCrowd := context.WithCancel(t.Context())
	var running sync.WaitGroup
	end := sync.OnceFunc(func() {
		endCrowd()
		running.Wait()
	})
	t.Cleanup(end)
	running.Go(func() { buyers.Run(crowding) })
	for i := range 4 {
		running.Go(func() { customers.shop(crowding, i) })
	}
	testkit.Eventually(t, within, "the old version sells", func() bool { return u.acceptedBy(u.old.name) > 200 })

	began := time.Now()
	u.run(u.new, "migrate", "up")
	step := func(what string) { t.Logf("%5.1f s  %s", time.Since(began).Seconds(), what) }
	step("migrated")
	// Processes of the old version crash on the new schema, and start again.
	u.willKill(u.urls[ingresses[1]])
	ingresses[1].Kill()
	u.remove(u.urls[ingresses[1]])
	ingresses[1] = u.ingress(u.old)
	workers[1].Kill()
	workers[1] = u.work(u.old, names[1])
	step("an old ingress and an old worker were killed, and are back")

	workers[0] = u.replaceWorker(workers[0], u.old, u.new, names[0])
	ingresses[0] = u.replaceIngress(ingresses[0], u.new)
	u.sideBySide(workers...)
	step("side by side")

	// kill -9 in the middle.
	u.willKill(u.urls[ingresses[0]])
	ingresses[0].Kill()
	u.remove(u.urls[ingresses[0]])
	u.recorded[u.new.name] += u.confirmed(workers[0])
	workers[0].Kill()
	ingresses[0], workers[0] = u.ingress(u.new), u.work(u.new, names[0])
	u.sideBySide(workers...)
	step("side by side after kill -9 of a new ingress and a new worker")

	// A bad release.
	workers[0] = u.replaceWorker(workers[0], u.new, u.old, names[0])
	ingresses[0] = u.replaceIngress(ingresses[0], u.old)
	before := u.acceptedBy(u.old.name)
	testkit.Eventually(t, within, "the old version sells", func() bool { return u.acceptedBy(u.old.name) > before+100 })
	step("back to the old version")
	workers[0] = u.replaceWorker(workers[0], u.old, u.new, names[0])
	ingresses[0] = u.replaceIngress(ingresses[0], u.new)
	u.sideBySide(workers...)
	step("forward again")

	workers[1] = u.replaceWorker(workers[1], u.old, u.new, names[1])
	ingresses[1] = u.replaceIngress(ingresses[1], u.new)
	require.Zero(t, relay.Stop().ExitCode())
	relay = u.command(u.new, "relay", "run")
	relay.Setenv("STAMPEDE_METRICS_ADDR", "127.0.0.1:0")
	relay.Start()
	before = u.acceptedBy(u.new.name)
	testkit.Eventually(t, within, "the new version sells", func() bool { return u.acceptedBy(u.new.name) > before+100 })
	step("all processes are new")
	end()

	report := buyers.Report()
	t.Logf("%d clicks, retried %v; %d broken by kill -9; customers: %v; recorded %v", report.Clicks, report.Retries,
		u.broken, &customers.done, u.recorded)
	assert.Empty(t, report.Failures, "a click without an answer")
	assert.Empty(t, u.lost, "requests without an answer, although no ingress was killed")
	for body := range u.failed {
		assert.Contains(t, body, "overloaded", "the only refusal of a machine that is busy")
	}
	assert.NotZero(t, u.recorded[u.old.name])
	assert.NotZero(t, u.recorded[u.new.name])
	assert.Positive(t, customers.done.paid.Load())
	assert.Positive(t, customers.done.cancelled.Load())

	audited := u.run(u.new, "audit", "--wait=60s")
	require.NotContains(t, audited, "BROKEN")
	comparison, err := verifier.Compare(t.Context(), buyers.Ledger())
	require.NoError(t, err)
	assert.True(t, comparison.Holds(), "%s: %v", comparison, comparison.Examples)
	assert.Equal(t, comparison.Accepted, comparison.Found, "no order was lost")
	var rebuilds, letters, orders, paid, cancelled int
	require.NoError(t, u.pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM sale_events WHERE type = 'SaleRebuilt'),
		(SELECT count(*) FROM dead_letters), count(*), count(*) FILTER (WHERE status = 'paid'),
		count(*) FILTER (WHERE status = 'cancelled') FROM orders`).Scan(&rebuilds, &letters, &orders, &paid, &cancelled))
	assert.Zero(t, rebuilds, "the versions do not take each other's scripts for a lost Redis")
	assert.Zero(t, letters)
	assert.EqualValues(t, customers.done.paid.Load(), paid)
	assert.EqualValues(t, customers.done.cancelled.Load(), cancelled)
	testkit.Eventually(t, within, "the shop hears of each order", func() bool {
		counts := hook.counts()
		return counts["stampede.order.confirmed"] == orders && counts["stampede.order.paid"] == paid &&
			counts["stampede.order.cancelled"] == cancelled
	})
	assert.Empty(t, hook.refused)
}

func (u *upgrade) createSale(terms string) uuid.UUID {
	u.t.Helper()
	var created struct{ ID uuid.UUID }
	status := u.send(u.t.Context(), http.MethodPost, "/v1/sales", "Bearer "+adminToken, terms, &created)
	require.Equal(u.t, http.StatusCreated, status)
	return created.ID
}

// send sends a request, and repeats it while a killed ingress gives no answer.
func (u *upgrade) send(ctx context.Context, method, path, authorization, body string, into any) int {
	for {
		r, err := http.NewRequestWithContext(context.WithoutCancel(ctx), method, u.balancer.url+path, strings.NewReader(body))
		if err != nil {
			u.lose(err.Error())
			return 0
		}
		r.Header.Set("Authorization", authorization)
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Idempotency-Key", "of-"+strconv.Itoa(len(body)))
		res, err := http.DefaultClient.Do(r)
		if err != nil {
			u.lose(err.Error())
			return 0
		}
		text, err := io.ReadAll(res.Body)
		_ = res.Body.Close()
		if err != nil {
			u.lose(err.Error())
			return 0
		}
		if res.StatusCode >= http.StatusInternalServerError && retry.Pause(checkInterval, nil) {
			continue
		}
		if json.Unmarshal(text, into) != nil {
			u.lose("not JSON: " + string(text))
		}
		return res.StatusCode
	}
}

// bearer returns the authorization of a user.
func (u *upgrade) bearer(user string) string {
	token, err := jwt.NewWithClaims(jwt.SigningMethodHS256, jwt.RegisteredClaims{
		Subject: user, ExpiresAt: jwt.NewNumericDate(time.Now().Add(time.Hour)),
	}).SignedString([]byte(jwtSecret))
	if err != nil {
		u.lose(err.Error())
	}
	return "Bearer " + token
}

// upgradedOrder is an answer about an order, or a refusal.
type upgradedOrder struct {
	Order   string `json:"order_id"`
	Receipt string
	Status  any // a word, or the number of a problem
	Type    string
	Items   map[string]int
}

// customers buy, show their receipts, and pay or cancel; each call may reach another version.
type customers struct {
	*upgrade
	sale uuid.UUID
	done customersDone
}

type customersDone struct{ paid, cancelled atomic.Int64 }

func (d *customersDone) String() string {
	return fmt.Sprintf("%d paid, %d cancelled", d.paid.Load(), d.cancelled.Load())
}

func (c *customers) shop(ctx context.Context, customer int) {
	for n := 0; ctx.Err() == nil; n++ {
		user := fmt.Sprintf("customer-%d-%d", customer, n)
		token := c.bearer(user)
		var order upgradedOrder
		want := func(wanted, status int, what string) bool {
			if status != wanted {
				c.lose(fmt.Sprintf("%s: %s: %d %+v", user, what, status, order))
			}
			return status == wanted
		}
		if !want(202, c.send(ctx, http.MethodPost, "/v1/sales/"+c.sale.String()+"/orders", token, "", &order), "buy") {
			return
		}
		path := "/v1/orders/" + order.Order
		for order.Status = ""; order.Status != "confirmed"; retry.Pause(10*time.Millisecond, nil) {
			if !want(200, c.send(ctx, http.MethodGet, path+"?receipt="+order.Receipt, token, "", &order), "look") ||
				order.Status != "confirmed" && order.Status != "reserved" {
				c.lose(fmt.Sprint(user, " is ", order.Status))
				return
			}
		}
		change, body, count := "/pay", `{"reference":"`+user+`"}`, &c.done.paid
		if n%2 == 1 {
			change, body, count = "/cancel", "", &c.done.cancelled
		}
		if !want(200, c.send(ctx, http.MethodPost, path+change, token, body, &order), change) {
			return
		}
		count.Add(1)
	}
}

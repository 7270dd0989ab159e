//go:build system && desk

package main

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"html"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/dashboard/fleet"
	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testmonitor"
	"stampede/reservation"
)

// site is a whole installation as it is deployed: two ingresses, two workers, a relay and a dashboard on servers of
// their own, with Prometheus and Alertmanager beside them.
type site struct {
	*shop
	redis     *localserver.Redis
	postgres  *localserver.Postgres
	rdb       redis.UniversalClient
	addrs     map[string]string // of the processes, by name
	running   map[string]*testkit.Cmd
	ways      map[string]*way // of the second ingress and the second worker to their servers
	operators string          // the file
	setClock  func(ahead time.Duration)
	sale      uuid.UUID
	client    *http.Client // of an operator who has logged in to the dashboard
	monitor   *testmonitor.Monitor
	buyers    int       // who have bought
	wrong     uuid.UUID // an order that contradicts its log
	drawn     uuid.UUID // the sale of the latest draw
}

// alertsFaster is how much shorter the delays and windows of the alerts are than deployed, and alertsEndFaster how much
// shorter they fire after their cause. What a process or the dashboard does takes its time: it must not be taken for an
// outage on a busy machine.
const alertsFaster, alertsEndFaster = 5, 10

// alertsWait is how long Alertmanager waits for the cause of an alert. It is not divided by alertsFaster: a worker
// looks at servers every five seconds, and an ingress notices at once.
const alertsWait = 15 * time.Second

// newSite starts a site. A Postgres whose clock can be set is slower.
func newSite(t *testing.T, clocked bool) *site {
	t.Helper()
	s := &site{
		redis: testkit.OwnRedis(t), running: map[string]*testkit.Cmd{}, addrs: map[string]string{}, ways: map[string]*way{},
	}
	if clocked {
		s.postgres, s.setClock = testkit.ClockedPostgres(t)
	} else {
		s.postgres = testkit.OwnPostgres(t)
	}
	s.shop = &shop{
		t: t, keys: reservation.Keys{Prefix: "shop", Partitions: 2}, pool: testkit.PoolAt(t, s.postgres.URL, 4),
		redisURL: s.redis.URL, databaseURL: s.postgres.URL,
	}
	s.rdb = control(t, s.redis.URL)
	for _, name := range []string{"ingress-2", "worker-2"} {
		s.ways[name+" to Redis"], s.ways[name+" to Postgres"] = newWay(t, s.redis.URL), newWay(t, s.postgres.URL)
	}
	s.operators = filepath.Join(t.TempDir(), "operators")
	s.appoint("")
	for _, name := range []string{"ingress-1", "ingress-2", "worker-1", "worker-2", "relay", "dashboard"} {
		s.addrs[name] = testkit.FreeAddr(t)
	}
	for _, name := range slices.Sorted(maps.Keys(s.addrs)) {
		s.start(name)
	}
	s.sale = s.createSale(s.at("ingress-1"), reservation.Terms{
		Name: "shoe", Stock: 1_000_000, PaymentWindow: time.Hour, UnitPrice: 4900, Currency: "EUR",
	})
	s.ends(exitOK, "relay", "add", "lines", "stdout")
	s.confirmed()
	s.ends(exitOK, "audit", "--wait=1m")
	s.logIn()
	s.monitor = testmonitor.Start(t, testmonitor.Options{
		Faster: alertsFaster, EndsFaster: alertsEndFaster, Scrape: 2 * time.Second, GroupWait: alertsWait, Targets: s.addrs,
	})
	testkit.Eventually(t, within, "all processes are scraped", func() bool {
		return len(s.monitor.Ask(`count_over_time((up == 1)[5s:1s]) > 4`)) == len(s.addrs)
	})
	return s
}

// at is the URL of a process.
func (s *site) at(name string) string { return "http://" + s.addrs[name] }

// start starts a process in the place of the one with that name, with further settings: names and values.
func (s *site) start(name string, settings ...string) {
	s.t.Helper()
	s.kill(name)
	var c *testkit.Cmd
	switch kind, _, _ := strings.Cut(name, "-"); kind {
	case "ingress":
		c = s.ingress()
		c.Setenv("STAMPEDE_HTTP_ADDR", s.addrs[name])
		c.Setenv("STAMPEDE_OPERATORS_FILE", s.operators)
	case "worker":
		c = s.worker(name)
		c.Setenv("STAMPEDE_METRICS_ADDR", s.addrs[name])
		c.Setenv("STAMPEDE_MIN_IDLE", "2s")
	case "relay":
		c = s.relay()
		c.Setenv("STAMPEDE_METRICS_ADDR", s.addrs[name])
	case "dashboard":
		c = s.command("dashboard", "--addr="+s.addrs[name], "--scrape="+s.targets())
		c.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
	}
	if strings.HasSuffix(name, "-2") {
		c.Setenv("REDIS_URL", s.ways[name+" to Redis"].url)
		c.Setenv("DATABASE_URL", s.ways[name+" to Postgres"].url)
	}
	for i := 0; i < len(settings); i += 2 {
		c.Setenv(settings[i], settings[i+1])
	}
	c.Start()
	s.running[name] = c
	c.WaitOutput(within, map[string]string{"d": "dashboard listens", "i": "ingress listens"}[name[:1]])
}

// restart starts processes as they were at first.
func (s *site) restart(names ...string) {
	s.t.Helper()
	for _, name := range names {
		s.start(name)
	}
}

func (s *site) kill(names ...string) {
	for _, name := range names {
		if c := s.running[name]; c != nil {
			c.Kill()
		}
	}
}

// targets are the URLs that the dashboard and top scrape.
func (s *site) targets() string {
	var urls []string
	for _, name := range slices.Sorted(maps.Keys(s.addrs)) {
		if name != "dashboard" {
			urls = append(urls, s.at(name)+"/metrics")
		}
	}
	return strings.Join(urls, ",")
}

// appoint writes the operators' file, with a viewer and these.
func (s *site) appoint(lines string) {
	lines += fmt.Sprintf("vic viewer %x\n", sha256.Sum256([]byte("token-of-vic")))
	require.NoError(s.t, os.WriteFile(s.operators+".new", []byte(lines), 0o600))
	require.NoError(s.t, os.Rename(s.operators+".new", s.operators))
}

func (s *site) logIn() {
	s.t.Helper()
	jar, err := cookiejar.New(nil)
	require.NoError(s.t, err)
	s.client = &http.Client{Jar: jar}
	r, err := http.NewRequestWithContext(s.t.Context(), http.MethodPost, s.at("dashboard")+"/login",
		strings.NewReader(url.Values{"token": {adminToken}}.Encode()))
	require.NoError(s.t, err)
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	answer, err := s.client.Do(r)
	require.NoError(s.t, err)
	require.NoError(s.t, answer.Body.Close())
	require.Equal(s.t, http.StatusOK, answer.StatusCode)
}

// exec changes Postgres by hand.
func (s *site) exec(statement string, args ...any) {
	s.t.Helper()
	_, err := s.pool.Exec(s.t.Context(), statement, args...)
	require.NoError(s.t, err)
}

// way is a connection to a server that can be cut, as a network can.
type way struct {
	url string

	mu    sync.Mutex
	isCut bool
	open  map[net.Conn]bool
}

func newWay(t *testing.T, to string) *way {
	t.Helper()
	w := &way{open: map[net.Conn]bool{}}
	u, err := url.Parse(to)
	require.NoError(t, err)
	u.Host = testkit.Proxy(t, u.Host, w.forward)
	w.url = u.String()
	return w
}

func (w *way) forward(client, server net.Conn) {
	w.mu.Lock()
	if w.isCut {
		w.mu.Unlock()
		return
	}
	w.open[client], w.open[server] = true, true
	w.mu.Unlock()
	var answers sync.WaitGroup
	answers.Go(func() {
		_, _ = io.Copy(client, server)
		_ = client.Close()
	})
	_, _ = io.Copy(server, client)
	_ = server.Close()
	answers.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.open, client)
	delete(w.open, server)
}

func (w *way) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isCut = true
	for conn := range w.open {
		_ = conn.Close()
	}
}

func (w *way) mend() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isCut = false
}

// play lets an incident happen, waits until the dashboard, top and an alert say it, and say nothing else, and until
// people are notified of it, and then undoes it.
func (s *site) play(i incident) (f figures) {
	t := s.t
	t.Helper()
	if i.before != nil {
		i.before(s)
	}
	s.awaitCalm("before " + i.what)
	told := len(s.monitor.Sent())
	began := time.Now()
	look := s.look()
	i.begin(s)
	again := time.Now()
	goOn := func() {
		if i.goesOn != nil && time.Since(again) > cmp.Or(i.every, 500*time.Millisecond) {
			i.goesOn(s)
			again = time.Now()
		}
	}
	note := func(seconds *float64, all []string) {
		if *seconds == 0 && slices.Equal(all, []string{i.said()}) {
			*seconds = time.Since(began).Seconds()
		}
	}
	s.eventually(i.what+" is "+i.said(), func() bool {
		goOn()
		note(&f.page, s.page())
		if slices.ContainsFunc(s.monitor.Firing(), func(a testmonitor.Alert) bool { return a.Name() == i.alert }) {
			note(&f.alert, []string{i.said()})
		}
		if f.top == 0 && hasEnded(look) {
			if note(&f.top, s.saidByTop(look)); f.top == 0 {
				look = s.look()
			}
		}
		return f.page > 0 && f.top > 0 && f.alert > 0
	})
	s.eventually("the notification of "+i.what+", and nothing beside it", func() bool {
		if i.every == 0 {
			goOn()
		}
		said := []string{i.said()}
		return len(s.monitor.Sent()) > told && len(s.monitor.Pending()) == 0 &&
			slices.Equal(said, s.page()) && slices.Equal(said, saidBy(s.monitor.Active()))
	})
	if i.end != nil {
		i.end(s)
	}
	if !i.last {
		s.awaitCalm("after " + i.what)
	}
	assert.Equal(t, []string{i.said()}, saidBy(s.monitor.Sent()[told:]), "%s: notifications", i.what)
	return f
}

// lookInterval is the pause between two looks at what is said.
const lookInterval = 200 * time.Millisecond

// eventually waits for a state, and tells what is said instead if it does not come.
func (s *site) eventually(what string, cond func() bool) {
	s.t.Helper()
	came := false
	defer func() {
		if !came {
			s.t.Logf("not %s, but %q on the page, firing %q, pending %q", what, s.page(), saidBy(s.monitor.Firing()),
				saidBy(s.monitor.Pending()))
		}
	}()
	var looked time.Time
	testkit.Eventually(s.t, within, what, func() bool {
		if time.Since(looked) > lookInterval {
			came, looked = cond(), time.Now()
		}
		return came
	})
}

// awaitCalm waits until nothing is wrong.
func (s *site) awaitCalm(when string) {
	s.t.Helper()
	s.eventually("all is well "+when, func() bool {
		page := s.page()
		return page != nil && len(page) == 0 && len(s.monitor.Firing())+len(s.monitor.Pending())+len(s.monitor.Active()) == 0
	})
}

// saidBy is what alerts say. Those of one name are one notification if Alertmanager groups them by it.
func saidBy(alerts []testmonitor.Alert) (all []string) {
	for _, a := range alerts {
		all = append(all, a.Name()+" #"+a.Section())
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// look starts top.
func (s *site) look() *testkit.Cmd {
	s.t.Helper()
	c := s.command("top", "--once", "--output=json", "--log-level=error", "--scrape="+s.targets())
	c.KeepStdout()
	c.Start()
	return c
}

func hasEnded(c *testkit.Cmd) bool {
	select {
	case <-c.Done():
		return true
	default:
		return false
	}
}

// saidByTop is what top said of the troubles without a cause.
func (s *site) saidByTop(c *testkit.Cmd) (all []string) {
	s.t.Helper()
	var found fleet.Snapshot
	require.NoError(s.t, json.Unmarshal([]byte(c.Stdout()), &found), c.Output())
	for _, trouble := range found.Troubles {
		all = append(all, fmt.Sprintf("%s %s #%s", trouble.Name, trouble.Severity, trouble.Runbook))
	}
	slices.Sort(all)
	return slices.Compact(all)
}

var (
	shownTroubles = regexp.MustCompile(`(?s)<ul class="troubles">(.*?)</ul>`)
	shownSection  = regexp.MustCompile(`href="/docs/runbook#([a-z-]+)"`)
	shownSeverity = regexp.MustCompile(`^(critical|warning)\b`)
)

// page is what the dashboard says is wrong; nil if it does not answer. A consequence stands within its cause. The name
// of an alert is that of its section.
func (s *site) page() (all []string) {
	s.t.Helper()
	r, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.at("dashboard")+"/", nil)
	require.NoError(s.t, err)
	answer, err := s.client.Do(r)
	if err != nil {
		return nil
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	require.NoError(s.t, err)
	if strings.Contains(string(text), "Nothing is wrong.") {
		return []string{}
	}
	list := shownTroubles.FindStringSubmatch(html.UnescapeString(string(text)))
	if list == nil {
		return nil // the first look is under way
	}
	for _, one := range strings.Split(list[1], `<li class="`)[1:] {
		sections := shownSection.FindAllStringSubmatch(one, -1)
		require.NotEmpty(s.t, sections, one)
		section := sections[len(sections)-1][1]
		name := ""
		for word := range strings.SplitSeq(section, "-") {
			name += strings.ToUpper(word[:1]) + word[1:]
		}
		all = append(all, fmt.Sprintf("%s %s #%s", name, shownSeverity.FindString(one), section))
	}
	slices.Sort(all)
	return slices.Compact(all)
}

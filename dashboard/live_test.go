package dashboard

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/dashboard/fleet"
	"stampede/dashboard/live"
	"stampede/internal/test/testkit"
	"stampede/reservation"
)

// follower reads the stream of a page.
type follower struct {
	t      testing.TB
	answer *http.Response
	lines  *bufio.Scanner
}

type told struct {
	id, event string
	data      struct {
		N uint64                `json:"n"`
		V map[string]string     `json:"v"`
		F map[string]string     `json:"f"`
		P map[string][]*float64 `json:"p"`
	}
}

func (b *browser) follow(lastSeen string) *follower {
	b.t.Helper()
	r, err := http.NewRequestWithContext(b.t.Context(), http.MethodGet, b.desk.url+"/live", nil)
	require.NoError(b.t, err)
	if lastSeen != "" {
		r.Header.Set("Last-Event-ID", lastSeen)
	}
	answer, err := b.Do(r)
	require.NoError(b.t, err)
	b.t.Cleanup(func() { _ = answer.Body.Close() })
	require.Equal(b.t, http.StatusOK, answer.StatusCode)
	require.Equal(b.t, []string{"text/event-stream", "no-store, no-transform", "no"}, []string{
		answer.Header.Get("Content-Type"), answer.Header.Get("Cache-Control"), answer.Header.Get("X-Accel-Buffering"),
	})
	lines := bufio.NewScanner(answer.Body)
	lines.Buffer(nil, 1<<20)
	return &follower{b.t, answer, lines}
}

// next returns the next event; ok is false at the end of the stream.
func (f *follower) next() (e told, ok bool) {
	f.t.Helper()
	for f.lines.Scan() {
		name, value, _ := strings.Cut(f.lines.Text(), ": ")
		switch name {
		case "id":
			e.id = value
		case "event":
			e.event = value
		case "data":
			require.NoError(f.t, json.Unmarshal([]byte(value), &e.data))
		case "":
			if e.event != "" {
				return e, true
			}
		}
	}
	return e, false
}

func TestStreamHasAllAndThenChanges(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := uuid.New()
	d.fleet.publish(func(s *fleet.Snapshot) {
		s.Sales = []fleet.Sale{{
			ID: id, Terms: reservation.Terms{Name: hostile}, State: reservation.StateOpen, Stock: 10,
			Available: 10, UnitsKnown: true,
		}}
	})
	b := d.as("vic")
	f := b.follow("")
	first, ok := f.next()
	require.True(t, ok)
	require.Equal(t, "all", first.event)
	require.Equal(t, "10", first.data.V[id.String()+".available"])
	require.Contains(t, first.data.F["sales"], "&lt;script&gt;document.title=\\&#34;X\\&#34;")
	require.NotContains(t, first.data.F["sales"], "<script>")
	require.Len(t, first.data.P[id.String()], 8)

	d.fleet.publish(func(s *fleet.Snapshot) {
		sale := s.Sales[0]
		sale.Available, sale.Held = 9, 1
		s.Sales = []fleet.Sale{sale}
	})
	second, ok := f.next()
	require.True(t, ok)
	require.Equal(t, "change", second.event)
	require.Equal(t, "9", second.data.V[id.String()+".available"])
	require.NotContains(t, second.data.V, id.String()+".stock", "only what has changed")
	require.Empty(t, second.data.F, "figures are no part of fragments")

	// Whoever comes back gets what was missed, and everything if that is not known.
	d.fleet.publish(func(s *fleet.Snapshot) { s.DeadLetters = 3 })
	third, ok := f.next()
	require.True(t, ok)
	again, ok := b.follow(second.id).next()
	require.True(t, ok)
	require.Equal(t, third, again)
	for _, unknown := range []string{"x", "", strings.Replace(second.id, second.id[:3], "AAA", 1), second.id + "0"} {
		whole, ok := b.follow(unknown).next()
		require.True(t, ok)
		require.Equal(t, "all", whole.event, unknown)
		require.Equal(t, "3", whole.data.V["dead_letters"])
	}
}

func TestNumberOfStreamsIsBounded(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	b := d.as("vic")
	for range 24 {
		b.follow("")
	}
	status, text := b.get("/live")
	require.Equal(t, http.StatusTooManyRequests, status)
	require.Contains(t, text, "too many open pages")
	require.EqualValues(t, 24, testutil.ToFloat64(d.metrics.watchers))
	// Other operators are not kept out.
	_, ok := d.as("ann").follow("").next()
	require.True(t, ok)
	require.Greater(t, live.WatchersMax, 3*24)
}

// A call without a login must take no connection to the servers, and a proxy must not hide the pages in an outage.
func TestReadyInOutage(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	d.Dashboard.Catalog.Pool.Close()
	d.fleet.publish(func(s *fleet.Snapshot) { s.Postgres.Reachable, s.Redis.Reachable = false, false })
	status, text := d.browser().get("/readyz")
	require.Equal(t, http.StatusOK, status, text)
}

// A client that reads no answers is ended; a stream goes on for as long as its events are read.
func TestTimeLimitOfAnswers(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	cookieOfVic := d.as("vic").cookie()
	server := d.server()
	require.Greater(t, server.WriteTimeout, bulkTimeout, "the longest action is answered")
	server.WriteTimeout = 100 * time.Millisecond
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(func() { _ = server.Close(); serving.Wait() })

	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", listener.Addr().String())
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	require.NoError(t, conn.SetDeadline(time.Now().Add(within)))
	_, err = fmt.Fprintf(conn, "GET /live HTTP/1.1\r\nHost: localhost\r\nCookie: %s=%s\r\n\r\n", cookie, cookieOfVic)
	require.NoError(t, err)
	stream := bufio.NewScanner(conn)
	stream.Buffer(nil, 1<<20)
	await := func(line string) {
		for stream.Scan() {
			if strings.Contains(stream.Text(), line) {
				return
			}
		}
		require.Fail(t, "the stream has ended before "+line, stream.Err())
	}
	await("event: all")

	deaf, err := new(net.Dialer).DialContext(t.Context(), "tcp", listener.Addr().String())
	require.NoError(t, err)
	defer func() { _ = deaf.Close() }()
	require.NoError(t, deaf.SetDeadline(time.Now().Add(within)))
	for err == nil {
		_, err = deaf.Write([]byte("GET /assets/desk.js HTTP/1.1\r\nHost: localhost\r\n\r\n"))
	}
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)

	d.fleet.publish(func(*fleet.Snapshot) {})
	await("event: change") // long after the time limit of an answer
}

func TestHistoryOfCharts(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := uuid.New()
	now := time.Now()
	d.fleet.history = []fleet.Point{
		{At: now.Add(-time.Second), Rates: fleet.Rates{PurchasesKnown: true, Offered: 3, BacklogKnown: true, Backlog: 7}},
		{At: now, Rates: fleet.Rates{DurableKnown: true}, Sales: map[uuid.UUID]fleet.SalePoint{id: {
			Rates: fleet.Rates{PurchasesKnown: true, Offered: 5}, Available: 4,
		}}},
	}
	b := d.as("vic")
	_, all := b.get("/history?of=all")
	require.Contains(t, all, `"points":[[3,0,0,0,0,null,null,null,null,null,7,0],`+
		`[null,null,null,null,null,0,null,null,null,null,null,null]]`)
	_, units := b.get("/history?of=" + id.String())
	require.Contains(t, units, `"points":[[5,0,0,0,0,null,null,null]]`, "what is not known is not zero")
	for _, path := range []string{"/history?of=x", "/minutes?of=x"} {
		status, _ := b.get(path)
		require.Equal(t, http.StatusBadRequest, status)
	}
	_, rows := b.get("/minutes?of=all")
	require.Contains(t, rows, `<td class="n">7</td>`)
	_, rows = b.get("/minutes?of=" + id.String())
	require.Contains(t, rows, `<td class="n">–</td>`)
}

// A process that is gone has no figures: its last ones are not of now. One that is up may not be ready.
func TestTroubledProcesses(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	d.fleet.publish(func(s *fleet.Snapshot) {
		s.Processes = []fleet.Process{
			{Target: "http://a:1/metrics", Kind: "ingress", Since: time.Now(), CPU: .5, MemoryBytes: 1e8, PerSecond: 777},
			{Target: "http://c:1/metrics", Kind: "ingress", Up: true, NotReady: "Redis does not answer"},
			{Target: "http://b:1/metrics", Kind: "worker", Up: true, Since: time.Now(), RatesKnown: true},
		}
		s.Troubles = []fleet.Trouble{{
			Severity: fleet.Critical, Text: "No worker",
			Consequences: []fleet.Trouble{{Text: "Orders wait", Runbook: "order-waits"}},
		}}
	})
	_, page := d.as("vic").get("/")
	require.Regexp(t, `(?s)c:1.*▲ not ready</span><span class="sub bad">Redis does not answer`, page)
	require.Regexp(t, `(?s)No worker.*└ Orders wait.*/docs/runbook#order-waits`, page)
	require.Regexp(t, `(?s)a:1.*● gone.*data-live="process.0.per_second">–<.*b:1.*✓ up.*data-live="process.2.per_second">0<`, page)
	require.NotContains(t, page, "777")
}

// What every page says without script, and every book with its links.
func TestPagesAreReadableWithoutScript(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sale("drop", 40)
	d.show(id)
	b := d.as("vic")
	_, page := b.get("/")
	require.Contains(t, page, `<noscript><meta http-equiv="refresh" content="5"></noscript>`)
	require.Regexp(t, `(?s)drop.*open until it is ended.*available">40<`, page)
	_, page = b.get("/sales/" + id.String() + "?refresh=5")
	require.Contains(t, page, `http-equiv="refresh"`)
	_, page = b.get("/sales/" + id.String())
	require.NotContains(t, page, `http-equiv="refresh"`, "a form is filled in there")
	_, page = b.get("/docs/operations")
	require.Contains(t, page, `<h2 id="operators">`)
	require.Contains(t, page, `href="/docs/http-api#operators"`)
	require.NotContains(t, page, `href="../`, "there is no such page here")
	older := d.sale("older", 7)
	_, page = b.get("/sales/" + older.String())
	require.Contains(t, page, "load the page again for new figures")
	require.Contains(t, page, `.available">7<`)
}

// BenchmarkWatchers is what a snapshot of 50 sales that all sell costs, until every open page has it.
func BenchmarkWatchers(b *testing.B) {
	for _, watchers := range []int{1, 50} {
		b.Run(fmt.Sprint(watchers), func(b *testing.B) {
			d := openDesk(b)
			sales := make([]fleet.Sale, 50)
			for i := range sales {
				sales[i] = fleet.Sale{
					ID: uuid.New(), Terms: reservation.Terms{Name: fmt.Sprint("sale ", i)}, State: reservation.StateOpen,
					Stock: 1e6, UnitsKnown: true,
				}
			}
			change := func(s *fleet.Snapshot) {
				next := make([]fleet.Sale, len(sales))
				for i, sale := range sales {
					sale.Sold, sale.Available = int64(s.Number), 1e6-int64(s.Number)
					next[i] = sale
				}
				s.Sales = next
			}
			d.fleet.publish(change)
			seen := make(chan struct{}, watchers)
			var following sync.WaitGroup
			var streams []*follower
			browsers := []*browser{d.as("vic"), d.as("ann"), d.as("ada")}
			for i := range watchers {
				f := browsers[i%len(browsers)].follow("")
				streams = append(streams, f)
				following.Go(func() {
					for {
						if _, ok := f.next(); !ok {
							return
						}
						seen <- struct{}{}
					}
				})
			}
			for range watchers {
				<-seen
			}
			b.ReportAllocs()
			b.ResetTimer()
			for b.Loop() {
				d.fleet.publish(change)
				for range watchers {
					<-seen
				}
			}
			b.StopTimer()
			for _, f := range streams {
				_ = f.answer.Body.Close()
			}
			following.Wait()
		})
	}
}

// The work for a snapshot is done once, whoever watches; without a watcher it is not done.
func TestSnapshotIsRenderedOnce(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	b := d.as("vic")
	rendered := func() bool {
		d.boards.mu.Lock()
		defer d.boards.mu.Unlock()
		return d.boards.newest != nil && d.boards.newest.Number == d.fleet.Snapshot().Number
	}
	d.fleet.publish(func(*fleet.Snapshot) {})
	select {
	case <-time.After(200 * time.Millisecond):
	case <-t.Context().Done():
	}
	require.False(t, rendered(), "nobody watches")
	one, two := b.follow(""), b.follow("")
	_, ok := one.next()
	require.True(t, ok)
	_, ok = two.next()
	require.True(t, ok)
	testkit.Eventually(t, within, "both watchers", func() bool { return testutil.ToFloat64(d.metrics.watchers) == 2 })
	d.fleet.publish(func(s *fleet.Snapshot) { s.DeadLetters = 7 })
	first, ok := one.next()
	require.True(t, ok)
	second, ok := two.next()
	require.True(t, ok)
	require.Equal(t, first, second)
	before := d.boards.newest
	_, _ = b.get("/")
	require.Same(t, before, d.boards.newest, "a page takes what is rendered")
}

package fleet

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

func mustRead(t testing.TB, page string) *sample {
	t.Helper()
	s, err := read([]byte(page))
	require.NoError(t, err)
	return s
}

var noon = time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)

func at(seconds float64) time.Time { return noon.Add(time.Duration(seconds * float64(time.Second))) }

func TestIncreasesOfProcess(t *testing.T) {
	t.Parallel()
	first, started := ingressPage(1, 100, 200, 10, 5), int(at(1).Unix())
	for name, test := range map[string]struct {
		next    string
		seconds float64
		want    outcomes // per second
	}{
		"counts what was added":              {ingressPage(1, 150, 220, 14, 6), 1, outcomes{50, 20, 4, 1}},
		"counts per second":                  {ingressPage(1, 150, 220, 14, 6), 2, outcomes{25, 10, 2, 0.5}},
		"nothing was added":                  {first, 1, outcomes{}},
		"restarted, with lower counters":     {ingressPage(started, 40, 3, 0, 0), 1, outcomes{40, 3, 0, 0}},
		"lower counters of the same start":   {ingressPage(1, 40, 3, 0, 0), 1, outcomes{40, 3, 0, 0}},
		"restarted, and counted beyond them": {ingressPage(started, 140, 300, 10, 5), 1, outcomes{140, 300, 10, 5}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var p process
			p.seen(mustRead(t, first), nil, at(0))
			require.Zero(t, p.gained, "one sample is no rate")
			p.seen(mustRead(t, test.next), nil, at(test.seconds))
			var sum increase
			sum.add(&p.gained)
			require.Equal(t, test.want, sum.purchases)
			require.Equal(t, test.want[shed], sum.overloaded)
			rates := sum.purchases.rates()
			require.Equal(t, rates.Offered, rates.Accepted+rates.Refused+rates.Shed+rates.Failed)
		})
	}
}

func TestProcessThatComesBackCountsFromItsNewValue(t *testing.T) {
	t.Parallel()
	var p process
	p.seen(mustRead(t, ingressPage(1, 100, 0, 0, 0)), nil, at(0))
	p.seen(mustRead(t, ingressPage(1, 110, 0, 0, 0)), nil, at(1))
	require.EqualValues(t, 10, p.shown().PerSecond)

	p.seen(nil, fmt.Errorf("refused"), at(2))
	gone := p.shown()
	require.False(t, gone.Up)
	require.Equal(t, at(2), gone.Since)
	require.Equal(t, at(1), gone.LastSeen)
	require.Equal(t, "refused", gone.Error)
	require.Zero(t, gone.PerSecond)
	require.Equal(t, "ingress", gone.Kind, "the last figures stay")
	require.EqualValues(t, 3, gone.InFlight)
	p.seen(nil, fmt.Errorf("refused"), at(3))
	require.Equal(t, at(2), p.shown().Since)

	p.seen(mustRead(t, ingressPage(1, 900, 0, 0, 0)), nil, at(100))
	require.True(t, p.shown().Up)
	require.Equal(t, at(100), p.shown().Since)
	require.Zero(t, p.shown().PerSecond, "what it did meanwhile is no rate of now")
	f := &Fleet{processes: []*process{&p}}
	require.False(t, p.shown().RatesKnown)
	require.False(t, f.snapshot(at(100)).Rates.PurchasesKnown)
	p.seen(mustRead(t, ingressPage(1, 907, 0, 0, 0)), nil, at(101))
	require.EqualValues(t, 7, p.shown().PerSecond)
	require.True(t, p.shown().RatesKnown)
	require.True(t, f.snapshot(at(101)).Rates.PurchasesKnown)

	notReady := ingressPage(1, 907, 0, 0, 0) + "stampede_ready{process=\"ingress\",reason=\"Redis does not answer\"} 0\n"
	ready := ingressPage(1, 907, 0, 0, 0) + "stampede_ready{process=\"ingress\",reason=\"\"} 1\n"
	for second, text := range []string{notReady, notReady, ready} {
		p.seen(mustRead(t, text), nil, at(float64(200+second)))
		require.True(t, p.shown().Up)
		require.Equal(t, text == notReady, p.shown().NotReady == "Redis does not answer")
		require.Equal(t, map[bool]time.Time{true: at(200), false: at(202)}[text == notReady], p.shown().Since)
	}
}

// A load balancer, or one name with several addresses: each look may reach another process.
func TestSeveralProcessesBehindOneAddressAreTrouble(t *testing.T) {
	t.Parallel()
	p := &process{name: "http://balanced/metrics"}
	f, s, r := healthy()
	f.processes = append(f.processes, p)
	look := func(second, start, sold int) float64 {
		p.seen(mustRead(t, ingressPage(start, sold, 0, 0, 0)), nil, at(float64(second)))
		s.At, s.Troubles = at(float64(second)), nil
		f.troubles.update(f, s, r)
		return p.gained.perSecond(p.gained.purchases.total())
	}
	older, newer := int(at(-86400).Unix()), int(at(-86000).Unix())
	require.Zero(t, look(0, older, 5_000_000))
	require.EqualValues(t, 7, look(1, older, 5_000_007))
	require.Empty(t, s.Troubles)
	for second := 2; second < 10; second += 2 {
		require.Zero(t, look(second, newer, 6_000_000), "nobody has bought anything")
		require.Zero(t, look(second+1, older, 5_000_007))
	}
	require.Equal(t, []string{targetGone.name}, troubleNames(s))
	require.Contains(t, s.Troubles[0].Text, "several processes answer at http://balanced/metrics")
	require.Zero(t, p.rebuilds)
	require.EqualValues(t, 3, look(10, older, 5_000_010))
	require.NotEmpty(t, s.Troubles, "the next one may be the other again")
	look(80, older, 5_000_010)
	require.Empty(t, s.Troubles)
	require.EqualValues(t, 5, look(81, int(at(80).Unix()), 5), "a restart")
	require.Empty(t, s.Troubles)
}

func TestRebuildOfRestartedWorkerIsTrouble(t *testing.T) {
	t.Parallel()
	rebuilt := func(start, lost, byHand int) string {
		return workerPage(start, 0, 0, 0, "a") + fmt.Sprintf("# TYPE stampede_rebuilds_total counter\n"+
			"stampede_rebuilds_total{reason=\"server\"} %d\nstampede_rebuilds_total{reason=\"by-hand\"} %d\n", lost, byHand)
	}
	var p process
	p.seen(mustRead(t, rebuilt(1, 1, 0)), nil, at(0))
	require.Zero(t, p.rebuilds, "that was before")
	p.seen(mustRead(t, rebuilt(1, 1, 1)), nil, at(1))
	require.Zero(t, p.rebuilds, "an operator asked for it")

	worker := newPage(t, rebuilt(1, 1, 0))
	f, _ := newFleet(t, worker.target())
	s := f.play(t, "it answers", func(s *Snapshot) bool { return s.Processes[0].Up })
	require.NotContains(t, troubleNames(s), stockRebuilt.name)
	worker.answer(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) })
	f.play(t, "it is gone", func(s *Snapshot) bool { return !s.Processes[0].Up })
	worker.handle.Store(nil)
	worker.set(rebuilt(int(time.Now().Unix()), 1, 0))
	f.play(t, "the rebuild of the new process is shown", func(s *Snapshot) bool {
		return slices.Contains(troubleNames(s), stockRebuilt.name)
	})
}

func TestOneTimeoutIsNotTheEndOfProcess(t *testing.T) {
	t.Parallel()
	var p process
	p.seen(mustRead(t, ingressPage(1, 100, 0, 0, 0)), nil, at(0))
	p.seen(nil, context.DeadlineExceeded, at(1))
	require.True(t, p.shown().Up)
	p.seen(mustRead(t, ingressPage(1, 130, 0, 0, 0)), nil, at(2))
	require.EqualValues(t, 15, p.shown().PerSecond, "of both seconds")
	p.seen(nil, context.DeadlineExceeded, at(3))
	p.seen(nil, context.DeadlineExceeded, at(4))
	require.False(t, p.shown().Up)
	require.Contains(t, p.shown().Error, "in time")
}

func TestSaleRatesAreThoseOfTheirPurchases(t *testing.T) {
	t.Parallel()
	id := uuid.New()
	text := func(acceptedN, refusedN int) string {
		return ingressPage(1, 0, 0, 0, 0) + fmt.Sprintf(`# TYPE stampede_sale_purchases_total counter
stampede_sale_purchases_total{sale="%[1]s",outcome="accepted"} %[2]d
stampede_sale_purchases_total{sale="%[1]s",outcome="refused"} %[3]d
stampede_sale_purchases_total{sale="other",outcome="refused"} 7
stampede_sale_purchases_total{sale="%[1]s",outcome="of a later version"} 7
`, id, acceptedN, refusedN)
	}
	var p, q process
	p.seen(mustRead(t, ingressPage(1, 0, 0, 0, 0)), nil, at(0))
	q.seen(mustRead(t, text(1, 1)), nil, at(0))
	p.seen(mustRead(t, text(5, 2)), nil, at(1))
	q.seen(mustRead(t, text(11, 1)), nil, at(1))
	var sum increase
	sum.add(&p.gained)
	sum.add(&q.gained)
	require.Equal(t, map[uuid.UUID]outcomes{id: {15, 2, 0, 0}}, sum.sales)
}

// Two instances observe known values; the merged quantiles are those of the values, to the width of a bucket, and
// exactly those that Prometheus would estimate.
func TestQuantilesAreExact(t *testing.T) {
	t.Parallel()
	require.Zero(t, histogram{}.quantile(0.99))
	// 1 to 100 in buckets of ten: each quantile is a value.
	h := histogram{}
	for bound := 10.0; bound <= 100; bound += 10 {
		h.bounds, h.counts = append(h.bounds, bound), append(h.counts, bound)
	}
	h.bounds, h.counts = append(h.bounds, math.Inf(1)), append(h.counts, 100)
	for q, want := range map[float64]float64{0.5: 50, 0.99: 99, 0.01: 1, 1: 100, 0.255: 25.5} {
		require.InDelta(t, want, h.quantile(q).Seconds(), 1e-6, q)
	}
	beyond := histogram{bounds: []float64{1, math.Inf(1)}, counts: []float64{1, 10}}
	require.Equal(t, time.Second, beyond.quantile(0.99), "the highest finite bound")
	require.True(t, beyond.valid())

	var pages [2]string
	bounds := []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1, 5}
	random := rand.New(rand.NewPCG(1, 2))
	exact := histogram{bounds: append(bounds, math.Inf(1)), counts: make([]float64, len(bounds)+1)}
	for i := range pages {
		registry := prometheus.NewRegistry()
		vec := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: metricPurchaseSeconds, Buckets: bounds},
			[]string{"outcome"})
		registry.MustRegister(vec)
		for range 1000 {
			v := random.ExpFloat64() / 50
			vec.WithLabelValues([]string{"accepted", "refused", "failed"}[random.IntN(3)]).Observe(v)
			for b := range exact.bounds {
				if v <= exact.bounds[b] {
					exact.counts[b]++
				}
			}
		}
		families, err := registry.Gather()
		require.NoError(t, err)
		var text bytes.Buffer
		for _, family := range families {
			_, err := expfmt.MetricFamilyToText(&text, family)
			require.NoError(t, err)
		}
		pages[i] = ingressPage(1, 0, 0, 0, 0) + text.String()
	}
	merged := mustRead(t, pages[0]).answers.plus(mustRead(t, pages[1]).answers)
	require.Equal(t, exact, merged)
	require.InDelta(t, math.Ln2/50, merged.quantile(0.5).Seconds(), 0.002, "the median of the distribution")

	grown := histogram{bounds: merged.bounds, counts: make([]float64, len(merged.counts))}
	for i := range grown.counts {
		grown.counts[i] = 3 * merged.counts[i]
	}
	require.Equal(t, merged.quantile(0.99), grown.since(merged).quantile(0.99))
	require.Equal(t, 2*merged.total(), grown.since(merged).total())
	require.Equal(t, merged, merged.since(grown), "after a restart all are new")
}

// During a rolling upgrade, histograms of two versions differ in their buckets.
func TestHistogramsWithOtherBucketsAreMerged(t *testing.T) {
	t.Parallel()
	a := histogram{bounds: []float64{1, 2, math.Inf(1)}, counts: []float64{10, 20, 20}}
	b := histogram{bounds: []float64{2, 4, math.Inf(1)}, counts: []float64{10, 30, 40}}
	require.Equal(t, histogram{
		bounds: []float64{1, 2, 4, math.Inf(1)}, counts: []float64{15, 30, 50, 60},
	}, a.plus(b))
	require.Equal(t, a.plus(b), b.plus(a))
	require.Equal(t, a, histogram{}.plus(a))
	require.Equal(t, a, a.plus(histogram{}))
}

func TestRatesOfTargetsAreSummed(t *testing.T) {
	t.Parallel()
	one, two := newPage(t, ingressPage(1, 0, 0, 0, 0)), newPage(t, ingressPage(1, 1000, 0, 0, 0))
	f, _ := newFleet(t, one.target(), two.target())
	f.play(t, "both answer", func(s *Snapshot) bool { return s.Processes[0].Up && s.Processes[1].Up })
	n := 0
	grow := func() {
		n++
		one.set(ingressPage(1, n*10, 0, 0, 0))
		two.set(ingressPage(1, 1000+n*30, 0, 0, 0))
	}
	s := f.play(t, "rates", func(s *Snapshot) bool {
		grow()
		return s.Rates.Accepted > 0 && s.Processes[1].PerSecond > s.Processes[0].PerSecond
	})
	require.InEpsilon(t, s.Processes[0].PerSecond+s.Processes[1].PerSecond, s.Rates.Accepted, 1e-9)
	require.Equal(t, []string{one.target(), two.target()}, []string{s.Processes[0].Target, s.Processes[1].Target})
	require.Equal(t, "v1.2.3", s.Processes[0].Version)

	two.CloseClientConnections()
	two.Close()
	s = f.play(t, "one is gone", func(s *Snapshot) bool { return !s.Processes[1].Up })
	require.Contains(t, troubleNames(s), targetGone.name)
	require.False(t, s.Processes[1].LastSeen.IsZero())
	s = f.play(t, "the other one counts", func(s *Snapshot) bool { grow(); return s.Rates.Accepted > 0 })
	require.InEpsilon(t, s.Processes[0].PerSecond, s.Rates.Accepted, 1e-9)
	require.True(t, s.Rates.PurchasesKnown)
	one.CloseClientConnections()
	one.Close()
	s = f.play(t, "both are gone", func(s *Snapshot) bool { return !s.Processes[0].Up })
	require.False(t, s.Rates.PurchasesKnown, "nobody knows")
}

func TestHostileTargetsAreErrorsOfTheirOwn(t *testing.T) {
	t.Parallel()
	good := newPage(t, ingressPage(1, 0, 0, 0, 0))
	released := make(chan struct{})
	t.Cleanup(func() { close(released) })
	write := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(text)) }
	}
	hostile := map[string]struct {
		answer http.HandlerFunc
		want   string
	}{
		"a web page":      {write("<html><body>hello</body></html>\n"), "not with the metrics"},
		"nothing":         {write(""), "not with the metrics"},
		"another program": {write("# TYPE go_goroutines gauge\ngo_goroutines 3\n"), "not with the metrics"},
		"broken":          {write("# TYPE stampede_purchases_total counter\nstampede_purchases_total{verdict=\"re"), "parsed"},
		"a number that is none": {
			write("# TYPE stampede_purchases_total counter\nstampede_purchases_total{verdict=\"reserved\"} many\n"), "parsed",
		},
		"without end": {func(w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				if _, err := w.Write(bytes.Repeat([]byte("stampede_purchases_total{verdict=\"x\"} 1\n"), 1000)); err != nil {
					return
				}
			}
		}, "longer than"},
		"silence": {func(_ http.ResponseWriter, r *http.Request) {
			select {
			case <-released:
			case <-r.Context().Done():
			}
		}, "in time"},
		"a trickle": {func(w http.ResponseWriter, r *http.Request) {
			_, _ = w.Write([]byte("# TYPE stampede_build_info gauge\n"))
			w.(http.Flusher).Flush()
			select {
			case <-released:
			case <-r.Context().Done():
			}
		}, "in time"},
		"a redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, good.target(), http.StatusFound)
		}, "status 302"},
		"a refusal": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }, "status 403"},
	}
	targets := []string{good.target()}
	var names []string
	for name, h := range hostile {
		p := newPage(t, "")
		p.answer(h.answer)
		names, targets = append(names, name), append(targets, strings.Replace(p.target(), "//", "//ann:secret@", 1))
	}
	f, _ := newFleet(t, targets...)
	s := f.play(t, "each has its error", func(s *Snapshot) bool {
		for i, name := range names {
			if !strings.Contains(s.Processes[i+1].Error, hostile[name].want) {
				return false
			}
		}
		return s.Processes[0].Up
	})
	for i, name := range names {
		p := s.Processes[i+1]
		require.False(t, p.Up, name)
		require.NotContains(t, p.Error+p.Target, "secret", name)
		require.NotContains(t, p.Target, "ann", name)
		require.NotContains(t, p.Error, "http://", name)
	}
	// None of them delays the next snapshot: only what answered is waited for.
	requireNoDelay(t, f)
	require.True(t, f.Snapshot().Processes[0].Up)
}

func TestFiguresOfStrangersAreFinite(t *testing.T) {
	t.Parallel()
	s := mustRead(t, `# TYPE stampede_build_info gauge
stampede_build_info{version="`+strings.Repeat("v", 10_000)+`"} 1
# TYPE stampede_purchases_total counter
stampede_purchases_total{verdict="reserved"} NaN
stampede_purchases_total{verdict="sold-out"} +Inf
stampede_purchases_total{verdict="paused"} -5
stampede_purchases_total{verdict="ended"} 1e300
# TYPE stampede_worker_failing gauge
stampede_worker_failing{step="a\nb`+"\u202e\u009bc"+`"} 1
`)
	require.Less(t, len(s.version), 200)
	require.Equal(t, outcomes{0, 1e15, 0, 0}, s.purchases)
	require.Equal(t, []string{"a b  c"}, s.failing)
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(ingressPage(1, 2, 3, 4, 5)))
	f.Add([]byte(workerPage(1, 2, 3, 4, "a")))
	f.Add([]byte("# TYPE stampede_purchase_duration_seconds histogram\n" +
		"stampede_purchase_duration_seconds_bucket{le=\"1\"} 3\nstampede_purchase_duration_seconds_bucket{le=\"+Inf\"} 2\n" +
		"# TYPE stampede_build_info gauge\nstampede_build_info 1\n"))
	f.Fuzz(func(t *testing.T, page []byte) {
		s, err := read(page)
		if err != nil {
			return
		}
		before := mustRead(t, ingressPage(1, 1, 1, 1, 1))
		gained := s.since(before, time.Second)
		for _, n := range append(gained.purchases[:], gained.answers.quantile(0.99).Seconds(), gained.cpu, gained.recorded) {
			require.False(t, math.IsNaN(n) || math.IsInf(n, 0) || n < 0, n)
		}
	})
}

func TestBacklogOfWorkersIsNotAdded(t *testing.T) {
	t.Parallel()
	one, two := newPage(t, workerPage(1, 0, 40, 7, "a")), newPage(t, workerPage(1, 0, 50, 5, "b"))
	f, _ := newFleet(t, one.target(), two.target())
	s := f.play(t, "both answer", func(s *Snapshot) bool { return s.Processes[0].Up && s.Processes[1].Up })
	require.True(t, s.Rates.BacklogKnown)
	require.EqualValues(t, 100, s.Rates.Backlog, "the higher one of each stream")
	require.Equal(t, 7*time.Second, s.Rates.OldestWaiting)
	require.Equal(t, []string{"a"}, s.Processes[0].Readers)
	require.Equal(t, "worker", s.Processes[0].Kind)

	one.set(workerPage(1, 0, 0, 99, "a"))
	two.set(workerPage(1, 0, 0, 99, "b"))
	s = f.play(t, "nothing waits", func(s *Snapshot) bool { return s.Rates.Backlog == 0 })
	require.Zero(t, s.Rates.OldestWaiting, "the first entry is done, and not trimmed yet")

	one.Close()
	two.Close()
	s = f.play(t, "both are gone", func(s *Snapshot) bool { return !s.Processes[0].Up && !s.Processes[1].Up })
	require.False(t, s.Rates.BacklogKnown, "nobody knows")
	require.Contains(t, troubleNames(s), noWorker.name)
}

func TestTargetsAreChecked(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"", "worker:9090", "ftp://worker/metrics", "http://", "dns+worker:9090", "://", "http://a b",
	} {
		_, err := parseTarget(text)
		require.ErrorIs(t, err, errTarget, text)
	}
	for text, want := range map[string]string{
		"http://worker:9090":                  "http://worker:9090/metrics",
		"https://ann:secret@worker/m?a=b":     "https://worker/m?a=b",
		"dns+http://worker:9090/metrics":      "http://worker:9090/metrics",
		"dns+https://[2001:db8::1]:1/metrics": "https://[2001:db8::1]:1/metrics",
	} {
		parsed, err := parseTarget(text)
		require.NoError(t, err, text)
		require.Equal(t, want, parsed.name())
		require.Equal(t, strings.HasPrefix(text, dnsScheme), parsed.dns)
	}
}

// The addresses of a name are processes of their own, and change while the fleet runs.
func TestEachAddressOfNameIsProcess(t *testing.T) {
	t.Parallel()
	p := newPage(t, ingressPage(1, 0, 0, 0, 0))
	f, _ := newFleet(t, "dns+"+strings.Replace(p.target(), "127.0.0.1", "localhost", 1), "dns+http://none.invalid:1")
	s := f.play(t, "localhost is resolved", func(s *Snapshot) bool {
		for _, one := range s.Processes {
			if one.Up {
				return len(s.Processes) >= 2 && s.Processes[len(s.Processes)-1].Error != ""
			}
		}
		return false
	})
	require.Contains(t, s.Processes[0].Target, "127.0.0.1")
	require.Equal(t, "dns+http://none.invalid:1/metrics", s.Processes[len(s.Processes)-1].Target)
	testkit.Eventually(t, 30*time.Second, "the name without an address is a trouble", func() bool {
		f.round(context.Background())
		return strings.Contains(fmt.Sprint(f.Snapshot().Troubles), "none.invalid")
	})
}

package keyset

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// published is a provider, and the source of its keys.
type published struct {
	*Source
	t       *testing.T
	answer  atomic.Pointer[func(http.ResponseWriter)]
	asked   atomic.Int64
	log     bytes.Buffer
	metrics *prometheus.Registry
}

func publish(t *testing.T, answer func(http.ResponseWriter)) *published {
	t.Helper()
	p := &published{t: t, metrics: prometheus.NewRegistry()}
	p.answer.Store(&answer)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		p.asked.Add(1)
		(*p.answer.Load())(w)
	}))
	t.Cleanup(server.Close)
	var err error
	p.Source, err = New(t.Context(), server.URL, slog.New(slog.NewTextHandler(&p.log, nil)), p.metrics)
	require.NoError(t, err)
	return p
}

// runs has the keys kept fresh until the returned function is called.
func (p *published) runs() (stop func()) {
	ctx, cancel := context.WithCancel(p.t.Context())
	var running sync.WaitGroup
	running.Go(func() { p.Run(ctx) })
	stop = func() {
		cancel()
		running.Wait()
	}
	p.t.Cleanup(stop)
	return stop
}

func (p *published) fetches(answer func(http.ResponseWriter)) {
	p.answer.Store(&answer)
	p.fetch(p.t.Context())
}

func (p *published) shows(usable, ignored, current float64) {
	p.t.Helper()
	require.Equal(p.t, []float64{usable, ignored, current}, []float64{
		testutil.ToFloat64(p.counts.WithLabelValues("usable")), testutil.ToFloat64(p.counts.WithLabelValues("ignored")),
		testutil.ToFloat64(p.current),
	})
}

func sends(text []byte) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) { _, _ = w.Write(text) }
}

func fails(w http.ResponseWriter) { w.WriteHeader(http.StatusBadGateway) }

func TestKeysOutliveFailures(t *testing.T) {
	t.Parallel()
	p := publish(t, fails)
	require.Nil(t, p.Known())
	p.shows(0, 0, 0)
	require.Contains(t, p.log.String(), "502 Bad Gateway")
	p.fetches(sends(setOf(t, rsaKey(), ecKey().with(object{"use": "tls"}))))
	p.shows(1, 1, 1)
	known := p.Known()
	for name, answer := range map[string]func(http.ResponseWriter){
		"an error":      fails,
		"a page":        sends([]byte("<html>maintenance</html>")),
		"no keys":       sends([]byte(`{"keys":[]}`)),
		"no usable key": sends(setOf(t, rsaKey().with(object{"use": "tls"}))),
		"a huge set":    sends([]byte(`{"keys":[],"x":"` + strings.Repeat("x", bytesMax) + `"}`)),
		"another status with keys": func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusNonAuthoritativeInfo)
			_, _ = w.Write(setOf(t, ecKey()))
		},
	} {
		p.fetches(answer)
		require.Same(t, known, p.Known(), name)
		p.shows(1, 1, 0)
	}
	require.Greater(t, p.pause(), retryLongest, "it is not asked as often as without keys")
	require.LessOrEqual(t, p.pause(), retryKnown)
	p.fetches(sends(setOf(t, rsaKey(), ecKey())))
	p.shows(2, 0, 1)
	require.Greater(t, p.pause(), retryKnown)
	require.Contains(t, p.log.String(), "can fetch the key set again")
}

func TestIgnoredKeysAreLoggedOnce(t *testing.T) {
	t.Parallel()
	odd := rsaKey().with(object{"kid": "odd", "use": "tls"})
	p := publish(t, sends(setOf(t, rsaKey(), odd)))
	require.Contains(t, p.log.String(), `key 2 (kid \"odd\"): its use is \"tls\"`)
	lines := func() int { return strings.Count(p.log.String(), "is ignored") }
	require.Equal(t, 1, lines())
	p.fetches(fails)
	p.fetches(sends(setOf(t, rsaKey(), odd)))
	require.Equal(t, 1, lines())
	p.fetches(sends(setOf(t, rsaKey(), odd, odd.with(object{"kid": "more"}))))
	require.Equal(t, 2, lines())
	many := []any{rsaKey()}
	for range 10 * linesMax {
		many = append(many, odd.with(object{"kid": strings.Repeat("k", 1000)}))
	}
	p.fetches(sends(setOf(t, many...)))
	require.Equal(t, 2+linesMax, lines())
	require.Less(t, p.log.Len(), 100*200)
	p.shows(1, 10*linesMax, 1)
}

func TestProviderIsAskedUntilItHasKeys(t *testing.T) {
	t.Parallel()
	p := publish(t, fails)
	for p.failed = 1; p.failed < 20; p.failed++ {
		require.LessOrEqual(t, p.pause(), retryLongest)
		require.GreaterOrEqual(t, p.pause(), retryFirst/2)
	}
	p.failed = 1
	p.runs()
	testkit.Eventually(t, 30*time.Second, "the provider is asked again", func() bool { return p.asked.Load() > 2 })
	answer := sends(setOf(t, rsaKey()))
	p.answer.Store(&answer)
	testkit.Eventually(t, 30*time.Second, "the key is known", func() bool { return p.Known() != nil })
}

// However many tokens no key verifies, the provider is asked once for all of them.
func TestTokensHaveProviderAskedOnce(t *testing.T) {
	t.Parallel()
	p := publish(t, sends(setOf(t, rsaKey())))
	p.runs()
	held, began := make(chan struct{}), make(chan struct{}, 2)
	answer := func(w http.ResponseWriter) {
		began <- struct{}{}
		<-held
		sends(setOf(t, ecKey()))(w)
	}
	p.answer.Store(&answer)
	var asking sync.WaitGroup
	asking.Go(func() { require.NoError(t, p.Renew(t.Context())) })
	<-began
	for range waitingMax - 1 {
		asking.Go(func() { require.NoError(t, p.Renew(t.Context())) })
	}
	testkit.Eventually(t, 30*time.Second, "all wait", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.waiting == waitingMax
	})
	require.ErrorIs(t, p.Renew(t.Context()), errBusy)
	close(held)
	asking.Wait()
	require.Len(t, p.Known().Find("a", "ES256"), 1)
	require.NoError(t, p.Renew(t.Context()), "asked a moment ago")
	require.EqualValues(t, 2, p.asked.Load())

	p.mu.Lock()
	require.Zero(t, p.waiting)
	p.renewed = p.renewed.Add(-renewInterval)
	p.mu.Unlock()
	next := sends(setOf(t, okpKey()))
	p.answer.Store(&next)
	require.NoError(t, p.Renew(t.Context()))
	require.Len(t, p.Known().Find("a", "EdDSA"), 1)
	require.EqualValues(t, 3, p.asked.Load())
}

// A provider that hangs holds a request no longer than renewWait.
func TestProviderThatHangsHoldsNobodyForLong(t *testing.T) {
	t.Parallel()
	p := publish(t, sends(setOf(t, rsaKey())))
	began := time.Now()
	require.NoError(t, p.Renew(t.Context())) // nothing runs
	require.Less(t, time.Since(began), 10*renewWait)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, p.Renew(gone))
}

package keyset

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/retry"
	"stampede/internal/telemetry"
)

const (
	fetchTimeout = 3 * time.Second
	refresh      = 15 * time.Minute
	// With old keys the provider is asked again retryKnown after a failure, because they may be revoked.
	retryKnown = time.Minute
	// Without keys nobody can buy: the pause grows from retryFirst to retryLongest.
	retryFirst, retryLongest = time.Second, 5 * time.Second
	// renewInterval is the pause between fetches for tokens that no key verifies, which any client can invent.
	renewInterval = 10 * time.Second
	// renewWait bounds how long a request waits for such a fetch, and waitingMax how many do.
	renewWait  = 2 * time.Second
	waitingMax = 256
	// linesMax bounds the log lines about ignored keys of one fetch.
	linesMax = 20
)

// errBusy means that too many requests wait for the provider's answer to wait for it, too.
var errBusy = errors.New("too many requests wait for the key set")

// Fetch gets the set of a URL, as Parse does.
func Fetch(ctx context.Context, url string) (*Keys, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = answer.Body.Close() }()
	var keys *Keys
	text, err := io.ReadAll(io.LimitReader(answer.Body, bytesMax+1))
	switch {
	case answer.StatusCode != http.StatusOK:
		err = errors.New(answer.Status)
	case len(text) > bytesMax:
		err = fmt.Errorf("the answer has more than %d bytes", bytesMax)
	case err == nil:
		keys, err = parse(text)
	}
	if err != nil {
		return keys, fmt.Errorf("GET %s: %w", request.URL.Redacted(), err)
	}
	return keys, nil
}

// Source has the keys of a URL. It is safe for concurrent use.
type Source struct {
	url    string
	log    *slog.Logger
	known  atomic.Pointer[Keys]
	wanted chan struct{} // wakes Run

	counts  *prometheus.GaugeVec
	current prometheus.Gauge

	mu sync.Mutex
	// renewed is when a fetch was wanted last because of a token. renewing is closed when the next fetch ends; nil if
	// none is wanted.
	renewed  time.Time
	renewing chan struct{}
	waiting  int

	// Of the goroutine that fetches.
	outage  retry.Outage
	failed  int // times in a row
	ignored []string
}

// New fetches the keys once. If that fails, there are none until Run has fetched them. Without a URL the source is nil,
// and only its metrics exist.
func New(ctx context.Context, url string, log *slog.Logger, registerer prometheus.Registerer) (*Source, error) {
	s := &Source{
		url: url, log: log, wanted: make(chan struct{}, 1), outage: retry.Outage{Log: log, Doing: "fetch the key set"},
		counts: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "stampede_key_set_keys",
			Help: "Keys of the set at STAMPEDE_JWKS_URL that verify tokens of buyers (usable), and those that cannot be used " +
				"(ignored).",
		}, []string{"state"}),
		current: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "stampede_key_set_current",
			Help: "1 if the latest try to fetch the set at STAMPEDE_JWKS_URL gave keys, or there is no such URL, else 0.",
		}),
	}
	for _, collector := range []prometheus.Collector{s.counts, s.current} {
		if err := registerer.Register(collector); err != nil {
			return nil, fmt.Errorf("key set: %w", err)
		}
	}
	s.count("usable", 0)
	s.count("ignored", 0)
	if url == "" {
		s.current.Set(1)
		return nil, nil
	}
	s.fetch(ctx)
	return s, nil
}

func (s *Source) count(state string, n int) { s.counts.WithLabelValues(state).Set(float64(n)) }

// Known returns the latest keys, or nil if there were none yet.
func (s *Source) Known() *Keys { return s.known.Load() }

// Run keeps the keys fresh until ctx is done. A failure keeps those that are known.
func (s *Source) Run(ctx context.Context) {
	for {
		pause := time.NewTimer(s.pause())
		select {
		case <-pause.C:
		case <-s.wanted:
			pause.Stop()
		case <-ctx.Done():
			pause.Stop()
			return
		}
		s.mu.Lock()
		renewing := s.renewing
		s.mu.Unlock()
		s.fetch(ctx)
		if renewing != nil { // one that was wanted since then comes next
			s.mu.Lock()
			s.renewing = nil
			s.mu.Unlock()
			close(renewing)
		}
	}
}

// pause is the pause before the next fetch.
func (s *Source) pause() time.Duration {
	switch {
	case s.failed == 0:
		return retry.Delay(1, refresh, refresh)
	case s.known.Load() == nil:
		return retry.Delay(s.failed, retryFirst, retryLongest)
	}
	return retry.Delay(1, retryKnown, retryKnown)
}

func (s *Source) fetch(ctx context.Context) {
	keys, err := Fetch(ctx, s.url)
	if ctx.Err() != nil {
		return
	}
	s.outage.Note(err)
	s.current.Set(telemetry.OneIf(err == nil))
	if keys != nil {
		s.noteIgnored(ctx, keys.Ignored)
	}
	if err != nil {
		s.failed++
		return
	}
	s.failed = 0
	s.known.Store(keys)
	s.count("usable", keys.Len())
}

// noteIgnored logs those keys that the last set did not have.
func (s *Source) noteIgnored(ctx context.Context, ignored []string) {
	s.count("ignored", len(ignored))
	lines := 0
	for _, one := range ignored {
		if lines < linesMax && !slices.Contains(s.ignored, one) {
			s.log.WarnContext(ctx, "a key of the key set cannot be used and is ignored", "reason", one)
			lines++
		}
	}
	s.ignored = ignored
}

// Renew has the provider asked again, because no known key verifies a token, and waits for its answer. If it was asked
// for another token a moment ago, nothing happens.
func (s *Source) Renew(ctx context.Context) error {
	answered, err := s.want()
	if answered == nil {
		return err
	}
	limit := time.NewTimer(renewWait)
	defer limit.Stop()
	select {
	case <-answered:
	case <-limit.C:
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting--
	return nil
}

// want returns what is closed when the provider has answered, or nil if the caller is not to wait.
func (s *Source) want() (answered <-chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.renewing == nil {
		if time.Since(s.renewed) < renewInterval {
			return nil, nil
		}
		s.renewed, s.renewing = time.Now(), make(chan struct{})
		select {
		case s.wanted <- struct{}{}:
		default:
		}
	}
	if s.waiting == waitingMax {
		return nil, errBusy
	}
	s.waiting++
	return s.renewing, nil
}

package ingress

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"stampede/draw"
	"stampede/internal/forwarded"
	"stampede/internal/ratelimit"
	"stampede/ledger/problems"
)

// Limit bounds how often each user or each address may call this server: a burst of Burst calls, and Rate from
// then on. The zero Limit is unlimited.
type Limit struct {
	Rate  ratelimit.Rate
	Burst int
}

var problemRateLimited = fixed(problem{
	Kind: problems.RateLimited, detail: "Nothing was done. Retry after the seconds in Retry-After.",
})

// clientLimits bounds each client. Each kind of call has buckets of its own, so that a buyer who purchases too
// often can still pay.
type clientLimits struct {
	proxies   forwarded.Proxies
	purchases callLimits
	orders    callLimits // paying, cancelling, and looking at orders
	others    callLimits // everything else

	orderStreams, saleStreams, downloads streamLimits

	// addressStreams is Config.AddressStreams, and refused counts who gets none of its places.
	addressStreams int
	refused        *prometheus.CounterVec

	log          *slog.Logger
	proxyWarning cooldown
}

func newClientLimits(c Config, registry *prometheus.Registry) (*clientLimits, error) {
	refused := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_rate_limited_total",
		Help: "Requests answered rate-limited, by the kind of limit (user or address) and of call.",
	}, []string{"by", "calls"})
	collectors := []prometheus.Collector{refused}
	limited := func(limit Limit, by, calls string) rateLimit {
		made := rateLimit{refused: refused.WithLabelValues(by, calls)}
		if limit.Rate > 0 {
			made.limiter = ratelimit.New(limit.Rate, limit.Burst)
		}
		collectors = append(collectors, prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name:        "stampede_rate_limit_evictions_total",
			Help:        "Clients whose calls were forgotten early, because the table of a rate limit was full.",
			ConstLabels: prometheus.Labels{"by": by, "calls": calls},
		}, made.evicted))
		return made
	}
	calls := func(kind string) callLimits {
		return callLimits{user: limited(c.UserLimit, "user", kind), address: limited(c.AddressLimit, "address", kind)}
	}
	l := &clientLimits{
		proxies: c.TrustedProxies, addressStreams: c.AddressStreams, refused: refused, log: c.Logger,
		purchases: calls("purchases"), orders: calls("orders"),
		others: callLimits{address: limited(c.AddressLimit, "address", "others")},
	}
	for kind, streams := range map[string]*streamLimits{"order-streams": &l.orderStreams, "sale-streams": &l.saleStreams} {
		streams.all.limit = int64(c.MaxStreams)
		streams.byAddress.limit, streams.byAddress.refused = c.AddressStreams, refused.WithLabelValues("address", kind)
	}
	l.orderStreams.tooMany, l.saleStreams.tooMany, l.downloads.tooMany =
		problemTooManyStreams, problemTooManyStreams, problemTooManyDownloads
	l.downloads.all.limit = downloadsMax
	l.downloads.byAddress.limit = min(c.AddressStreams, addressDownloads)
	l.downloads.byAddress.refused = refused.WithLabelValues("address", "downloads")
	l.orderStreams.byUser.limit = c.UserStreams
	l.orderStreams.byUser.refused = refused.WithLabelValues("user", "order-streams")
	return l, register(registry, collectors...)
}

// callLimits are the limits of one kind of call.
type callLimits struct{ user, address rateLimit }

// rateLimit bounds each user, or each address.
type rateLimit struct {
	limiter *ratelimit.Limiter // nil is unlimited
	refused prometheus.Counter
}

func (l rateLimit) evicted() float64 {
	if l.limiter == nil {
		return 0
	}
	return float64(l.limiter.Evicted())
}

func (l rateLimit) refuse(wait time.Duration) *problem {
	l.refused.Inc()
	p := *problemRateLimited
	p.retryAfter = secondsUntil(time.Time{}.Add(wait), time.Time{})
	return &p
}

// limitRefused limits the addresses of those who show no proof, where others have no limit. It returns the answer to a
// request that is refused with err.
func (l *clientLimits) limitRefused(r *http.Request, err error) error {
	if limited := l.admitAddress(&l.others, r, time.Now()); limited != nil {
		return limited
	}
	return err
}

// admitAddress comes before authentication: counting costs less than verifying a token.
func (l *clientLimits) admitAddress(calls *callLimits, r *http.Request, now time.Time) error {
	if calls.address.limiter == nil {
		return nil
	}
	key := l.proxies.Key(r)
	if wait, ok := calls.address.limiter.TakeBytes(key[:], now); !ok {
		l.warnAboutProxy(r)
		return calls.address.refuse(wait)
	}
	return nil
}

// admitUser comes after authentication.
func (l *clientLimits) admitUser(calls *callLimits, user string, now time.Time) error {
	if calls.user.limiter == nil {
		return nil
	}
	if wait, ok := calls.user.limiter.Take(user, now); !ok {
		return calls.user.refuse(wait)
	}
	return nil
}

// warnAboutProxy logs that a refused address forwards requests and is not trusted: it may be a proxy, and then
// all its clients share one limit.
func (l *clientLimits) warnAboutProxy(r *http.Request) {
	if r.Header["X-Forwarded-For"] != nil && l.proxies.Client(r) == forwarded.Proxies(nil).Client(r) &&
		l.proxyWarning.start(time.Minute) {
		l.log.WarnContext(r.Context(), "rate-limited an address that forwards requests and is not in "+
			"STAMPEDE_TRUSTED_PROXIES: if it is a proxy, all its clients share one limit",
			"address", l.proxies.Client(r).String())
	}
}

// inFlightSlots splits the slots of Config.MaxInFlight, so that buyers can pay and operators can pause a sale
// however many purchases and anonymous requests there are.
type inFlightSlots struct {
	purchases slots
	orders    slots // buyers who pay, cancel, and look at their orders
	sales     slots // requests for sales
	operators slots
	looks     slots // operators who look at orders
}

// newInFlightSlots gives most slots to purchases, and at least one to each kind, even if that is more than limit.
func newInFlightSlots(limit int) inFlightSlots {
	part := func(n int) slots { return slots{limit: int64(max(1, n))} }
	eighth, sixteenth, looks := limit/8, limit/16, limit/64
	return inFlightSlots{
		purchases: part(limit - 2*eighth - sixteenth - looks),
		orders:    part(eighth), sales: part(eighth), operators: part(sixteenth), looks: part(looks),
	}
}

func (s *inFlightSlots) all() [5]*slots {
	return [...]*slots{&s.purchases, &s.orders, &s.sales, &s.operators, &s.looks}
}

func (s *inFlightSlots) limit() (n int64) {
	for _, part := range s.all() {
		n += part.limit
	}
	return n
}

// taken is the number of requests in flight.
func (s *inFlightSlots) taken() (n int64) {
	for _, part := range s.all() {
		n += part.taken.Load()
	}
	return n
}

// slots is a semaphore that never blocks. Invariant: 0 <= taken <= limit, except for the instants in which
// acquire fails.
type slots struct {
	limit int64
	taken atomic.Int64
}

// withSlot runs a function in a slot.
func (s *slots) withSlot(f func() error) error {
	if !s.acquire() {
		return problemOverloaded
	}
	defer s.release()
	return f()
}

// acquire takes a slot, which release returns. It is false if none is free.
func (s *slots) acquire() bool {
	if s.taken.Add(1) > s.limit {
		s.release()
		return false
	}
	return true
}

func (s *slots) release() { s.taken.Add(-1) }

func (s *slots) gauge(o prometheus.GaugeOpts) prometheus.GaugeFunc {
	return prometheus.NewGaugeFunc(o, func() float64 { return float64(s.taken.Load()) })
}

// keyedSlots bounds the slots of each key. It has an entry for each key with a slot, so the bound of all slots
// together bounds it as well.
type keyedSlots[K comparable] struct {
	limit   int // 0 is unlimited
	refused prometheus.Counter

	mu    sync.Mutex
	taken map[K]int
}

// acquire takes a slot, which release returns. It is false if the key has all that it may have.
func (s *keyedSlots[K]) acquire(key K) bool {
	if s.limit == 0 {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[key] >= s.limit {
		s.refused.Inc()
		return false
	}
	if s.taken == nil {
		s.taken = make(map[K]int)
	}
	s.taken[key]++
	return true
}

func (s *keyedSlots[K]) release(key K) {
	if s.limit == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[key]--; s.taken[key] == 0 {
		delete(s.taken, key)
	}
}

// streamLimits bounds the open streams of one kind: in total, for each user and for each address. Streams of sales
// have no users.
type streamLimits struct {
	all       slots
	byUser    keyedSlots[string]
	byAddress keyedSlots[forwarded.Key]
	// tooMany is the answer to a user or an address that has all that it may have.
	tooMany *problem
}

var (
	problemTooManyStreams = fixed(problem{
		Kind: problems.RateLimited, retryAfter: retryPaused,
		detail: "This user or address has too many event streams open. Close one, or poll instead.",
	})
	problemTooManyDownloads = fixed(problem{
		Kind: problems.RateLimited, retryAfter: retryPaused,
		detail: "This address downloads two files already. Retry when one is complete.",
	})
)

// openStream takes a slot for a stream.
func (l *clientLimits) openStream(streams *streamLimits, r *http.Request, user string) (release func(), err error) {
	address := l.proxies.Key(r)
	if !streams.byUser.acquire(user) {
		return nil, streams.tooMany
	}
	if !streams.byAddress.acquire(address) {
		l.warnAboutProxy(r)
		streams.byUser.release(user)
		return nil, streams.tooMany
	}
	releaseClient := func() {
		streams.byAddress.release(address)
		streams.byUser.release(user)
	}
	if !streams.all.acquire() {
		releaseClient()
		return nil, problemOverloaded
	}
	return func() {
		streams.all.release()
		releaseClient()
	}, nil
}

const (
	// inLineMax calls wait in a line, and addressPlaces of an address where streams are bounded, for lineTimeout.
	inLineMax     = 500
	addressPlaces = 8
	lineTimeout   = catalogTimeout
)

var problemTooManyInLine = fixed(problem{
	Kind: problems.RateLimited, retryAfter: retryPaused,
	detail: "This address has as many calls of this kind in line as it may have. Retry when one is answered.",
})

// line runs a few calls at a time that cost more than a look. The others wait. They hold no slot of inFlight, so that a
// crowd of them keeps no one else out.
type line struct {
	limits  *clientLimits
	callers streamLimits
	turns   chan struct{}
	// rests is how many times as long as a call took its turn stays unused.
	rests time.Duration
}

// newLine returns a line for calls on draws.
func (l *clientLimits) newLine() *line {
	in := &line{limits: l, turns: make(chan struct{}, lineTurns)}
	in.callers.all.limit = lineTurns + inLineMax
	in.callers.byAddress.limit = min(l.addressStreams, addressPlaces)
	in.callers.byAddress.refused = l.refused.WithLabelValues("address", "draws")
	in.callers.tooMany = problemTooManyInLine
	return in
}

// run has a client's call wait for its turn.
func (l *line) run(r *http.Request, do func() error) error {
	leave, err := l.limits.openStream(&l.callers, r, "")
	if err != nil {
		return err
	}
	defer leave()
	return l.take(r.Context(), do)
}

// take waits for a turn, outside of the places of addresses.
func (l *line) take(ctx context.Context, do func() error) error {
	limited, cancel := context.WithTimeout(ctx, lineTimeout)
	defer cancel()
	select {
	case l.turns <- struct{}{}:
		began := time.Now()
		defer func() {
			if rest := l.rests * time.Since(began); rest > 0 {
				time.AfterFunc(rest, func() { <-l.turns })
			} else {
				<-l.turns
			}
		}()
		return do()
	case <-limited.Done():
		return problemOverloaded
	}
}

const (
	// verifyRests keeps the verification of signatures, which anybody can ask for, to a fifth of a core.
	verifyRests = 4
	// verifiedMax bounds the signatures that are remembered.
	verifiedMax = 4096
)

// verifier verifies rounds of drand, each once.
type verifier struct {
	line *line

	mu    sync.Mutex
	known map[[sha256.Size]byte]error
}

// verify returns draw.ErrBeacon for what is not the signature of the round.
func (v *verifier) verify(r *http.Request, round int64, signature []byte) error {
	key := sha256.Sum256(binary.BigEndian.AppendUint64(signature[:len(signature):len(signature)], uint64(round)))
	if err, known := v.recall(key); known {
		return err
	}
	return v.line.run(r, func() error {
		err, known := v.recall(key) // another one had it verified meanwhile
		if known {
			return err
		}
		_, err = draw.BeaconSeed(round, signature)
		v.mu.Lock()
		defer v.mu.Unlock()
		if v.known == nil || len(v.known) >= verifiedMax {
			v.known = map[[sha256.Size]byte]error{}
		}
		v.known[key] = err
		return err
	})
}

func (v *verifier) recall(key [sha256.Size]byte) (err error, known bool) { //nolint:revive // known is of the map
	v.mu.Lock()
	defer v.mu.Unlock()
	err, known = v.known[key]
	return err, known
}

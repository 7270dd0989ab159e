package fleet

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// missesMax is how many scrapes in a row may run into the time-out until a process counts as gone: one that is busy for
// a moment is not. Any other error is a process that is gone.
const missesMax = 2

const (
	// hostsApart is how much the clocks of two hosts may differ.
	hostsApart = time.Minute
	// holdOthers is how long it is shown that several processes answered at one address.
	holdOthers = time.Minute
)

// process is one scraped process. All fields below busy are guarded by Fleet.mu.
type process struct {
	target *target
	place  int        // of its target in the configuration
	addr   netip.Addr // the zero value for the target's host
	url    string
	name   string // url without user and password

	busy atomic.Bool

	listedAt time.Time // when its target last had this address

	up       bool
	since    time.Time // of up, and of whether it is ready
	lastSeen time.Time
	err      string
	misses   int

	last *sample // as of lastSeen; nil before the first one
	// gained is what has increased between the last two samples; zero after the first one. It is fresh until a snapshot
	// has counted it.
	gained increase
	fresh  bool
	// rebuilds has the reasons of those that no snapshot has shown yet.
	rebuilds map[string]bool
	// othersAt is when another process answered than the one before, which had not ended. formerStart is the start of the
	// one before.
	othersAt    time.Time
	formerStart float64
}

// seen notes a scrape that was made at that time.
func (p *process) seen(s *sample, err error, at time.Time) {
	if err != nil {
		p.missed(err, at)
		return
	}
	// What a process did while it did not answer is no rate of now.
	p.gained, p.fresh = increase{}, false
	if before := p.before(s, at); before != nil {
		if p.up && at.After(p.lastSeen) {
			p.gained, p.fresh = s.since(before, at.Sub(p.lastSeen)), true
		}
		// Also while it did not answer: a worker that finds a lost Redis when it starts has rebuilt the stock before it is
		// asked.
		for reason, n := range s.rebuilds {
			if gained(before.rebuilds[reason], n) > 0 {
				if p.rebuilds == nil {
					p.rebuilds = map[string]bool{}
				}
				p.rebuilds[reason] = true
			}
		}
	}
	if !p.up || (s.notReady == "") != (p.last.notReady == "") {
		p.up, p.since = true, at
	}
	p.last, p.lastSeen, p.err, p.misses = s, at, "", 0
}

// before returns the sample from which the process has counted on. It is empty after a restart. It is nil for the first
// sample, and if another process answered before that has not ended: both are behind one address.
func (p *process) before(s *sample, at time.Time) *sample {
	if p.last == nil || s.start == p.last.start || s.start == 0 || p.last.start == 0 {
		return p.last
	}
	isKnown := s.start == p.formerStart
	p.formerStart = p.last.start
	if !isKnown && s.start > p.last.start && s.start > float64(p.lastSeen.Add(-hostsApart).Unix()) {
		return &sample{}
	}
	p.othersAt = at
	return nil
}

func (p *process) missed(err error, at time.Time) {
	p.misses++
	if isTimeout(err) {
		err = errors.New("it does not answer in time")
		if p.up && p.misses < missesMax {
			return // the increase until the next answer counts from the last one
		}
	}
	p.err = printable(err.Error())
	p.gained, p.fresh = increase{}, false
	if p.up {
		p.up, p.since = false, at
	}
}

// ofIngress is the trouble of an ingress that explains why purchases fail: those that fail at ingresses that are ready
// are too few for a trouble. It is nil without one.
func (t *troubles) ofIngress(processes []*process, offered float64) (cause *lasting) {
	unexplained := 0.0
	for _, p := range processes {
		switch one := t.known[notReady.key(p.url)]; {
		case !p.up || p.gained.purchases[failed] == 0:
		case one == nil || one.seen != t.now:
			unexplained += p.gained.perSecond(p.gained.purchases[failed])
		case cause == nil:
			cause = one
		}
	}
	if unexplained > shareMost*offered {
		return nil
	}
	return cause
}

// whyIdle says why workers that are up read nothing.
func (s *Snapshot) whyIdle() (why string) {
	for i := range s.Processes {
		if p := &s.Processes[i]; p.Idle != "" {
			why += "; of " + p.Target + ": " + p.Idle
		}
	}
	return why
}

// shown is the process in a snapshot.
func (p *process) shown() Process {
	s := Process{
		Target: p.name, Up: p.up, Since: p.since, LastSeen: p.lastSeen, Error: p.err,
	}
	if p.last == nil {
		return s
	}
	s.Kind, s.Version = p.last.kind(), p.last.version
	if p.last.start > 0 {
		s.Started = time.UnixMilli(int64(1000 * p.last.start)).UTC()
	}
	s.MemoryBytes, s.Connections = p.last.memory, p.last.connections
	s.InFlight, s.InFlightLimit = p.last.inFlight, p.last.inFlightLimit
	s.Readers, s.Failing = p.last.readers(), p.last.failing
	if p.up {
		s.NotReady, s.Idle, s.RatesKnown = p.last.notReady, p.last.idle, p.gained.seconds > 0
	}
	s.CPU = p.gained.perSecond(p.gained.cpu)
	for _, most := range []float64{p.gained.purchases.total(), p.gained.recorded, p.gained.delivered} {
		s.PerSecond = max(s.PerSecond, p.gained.perSecond(most))
	}
	return s
}

const (
	// pageMax bounds a page of metrics. One of an ingress has 60 KB.
	pageMax = 2 << 20
	// processesMax bounds the processes that are scraped. Further addresses of a name are left out.
	processesMax = 256
	// resolveInterval is how often the name of a dns target is resolved again.
	resolveInterval = 5 * time.Second
	// forgetAfter is how long a process is shown as gone whose address its name has no more.
	forgetAfter = time.Minute
)

// dnsScheme is the prefix of a target's scheme whose host is resolved to processes.
const dnsScheme = "dns+"

// target is a URL of metrics. Its processes are the addresses of its host, or one.
type target struct {
	url    *url.URL
	dns    bool
	client *http.Client
}

// errTarget is wrapped by the errors of New for targets that are no URLs of metrics.
var errTarget = errors.New("not a URL of metrics: want http://host:port/metrics, or dns+http://name:port/metrics")

func parseTarget(text string) (*target, error) {
	plain, dns := strings.CutPrefix(text, dnsScheme)
	u, err := url.Parse(plain)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
		return nil, errTarget // the text may have a password
	}
	if u.Path == "" {
		u.Path = "/metrics"
	}
	return &target{
		url: u, dns: dns,
		client: &http.Client{
			// What a target redirects to is not what the operator has named.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
			Transport: &http.Transport{
				DialContext:         (&net.Dialer{Timeout: roundTimeout}).DialContext,
				DisableCompression:  true, // it costs more than it saves, and a small answer could become a large one
				MaxIdleConnsPerHost: 1,
				IdleConnTimeout:     10 * roundInterval,
				TLSClientConfig:     &tls.Config{ServerName: u.Hostname(), MinVersion: tls.VersionTLS12},

				MaxResponseHeaderBytes: 64 << 10,
			},
		},
	}, nil
}

// name is the URL without user and password.
func (t *target) name() string {
	u := *t.url
	u.User = nil
	return u.String()
}

// process is a process at an address of the target; the zero address stands for its host.
func (t *target) process(addr netip.Addr, place int) *process {
	u := *t.url
	if addr.IsValid() {
		u.Host = addr.String()
		if port := t.url.Port(); port != "" {
			u.Host = net.JoinHostPort(addr.String(), port)
		} else if addr.Is6() {
			u.Host = "[" + u.Host + "]"
		}
	}
	shown := u
	shown.User = nil
	now := time.Now()
	return &process{
		target: t, addr: addr, place: place, url: u.String(), name: shown.String(), listedAt: now, since: now,
	}
}

// resolve returns the addresses of the target's host, in their order.
func (t *target) resolve(ctx context.Context) ([]netip.Addr, error) {
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", t.url.Hostname())
	if err != nil {
		return nil, err
	}
	for i := range found {
		found[i] = found[i].Unmap()
	}
	slices.SortFunc(found, netip.Addr.Compare)
	return slices.Compact(found), nil
}

// scrape reads the metrics of a process. The error names no URL.
func (t *target) scrape(ctx context.Context, at string) (*sample, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return nil, errTarget
	}
	request.Host = t.url.Host
	request.Header.Set("Accept", "text/plain;version=0.0.4")
	request.Header.Set("User-Agent", "stampede")
	response, err := t.client.Do(request)
	if err != nil {
		var failed *url.Error
		if errors.As(err, &failed) {
			err = failed.Err
		}
		return nil, err
	}
	defer func() { _ = response.Body.Close() }() // it was only read
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("it answers with status %d", response.StatusCode)
	}
	page, err := io.ReadAll(io.LimitReader(response.Body, pageMax+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read its metrics: %w", err)
	case len(page) > pageMax:
		return nil, fmt.Errorf("its metrics are longer than %d MB", pageMax>>20)
	}
	return read(page)
}

// named is a target whose host is resolved to the addresses of processes.
type named struct {
	target *target
	place  int
	busy   atomic.Bool

	resolvedAt time.Time
	err        string // why there are no addresses
	since      time.Time
}

// resolve looks up the hosts of dns targets that are due, in the background.
func (f *Fleet) resolve(ctx context.Context, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, n := range f.names {
		if now.Sub(n.resolvedAt) < resolveInterval {
			continue
		}
		n.resolvedAt = now
		f.start(&n.busy, func() {
			limited, cancel := context.WithTimeout(ctx, resolveInterval)
			defer cancel()
			found, err := n.target.resolve(limited)
			if ctx.Err() == nil {
				f.list(n, found, err, time.Now())
			}
		})
	}
}

// list makes the addresses of a name processes. Those that the name has no more are forgotten after a while; until then
// they are scraped, and shown as gone if they do not answer.
func (f *Fleet) list(n *named, found []netip.Addr, err error, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	was := n.err
	switch {
	case err != nil:
		n.err = printable(err.Error())
	case len(found) == 0:
		n.err = "its name has no address"
	default:
		n.err = ""
	}
	if was == "" && n.err != "" {
		n.since = now
	}
	known := map[netip.Addr]*process{}
	for _, p := range f.processes {
		if p.target == n.target {
			known[p.addr] = p
		}
	}
	for _, addr := range found {
		if p := known[addr]; p != nil {
			p.listedAt = now
		} else if len(f.processes) < processesMax {
			f.processes = append(f.processes, n.target.process(addr, n.place))
		}
	}
	if err == nil { // else the addresses are as before, as far as is known
		f.processes = slices.DeleteFunc(f.processes, func(p *process) bool {
			return p.target == n.target && !p.up && now.Sub(p.listedAt) > forgetAfter
		})
	}
	slices.SortStableFunc(f.processes, func(a, b *process) int {
		return cmp.Or(cmp.Compare(a.place, b.place), a.addr.Compare(b.addr))
	})
}

// shown is the name in a snapshot while it has no address.
func (n *named) shown() Process {
	return Process{Target: dnsScheme + n.target.name(), Since: n.since, Error: n.err}
}

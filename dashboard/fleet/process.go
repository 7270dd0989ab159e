package fleet

import (
	"errors"
	"net/netip"
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

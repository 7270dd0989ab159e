package fleet

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"
)

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

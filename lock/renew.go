package lock

import (
	"context"
	"slices"
	"sync"
	"time"
)

// renewParallel is how many renewals run at the same time on one node. It leaves connections for
// others.
const renewParallel = 4

// renewRound renews the holds of a round: few calls for each slot, several at the same time, and at
// most renewParallel on one node, which may hang.
func (l *Locker) renewRound(holds []*hold) {
	bySlot := make(map[string][]*hold)
	for _, h := range holds {
		slot := l.scripts.slot(h.key)
		bySlot[slot] = append(bySlot[slot], h)
	}
	byNode := make(map[string][][]*hold)
	for _, group := range bySlot {
		node := l.scripts.node(l.running, group[0].key)
		byNode[node] = slices.AppendSeq(byNode[node], slices.Chunk(group, renewalsPerCall))
	}
	var nodes sync.WaitGroup
	for _, chunks := range byNode {
		nodes.Go(func() {
			inParallel(len(chunks), renewParallel, func(i int) { l.renewChunk(chunks[i]) })
		})
	}
	nodes.Wait()
}

func (l *Locker) renewChunk(holds []*hold) {
	// A longer call counts as failed, so that there is time for another.
	lease := l.watchdog.lease
	ctx, cancel := context.WithTimeout(l.running, lease/3)
	defer cancel()
	_ = l.renew(ctx, holds, lease) // the observer and the losing holders are informed
	l.watchdog.renewalDone(holds)
}

// renew extends the leases of some locks in one call. Its error is a *LostError or an error of
// Redis.
func (l *Locker) renew(ctx context.Context, holds []*hold, lease time.Duration) error {
	sent := time.Now()
	renewed, err := l.scripts.sendRenew(ctx, holds, lease)
	l.observer.renewed(len(holds), sent, err)
	if err != nil {
		return err
	}
	var callbacks []func()
	var lost []string
	unreported := 0
	l.mu.Lock()
	for i, h := range holds {
		switch {
		case len(h.leases) == 0: // released meanwhile
		case renewed[i]:
			// A lease that ended before the answer stays ended: its holder may know.
			if h.valid(time.Now()) {
				h.extend(sent, lease)
			}
			l.watchdog.update(h)
		default:
			lost = append(lost, h.key)
			if !h.lost { // otherwise already reported
				unreported++
				callbacks = append(callbacks, l.markLost(h)...)
			}
		}
	}
	l.mu.Unlock()
	l.reportLost(unreported, callbacks)
	if len(lost) > 0 {
		return &LostError{Keys: lost}
	}
	return nil
}

// leasesExpired is called by the watchdog. A hold may have been renewed or released since then.
func (l *Locker) leasesExpired(holds []*hold) {
	l.mu.Lock()
	now := time.Now()
	var callbacks []func()
	lost := 0
	for _, h := range holds {
		switch {
		case len(h.leases) == 0 || h.lost:
		case h.valid(now):
			l.watchdog.watch(h)
		default:
			lost++
			callbacks = append(callbacks, l.markLost(h)...)
		}
	}
	l.mu.Unlock()
	l.reportLost(lost, callbacks)
}

// markLost records a loss and returns the callbacks to run. Callers hold mu.
func (l *Locker) markLost(h *hold) []func() {
	h.lost = true
	l.watchdog.unwatch(h)
	var callbacks []func()
	now := time.Now()
	for _, le := range h.leases {
		callbacks = append(callbacks, le.takeCallbacks(le.err(now))...)
	}
	return callbacks
}

func (l *Locker) reportLost(locks int, callbacks []func()) {
	l.observer.lost(locks)
	for _, callback := range callbacks {
		callback()
	}
}

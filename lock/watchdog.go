package lock

import (
	"context"
	"slices"
	"sync"
	"time"
)

// watchIdle bounds the watchdog's sleep, and so how long it lives without holds.
const watchIdle = 5 * time.Second

// watchdog watches holds that are renewed, and holds with callbacks for their end, in one goroutine
// while there are any. It looks at all of them when something is due: about twenty times a lease,
// as renewals are batched.
//
// Renewals that are due at about the same time run together, in a goroutine of their own. Meanwhile
// the watchdog keeps reporting leases that end, however long Redis takes.
type watchdog struct {
	mu *sync.Mutex // the Locker's; guards the state of holds and all fields below
	// lease is the length of renewed leases. They are renewed when a third of it has passed.
	lease time.Duration
	// renew asks Redis, updates or removes each hold, and calls renewalDone. expired takes holds
	// whose lease has ended. Both run without mu.
	renew, expired func([]*hold)

	watched    map[*hold]struct{}
	running    bool
	stopped    bool
	sleepUntil time.Time // nothing is due before
	wake       chan struct{}
	tasks      sync.WaitGroup
}

func newWatchdog(mu *sync.Mutex, lease time.Duration, renew, expired func([]*hold)) *watchdog {
	return &watchdog{
		mu: mu, lease: lease, renew: renew, expired: expired,
		watched: make(map[*hold]struct{}), wake: make(chan struct{}, 1),
	}
}

// batchWindow is how much earlier than due a renewal may run together with others.
func (w *watchdog) batchWindow() time.Duration { return w.lease / 20 }

// retryPause is the time between a failed renewal and the next attempt.
func (w *watchdog) retryPause() time.Duration { return w.lease / 10 }

// watch adds a hold. Callers hold mu.
func (w *watchdog) watch(h *hold) {
	if w.stopped || h.lost {
		return
	}
	w.watched[h] = struct{}{}
	w.update(h)
}

// update wakes the watchdog if a hold is due earlier than before. Callers hold mu.
func (w *watchdog) update(h *hold) {
	_, watched := w.watched[h]
	switch {
	case !watched || w.stopped:
	case !w.running:
		w.running = true
		w.tasks.Go(w.run)
	case w.due(h).Before(w.sleepUntil):
		signal(w.wake)
	}
}

func (w *watchdog) due(h *hold) time.Time {
	if h.renewing || !h.watched() {
		return h.ends
	}
	at := h.ends.Add(-w.lease * 2 / 3)
	// A lock that another lease holds for longer is renewed as often, or its loss would be reported
	// late.
	if third := h.renewedAt.Add(w.lease/3 - drift(w.lease)); third.Before(at) {
		at = third
	}
	if at.Before(h.notBefore) {
		at = h.notBefore
	}
	if at.After(h.ends) {
		return h.ends
	}
	return at
}

// unwatch removes a hold. Callers hold mu.
func (w *watchdog) unwatch(h *hold) { delete(w.watched, h) }

// run ends when it wakes and has no holds. It sleeps through short times without holds, so that
// consecutive locks share one goroutine.
func (w *watchdog) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for first := true; ; first = false {
		w.mu.Lock()
		if w.stopped || len(w.watched) == 0 && !first { // the first hold may already be released
			w.running = false
			w.mu.Unlock()
			return
		}
		renew, expired := w.takeDue(time.Now())
		sleep := min(time.Until(w.sleepUntil), watchIdle)
		w.mu.Unlock()

		if len(renew) > 0 {
			w.tasks.Go(func() { w.renew(renew) })
		}
		if len(expired) > 0 {
			w.expired(expired)
		}
		timer.Reset(sleep)
		select {
		case <-timer.C:
		case <-w.wake:
		}
	}
}

// takeDue returns the holds to renew now, and the holds whose lease has ended, which it removes. It
// sets when the next one is due. Callers hold mu.
func (w *watchdog) takeDue(now time.Time) (renew, expired []*hold) {
	soon := now.Add(w.batchWindow())
	w.sleepUntil = now.Add(watchIdle)
	for h := range w.watched {
		if hasEnded(h.ends, now) {
			expired = append(expired, h)
			w.unwatch(h)
			continue
		}
		if !h.renewing && h.watched() && hasEnded(w.due(h), soon) {
			h.renewing = true
			renew = append(renew, h)
		}
		if due := w.due(h); due.Before(w.sleepUntil) {
			w.sleepUntil = due
		}
	}
	return renew, expired
}

// renewalDone records that a renewal was answered or failed. Holds that were not renewed are due
// again after retryPause.
func (w *watchdog) renewalDone(holds []*hold) {
	w.mu.Lock()
	defer w.mu.Unlock()
	notBefore := time.Now().Add(w.retryPause())
	for _, h := range holds {
		h.renewing, h.notBefore = false, notBefore
		w.update(h)
	}
}

// stop ends the goroutine. Holds that are added later are not watched.
func (w *watchdog) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stopped = true
	signal(w.wake)
}

func (w *watchdog) wait() { w.tasks.Wait() }

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

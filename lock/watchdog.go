package lock

import (
	"container/heap"
	"sync"
	"time"
)

const (
	// watchIdle bounds the watchdog's sleep, and so how long it lives without holds.
	watchIdle = 5 * time.Second
	// notInHeap is the index of a hold that the watchdog does not watch.
	notInHeap = -1
)

// alarm is when the watchdog acts on a hold. Guarded by Locker.mu.
type alarm struct {
	index int // in the heap
	at    time.Time
	// notBefore delays the retry of a failed renewal.
	notBefore time.Time
	renewing  bool // a renewal is in progress
}

// watchdog watches holds that are renewed, and holds with callbacks for their end: one heap, and
// one goroutine while the heap is not empty.
//
// Renewals that are due at about the same time run together, in a goroutine of their own. Meanwhile
// the watchdog keeps reporting leases that end, however long Redis takes.
type watchdog struct {
	mu *sync.Mutex // the Locker's; guards the alarms and all fields below
	// lease is the length of renewed leases. They are renewed when a third of it has passed.
	lease time.Duration
	// renew asks Redis, updates or removes each hold, and calls renewalDone. expired takes holds
	// whose lease has ended. Both run without mu.
	renew, expired func([]*hold)

	heap       alarms
	running    bool
	stopped    bool
	sleepUntil time.Time // nothing is due before
	wake       chan struct{}
	tasks      sync.WaitGroup
}

func newWatchdog(mu *sync.Mutex, lease time.Duration, renew, expired func([]*hold)) *watchdog {
	return &watchdog{mu: mu, lease: lease, renew: renew, expired: expired, wake: make(chan struct{}, 1)}
}

// batchWindow is how much earlier than due a renewal may run together with others.
func (w *watchdog) batchWindow() time.Duration { return w.lease / 20 }

// retryPause is the time between a failed renewal and the next attempt.
func (w *watchdog) retryPause() time.Duration { return w.lease / 10 }

// watch adds a hold, or updates it if it is already watched. Callers hold mu.
func (w *watchdog) watch(h *hold) {
	if w.stopped || h.lost {
		return
	}
	if h.index == notInHeap {
		heap.Push(&w.heap, h)
	}
	w.update(h)
}

// update recomputes the alarm of a watched hold. Callers hold mu.
func (w *watchdog) update(h *hold) {
	if h.index == notInHeap {
		return
	}
	h.at = w.due(h)
	heap.Fix(&w.heap, h.index)
	switch {
	case w.stopped:
	case !w.running:
		w.running = true
		w.tasks.Go(w.run)
	case h.at.Before(w.sleepUntil):
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
func (w *watchdog) unwatch(h *hold) {
	if h.index != notInHeap {
		heap.Remove(&w.heap, h.index)
	}
}

// run ends when it wakes and has no holds. It sleeps through short times without holds, so that
// consecutive locks share one goroutine.
func (w *watchdog) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for first := true; ; first = false {
		w.mu.Lock()
		if w.stopped || len(w.heap) == 0 && !first { // the first hold may already be released
			w.running = false
			w.mu.Unlock()
			return
		}
		renew, expired := w.pop(time.Now())
		w.sleepUntil = time.Now().Add(watchIdle)
		if len(w.heap) > 0 {
			w.sleepUntil = w.heap[0].at
		}
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

// pop returns the holds to renew now, and the holds whose lease has ended, which it removes.
// Callers hold mu.
func (w *watchdog) pop(now time.Time) (renew, expired []*hold) {
	soon := now.Add(w.batchWindow())
	var later []*hold
	for len(w.heap) > 0 && hasEnded(w.heap[0].at, soon) {
		h := heap.Pop(&w.heap).(*hold)
		switch {
		case hasEnded(h.ends, now):
			expired = append(expired, h)
			continue
		case !h.renewing && h.watched() && hasEnded(w.due(h), soon):
			h.renewing = true
			renew = append(renew, h)
		}
		later = append(later, h)
	}
	for _, h := range later {
		h.at = w.due(h)
		heap.Push(&w.heap, h)
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

// alarms is a heap ordered by time.
type alarms []*hold

// Len implements heap.Interface.
func (a alarms) Len() int { return len(a) }

// Less implements heap.Interface.
func (a alarms) Less(i, j int) bool { return a[i].at.Before(a[j].at) }

// Swap implements heap.Interface.
func (a alarms) Swap(i, j int) {
	a[i], a[j] = a[j], a[i]
	a[i].index, a[j].index = i, j
}

// Push implements heap.Interface.
func (a *alarms) Push(x any) {
	h := x.(*hold)
	h.index = len(*a)
	*a = append(*a, h)
}

// Pop implements heap.Interface.
func (a *alarms) Pop() any {
	last := len(*a) - 1
	h := (*a)[last]
	(*a)[last] = nil
	*a = (*a)[:last]
	h.index = notInHeap
	return h
}

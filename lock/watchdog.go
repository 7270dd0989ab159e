package lock

import (
	"container/heap"
	"sync"
	"time"
)

const (
	// watchIdle is how long the watchdog sleeps at most, and so how long it lives with nothing to do.
	watchIdle = 5 * time.Second
	// notInHeap is the index of a hold that is not in the heap.
	notInHeap = -1
)

// alarm is when the watchdog looks at a hold again. Guarded by Locker.mu.
type alarm struct {
	index int // in the heap
	at    time.Time
	// notBefore keeps a renewal that failed from being tried again and again.
	notBefore time.Time
	renewing  bool // Redis is being asked
}

// watchdog looks after the holds that are to be renewed, and those of which somebody wants to know when
// they end: one heap, and one goroutine while there is something in it.
//
// Whatever is due about now is renewed together. While Redis is asked, in goroutines of that round, the
// watchdog goes on: it tells holders that their lease has ended however long Redis takes.
type watchdog struct {
	mu *sync.Mutex // the Locker's: it guards the alarms and all below
	// lease is what renewed locks get; they are renewed when a third of it is over.
	lease time.Duration
	// renew asks Redis for these, looks at or forgets each, and calls asked; over is told of those whose
	// lease has ended. Both are called without mu.
	renew, expired func([]*hold)

	heap       alarms
	running    bool
	stopped    bool
	sleepUntil time.Time // until when there is nothing to do
	wake       chan struct{}
	tasks      sync.WaitGroup
}

func newWatchdog(mu *sync.Mutex, lease time.Duration, renew, expired func([]*hold)) *watchdog {
	return &watchdog{mu: mu, lease: lease, renew: renew, expired: expired, wake: make(chan struct{}, 1)}
}

// together is how much earlier than due a renewal may travel with others.
func (w *watchdog) batchWindow() time.Duration { return w.lease / 20 }

// pause is how long a renewal that failed is not tried again.
func (w *watchdog) retryPause() time.Duration { return w.lease / 10 }

// watch begins to look after a hold, if it has not. It needs mu.
func (w *watchdog) watch(h *hold) {
	if w.stopped || h.lost {
		return
	}
	if h.index == notInHeap {
		heap.Push(&w.heap, h)
	}
	w.update(h)
}

// look notes that a hold that is looked after has changed. It needs mu.
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
	// One that is held for long besides is looked after as the others, or its loss would be told late.
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

// forget leaves off looking after a hold. It needs mu.
func (w *watchdog) unwatch(h *hold) {
	if h.index != notInHeap {
		heap.Remove(&w.heap, h.index)
	}
}

// run ends when it wakes up and there is nothing to look after. It sleeps through a time without holds,
// so that one lock after another costs one goroutine.
func (w *watchdog) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for first := true; ; first = false {
		w.mu.Lock()
		if w.stopped || len(w.heap) == 0 && !first { // at first, it may have been released already
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

// pop returns the holds that are to be renewed now, and those whose lease has ended, which are looked
// after no more. It needs mu.
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

// asked notes that Redis has answered for these, or will not. Those that are not renewed are due again after
// a pause.
func (w *watchdog) renewalDone(holds []*hold) {
	w.mu.Lock()
	defer w.mu.Unlock()
	notBefore := time.Now().Add(w.retryPause())
	for _, h := range holds {
		h.renewing, h.notBefore = false, notBefore
		w.update(h)
	}
}

// stop ends the goroutine; what is watched after that is not.
func (w *watchdog) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stopped = true
	signal(w.wake)
}

func (w *watchdog) wait() { w.tasks.Wait() }

// alarms is a heap by time.
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

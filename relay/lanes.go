package relay

import (
	"container/heap"
	"context"
	"sync"
	"time"

	"stampede/relay/feed"
)

// lanes send events of different subjects at the same time and those of one subject one after the other.
//
// A failure stops all of them: the events in flight end, and nothing else is sent until resume. Then one event is sent
// alone, the first one that is not delivered, and only its success lets the others follow.
type lanes struct {
	send  func(context.Context, *feed.Event) error
	ended func(took time.Duration, err error)
	// changed has room for one signal: there is room for more events, or one failed.
	changed chan struct{}

	mu   sync.Mutex
	wake sync.Cond
	// window holds the events from the first one that is not delivered, in the order of their positions.
	window []*entry
	// ready are the events that may be sent now: at most one of a subject.
	ready readyHeap
	// behind has a queue for each subject with an event that is ready or in flight: the events behind it.
	behind map[string][]*entry
	// passed is the position up to which all events are delivered.
	passed    int64
	delivered int64
	inFlight  int
	failure   error
	failed    feed.Event // whose delivery has the failure
	probing   bool
	closed    bool
}

type entry struct {
	feed.Event
	done bool
}

func newLanes(
	passed int64, probing bool, send func(context.Context, *feed.Event) error, ended func(time.Duration, error),
) *lanes {
	l := &lanes{
		send: send, ended: ended, changed: make(chan struct{}, 1), behind: map[string][]*entry{}, passed: passed,
		probing: probing,
	}
	l.wake.L = &l.mu
	return l
}

// run sends events with n goroutines until close, and returns when no event is in flight.
func (l *lanes) run(ctx context.Context, n int) {
	var senders sync.WaitGroup
	for range n {
		senders.Go(func() { l.sendAll(ctx) })
	}
	senders.Wait()
}

func (l *lanes) sendAll(ctx context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for !l.closed && !l.mayStart() {
			l.wake.Wait()
		}
		if l.closed {
			return
		}
		e := heap.Pop(&l.ready).(*entry)
		l.inFlight++
		l.mu.Unlock()
		begun := time.Now()
		err := l.send(ctx, &e.Event)
		l.ended(time.Since(begun), err)
		l.mu.Lock()
		l.inFlight--
		l.finish(e, err)
	}
}

// mayStart requires mu.
func (l *lanes) mayStart() bool {
	return l.failure == nil && len(l.ready) > 0 && (!l.probing || l.inFlight == 0)
}

// finish requires mu.
func (l *lanes) finish(e *entry, err error) {
	if err != nil {
		heap.Push(&l.ready, e)
		if l.failure == nil || isFinal(err) {
			l.failure, l.failed = err, e.Event
		}
	} else {
		l.deliver(e)
	}
	if l.failure != nil || len(l.window) <= windowLow {
		select {
		case l.changed <- struct{}{}:
		default:
		}
	}
	switch {
	case l.failure != nil:
	case len(l.ready) > 1:
		l.wake.Broadcast()
	case len(l.ready) == 1:
		l.wake.Signal()
	}
}

// deliver requires mu.
func (l *lanes) deliver(e *entry) {
	e.done, e.Body = true, nil
	l.probing = false
	l.delivered++
	if queue := l.behind[e.Subject]; len(queue) > 0 {
		heap.Push(&l.ready, queue[0])
		l.behind[e.Subject] = queue[1:]
	} else {
		delete(l.behind, e.Subject)
	}
	first := 0
	for first < len(l.window) && l.window[first].done {
		l.passed = l.window[first].Position
		first++
	}
	l.window = l.window[first:]
	if len(l.window) > 0 { // it may have the same position, if archives of other databases were brought back
		l.passed = min(l.passed, l.window[0].Position-1)
	}
}

// add takes the next events, which have higher positions than those before.
func (l *lanes) add(events []feed.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, event := range events {
		e := &entry{Event: event}
		l.window = append(l.window, e)
		if queue, busy := l.behind[e.Subject]; busy {
			l.behind[e.Subject] = append(queue, e)
		} else {
			l.behind[e.Subject] = nil
			heap.Push(&l.ready, e)
		}
	}
	l.wake.Broadcast()
}

// progress is what was delivered so far.
type progress struct {
	// passed is the position up to which all events are delivered.
	passed int64
	// waiting counts the events from the first one that is not delivered.
	waiting int
	// delivered counts all events that were delivered.
	delivered int64
	// failure is set when an event has failed and none is in flight any more.
	failure error
	failed  feed.Event // whose delivery has the failure
}

func (l *lanes) progress() progress {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := progress{passed: l.passed, waiting: len(l.window), delivered: l.delivered}
	if l.inFlight == 0 {
		p.failure, p.failed = l.failure, l.failed
	}
	return p
}

// skipTo notes that there is no event up to a position behind those that were added. It does nothing while one of them
// is not delivered.
func (l *lanes) skipTo(position int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.window) == 0 {
		l.passed = max(l.passed, position)
	}
}

// resume tries again after a failure.
func (l *lanes) resume() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failure, l.probing = nil, true
	l.wake.Signal()
}

// close starts no other event.
func (l *lanes) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.wake.Broadcast()
}

// readyHeap has the lowest position first.
type readyHeap []*entry

func (h readyHeap) Len() int           { return len(h) }
func (h readyHeap) Less(i, j int) bool { return h[i].Position < h[j].Position }
func (h readyHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }

// Push implements heap.Interface.
func (h *readyHeap) Push(e any) { *h = append(*h, e.(*entry)) }

// Pop implements heap.Interface.
func (h *readyHeap) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return e
}

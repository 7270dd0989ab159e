package relay

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"stampede/internal/crashpoint"
	"stampede/internal/retry"
	"stampede/internal/tracing"
	"stampede/relay/feed"
	"stampede/relay/target"
)

const (
	// windowMax bounds the events of a target in memory. More are read when windowLow are left.
	windowMax, windowLow = 4096, 1024
	// readMax bounds the events of one read.
	readMax = 1024

	// lookBusy and lookIdle are the pauses between two looks for new events: where some came, and where none did.
	lookBusy, lookIdle = 20 * time.Millisecond, 100 * time.Millisecond
	// moveEvery is the least time between two writes of the position, and so about how many events a crash repeats.
	moveEvery = 200 * time.Millisecond

	// heldLong is when a transaction that keeps events from being sent is logged, and heldAgain when it is logged again.
	heldLong, heldAgain = 5 * time.Second, time.Minute
)

// session serves one target on one connection, until its first error.
type session struct {
	log     *slog.Logger
	target  *target.Target
	conn    *pgx.Conn
	reader  *feed.Reader
	sender  sender
	lanes   *lanes
	metrics *targetMetrics
	drain   time.Duration

	state feed.State
	// read is the position up to which events were read.
	read int64
	// delivered is how many events were delivered at the last move.
	delivered         int64
	lookedAt, movedAt time.Time
	// resumeAt ends the pause after a failure.
	resumeAt time.Time
	paused   bool
	heldAt   time.Time
}

func (r *Relay) newSession(t *target.Target, conn *pgx.Conn) (*session, error) {
	at, err := target.ParseAddress(t.URL)
	if err != nil {
		return nil, err
	}
	to, err := r.open(t, at)
	if err != nil {
		return nil, err
	}
	if r.config.Tracer != nil {
		to = &tracedSender{to, r.config.Tracer, at, t.Name}
	}
	m := r.metrics.of(t.Name)
	return &session{
		log: r.config.Logger.With("target", t.Name), target: t, conn: conn, reader: feed.NewReader(conn, r.config.Source),
		sender: to, lanes: newLanes(t.Position, t.Failures > 0, to.Send, m.sent), metrics: m, drain: r.config.DrainTimeout,
		read: t.Position, resumeAt: time.Time(t.RetryAt),
	}, nil
}

// run serves the target, and then waits for the events in flight: for the drain timeout after a stop, not at all after
// an error. Their deliveries are recorded if the target still is this session's.
func (s *session) run(ctx context.Context) error {
	s.log.Info("serving a target", "position", s.target.Position, "url", target.Redacted(s.target.URL))
	sending, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var senders sync.WaitGroup
	senders.Go(func() { s.lanes.run(sending, s.sender.InFlight()) })
	err := s.serve(ctx)
	s.lanes.close()
	if err == nil {
		defer time.AfterFunc(s.drain, stop).Stop()
	} else {
		stop()
	}
	senders.Wait()
	_ = s.sender.Close() // nothing is in flight
	if err != nil {
		return err
	}
	return s.move(ctx, s.lanes.progress())
}

// serve returns nil when ctx ends.
func (s *session) serve(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := s.step(ctx); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-s.lanes.changed:
		case <-time.After(s.pause()):
		}
	}
	return nil
}

// step does what is due.
func (s *session) step(ctx context.Context) error {
	now := time.Now()
	if now.Sub(s.lookedAt) >= s.lookEvery() {
		if err := s.look(ctx); err != nil {
			return err
		}
	}
	p := s.lanes.progress()
	if p.failure != nil {
		return s.handle(ctx, p, now)
	}
	if now.Before(s.resumeAt) {
		return nil
	}
	if err := s.refill(ctx, p); err != nil {
		return err
	}
	if now.Sub(s.movedAt) >= moveEvery {
		return s.move(ctx, s.lanes.progress())
	}
	return nil
}

func (s *session) lookEvery() time.Duration {
	if s.state.Settled < s.state.Newest || s.lanes.progress().waiting > 0 {
		return lookBusy
	}
	return lookIdle
}

// pause is the time until something is due, without a signal of the lanes.
func (s *session) pause() time.Duration {
	pause := s.lookEvery()
	if s.read < s.state.Settled && s.lanes.progress().waiting <= windowLow && !time.Now().Before(s.resumeAt) {
		return 0
	}
	return pause
}

// look finds out how far events can be read, and whether the target is still this session's.
func (s *session) look(ctx context.Context) (err error) {
	calling, cancel := retry.ForCall(ctx)
	defer cancel()
	if s.state, err = s.reader.Look(calling, s.target.Name); err != nil {
		return err
	}
	s.lookedAt = time.Now()
	if s.state.Fence != s.target.Fence {
		return target.ErrStale
	}
	s.metrics.held.Set(s.state.HeldFor.Seconds())
	if s.state.HeldFor >= heldLong && time.Since(s.heldAt) >= heldAgain {
		s.heldAt = time.Now()
		s.log.Warn("an open transaction keeps events from being sent", "pid", s.state.HeldBy, "for", s.state.HeldFor)
	}
	return nil
}

// refill reads events while there is room for them.
func (s *session) refill(ctx context.Context, p progress) error {
	if s.read < s.state.Settled && p.waiting <= windowMax-readMax {
		calling, cancel := retry.ForCall(ctx)
		defer cancel()
		events, through, err := s.reader.Read(calling, s.read, readMax)
		if err != nil {
			return err
		}
		s.lanes.add(events)
		s.read = through
	}
	s.lanes.skipTo(s.read)
	return nil
}

// handle records a failure, and ends the pause after it.
func (s *session) handle(ctx context.Context, p progress, now time.Time) error {
	switch {
	case s.paused && !now.Before(s.resumeAt):
		s.paused = false
		s.lanes.resume()
		return nil
	case s.paused:
		return nil
	}
	final := isFinal(p.failure)
	pause := backoff(s.target.Failures+1, p.failure)
	s.paused, s.resumeAt = true, now.Add(pause)
	calling, cancel := retry.ForCall(ctx)
	defer cancel()
	if err := s.target.NoteFailure(calling, s.conn, p.passed, p.failure, pause, final); err != nil {
		return err
	}
	if final {
		s.log.Error("a receiver wants no more events: its target is disabled", "event", p.failed.ID,
			"trace_id", tracing.ID(p.failed.TraceParent), "error", p.failure)
		return fmt.Errorf("%w: it is disabled", target.ErrNotFound)
	}
	if s.target.Failures == 1 || pause > time.Minute {
		s.log.Warn("a delivery failed", "event", p.failed.ID, "trace_id", tracing.ID(p.failed.TraceParent),
			"error", p.failure, "failures", s.target.Failures, "again_in", pause)
	}
	return nil
}

// move records up to where all events are delivered.
func (s *session) move(ctx context.Context, p progress) error {
	if p.passed <= s.target.Position {
		return nil
	}
	calling, cancel := retry.ForCall(ctx)
	defer cancel()
	crashpoint.Hit(crashpoint.BeforeRelayMove)
	err := s.target.Move(calling, s.conn, p.passed, p.delivered > s.delivered)
	if err != nil && !errors.Is(err, target.ErrStale) {
		// Unknown whether it was written; the next session reads what is.
		return err
	}
	crashpoint.Hit(crashpoint.AfterRelayMove)
	s.movedAt, s.delivered = time.Now(), p.delivered
	return err
}

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

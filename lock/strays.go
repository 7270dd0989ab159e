package lock

import (
	"context"
	"errors"
	"time"
)

const (
	// strayTime is how long a stray is tried at least.
	strayTime = 30 * time.Second
	// straysMax bounds them: in an outage with more, the oldest are left to end by themselves.
	straysMax = 4096

	strayPause    = 20 * time.Millisecond
	strayPauseMax = time.Second
)

// errNoStray tells that nothing is left to be settled.
var errNoStray = errors.New("no stray")

// stray is a call of which nobody waits for the answer any more, and which may have taken locks, or may still
// do so. Releasing them settles it: what was taken is free, and a try that comes later is refused.
type stray struct {
	call  call
	owner string
	keys  []string
	until time.Time
}

// strays are settled one after another, as soon as Redis can be reached. Guarded by Locker.mu.
type strays struct {
	queue   []stray
	running bool
}

// settleLater hands over the calls of a lease of some length. It needs mu.
func (l *Locker) settleLater(lease time.Duration, calls ...stray) {
	s := &l.strays
	until := time.Now().Add(max(lease, strayTime))
	for _, c := range calls {
		c.until = until
		s.queue = append(s.queue, c)
	}
	if over := len(s.queue) - straysMax; over > 0 {
		s.queue = s.queue[over:]
	}
	if len(s.queue) > 0 && !s.running && !l.closed {
		s.running = true
		l.tasks.Go(l.settleStrays)
	}
}

// settleStrays ends when there are none, or with the Locker.
func (l *Locker) settleStrays() {
	pause := strayPause
	for {
		err := l.settleOne(l.running)
		switch {
		case errors.Is(err, errNoStray):
			return
		case err == nil:
			pause = strayPause
			continue
		}
		if sleep(l.running, pause) != nil {
			return
		}
		pause = min(2*pause, strayPauseMax)
	}
}

// settleOne settles the oldest stray, unless it has been tried for long enough.
func (l *Locker) settleOne(ctx context.Context) error {
	l.mu.Lock()
	s := &l.strays
	for len(s.queue) > 0 && time.Now().After(s.queue[0].until) {
		s.queue = s.queue[1:]
	}
	if len(s.queue) == 0 {
		s.queue, s.running = nil, false
		l.mu.Unlock()
		return errNoStray
	}
	oldest := s.queue[0]
	l.mu.Unlock()

	limited, cancel := context.WithTimeout(ctx, giveBackTimeout)
	defer cancel()
	if _, err := l.sendRelease(limited, oldest.call, oldest.owner, oldest.keys); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(s.queue) > 0 && s.queue[0].call == oldest.call { // or it had to make room
		s.queue = s.queue[1:]
	}
	l.settle(oldest.call)
	return nil
}

// settleLast tries each stray once more when the Locker is closed, for as long as Redis answers.
func (l *Locker) settleLast(ctx context.Context) {
	for l.settleOne(ctx) == nil {
	}
}

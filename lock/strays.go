package lock

import (
	"context"
	"slices"
	"sync"
	"time"
)

const (
	// strayTime is how long a stray is tried at least.
	strayTime = 30 * time.Second
	// straysMax bounds them: in an outage with more, the oldest are left to end by themselves.
	straysMax = 16_384
	// straysAtOnce is how many are tried at the same time.
	straysAtOnce = 8

	strayPause    = 20 * time.Millisecond
	strayPauseMax = time.Second
)

// stray is a call of which nobody waits for the answer any more, and which may have taken locks, or may still
// do so. Releasing them settles it: what was taken is free, and a try that comes later is refused.
type stray struct {
	call  call
	owner string
	keys  []string
	until time.Time
}

// strays are settled behind whoever made them, as soon as Redis can be reached. Guarded by Locker.mu.
type strays struct {
	queue   []stray
	running bool
}

// settleLater hands over a call of a lease of some length. It needs mu.
func (l *Locker) settleLater(lease time.Duration, one stray) {
	s := &l.strays
	one.until = time.Now().Add(max(lease, strayTime))
	s.queue = append(s.queue, one)
	if over := len(s.queue) - straysMax; over > 0 {
		s.queue = s.queue[over:]
	}
	if !s.running && !l.closed {
		s.running = true
		l.tasks.Go(l.settleStrays)
	}
}

// settleStrays ends when there are none, or with the Locker.
func (l *Locker) settleStrays() {
	pause := strayPause
	for {
		failed, left := l.settleRound(l.running)
		switch {
		case left == 0:
			return
		case failed == 0:
			pause = strayPause
			continue
		}
		if sleep(l.running, pause) != nil {
			return
		}
		pause = min(2*pause, strayPauseMax)
	}
}

// settleRound tries the oldest strays once, some at the same time. Those that fail go to the end, so that
// one node that is away keeps none of the others waiting.
func (l *Locker) settleRound(ctx context.Context) (failed, left int) {
	l.mu.Lock()
	s := &l.strays
	n := min(straysAtOnce, len(s.queue))
	round := slices.Clone(s.queue[:n])
	s.queue = s.queue[n:]
	l.mu.Unlock()

	var tries sync.WaitGroup
	settled := make([]bool, n)
	for i, one := range round {
		tries.Go(func() {
			limited, cancel := context.WithTimeout(ctx, giveBackTimeout)
			defer cancel()
			_, err := l.sendRelease(limited, one.call, one.owner, one.keys)
			settled[i] = err == nil || refused(err)
		})
	}
	tries.Wait()

	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for i, one := range round {
		switch {
		case settled[i]:
			l.settle(one.call)
		case now.Before(one.until):
			failed++
			s.queue = append(s.queue, one)
		}
	}
	s.running = s.running && len(s.queue) > 0
	return failed, len(s.queue)
}

// settleLast tries each stray once more when the Locker is closed.
func (l *Locker) settleLast(ctx context.Context) {
	l.mu.Lock()
	rounds := (len(l.strays.queue) + straysAtOnce - 1) / straysAtOnce
	l.mu.Unlock()
	for range rounds {
		if ctx.Err() != nil {
			return
		}
		l.settleRound(ctx)
	}
}

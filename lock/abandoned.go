package lock

import (
	"context"
	"slices"
	"sync"
	"time"
)

const (
	// abandonedRetryMin is how long a stray is tried at least.
	abandonedRetryMin = 30 * time.Second
	// abandonedMax bounds them: in an outage with more, the oldest are left to end by themselves.
	abandonedMax = 16_384
	// abandonedParallel is how many are tried at the same time.
	abandonedParallel = 8

	abandonedPause    = 20 * time.Millisecond
	abandonedPauseMax = time.Second
)

// stray is a call of which nobody waits for the answer any more, and which may have taken locks, or may still
// do so. Releasing them settles it: what was taken is free, and a try that comes later is refused.
type abandonedCall struct {
	call  call
	owner string
	keys  []string
	until time.Time
}

// abandonedCalls are settled behind whoever made them, as soon as Redis can be reached. Guarded by Locker.mu.
type abandonedCalls struct {
	queue   []abandonedCall
	running bool
}

// abandonCall hands over a call of a lease of some length. It needs mu.
func (l *Locker) abandonCall(lease time.Duration, one abandonedCall) {
	s := &l.abandonedCalls
	one.until = time.Now().Add(max(lease, abandonedRetryMin))
	s.queue = append(s.queue, one)
	if over := len(s.queue) - abandonedMax; over > 0 {
		s.queue = s.queue[over:]
	}
	if !s.running && !l.closed {
		s.running = true
		l.tasks.Go(l.releaseAbandoned)
	}
}

// releaseAbandoned ends when there are none, or with the Locker.
func (l *Locker) releaseAbandoned() {
	pause := abandonedPause
	for {
		failed, left := l.releaseAbandonedRound(l.running)
		switch {
		case left == 0:
			return
		case failed == 0:
			pause = abandonedPause
			continue
		}
		if sleep(l.running, pause) != nil {
			return
		}
		pause = min(2*pause, abandonedPauseMax)
	}
}

// releaseAbandonedRound tries the oldest abandonedCalls once, some at the same time. Those that fail go to the end, so that
// one node that is away keeps none of the others waiting.
func (l *Locker) releaseAbandonedRound(ctx context.Context) (failed, left int) {
	l.mu.Lock()
	s := &l.abandonedCalls
	n := min(abandonedParallel, len(s.queue))
	round := slices.Clone(s.queue[:n])
	s.queue = s.queue[n:]
	l.mu.Unlock()

	var tries sync.WaitGroup
	released := make([]bool, n)
	for i, one := range round {
		tries.Go(func() {
			limited, cancel := context.WithTimeout(ctx, undoTimeout)
			defer cancel()
			_, err := l.sendRelease(limited, one.call, one.owner, one.keys)
			released[i] = err == nil || rejected(err)
		})
	}
	tries.Wait()

	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for i, one := range round {
		switch {
		case released[i]:
			l.freeReceipt(one.call)
		case now.Before(one.until):
			failed++
			s.queue = append(s.queue, one)
		}
	}
	s.running = s.running && len(s.queue) > 0
	return failed, len(s.queue)
}

// releaseAbandonedOnce tries each stray once more when the Locker is closed.
func (l *Locker) releaseAbandonedOnce(ctx context.Context) {
	l.mu.Lock()
	rounds := (len(l.abandonedCalls.queue) + abandonedParallel - 1) / abandonedParallel
	l.mu.Unlock()
	for range rounds {
		if ctx.Err() != nil {
			return
		}
		l.releaseAbandonedRound(ctx)
	}
}

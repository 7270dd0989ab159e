package lock

import (
	"context"
	"slices"
	"sync"
	"time"
)

const (
	// abandonedRetryMin is how long an abandoned call is retried at least.
	abandonedRetryMin = 30 * time.Second
	// abandonedMax bounds the queue. In a large outage the oldest calls are dropped, and their
	// locks end with their leases.
	abandonedMax = 16_384
	// abandonedParallel is how many are retried at the same time.
	abandonedParallel = 8

	abandonedPause    = 20 * time.Millisecond
	abandonedPauseMax = time.Second
)

// abandonedCall is a script call without a caller that waits for its answer. It may have taken
// locks, or may still take them. Releasing its locks frees what was taken, and a late repeat is
// then rejected.
type abandonedCall struct {
	call  scriptCall
	owner string
	keys  []string
	until time.Time
}

// abandonedCalls are released in the background as soon as Redis can be reached. Guarded by
// Locker.mu.
type abandonedCalls struct {
	queue   []abandonedCall
	running bool
}

// abandonCall queues a call. It is retried for the length of its lease, and at least for
// abandonedRetryMin. Callers hold mu.
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

// releaseAbandoned runs until the queue is empty or the Locker is closed.
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
		if pauseFor(l.running, pause) != nil {
			return
		}
		pause = min(2*pause, abandonedPauseMax)
	}
}

// releaseAbandonedRound tries the oldest calls once, in parallel. Failed ones go to the end of the
// queue, so that a node that is away does not delay the others.
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

// releaseAbandonedOnce tries each call once more when the Locker is closed.
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

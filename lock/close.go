package lock

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// closeParallel is how many leases Close releases at the same time.
const closeParallel = 16

// Close releases all leases of the Locker, ends their contexts with the cause ErrClosed, and makes
// waiting acquires return ErrClosed. It returns when that is done, or with the cause of ctx. The
// error names what could not be released; those locks end with their leases. Close may be called
// again.
func (l *Locker) Close(ctx context.Context) error {
	l.mu.Lock()
	l.closed = true
	leases := make([]*Lease, 0, len(l.leases))
	for le := range l.leases {
		leases = append(leases, le)
	}
	l.waiting.wakeAll()
	before, closed := l.closing, make(chan struct{})
	l.closing = closed
	l.mu.Unlock()
	l.stop()
	l.watchdog.stop()

	done := make(chan error, 1)
	go func() {
		defer close(closed)
		err := releaseAll(ctx, leases, ErrClosed)
		if before != nil {
			<-before // it may still be releasing
		}
		l.tasks.Wait()
		l.watchdog.wait()
		l.releaseAbandonedOnce(ctx)
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("close the locker: %w", err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("close the locker: %w", context.Cause(ctx))
	}
}

// releaseAll releases leases in parallel and joins the errors. It ends all leases first, so that no
// holder waits for a slow Redis to learn that its lease is no longer renewed.
func releaseAll(ctx context.Context, leases []*Lease, cause error) error {
	for _, le := range leases {
		select {
		case le.sem <- struct{}{}:
			le.end(cause)
			<-le.sem
		default: // it is being released
		}
	}
	var mu sync.Mutex
	var failed []error
	next := make(chan *Lease)
	var workers sync.WaitGroup
	for range min(closeParallel, len(leases)) {
		workers.Go(func() {
			for le := range next {
				if err := le.release(ctx, cause); err != nil {
					mu.Lock()
					failed = append(failed, err)
					mu.Unlock()
				}
			}
		})
	}
	for _, le := range leases {
		next <- le
	}
	close(next)
	workers.Wait()
	return errors.Join(failed...)
}

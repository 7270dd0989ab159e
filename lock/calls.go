package lock

import (
	"context"
	"slices"
	"strconv"
	"time"
)

// scriptCall identifies one script call and its repeats. Serials grow with each call of a Locker, and two
// calls that are in progress never share a receipt.
type scriptCall struct {
	receipt receiptKey
	serial  uint64
}

// receiptKey is the name of a key in which Redis keeps the last call and its answer, without a hash
// tag for clusters.
type receiptKey string

// calls identifies the script calls of a Locker, and releases what abandoned calls took. Callers of
// methods whose comment does not say otherwise hold mu.
type calls struct {
	*lifetime
	scripts
	id     string // unique among all processes
	serial uint64
	// unused receipts are reused, the last used first.
	unused []receiptKey
	made   int
	// abandoned calls are released in the background, the first of them next.
	abandoned []abandonedCall
	releasing bool // a goroutine runs releaseAbandoned
}

func (c *calls) next() scriptCall {
	if n := len(c.unused); n > 0 {
		last := c.unused[n-1]
		c.unused = c.unused[:n-1]
		return c.nextOn(last)
	}
	c.made++
	return c.nextOn(receiptKey(c.prefix + ":receipt:" + c.id + ":" + strconv.Itoa(c.made)))
}

// nextOn returns a call that overwrites the receipt of an earlier one.
func (c *calls) nextOn(receipt receiptKey) scriptCall {
	c.serial++
	return scriptCall{receipt, c.serial}
}

// acquire returns a call that takes locks, with an owner name that is unique among all processes.
func (c *calls) acquire() *grant {
	call := c.next()
	return &grant{owner: c.id + ":" + decimal(call.serial), acquireCall: call}
}

// release returns the call that releases locks of a grant.
func (c *calls) release(g *grant) scriptCall {
	if g.receiptMoved {
		return c.next()
	}
	g.receiptMoved = true
	return c.nextOn(g.acquireCall.receipt)
}

// done lets other calls use the receipt.
func (c *calls) done(call scriptCall) { c.unused = append(c.unused, call.receipt) }

const (
	// abandonedRetryMin is how long an abandoned call is retried at least.
	abandonedRetryMin = 30 * time.Second
	// abandonedMax bounds the queue. In a large outage the oldest calls are dropped, and their
	// locks end with their leases.
	abandonedMax = 16_384
	// abandonedParallel is how many are retried at the same time.
	abandonedParallel = 8
)

// abandonedCall is a script call without a caller that waits for its answer. It may have taken
// locks, or may still take them. Releasing its locks frees what was taken, and a late repeat is
// then rejected.
type abandonedCall struct {
	call  scriptCall
	owner string
	keys  []string
	until time.Time // it is retried
}

// abandon queues a call, which is released in the background as soon as Redis can be reached. It is
// retried for the length of its lease, at least for abandonedRetryMin, and once more when the Locker
// is closed.
func (c *calls) abandon(lease time.Duration, a abandonedCall) {
	a.until = time.Now().Add(max(lease, abandonedRetryMin))
	c.abandoned = append(c.abandoned, a)
	if over := len(c.abandoned) - abandonedMax; over > 0 {
		c.abandoned = c.abandoned[over:]
	}
	if !c.releasing && !c.closed {
		c.releasing = true
		c.tasks.Go(c.releaseAbandoned)
	}
}

// releaseAbandoned runs until the queue is empty or the Locker is closed. It locks mu.
func (c *calls) releaseAbandoned() {
	wait := outagePause
	for {
		failed, left := c.releaseAbandonedRound(c.running)
		switch {
		case left == 0:
			return
		case failed == 0:
			wait = outagePause
			continue
		}
		if pause(c.running, wait, nil) != nil {
			return
		}
		wait = min(2*wait, outagePauseMax)
	}
}

// releaseAbandonedRound tries the oldest calls once, in parallel. Failed ones go to the end of the
// queue, so that a node that is away does not delay the others. It locks mu.
func (c *calls) releaseAbandonedRound(ctx context.Context) (failed, left int) {
	c.mu.Lock()
	n := min(abandonedParallel, len(c.abandoned))
	round := slices.Clone(c.abandoned[:n])
	c.abandoned = c.abandoned[n:]
	c.mu.Unlock()

	released := make([]bool, n)
	inParallel(n, n, func(i int) {
		limited, cancel := context.WithTimeout(ctx, undoTimeout)
		defer cancel()
		_, err := c.sendRelease(limited, round[i].call, round[i].owner, round[i].keys)
		released[i] = err == nil || rejected(err)
	})

	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	for i, a := range round {
		switch {
		case released[i]:
			c.done(a.call)
		case now.Before(a.until):
			failed++
			c.abandoned = append(c.abandoned, a)
		}
	}
	c.releasing = c.releasing && len(c.abandoned) > 0
	return failed, len(c.abandoned)
}

// releaseAbandonedOnce tries each call once more when the Locker is closed. It locks mu.
func (c *calls) releaseAbandonedOnce(ctx context.Context) {
	c.mu.Lock()
	rounds := (len(c.abandoned) + abandonedParallel - 1) / abandonedParallel
	c.mu.Unlock()
	for range rounds {
		if ctx.Err() != nil {
			return
		}
		c.releaseAbandonedRound(ctx)
	}
}

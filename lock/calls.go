package lock

import (
	"context"
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
// its methods hold mu.
type calls struct {
	*lifetime
	scripts
	id     string // unique among all processes
	serial uint64
	// unused receipts are reused, the last used first.
	unused    []receiptKey
	made      int
	abandoned int           // calls that are released in the background
	slots     chan struct{} // abandonedParallel of them
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
	// abandonedMax bounds the abandoned calls. In a large outage further ones are dropped, and their
	// locks end with their leases.
	abandonedMax = 4096
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
}

// abandon releases a call in the background as soon as Redis can be reached. It is retried for the
// length of its lease, at least for abandonedRetryMin, and once more when the Locker is closed. The
// caller runs as a task.
func (c *calls) abandon(lease time.Duration, a abandonedCall) {
	if c.abandoned == abandonedMax {
		return
	}
	c.abandoned++
	until := time.Now().Add(max(lease, abandonedRetryMin))
	c.tasks.Go(func() {
		released := false
		wait := outagePause
		for last := false; !released && !last; wait = min(2*wait, outagePauseMax) {
			last = c.running.Err() != nil || time.Now().After(until)
			if released = c.tryAbandoned(a); !released && !last {
				_ = pause(c.running, wait, nil) // ends early if the Locker is closed
			}
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.abandoned--
		if released {
			c.done(a.call)
		}
	})
}

func (c *calls) tryAbandoned(a abandonedCall) bool {
	c.slots <- struct{}{}
	defer func() { <-c.slots }()
	ctx, cancel := context.WithTimeout(context.Background(), undoTimeout)
	defer cancel()
	_, err := c.sendRelease(ctx, a.call, a.owner, a.keys)
	return err == nil || rejected(err)
}

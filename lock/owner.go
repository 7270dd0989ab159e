package lock

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"stampede/lua"
)

// receiptTTL is how long Redis knows a release by its name. It is longer than a client with
// reasonable time-outs keeps sending the same command.
const receiptTTL = 30 * time.Second

// The answers of the scripts.
const (
	answerHeld     = "held"
	answerBusy     = "busy"
	answerReleased = "released"
	answerKept     = "kept"
	answerLost     = "lost"
)

// owner is who holds locks: a call of TryEach, and every further one with a context of its leases.
type owner struct {
	locker *Locker
	id     string
	// turn is taken for the time of a call, because a call says how deep a lock is going to be: two
	// at a time would say the same. It is a channel so that a caller can give up waiting for it.
	turn chan struct{}
	// depth is how many leases hold a key and are not known to be released; guarded by turn. The
	// depth in Redis follows it, and is never read.
	depth map[string]int
}

// ownerKey finds the owner in a context. It holds the Locker because the owner of a lock in one
// Redis owns nothing in another.
type ownerKey struct{ *Locker }

func (l *Locker) owner(ctx context.Context) *owner {
	if o, ok := ctx.Value(ownerKey{l}).(*owner); ok {
		return o
	}
	return &owner{locker: l, id: l.unique(), turn: make(chan struct{}, 1), depth: map[string]int{}}
}

func (o *owner) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil { // select would choose by lot
		return err
	}
	select {
	case o.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (o *owner) leave() { <-o.turn }

// acquire asks for one more hold on each key, and tells Redis's answers. The depths here are left to
// the caller, who decides whether it keeps what it got.
func (o *owner) acquire(ctx context.Context, keys []string, lease time.Duration) ([]string, error) {
	args := make([]any, 0, 2+len(keys))
	args = append(args, o.id, lease.Milliseconds())
	for _, key := range keys {
		args = append(args, o.depth[key]+1)
	}
	answers, err := lua.LockAcquire.Run(ctx, o.locker.rdb, keys, args...).StringSlice()
	if err != nil {
		return nil, err
	}
	return answers, check(answers, len(keys), answerHeld, answerBusy, answerLost)
}

// release tells Redis how many holds on each key are left after giving up that many of them, and
// tells its answers. The name says which release this is, so that a repeat is known as one.
func (o *owner) release(ctx context.Context, name string, keys []string, holds int) ([]string, error) {
	args := make([]any, 0, 2+len(keys))
	args = append(args, o.id, receiptTTL.Milliseconds())
	for _, key := range keys {
		args = append(args, o.depth[key]-holds)
	}
	names := append([]string{receiptKey(keys[0], name)}, keys...)
	answers, err := lua.LockRelease.Run(ctx, o.locker.rdb, names, args...).StringSlice()
	if err != nil {
		return nil, err
	}
	return answers, check(answers, len(keys), answerReleased, answerKept, answerLost)
}

// count notes that each key is held by so many leases more, or fewer.
func (o *owner) count(keys []string, leases int) {
	for _, key := range keys {
		if o.depth[key] += leases; o.depth[key] == 0 {
			delete(o.depth, key)
		}
	}
}

// receiptKey names the receipt of a release so that it lies in the slot of the lock.
func receiptKey(key, name string) string {
	if open := strings.IndexByte(key, '{'); open < 0 || strings.IndexByte(key[open:], '}') < 2 {
		key = "{" + key + "}"
	}
	return key + ":released:" + name
}

// check holds the script's answer against its header: one word that is listed there for each key.
func check(answers []string, keys int, words ...string) error {
	if len(answers) != keys {
		return fmt.Errorf("%d answers for %d keys", len(answers), keys)
	}
	for _, answer := range answers {
		if !slices.Contains(words, answer) {
			return fmt.Errorf("unknown answer %q", answer)
		}
	}
	return nil
}

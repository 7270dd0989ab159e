package lock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// Acquire takes the lock of a key and waits for it until ctx is done. Without For, the lease is
// renewed until Release. If the owner in ctx (see [Lease.Context]) holds the lock, Acquire reenters
// it without a call to Redis, unless the lease must be extended.
//
// The waiters of one process are served in order. Only the first asks Redis: when the lock is
// released, when its lease should have ended, and every WithPoll. Between processes the first to
// ask after a release gets the lock.
//
// If Redis cannot be reached, or answers that it cannot serve now (LOADING, READONLY, MASTERDOWN
// and the like), Acquire waits for it as for a busy lock and reports each attempt to
// Observer.Unreachable. Without a deadline in ctx it waits for as long as Redis is unavailable.
//
// If the deadline of ctx passes first, the error wraps ErrBusy and context.DeadlineExceeded, and
// the last error of Redis if it was unavailable. Other errors are ErrInvalid, ErrLost, ErrClosed,
// the cause of a cancelled ctx, and errors of Redis that a retry cannot fix, such as a wrong
// password. On an error, everything that the call took or may have taken is released, as soon as
// Redis can be reached.
func (l *Locker) Acquire(ctx context.Context, key string, opts ...AcquireOption) (*Lease, error) {
	return l.AcquireAll(ctx, []string{key}, opts...)
}

// TryAcquire is Acquire without waiting: it returns ErrBusy if another owner holds the lock, and
// the error if Redis is unavailable.
func (l *Locker) TryAcquire(ctx context.Context, key string, opts ...AcquireOption) (*Lease, error) {
	lease, busy, err := l.tryAll(ctx, []string{key}, opts)
	if len(busy) > 0 {
		err = fmt.Errorf("%w: %s", ErrBusy, key)
	}
	return lease, err
}

// tryAll takes the locks of all keys without waiting, or returns which are busy.
func (l *Locker) tryAll(ctx context.Context, keys []string, opts []AcquireOption) (*Lease, []string, error) {
	req, err := l.newRequest(ctx, modeAll, keys, opts)
	if err != nil {
		return nil, nil, err
	}
	got, err := req.attempt(ctx)
	return got.lease, got.busy, err
}

// AcquireAll takes the locks of all keys in one step. It waits until no other owner holds any of
// them, or ctx is done. It holds none while it waits, so calls that name the same keys in another
// order do not deadlock. A call with many keys can be overtaken by calls with fewer. A key that is
// named twice is taken once. Everything else is as in Acquire.
func (l *Locker) AcquireAll(ctx context.Context, keys []string, opts ...AcquireOption) (*Lease, error) {
	if len(keys) > MaxKeysAtOnce {
		return nil, fmt.Errorf("%w: %d keys at once, want at most %d", ErrInvalid, len(keys), MaxKeysAtOnce)
	}
	req, err := l.newRequest(ctx, modeAll, keys, opts)
	if err != nil {
		return nil, err
	}
	return req.await(ctx)
}

// TryEach takes the lock of every key that is free, or held by the owner in ctx (see
// [Lease.Context]), and never waits. It returns a lease on these, which may be none, and the keys
// that others hold, in the order given. A key that is named twice is taken once.
//
// It costs one round trip for every 512 keys. All keys of the call have the same owner, a new one
// unless ctx has one.
//
// It returns ErrLost if the owner has lost one of the locks, because the caller relies on having
// held it all the time. It returns the other errors of TryAcquire, except ErrBusy.
func (l *Locker) TryEach(
	ctx context.Context, keys []string, opts ...AcquireOption,
) (lease *Lease, busy []string, err error) {
	req, err := l.newRequest(ctx, modeEach, keys, opts)
	if err != nil {
		return nil, nil, err
	}
	got, err := req.attempt(ctx)
	return got.lease, got.busy, err
}

// Do calls f while it holds the lock of a key. The context of f is the lease's context and ends
// when the lock is lost. The error joins the errors of f and Release.
func (l *Locker) Do(
	ctx context.Context, key string, f func(ctx context.Context) error, opts ...AcquireOption,
) (err error) {
	lease, err := l.Acquire(ctx, key, opts...)
	if err != nil {
		return err
	}
	return holding(ctx, lease, f)
}

// holding calls f and releases the lease, also if f panics.
func holding(ctx context.Context, lease interface {
	Context(ctx context.Context) context.Context
	Release(ctx context.Context) error
	abandon()
}, f func(ctx context.Context) error,
) (err error) {
	defer func() {
		if released := lease.Release(ctx); released != nil {
			lease.abandon()
			err = errors.Join(err, released)
		}
	}()
	return f(lease.Context(ctx))
}

// request is what one acquire asks for, in all its attempts.
type request struct {
	*Locker
	terms
	owner *lockOwner
	mode  string
	keys  []string
	since time.Time
	// waits is set if the request retries. Its attempts repeat one script call, for callKeys.
	waits    bool
	call     *grant
	callKeys []string
}

func (l *Locker) newRequest(ctx context.Context, mode string, keys []string, opts []AcquireOption) (*request, error) {
	t, err := l.terms(opts)
	if err != nil {
		return nil, err
	}
	if l.clientErr != nil {
		return nil, l.clientErr
	}
	if keys, err = l.validate(keys); err != nil {
		return nil, err
	}
	return &request{Locker: l, terms: t, owner: l.owner(ctx), mode: mode, keys: keys, since: time.Now()}, nil
}

// validate returns the keys without duplicates.
func (l *Locker) validate(keys []string) ([]string, error) {
	if len(keys) > MaxKeys {
		return nil, fmt.Errorf("%w: %d keys, want at most %d", ErrInvalid, len(keys), MaxKeys)
	}
	for _, key := range keys {
		if err := l.validateKey(key); err != nil {
			return nil, err
		}
		if l.scripts.slot(key) != l.scripts.slot(keys[0]) {
			return nil, fmt.Errorf("%w: in a cluster, the keys of one call must share a hash tag: %q and %q do not",
				ErrInvalid, keys[0], key)
		}
	}
	if len(keys) == 1 {
		return []string{keys[0]}, nil // the caller may change its slice while this call waits
	}
	once := make([]string, 0, len(keys))
	seen := make(map[string]struct{}, len(keys))
	for _, key := range keys {
		if _, again := seen[key]; !again {
			seen[key] = struct{}{}
			once = append(once, key)
		}
	}
	return once, nil
}

func (l *Locker) validateKey(key string) error {
	clustered := l.scripts.clustered
	switch {
	case key == "" || len(key) > MaxKeyBytes:
		return fmt.Errorf("%w: a key of %d bytes, want 1 to %d", ErrInvalid, len(key), MaxKeyBytes)
	case clustered && hashTag(key) == key && strings.ContainsAny(key, "{}"):
		return fmt.Errorf("%w: in a cluster, key %q must have a hash tag or no braces: its channel would be in another slot",
			ErrInvalid, key)
	case clustered && hashTag(l.prefix) != l.prefix && hashTag(l.prefix) != hashTag(key):
		return fmt.Errorf("%w: in a cluster, key %q must have the hash tag of the prefix %q", ErrInvalid, key, l.prefix)
	}
	return nil
}

// undoTimeout is short: the caller already has an error, and a Redis that did not answer will
// hardly answer now.
const undoTimeout = time.Second

// outcome is the result of an attempt: a lease, and the keys that are busy. In mode all it has one
// of them only.
type outcome struct {
	lease *Lease
	busy  []string
	// wait is when the busy keys are free unless they are renewed, 0 if unknown. listeners is how
	// many connections listen for the release of the first.
	wait      time.Duration
	listeners int
}

// attempt asks once.
func (req *request) attempt(ctx context.Context) (outcome, error) {
	got, err := req.take(ctx)
	if err != nil {
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) { // the client reports no more than that
			err = context.Cause(ctx)
		}
		return outcome{}, fmt.Errorf("acquire %s: %w", describe(req.keys), err)
	}
	req.observer.busy(len(got.busy))
	return got, nil
}

func describe(keys []string) string {
	if len(keys) == 1 {
		return "lock " + keys[0]
	}
	return fmt.Sprintf("%d locks", len(keys))
}

func (req *request) take(ctx context.Context) (got outcome, err error) {
	if err := req.owner.enter(ctx); err != nil {
		return outcome{}, err
	}
	defer req.owner.leave()
	if !req.startTask() {
		return outcome{}, ErrClosed
	}
	defer req.tasks.Done()

	le := newLease(req)
	defer func() {
		if got.lease == nil {
			le.undo(ctx)
		}
	}()
	fresh, err := req.reenter(ctx, le)
	if err != nil {
		return outcome{}, err
	}
	reentered := len(le.holds)
	for chunk := range slices.Chunk(fresh, keysPerCall) {
		reply, err := req.takeChunk(ctx, le, chunk)
		if err != nil {
			return outcome{}, err
		}
		got.busy = append(got.busy, reply.busy(chunk)...)
		got.wait, got.listeners = max(got.wait, reply.wait), max(got.listeners, reply.listeners)
	}
	if req.mode == modeAll && len(got.busy) > 0 {
		return got, nil
	}
	if err := le.activate(req.keys); err != nil {
		return outcome{}, err
	}
	req.observer.reentered(reentered)
	req.observer.acquired(len(le.holds)-reentered, req.since)
	got.lease = le
	return got, nil
}

// reenter adds to the lease what its owner already holds, extends it where needed, and returns the
// other keys.
func (req *request) reenter(ctx context.Context, le *Lease) (fresh []string, err error) {
	req.mu.Lock()
	if len(req.owner.holds) == 0 {
		req.mu.Unlock()
		return req.keys, nil
	}
	now := time.Now()
	var short []*hold
	var lost []string
	for _, key := range req.keys {
		h := req.owner.holds[key]
		switch {
		case h == nil:
			fresh = append(fresh, key)
		case !h.valid(now):
			lost = append(lost, key)
		default:
			le.add(h)
			// The watchdog renews a watched lease, immediately if little time is left.
			if !req.watched && h.ends.Before(now.Add(req.lease-drift(req.lease))) {
				short = append(short, h)
			}
		}
	}
	req.mu.Unlock()
	if len(lost) > 0 {
		return nil, &LostError{Keys: lost}
	}
	for chunk := range slices.Chunk(short, renewalsPerCall) {
		if err := req.renew(ctx, chunk, req.lease); err != nil {
			return nil, err
		}
	}
	return fresh, nil
}

// takeChunk makes one script call and adds to the lease what that took, or may have taken.
func (req *request) takeChunk(ctx context.Context, le *Lease, keys []string) (acquireReply, error) {
	g := req.callFor(keys)
	sent := time.Now()
	reply, err := req.scripts.sendAcquire(ctx, g, req.mode, req.waits, keys, req.lease)
	// A waiter repeats this call until Redis answers, and the repeat takes nothing twice. If it
	// gives up before that, abandonCall releases what the call took.
	repeats := req.waits && ctx.Err() == nil && isUnavailable(err)
	nothing := req.mode == modeAll && slices.Contains(reply.answers, answerBusy) || rejected(err) || repeats

	req.mu.Lock()
	defer req.mu.Unlock()
	g.token = reply.token
	took := false
	for i, key := range keys {
		if nothing || err == nil && reply.answers[i] != answerHeld {
			continue
		}
		took = true
		// What may have been taken counts as lost: it is released and not reported.
		h := &hold{grant: g, key: key, lost: err != nil}
		h.extend(sent, req.lease)
		if err == nil && req.owner.holds != nil {
			req.owner.holds[key] = h
			req.waiters.wakeOwner(key, req.owner)
		}
		le.add(h)
	}
	switch {
	case took:
		req.call = nil
	case !req.waits:
		req.calls.done(g.acquireCall)
	}
	return reply, err
}

// callFor returns a new call for each attempt. A waiter has one call for all its attempts as long
// as they name the same keys.
func (req *request) callFor(keys []string) *grant {
	if req.call != nil {
		if slices.Equal(req.callKeys, keys) {
			return req.call
		}
		req.abandonCall()
	}
	req.mu.Lock()
	defer req.mu.Unlock()
	g := req.calls.acquire()
	if req.waits {
		req.call, req.callKeys = g, keys
	}
	return g
}

// abandonCall makes sure that an attempt which is still in progress takes nothing.
func (req *request) abandonCall() {
	if req.call == nil {
		return
	}
	req.mu.Lock()
	defer req.mu.Unlock()
	req.calls.abandon(req.lease, abandonedCall{
		call: req.calls.release(req.call), owner: req.call.owner, keys: req.callKeys,
	})
	req.call = nil
}

const (
	// outagePause is the pause after a first attempt that could not reach Redis. It doubles with
	// each further one, up to outagePauseMax.
	outagePause    = 20 * time.Millisecond
	outagePauseMax = time.Second
)

// await retries until the request has all its locks.
func (req *request) await(ctx context.Context) (*Lease, error) {
	if !req.startTask() {
		return nil, ErrClosed
	}
	defer req.tasks.Done() // after abandonCall
	req.waits = true
	defer req.abandonCall()
	var outage outageState
	lease, err := req.retry(ctx, &outage)
	return lease, deadlineError(ctx, outage.annotate(err))
}

func (req *request) retry(ctx context.Context, outage *outageState) (lease *Lease, err error) {
	w := &waiter{owner: req.owner}
	defer func() {
		if w.queue != nil {
			req.waiters.leave(w, lease.duration())
		}
	}()
	if err := req.letOthersFirst(ctx, w); err != nil {
		return nil, err
	}
	for {
		got, err := req.attempt(ctx)
		within, again := outage.note(ctx, err, isUnavailable(err))
		if err != nil && !again || got.lease != nil {
			return got.lease, err
		}
		candidates := got.busy
		if err != nil {
			req.observer.unreachable(len(req.keys), err)
			candidates = req.notHeld()
		} else {
			within = got.wait
		}
		if len(candidates) == 0 { // it reenters: its owner holds all the keys, so it waits in no queue
			if err := pause(ctx, within, req.running.Done()); err != nil {
				return nil, fmt.Errorf("acquire %s: %w", describe(req.keys), err)
			}
			continue
		}
		key := candidates[0]
		if w.queue != nil && slices.Contains(candidates, w.queue.key) {
			key = w.queue.key // it keeps its place
		}
		if first := req.waiters.join(w, key, within, got.listeners); !first {
			// Other waiters of this process come first now. An attempt that is still in progress must
			// not take the lock for this one.
			req.abandonCall()
		}
		if err := req.waiters.wait(ctx, w); err != nil {
			return nil, err
		}
	}
}

// letOthersFirst waits while a key is left to other processes or to earlier waiters of this one.
func (req *request) letOthersFirst(ctx context.Context, w *waiter) error {
	key, within := req.waiters.contended(req.owner, req.keys)
	if within > 0 {
		if err := pause(ctx, within, req.running.Done()); err != nil {
			return fmt.Errorf("wait for lock %s: %w", key, err)
		}
		key, _ = req.waiters.contended(req.owner, req.keys)
	}
	if key == "" || req.waiters.join(w, key, 0, 0) {
		return nil
	}
	return req.waiters.wait(ctx, w)
}

// notHeld returns the requested keys that their owner does not hold.
func (req *request) notHeld() []string {
	req.mu.Lock()
	defer req.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(req.keys), func(key string) bool { return req.owner.holds[key] != nil })
}

// outageState is what a waiter knows about a Redis that is unavailable.
type outageState struct {
	pause time.Duration // until its next attempt; 0 if Redis answered the last one
	why   error
}

// note takes the error of an attempt. It reports whether the waiter retries, and after which time.
func (o *outageState) note(ctx context.Context, err error, unavailable bool) (within time.Duration, retry bool) {
	switch {
	case ctx.Err() != nil && err != nil:
		return 0, false
	case !unavailable:
		*o = outageState{}
		return 0, false
	}
	o.pause, o.why = min(max(outagePause, 2*o.pause), outagePauseMax), err
	return o.pause/2 + rand.N(o.pause/2), true // random, so that processes do not retry together
}

// annotate adds the last error of an unavailable Redis to the error of a waiter that gives up.
func (o *outageState) annotate(err error) error {
	if err == nil || o.why == nil {
		return err
	}
	return fmt.Errorf("%w; Redis is unavailable: %w", err, o.why)
}

// deadlineError adds ErrBusy to the error of a waiter whose deadline has passed.
func deadlineError(ctx context.Context, err error) error {
	ended := ctx.Err()
	switch {
	case err == nil || !errors.Is(ended, context.DeadlineExceeded):
		return err
	case errors.Is(err, ended):
		return fmt.Errorf("%w: %w", ErrBusy, err)
	case errors.Is(err, context.Cause(ctx)) || isUnavailable(err):
		return fmt.Errorf("%w: %w (%w)", ErrBusy, err, ended)
	}
	return err
}

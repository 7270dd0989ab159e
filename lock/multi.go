package lock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// nodeTimeoutDivisor is the part of a lease for which a Multi waits for one server, and
	// nodeTimeoutMax the longest time.
	nodeTimeoutDivisor = 10
	nodeTimeoutMax     = time.Second
	// splitDelayMax spreads the retries of processes that each got some servers and none enough.
	splitDelayMax = 20 * time.Millisecond
)

// Multi takes locks on several independent Redis servers, after the algorithm that Redis's
// documentation calls Redlock: the holder of a majority of the servers holds the lock. It works
// while fewer than half of the servers are away, and a server that fails over or restarts empty
// does not give a lock away.
//
// Multi replaces trust in one server by trust in the clocks of all servers, and in fewer than half
// of them restarting empty within one lease. It has no fencing tokens, because independent servers
// have no common counter. Where correctness depends on the lock, a check in the store is worth more
// than more servers; where it does not, one server is enough, and three times as fast. It is safe
// for concurrent use.
type Multi struct {
	nodes []*Locker
	need  int
}

// MultiOption changes a setting of a Multi.
type MultiOption func(*Multi)

// All requires all servers, as Redisson's MultiLock does. Then no server may be away.
func All() MultiOption { return func(m *Multi) { m.need = len(m.nodes) } }

// NewMulti returns a Multi of Lockers, each on another server. The caller closes the Lockers, which
// also ends calls of the Multi. It returns ErrInvalid for no Locker, or for two with the same
// client.
func NewMulti(nodes []*Locker, opts ...MultiOption) (*Multi, error) {
	if len(nodes) == 0 {
		return nil, fmt.Errorf("%w: a Multi needs at least one Locker", ErrInvalid)
	}
	m := &Multi{nodes: slices.Clone(nodes), need: len(nodes)/2 + 1}
	once := make(map[redis.UniversalClient]bool, len(nodes))
	for _, node := range nodes {
		if once[node.rdb] {
			return nil, fmt.Errorf("%w: two Lockers of a Multi have the same client", ErrInvalid)
		}
		once[node.rdb] = true
	}
	for _, opt := range opts {
		opt(m)
	}
	return m, nil
}

// TryAcquire takes the lock of a key on all servers in parallel, without waiting for it. It returns
// ErrBusy if others hold the lock on so many servers that too few are left. What was taken is then
// released. It waits for a server that does not answer for a tenth of the lease, one second at
// most.
//
// Options, reentry and errors are as in Locker.TryAcquire. If too many servers failed, the error
// joins theirs.
func (m *Multi) TryAcquire(ctx context.Context, key string, opts ...AcquireOption) (*MultiLease, error) {
	lease, votes, err := m.attempt(ctx, key, opts)
	if err == nil && lease == nil {
		err = fmt.Errorf("%w: %s on %d of %d servers", ErrBusy, key, len(votes.busy), len(m.nodes))
	}
	return lease, err
}

// Acquire is TryAcquire that waits until ctx is done, also for servers that are away; see
// Locker.Acquire. The waiters of one process are served in order, and a release on a server where
// the lock is busy wakes the first.
func (m *Multi) Acquire(ctx context.Context, key string, opts ...AcquireOption) (*MultiLease, error) {
	var outage outageState
	lease, err := m.acquireLoop(ctx, key, opts, &outage)
	return lease, deadlineError(ctx, outage.annotate(err))
}

// Do calls f while it holds the lock of a key; see Locker.Do.
func (m *Multi) Do(
	ctx context.Context, key string, f func(ctx context.Context) error, opts ...AcquireOption,
) (err error) {
	lease, err := m.Acquire(ctx, key, opts...)
	if err != nil {
		return err
	}
	defer func() { // also if f panics
		if released := lease.Release(ctx); released != nil {
			lease.undo(ctx)
			err = errors.Join(err, released)
		}
	}()
	return f(lease.Context(ctx))
}

func (m *Multi) acquireLoop(
	ctx context.Context, key string, opts []AcquireOption, outage *outageState,
) (*MultiLease, error) {
	w := newWaiter(nil)
	at := m.nodes[0] // the server whose queue it joins
	for {
		lease, votes, err := m.attempt(ctx, key, opts)
		within, retry := outage.note(ctx, err, isUnavailable(err) && votes.allUnavailable())
		if err != nil && !retry || lease != nil {
			at.leaveQueue(w, lease.leaseOn(at))
			return lease, err
		}
		if err != nil {
			at.leaveQueue(w, nil)
			if err := pauseFor(ctx, within); err != nil {
				return nil, fmt.Errorf("wait for lock %s: %w", key, err)
			}
			continue
		}
		if busy := m.firstOf(votes.busy); busy != at {
			at.leaveQueue(w, nil)
			at = busy
		}
		at.joinQueue(w, key, 0, 0)
		if err := at.wait(ctx, w, key); err != nil {
			return nil, err
		}
		if len(votes.leases) > 0 { // releases of partly taken locks wake other waiters
			if err := pauseFor(ctx, rand.N(splitDelayMax)); err != nil {
				at.leaveQueue(w, nil)
				return nil, fmt.Errorf("wait for lock %s: %w", key, err)
			}
		}
	}
}

// firstOf returns the first of these servers, so that all waiters join the same queue.
func (m *Multi) firstOf(busy []*Locker) *Locker {
	return m.nodes[slices.IndexFunc(m.nodes, func(node *Locker) bool { return slices.Contains(busy, node) })]
}

// attempt asks all servers once. Without an error, it returns a lease, or nil if the lock is busy.
func (m *Multi) attempt(ctx context.Context, key string, opts []AcquireOption) (*MultiLease, voteCount, error) {
	t, err := m.nodes[0].terms(opts)
	if err != nil {
		return nil, voteCount{}, err
	}
	nodes, err := m.nodesToAsk(ctx, key)
	if err != nil {
		return nil, voteCount{}, fmt.Errorf("acquire lock %s: %w", key, err)
	}
	v := m.ask(ctx, nodes, key, opts, min(t.lease/nodeTimeoutDivisor, nodeTimeoutMax))
	lease := &MultiLease{multi: m, key: key, leases: v.leases}
	if len(v.leases) >= m.need && lease.Err() == nil {
		return lease, v, nil
	}
	lease.undo(ctx)
	switch {
	case len(v.leases) >= m.need:
		return nil, v, fmt.Errorf("acquire lock %s: %w", key, &LostError{Keys: []string{key}})
	case ctx.Err() != nil:
		return nil, v, fmt.Errorf("acquire lock %s: %w", key, context.Cause(ctx))
	case len(v.leases)+len(v.busy) < m.need:
		return nil, v, fmt.Errorf("acquire lock %s on %d of %d servers: %w",
			key, m.need, len(m.nodes), errors.Join(v.failed...))
	}
	return nil, v, nil
}

// nodesToAsk returns all servers, or those on which the owner holds the lock, and ErrLost if these
// are too few.
func (m *Multi) nodesToAsk(ctx context.Context, key string) ([]*Locker, error) {
	var held []*Locker
	knows := false
	for _, node := range m.nodes {
		known, good := node.holds(ctx, key)
		knows = knows || known
		if good {
			held = append(held, node)
		}
	}
	switch {
	case !knows:
		return m.nodes, nil
	case len(held) < m.need:
		return nil, &LostError{Keys: []string{key}}
	}
	return held, nil
}

// holds reports whether the owner in ctx has taken and not released the lock of a key, and whether
// it still has it.
func (l *Locker) holds(ctx context.Context, key string) (known, good bool) {
	o, ok := ctx.Value(ownerKey{l}).(*lockOwner)
	if !ok {
		return false, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	h := o.holds[key]
	return h != nil, h != nil && h.valid(time.Now())
}

// errNoAnswer is the error of a server that did not answer. unavailable accepts it.
var errNoAnswer = fmt.Errorf("no answer in time: %w", os.ErrDeadlineExceeded)

// ask asks in parallel and waits for all answers, for at most the timeout. What servers take later
// is released.
func (m *Multi) ask(
	ctx context.Context, nodes []*Locker, key string, opts []AcquireOption, timeout time.Duration,
) voteCount {
	answers := make(chan vote)
	over := make(chan struct{})
	defer close(over)
	var v voteCount
	waiting := 0
	for _, node := range nodes {
		ask := func() {
			lease, err := node.TryAcquire(ctx, key, opts...)
			select {
			case answers <- vote{node, lease, err}:
			case <-over:
				if err == nil {
					_ = lease.Release(ctx)
					lease.abandon()
				}
			}
		}
		if node.spawnTask(ask) {
			waiting++
		} else {
			v.failed = append(v.failed, ErrClosed)
		}
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for ; waiting > 0; waiting-- {
		select {
		case a := <-answers:
			v.count(a)
		case <-timer.C:
			v.failed = append(v.failed, fmt.Errorf("%d servers: %w", waiting, errNoAnswer))
			return v
		case <-ctx.Done():
			v.failed = append(v.failed, context.Cause(ctx))
			return v
		}
	}
	return v
}

// voteCount holds the answers of the servers.
type voteCount struct {
	leases []*Lease
	busy   []*Locker
	failed []error
}

func (v *voteCount) count(of vote) {
	switch {
	case of.err == nil:
		v.leases = append(v.leases, of.lease)
	case errors.Is(of.err, ErrBusy):
		v.busy = append(v.busy, of.node)
	default:
		v.failed = append(v.failed, of.err)
	}
}

// allUnavailable reports that a later attempt may succeed on all servers that failed.
func (v *voteCount) allUnavailable() bool {
	return !slices.ContainsFunc(v.failed, func(err error) bool { return !isUnavailable(err) })
}

type vote struct {
	node  *Locker
	lease *Lease
	err   error
}

// MultiLease is a lock that is held on enough servers. Release each. It is safe for concurrent use.
type MultiLease struct {
	multi  *Multi
	key    string
	leases []*Lease
}

// Err returns nil while enough servers hold the lock, and later a *LostError, ErrReleased or
// ErrClosed; see Lease.Err. The lease on each server counts from when that server was asked, less
// the drift of the clocks.
func (le *MultiLease) Err() error {
	good := 0
	var over error
	for _, lease := range le.leases {
		switch err := lease.Err(); {
		case err == nil:
			good++
		case !errors.Is(err, ErrLost):
			over = err
		}
	}
	switch {
	case good >= le.multi.need:
		return nil
	case over != nil:
		return over
	}
	return &LostError{Keys: []string{le.key}}
}

// Context returns a context that carries the owner of the lease and ends with the lease; see
// Lease.Context.
func (le *MultiLease) Context(ctx context.Context) context.Context {
	for _, lease := range le.leases {
		ctx = lease.withOwner(ctx)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	look := func(error) {
		if err := le.Err(); err != nil {
			cancel(err)
		}
	}
	for _, lease := range le.leases {
		lease.onEnd(ctx, look)
	}
	return ctx
}

// Release releases the lock on all servers in parallel; see Lease.Release. It returns when enough
// servers have answered, and nil if they released it: on a server that is away the lock ends with
// its lease. It returns a *LostError if fewer servers than needed still had it.
func (le *MultiLease) Release(ctx context.Context) error {
	answers := make(chan error, len(le.leases))
	var inline sync.WaitGroup
	for _, lease := range le.leases {
		release := func() { answers <- lease.Release(ctx) }
		if !lease.locker.spawnTask(release) {
			inline.Go(release)
		}
	}
	defer inline.Wait()
	released, lost := 0, 0
	var failed []error
	for range le.leases {
		switch err := <-answers; {
		case err == nil:
			released++
		case errors.Is(err, ErrLost):
			lost++
		default:
			failed = append(failed, err)
		}
		if released >= le.multi.need {
			return nil
		}
	}
	if len(le.leases)-lost < le.multi.need {
		failed = append(failed, &LostError{Keys: []string{le.key}})
	}
	return errors.Join(failed...)
}

// leaseOn returns the lease on one server, or nil.
func (le *MultiLease) leaseOn(node *Locker) *Lease {
	if le == nil {
		return nil
	}
	for _, lease := range le.leases {
		if lease.locker == node {
			return lease
		}
	}
	return nil
}

// undo releases a lease that no caller has or releases again. The rest is released as soon as the
// servers can be reached.
func (le *MultiLease) undo(ctx context.Context) {
	_ = le.Release(ctx)
	for _, lease := range le.leases {
		if !lease.locker.spawnTask(lease.abandon) {
			lease.abandon()
		}
	}
}

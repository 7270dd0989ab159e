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
	// nodeTimeoutDivisor is the part of a lease for which a Multi waits for a node that does not answer, and
	// nodeTimeoutMax the longest time.
	nodeTimeoutDivisor = 10
	nodeTimeoutMax     = time.Second
	// splitDelayMax keeps those apart who each got some nodes and none of them enough.
	splitDelayMax = 20 * time.Millisecond
)

// Multi takes locks on several Redis servers that know nothing of each other, after the algorithm that
// Redis's documentation calls Redlock: a lock is held by whoever holds it on the larger part of the
// servers. It goes on working while fewer than half of them are away, and one that fails over or restarts
// empty does not give a lock away.
//
// What it is worth: it replaces the trust in one server by the trust in the clocks of all of them, and in
// their not restarting empty within a lease one after another. It has no fencing token, because servers
// that know nothing of each other cannot count together. Where correctness depends on the lock, a check
// in the store that is written to is worth more than any number of servers; where it does not, one server
// is enough, and three times as fast. It is safe for concurrent use.
type Multi struct {
	nodes []*Locker
	need  int
}

// MultiOption changes a setting of a Multi.
type MultiOption func(*Multi)

// All has a lock held only by whoever holds it on all servers, as Redisson's MultiLock does. Then none
// of them may be away.
func All() MultiOption { return func(m *Multi) { m.need = len(m.nodes) } }

// NewMulti returns a Multi of the given Lockers, each of which is of another server. Whoever made them
// closes them, which also ends what the Multi has under way. The error is ErrInvalid, for no Locker, or
// two with the same client.
func NewMulti(nodes []*Locker, opts ...MultiOption) (*Multi, error) {
	if len(nodes) == 0 {
		return nil, fmt.Errorf("%w: a Multi of no Lockers", ErrInvalid)
	}
	m := &Multi{nodes: slices.Clone(nodes), need: len(nodes)/2 + 1}
	once := make(map[redis.UniversalClient]bool, len(nodes))
	for _, node := range nodes {
		if once[node.rdb] {
			return nil, fmt.Errorf("%w: a Multi of two Lockers with the same client", ErrInvalid)
		}
		once[node.rdb] = true
	}
	for _, opt := range opts {
		opt(m)
	}
	return m, nil
}

// TryAcquire takes the lock of a key on all servers at the same time, and does not wait for it: ErrBusy
// tells that others hold it on so many that the rest is not enough. What was taken is then given back. A
// server that does not answer is waited for a tenth of the lease, and one second at most.
//
// Options, re-entry by the context, and errors are those of Locker.TryAcquire; if too many servers failed,
// the error joins theirs.
func (m *Multi) TryAcquire(ctx context.Context, key string, opts ...AcquireOption) (*MultiLease, error) {
	lease, votes, err := m.attempt(ctx, key, opts)
	if err == nil && lease == nil {
		err = fmt.Errorf("%w: %s on %d of %d servers", ErrBusy, key, len(votes.busy), len(m.nodes))
	}
	return lease, err
}

// Acquire is TryAcquire that waits until ctx is done, also for servers that are away; see Locker.Acquire. Those
// who wait in one process are served in order, and the first of them is woken by a release on one of the servers
// on which the lock is busy.
func (m *Multi) Acquire(ctx context.Context, key string, opts ...AcquireOption) (*MultiLease, error) {
	var outage outage
	lease, err := m.acquireLoop(ctx, key, opts, &outage)
	return lease, deadlineError(ctx, outage.annotate(err))
}

// Do calls f with the lock of a key held; see Locker.Do.
func (m *Multi) Do(ctx context.Context, key string, f func(ctx context.Context) error, opts ...AcquireOption) (err error) {
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

func (m *Multi) acquireLoop(ctx context.Context, key string, opts []AcquireOption, outage *outage) (*MultiLease, error) {
	w := newWaiter(nil)
	at := m.nodes[0] // where it waits
	for {
		lease, votes, err := m.attempt(ctx, key, opts)
		within, retry := outage.note(ctx, err, unavailable(err) && !slices.ContainsFunc(votes.failed, func(one error) bool { return !unavailable(one) }))
		if err != nil && !retry || lease != nil {
			at.leaveQueue(w, lease.leaseOn(at))
			return lease, err
		}
		if err != nil {
			at.leaveQueue(w, nil)
			if err := sleep(ctx, within); err != nil {
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
		if len(votes.leases) > 0 { // what it gave back woke others, and theirs woke it
			if err := sleep(ctx, rand.N(splitDelayMax)); err != nil {
				at.leaveQueue(w, nil)
				return nil, fmt.Errorf("wait for lock %s: %w", key, err)
			}
		}
	}
}

// firstOf returns the first of those servers, so that all who wait meet at the same one.
func (m *Multi) firstOf(busy []*Locker) *Locker {
	return m.nodes[slices.IndexFunc(m.nodes, func(node *Locker) bool { return slices.Contains(busy, node) })]
}

// attempt asks all servers once. It returns a lease, or none if the lock is busy on too many of them.
func (m *Multi) attempt(ctx context.Context, key string, opts []AcquireOption) (*MultiLease, votes, error) {
	t, err := m.nodes[0].terms(opts)
	if err != nil {
		return nil, votes{}, err
	}
	nodes, err := m.nodesToAsk(ctx, key)
	if err != nil {
		return nil, votes{}, fmt.Errorf("acquire lock %s: %w", key, err)
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
		return nil, v, fmt.Errorf("acquire lock %s on %d of %d servers: %w", key, m.need, len(m.nodes), errors.Join(v.failed...))
	}
	return nil, v, nil
}

// nodesToAsk is all servers or, for an owner that holds the lock, those on which it does: ErrLost if these are
// not enough any more.
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

// holds tells whether the owner in ctx took the lock of a key and did not release it, and whether it still
// has it.
func (l *Locker) holds(ctx context.Context, key string) (known, good bool) {
	o, ok := ctx.Value(ownerKey{l}).(*owner)
	if !ok {
		return false, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	h := o.holds[key]
	return h != nil, h != nil && h.valid(time.Now())
}

// errNoAnswer stands for the answer of a server that gave none. It is one of those that away knows.
var errNoAnswer = fmt.Errorf("no answer in time: %w", os.ErrDeadlineExceeded)

// ask asks at the same time, and waits for all answers, but for silent servers no longer than given. What
// these take later on is given back.
func (m *Multi) ask(ctx context.Context, nodes []*Locker, key string, opts []AcquireOption, timeout time.Duration) votes {
	answers := make(chan vote)
	over := make(chan struct{})
	defer close(over)
	var v votes
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

// votes is how the servers answered.
type votes struct {
	leases []*Lease
	busy   []*Locker
	failed []error
}

func (v *votes) count(of vote) {
	switch {
	case of.err == nil:
		v.leases = append(v.leases, of.lease)
	case errors.Is(of.err, ErrBusy):
		v.busy = append(v.busy, of.node)
	default:
		v.failed = append(v.failed, of.err)
	}
}

type vote struct {
	node  *Locker
	lease *Lease
	err   error
}

// MultiLease is a lock that is held on enough servers. Each has to be released. It is safe for
// concurrent use.
type MultiLease struct {
	multi  *Multi
	key    string
	leases []*Lease
}

// Err returns nil as long as the lock is held on enough servers, and then a *LostError, or ErrReleased or
// ErrClosed; see Lease.Err. A lease of a lock counts on each server from when that was asked, less the
// drift of its clock.
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

// Context returns a context that carries the owner of the lease, and ends with the lease; see
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

// Release gives up the lock on all servers at the same time; see Lease.Release. It returns when enough
// servers have answered that others can take the lock, and nil if they have released it: what a server
// that is away keeps ends with its lease. It is a *LostError if fewer servers than needed still had it.
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

// on returns the lease on one server, which may be nil.
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

// giveBack releases what nobody was given, or nobody will release again: what cannot be released now, as
// soon as that server can be reached.
func (le *MultiLease) undo(ctx context.Context) {
	_ = le.Release(ctx)
	for _, lease := range le.leases {
		if !lease.locker.spawnTask(lease.abandon) {
			lease.abandon()
		}
	}
}

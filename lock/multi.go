package lock

import (
	"context"
	"errors"
	"fmt"
	"maps"
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
// documentation calls Redlock: the holder of a majority of the servers holds the locks. It works
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
		if once[node.scripts.rdb] {
			return nil, fmt.Errorf("%w: two Lockers of a Multi have the same client", ErrInvalid)
		}
		once[node.scripts.rdb] = true
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
	return m.TryAcquireAll(ctx, []string{key}, opts...)
}

// TryAcquireAll is TryAcquire for 1 to MaxKeysAtOnce keys. Each server grants all of them or none.
func (m *Multi) TryAcquireAll(ctx context.Context, keys []string, opts ...AcquireOption) (*MultiLease, error) {
	lease, votes, err := m.attempt(ctx, slices.Clone(keys), opts)
	if err == nil && lease == nil {
		_, _, busy := votes.firstBusy()
		err = fmt.Errorf("%w: %s on %d of %d servers", ErrBusy, describe(keys), busy, len(m.nodes))
	}
	return lease, err
}

// Acquire is TryAcquire that waits until ctx is done, also for servers that are away; see
// Locker.Acquire. The waiters of one process are served in order, and a release on a server where
// the lock is busy wakes the first.
func (m *Multi) Acquire(ctx context.Context, key string, opts ...AcquireOption) (*MultiLease, error) {
	return m.AcquireAll(ctx, []string{key}, opts...)
}

// AcquireAll is TryAcquireAll that waits like Acquire. It holds none of the locks while it waits.
func (m *Multi) AcquireAll(ctx context.Context, keys []string, opts ...AcquireOption) (*MultiLease, error) {
	var outage outageState
	lease, err := m.retry(ctx, slices.Clone(keys), opts, &outage)
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
	return holding(ctx, lease, f)
}

func (m *Multi) retry(
	ctx context.Context, keys []string, opts []AcquireOption, outage *outageState,
) (lease *MultiLease, err error) {
	w := &waiter{}
	at := m.nodes[0] // the server whose queue it joins
	defer func() { at.waiters.leave(w, lease.duration()) }()
	for {
		lease, votes, err := m.attempt(ctx, keys, opts)
		within, again := outage.note(ctx, err, isUnavailable(err) && votes.allUnavailable())
		switch {
		case err != nil && !again || lease != nil:
			return lease, err
		case err != nil:
			at.waiters.leave(w, 0)
			err = pause(ctx, within, nil)
		default:
			node, key, _ := votes.firstBusy()
			if w.queue != nil && votes.busyOn(at, w.queue.key) {
				node, key = at, w.queue.key // it keeps its place
			}
			if node != at {
				at.waiters.leave(w, 0)
				at = node
			}
			at.waiters.join(w, key, 0, 0)
			if err := at.waiters.wait(ctx, w); err != nil {
				return nil, err
			}
			if len(votes.leases()) > 0 { // releases of partly taken locks wake other waiters
				err = pause(ctx, rand.N(splitDelayMax), nil)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("wait for %s: %w", describe(keys), err)
		}
	}
}

// attempt asks all servers once. Without an error, it returns a lease, or nil if a lock is busy.
func (m *Multi) attempt(ctx context.Context, keys []string, opts []AcquireOption) (*MultiLease, votes, error) {
	fail := func(v votes, err error) (*MultiLease, votes, error) {
		return nil, v, fmt.Errorf("acquire %s: %w", describe(keys), err)
	}
	if len(keys) == 0 || len(keys) > MaxKeysAtOnce {
		return fail(nil, fmt.Errorf("%w: %d keys at once, want 1 to %d", ErrInvalid, len(keys), MaxKeysAtOnce))
	}
	t, err := m.nodes[0].terms(opts)
	if err != nil {
		return nil, nil, err
	}
	nodes, err := m.nodesToAsk(ctx, keys)
	if err != nil {
		return fail(nil, err)
	}
	v := ask(ctx, nodes, keys, opts, min(t.lease/nodeTimeoutDivisor, nodeTimeoutMax))
	lease := &MultiLease{multi: m, leases: v.leases()}
	enough := len(lease.leases) >= m.need
	over := lease.Err()
	if enough && over == nil {
		return lease, v, nil
	}
	_ = lease.Release(ctx)
	lease.abandon()
	_, _, busy := v.firstBusy()
	switch {
	case enough:
		return fail(v, over)
	case ctx.Err() != nil:
		return fail(v, context.Cause(ctx))
	case len(lease.leases)+busy < m.need:
		return nil, v, fmt.Errorf("acquire %s on %d of %d servers: %w", describe(keys), m.need, len(m.nodes), v.failed())
	}
	return nil, v, nil
}

// nodesToAsk returns the servers on which the owner still holds all the locks that it has taken and
// not released, or all servers if these are too few. It returns a *LostError with the locks that too
// few servers still have.
func (m *Multi) nodesToAsk(ctx context.Context, keys []string) ([]*Locker, error) {
	taken := make([]map[string]bool, len(m.nodes))
	for i, node := range m.nodes {
		taken[i] = node.taken(ctx, keys)
	}
	known := make(map[string]bool)
	var lost []string
	for _, key := range keys {
		had, has := 0, 0
		for _, node := range taken {
			valid, found := node[key]
			if found {
				had++
			}
			if valid {
				has++
			}
		}
		if had > 0 && has < m.need && !known[key] {
			lost = append(lost, key)
		}
		if had > 0 {
			known[key] = true
		}
	}
	if len(lost) > 0 {
		return nil, &LostError{Keys: lost}
	}
	var nodes []*Locker
	for i, node := range m.nodes {
		if maps.Equal(taken[i], known) {
			nodes = append(nodes, node)
		}
	}
	if len(nodes) < m.need {
		return m.nodes, nil
	}
	return nodes, nil
}

// taken returns which of the keys the owner in ctx has taken and not released, and whether it still
// has them.
func (l *Locker) taken(ctx context.Context, keys []string) map[string]bool {
	owner := l.owner(ctx) // calls a method of the caller's context, so without mu
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	taken := make(map[string]bool)
	for _, key := range keys {
		if h := owner.holds[key]; h != nil {
			taken[key] = h.valid(now)
		}
	}
	return taken
}

// errNoAnswer is the error of a server that did not answer. isUnavailable accepts it.
var errNoAnswer = fmt.Errorf("no answer in time: %w", os.ErrDeadlineExceeded)

// ask asks in parallel and waits for all answers, for at most the timeout. What servers take later
// is released.
func ask(ctx context.Context, nodes []*Locker, keys []string, opts []AcquireOption, timeout time.Duration) votes {
	type answer struct {
		from int
		vote vote
	}
	answers := make(chan answer)
	over := make(chan struct{})
	defer close(over)
	all := make(votes, len(nodes))
	waiting := 0
	for i, node := range nodes {
		all[i] = vote{node: node, err: ErrClosed}
		if node.spawnTask(func() {
			lease, busy, err := node.tryAll(ctx, keys, opts)
			select {
			case answers <- answer{i, vote{node, lease, busy, err}}:
			case <-over:
				if lease != nil {
					lease.undo(ctx)
				}
			}
		}) {
			all[i].err = errNoAnswer
			waiting++
		}
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for ; waiting > 0; waiting-- {
		select {
		case a := <-answers:
			all[a.from] = a.vote
		case <-timer.C:
			return all
		case <-ctx.Done():
			return all
		}
	}
	return all
}

// vote is the answer of one server: a lease, the keys that are busy, or an error.
type vote struct {
	node  *Locker
	lease *Lease
	busy  []string
	err   error
}

// votes are in the order of the servers.
type votes []vote

func (v votes) leases() (leases []*Lease) {
	for _, one := range v {
		if one.lease != nil {
			leases = append(leases, one.lease)
		}
	}
	return leases
}

// firstBusy returns the first server with a busy lock, so that all waiters join the same queue, and
// how many there are.
func (v votes) firstBusy() (node *Locker, key string, servers int) {
	for _, one := range slices.Backward(v) {
		if len(one.busy) > 0 {
			node, key = one.node, one.busy[0]
			servers++
		}
	}
	return node, key, servers
}

func (v votes) busyOn(node *Locker, key string) bool {
	return slices.ContainsFunc(v, func(one vote) bool { return one.node == node && slices.Contains(one.busy, key) })
}

func (v votes) failed() error {
	failed := make([]error, 0, len(v))
	for _, one := range v {
		failed = append(failed, one.err)
	}
	return errors.Join(failed...)
}

// allUnavailable reports that a later attempt may succeed on all servers that failed.
func (v votes) allUnavailable() bool {
	return !slices.ContainsFunc(v, func(one vote) bool { return one.err != nil && !isUnavailable(one.err) })
}

// MultiLease is a set of locks that is held on enough servers. Release each. It is safe for
// concurrent use.
type MultiLease struct {
	multi  *Multi
	leases []*Lease
}

func (le *MultiLease) duration() time.Duration {
	if le == nil {
		return 0
	}
	return le.leases[0].duration()
}

// Err returns nil while enough servers hold all locks, and later a *LostError, ErrReleased or
// ErrClosed; see Lease.Err. The lease on each server counts from when that server was asked, less
// the drift of the clocks.
func (le *MultiLease) Err() error {
	good := 0
	var over error
	var lost losses
	for _, lease := range le.leases {
		switch err := lease.Err(); {
		case err == nil:
			good++
		case lost.add(err) != nil:
			over = err
		}
	}
	switch {
	case good >= le.multi.need:
		return nil
	case over != nil:
		return over
	}
	return le.lost(lost)
}

// losses are the locks that servers lost, each as often as servers lost it.
type losses []string

// add takes the lost locks out of an error of one server, and returns the rest of it.
func (s *losses) add(err error) (rest error) {
	parts := []error{err}
	var joined interface {
		error
		Unwrap() []error
	}
	if errors.As(err, &joined) {
		parts = joined.Unwrap()
	}
	var others []error
	for _, part := range parts {
		var lost *LostError
		if errors.As(part, &lost) {
			*s = append(*s, lost.Keys...)
		} else {
			others = append(others, part)
		}
	}
	return errors.Join(others...)
}

// lost names the locks that too few servers have, or, if servers lost different ones so that each is
// on enough of them, all that a server lost.
func (le *MultiLease) lost(lost losses) *LostError {
	servers := make(map[string]int)
	for _, key := range lost {
		servers[key]++
	}
	keys := slices.Sorted(maps.Keys(servers))
	few := slices.DeleteFunc(slices.Clone(keys), func(key string) bool {
		return len(le.leases)-servers[key] >= le.multi.need
	})
	if len(few) > 0 {
		keys = few
	}
	return &LostError{Keys: keys}
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

// Release releases the locks on all servers in parallel; see Lease.Release. It returns when enough
// servers have answered, and nil if they released it: on a server that is away they end with
// their lease. It returns a *LostError if fewer servers than needed still had them.
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
	released, lossy := 0, 0
	var lost losses
	var failed []error
	for range le.leases {
		err := <-answers
		if err == nil {
			released++
		}
		if errors.Is(err, ErrLost) {
			lossy++
		}
		if rest := lost.add(err); rest != nil {
			failed = append(failed, rest)
		}
		if released >= le.multi.need {
			return nil
		}
	}
	if len(le.leases)-lossy < le.multi.need {
		failed = append(failed, le.lost(lost))
	}
	return errors.Join(failed...)
}

// abandon lets the background release the rest as soon as the servers can be reached.
func (le *MultiLease) abandon() {
	for _, lease := range le.leases {
		lease.locker.spawnTask(lease.retryInBackground)
	}
}

package lock

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// renewParallel is how many renewals run at the same time on one node. It leaves connections for
// others.
const renewParallel = 4

// renewRound renews the holds of a round: few calls for each slot, several at the same time, and at
// most renewParallel on one node, which may hang.
func (l *Locker) renewRound(holds []*hold) {
	byNode := make(map[string][][]*hold)
	for _, group := range l.groupBySlot(holds) {
		node := l.nodeOf(group[0].key)
		for chunk := range slices.Chunk(group, renewalsPerCall) {
			byNode[node] = append(byNode[node], chunk)
		}
	}
	var workers sync.WaitGroup
	for _, calls := range byNode {
		next := new(atomic.Int64)
		for range min(renewParallel, len(calls)) {
			workers.Go(func() {
				for i := next.Add(1) - 1; i < int64(len(calls)); i = next.Add(1) - 1 {
					l.renewChunk(calls[i])
				}
			})
		}
	}
	workers.Wait()
}

// groupBySlot returns groups of holds that one script call may name.
func (l *Locker) groupBySlot(holds []*hold) [][]*hold {
	if !l.clustered {
		return [][]*hold{holds}
	}
	of := make(map[string]int)
	var groups [][]*hold
	for _, h := range holds {
		tag := hashTag(h.key)
		i, known := of[tag]
		if !known {
			i = len(groups)
			of[tag] = i
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], h)
	}
	return groups
}

// nodeOf names the node of a lock, as far as the client knows it.
func (l *Locker) nodeOf(key string) string {
	cluster, ok := l.rdb.(*redis.ClusterClient)
	if !ok {
		return ""
	}
	node, err := cluster.MasterForKey(l.running, key)
	if err != nil {
		return ""
	}
	return node.Options().Addr
}

func (l *Locker) renewChunk(holds []*hold) {
	// A longer call counts as failed, so that there is time for another.
	lease := l.watchdog.lease
	ctx, cancel := context.WithTimeout(l.running, lease/3)
	defer cancel()
	_ = l.renew(ctx, holds, lease) // the observer and the losing holders are informed
	l.watchdog.renewalDone(holds)
}

// renew extends the leases of some locks in one call. Its error is a *LostError or an error of
// Redis.
func (l *Locker) renew(ctx context.Context, holds []*hold, lease time.Duration) error {
	sent := time.Now()
	renewed, err := l.sendRenew(ctx, holds, lease)
	l.observer.renewed(len(holds), sent, err)
	if err != nil {
		return err
	}
	var callbacks []func()
	var lost []string
	unreported := 0
	l.mu.Lock()
	for i, h := range holds {
		switch {
		case len(h.leases) == 0: // released meanwhile
		case renewed[i]:
			// A lease that ended before the answer stays ended: its holder may know.
			if h.valid(time.Now()) {
				h.extend(sent, lease)
			}
			l.watchdog.update(h)
		default:
			lost = append(lost, h.key)
			if !h.lost { // otherwise already reported
				unreported++
				callbacks = append(callbacks, l.markLost(h)...)
			}
		}
	}
	l.mu.Unlock()
	l.reportLost(unreported, callbacks)
	if len(lost) > 0 {
		return &LostError{Keys: lost}
	}
	return nil
}

// leasesExpired is called by the watchdog. A hold may have been renewed or released since then.
func (l *Locker) leasesExpired(holds []*hold) {
	l.mu.Lock()
	now := time.Now()
	var callbacks []func()
	lost := 0
	for _, h := range holds {
		switch {
		case len(h.leases) == 0 || h.lost:
		case h.valid(now):
			l.watchdog.watch(h)
		default:
			lost++
			callbacks = append(callbacks, l.markLost(h)...)
		}
	}
	l.mu.Unlock()
	l.reportLost(lost, callbacks)
}

// markLost records a loss and returns the callbacks to run. Callers hold mu.
func (l *Locker) markLost(h *hold) []func() {
	h.lost = true
	l.watchdog.unwatch(h)
	var callbacks []func()
	now := time.Now()
	for _, le := range h.leases {
		callbacks = append(callbacks, le.takeCallbacks(le.err(now))...)
	}
	return callbacks
}

func (l *Locker) reportLost(locks int, callbacks []func()) {
	l.observer.lost(locks)
	for _, callback := range callbacks {
		callback()
	}
}

package fleet

import (
	"cmp"
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"stampede/internal/redisinfo"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

const (
	// infoInterval is how often the nodes of Redis are asked for their memory and their log.
	infoInterval = 5 * time.Second
	// pageWait is how long a look into Redis waits for the sales of Postgres, and then counts those that are known.
	pageWait = 300 * time.Millisecond
	// errorMax bounds an error that is shown, in runes.
	errorMax = 300
)

// server is what is known of Redis or Postgres. Its fields are guarded by Fleet.mu.
type server struct {
	up     bool
	since  time.Time
	err    string
	misses int
}

// note notes whether the server answered.
func (s *server) note(err error, at time.Time) {
	if err == nil {
		if !s.up {
			s.up, s.since = true, at
		}
		s.err, s.misses = "", 0
		return
	}
	s.misses++
	if isTimeout(err) {
		err = errors.New("it does not answer in time")
		if s.up && s.misses < missesMax {
			return
		}
	}
	if network := (*net.OpError)(nil); errors.As(err, &network) {
		err = network // without what was wanted of the server
	}
	s.err = shortened(err.Error(), errorMax)
	if s.up {
		s.up, s.since = false, at
	}
}

func (s *server) shown() Server { return Server{Reachable: s.up, Since: s.since, Error: s.err} }

func isTimeout(err error) bool {
	var network net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &network) && network.Timeout()
}

// lookIntoServers begins the looks of a round, and returns what to wait for. Postgres is asked for the sales, and for
// either the funnels of some sales, or the records and one of what changes slowly: three looks at most at a time.
func (f *Fleet) lookIntoServers(ctx context.Context, now time.Time) (waits []<-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	page := f.start(&f.pageBusy, func() { f.lookAtSales(ctx) })
	if page != nil && (f.postgres.up || f.postgres.misses == 0) {
		waits = append(waits, page)
	}
	due := f.funnels.due(f.sales.listed, now)
	slowly := []func(context.Context){f.lookAtUnpaid, f.lookAtDraws, f.lookForRelay}
	isFirst := !f.slowlySeen && !f.sales.readAt.IsZero() // one look has to tell all
	if !isFirst {
		slowly = slowly[f.slowLooks%len(slowly):][:1]
	}
	slow := f.start(&f.slowBusy, func() {
		if len(due) > 0 {
			f.lookAtFunnels(ctx, due)
			return
		}
		f.lookAtRecords(ctx)
		for _, look := range slowly {
			look(ctx)
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		f.slowlySeen = f.slowlySeen || isFirst
	})
	if slow != nil && len(due) == 0 {
		f.slowLooks++
	}
	if slow != nil && len(due) == 0 && f.postgres.up {
		waits = append(waits, slow)
	}
	stock := f.start(&f.redisBusy, func() {
		if page != nil {
			late := time.NewTimer(pageWait)
			defer late.Stop()
			select {
			case <-page:
			case <-late.C:
			case <-ctx.Done():
			}
		}
		f.lookIntoRedis(ctx)
	})
	if stock != nil && (f.redis.up || f.redis.misses == 0) {
		waits = append(waits, stock)
	}
	return waits
}

// lookIntoRedis counts the units of the sales that are known, asks whether the servers of open sales are verified, and
// from time to time how each server is. In a cluster some of this is known while a master does not answer.
func (f *Fleet) lookIntoRedis(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, roundTimeout)
	defer cancel()
	f.mu.Lock()
	page, listed, paid := f.sales.page, f.sales.listed, f.funnels.paid()
	askNodes := time.Since(f.nodesAt) >= infoInterval ||
		slices.ContainsFunc(f.nodes, func(n node) bool { return n.Err != nil })
	f.mu.Unlock()

	var pinged, uncounted error
	var states map[int]reservation.ServerState
	var counted []catalog.CountResult
	var nodes []redisinfo.Server
	var asking sync.WaitGroup
	asking.Go(func() { pinged = f.config.Catalog.Store.Ping(limited) })
	asking.Go(func() { counted, uncounted = f.config.Catalog.CountPageOf(limited, page, paid) })
	asking.Go(func() { states = f.inspect(limited, listed) })
	if askNodes {
		asking.Go(func() { nodes = redisinfo.Masters(limited, f.config.Catalog.Store.Redis) })
	}
	asking.Wait()
	if ctx.Err() != nil {
		return
	}
	now := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	err := cmp.Or(pinged, uncounted)
	f.redis.note(err, now)
	if nodes != nil {
		f.nodesAt = now
		f.noteNodes(nodes, now)
	}
	if err == nil {
		f.sales.count(counted, paid, states)
	}
}

// inspectionsMax bounds the partitions that are asked at the same time.
const inspectionsMax = 8

// inspect reads the identity of the servers of partitions in which a sale is open. Servers that do not answer are
// missing.
func (f *Fleet) inspect(ctx context.Context, sales []catalog.CountedSale) map[int]reservation.ServerState {
	var asking errgroup.Group
	asking.SetLimit(inspectionsMax)
	var mu sync.Mutex
	states := map[int]reservation.ServerState{}
	asked := map[int]bool{}
	for i := range sales {
		if sales[i].State != reservation.StateOpen {
			continue
		}
		for shard := range sales[i].Shards {
			partition := sales[i].Layout().Partition(shard)
			if asked[partition] {
				continue
			}
			asked[partition] = true
			asking.Go(func() error {
				if state, err := f.config.Catalog.Store.Inspect(ctx, partition); err == nil {
					mu.Lock()
					defer mu.Unlock()
					states[partition] = state
				}
				return nil
			})
		}
	}
	_ = asking.Wait() // it is nil
	return states
}

// node is a server of Redis: the only one, or a master of a cluster.
type node struct {
	redisinfo.Server
	health    server
	delayedAt time.Time // when it was last seen to have delayed syncs of its log
}

func (n node) isDown() bool { return !n.health.up && n.health.err != "" }

// noteNodes replaces the nodes, and notes which of them delayed syncs since they were last asked.
func (f *Fleet) noteNodes(found []redisinfo.Server, now time.Time) {
	nodes := make([]node, len(found))
	for i, s := range found {
		nodes[i] = node{Server: s, health: server{since: now}}
		for _, before := range f.nodes {
			if before.Name != s.Name {
				continue
			}
			nodes[i].health, nodes[i].delayedAt = before.health, before.delayedAt
			if s.DelayedSyncs > before.DelayedSyncs && before.Err == nil {
				nodes[i].delayedAt = now
			}
		}
		nodes[i].health.note(s.Err, now)
	}
	f.nodes = nodes
}

func (n *node) shown() RedisNode {
	return RedisNode{Name: n.Name, Server: n.health.shown(), UsedBytes: n.UsedBytes, MaxBytes: n.MaxBytes}
}

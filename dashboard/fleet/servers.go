package fleet

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

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
	s.err = shortened(err.Error(), errorMax)
	if s.up {
		s.up, s.since = false, at
	}
}

func (s *server) shown() Server { return Server{Reachable: s.up, Since: s.since, Error: s.err} }

func isTimeout(err error) bool {
	var of net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &of) && of.Timeout()
}

// lookIntoServers begins the looks of a round, and returns what to wait for. Postgres is asked for the sales, and for
// either the desk or the funnels of some sales: two looks at most.
func (f *Fleet) lookIntoServers(ctx context.Context, now time.Time) (waits []<-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	page := f.start(&f.pageBusy, func() { f.lookAtSales(ctx) })
	if page != nil && (f.postgres.up || f.postgres.misses == 0) {
		waits = append(waits, page)
	}
	due := f.funnels.due(f.sales.listed, now)
	slow := f.start(&f.slowBusy, func() {
		if len(due) > 0 {
			f.lookAtFunnels(ctx, due)
		} else {
			f.lookAtDesk(ctx)
		}
	})
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
// from time to time how each node is.
func (f *Fleet) lookIntoRedis(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, roundTimeout)
	defer cancel()
	f.mu.Lock()
	page, listed, paid := f.sales.page, f.sales.listed, f.funnels.paid()
	askNodes := time.Since(f.nodesAt) >= infoInterval
	f.mu.Unlock()

	err := f.config.Store.Ping(limited)
	var states map[int]reservation.ServerState
	var counted []catalog.CountResult
	if err == nil {
		counted, err = f.config.Catalog.CountPageOf(limited, page, paid)
	}
	if err == nil {
		states, err = f.inspect(limited, listed)
	}
	var nodes []node
	if err == nil && askNodes {
		nodes, err = readNodes(limited, f.config.Store.Redis)
	}
	if ctx.Err() != nil {
		return
	}
	now := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.redis.note(err, now)
	if err != nil {
		return
	}
	f.sales.count(counted, states)
	if nodes != nil {
		f.nodesAt = now
		f.noteNodes(nodes, now)
	}
}

// inspectionsMax bounds the partitions that are asked at the same time.
const inspectionsMax = 8

// inspect asks the servers of the partitions in which a sale is open who they are.
func (f *Fleet) inspect(
	ctx context.Context, sales []catalog.CountedSale,
) (map[int]reservation.ServerState, error) {
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
				state, err := f.config.Store.Inspect(ctx, partition)
				mu.Lock()
				defer mu.Unlock()
				states[partition] = state
				return err
			})
		}
	}
	return states, asking.Wait()
}

// node is the state of a Redis server.
type node struct {
	addr            string
	used, memoryMax int64
	logFails        bool  // the last write of its log failed
	delayed         int64 // writes that waited for a sync of the log, since its start
	delayedAt       time.Time
}

// noteNodes replaces the nodes, and notes which of them delayed writes since they were last asked.
func (f *Fleet) noteNodes(nodes []node, now time.Time) {
	for i := range nodes {
		for _, before := range f.nodes {
			if before.addr != nodes[i].addr {
				continue
			}
			nodes[i].delayedAt = before.delayedAt
			if nodes[i].delayed > before.delayed {
				nodes[i].delayedAt = now
			}
		}
	}
	f.nodes = nodes
}

// readNodes asks each master.
func readNodes(ctx context.Context, rdb redis.UniversalClient) ([]node, error) {
	var mu sync.Mutex
	var nodes []node
	ask := func(ctx context.Context, c *redis.Client) error {
		info, err := c.Info(ctx, "memory", "persistence").Result()
		if err != nil {
			return fmt.Errorf("ask %s: %w", c.Options().Addr, err)
		}
		n := parseNode(info)
		n.addr = c.Options().Addr
		mu.Lock()
		defer mu.Unlock()
		nodes = append(nodes, n)
		return nil
	}
	switch c := rdb.(type) {
	case *redis.ClusterClient:
		return nodes, errors.Join(c.ForEachMaster(ctx, ask), nil)
	case *redis.Client:
		err := ask(ctx, c)
		return nodes, err
	}
	return nil, nil
}

func parseNode(info string) (n node) {
	lines := bufio.NewScanner(strings.NewReader(info))
	for lines.Scan() {
		name, value, _ := strings.Cut(strings.TrimSpace(lines.Text()), ":")
		number, _ := strconv.ParseInt(value, 10, 64) // 0 for a text
		switch name {
		case "used_memory":
			n.used = number
		case "maxmemory":
			n.memoryMax = number
		case "aof_last_write_status":
			n.logFails = value != "ok"
		case "aof_delayed_fsync":
			n.delayed = number
		}
	}
	return n
}

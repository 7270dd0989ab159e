package limits

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/lua"
	"stampede/reservation/order"
)

// request is one buyer's part of the arguments of lua/reserve.lua, built before the clock starts: a
// limit of Redis must not include the building of strings.
type request struct {
	order   uuid.UUID
	user    string
	orderID string
}

// newRequests builds requests of users who have bought nothing yet.
func newRequests(sale uuid.UUID, n int) []request {
	requests := make([]request, n)
	for i := range requests {
		r := &requests[i]
		r.order = order.NewOrderID(sale)
		r.orderID = order.CompactID(r.order)
		r.user = "buyer-" + strconv.FormatUint(buyerSerial.Add(1), 10)
	}
	return requests
}

// scriptCaller calls the reserve script for one sale on one connection. It is not safe for concurrent
// use.
type scriptCaller struct {
	rdb   redis.UniversalClient
	units string
	args  []any
	head  int
}

func newScriptCaller(s shop) *scriptCaller {
	keys, sale := s.keys, s.sale
	p := keys.Partition(sale)
	args := []any{
		"evalsha", lua.Reserve.Hash(), 4, keys.Sale(p, sale), keys.Buyers(p, sale), keys.Orders(p), keys.Ended(p, sale),
		"1", "0", order.ReservedMetadataPrefix(sale, 1, s.units[0] > '9'),
	}
	return &scriptCaller{rdb: s.Redis, units: s.units, args: args, head: len(args)}
}

// reserve sends all requests in one call, and fails unless every one of them is reserved.
func (c *scriptCaller) reserve(ctx context.Context, batch []request) error {
	c.args = c.args[:c.head]
	for i := range batch {
		c.args = append(c.args, &batch[i].user, &batch[i].orderID, "-", c.units)
	}
	cmd := redis.NewStringSliceCmd(ctx, c.args...)
	if err := c.rdb.Process(ctx, cmd); err != nil {
		return err
	}
	const header = 3 // before the answers
	answers := cmd.Val()[header:]
	if len(answers) != len(batch) {
		return fmt.Errorf("the script answered %d of %d requests", len(answers), len(batch))
	}
	for _, answer := range answers {
		if !strings.HasPrefix(answer, "reserved ") {
			return fmt.Errorf("the script answered %q", answer)
		}
	}
	return nil
}

// reserveAll sends the requests in batches over several connections, each with one call in flight,
// until all are sent or the time is over, and returns how many were reserved.
func (s shop) reserveAll(b *testing.B, requests []request, batch, connections int, within time.Duration) int64 {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), within+callGrace)
	defer cancel()
	deadline := time.Now().Add(within)
	share := len(requests) / connections
	var reserved atomic.Int64
	var all errgroup.Group
	for i := range connections {
		all.Go(func() error {
			caller := newScriptCaller(s)
			for rest := requests[i*share : (i+1)*share]; len(rest) > 0 && time.Now().Before(deadline); {
				n := min(batch, len(rest))
				if err := caller.reserve(ctx, rest[:n]); err != nil {
					return err
				}
				reserved.Add(int64(n))
				rest = rest[n:]
			}
			return nil
		})
	}
	require.NoError(b, all.Wait())
	return reserved.Load()
}

package reservation

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"stampede/lua"
)

// fence is lua/reserve.lua under a hash that is good for one partition on one server, in one term of
// that server as a primary. Redis forgets loaded scripts with its process, and a replica was never given
// any. So a server that knows the hash is the one for which somebody has loaded it, and he has asked
// before whether the stock there was verified: the answer NOSCRIPT comes before the first wrong
// reservation, and a right one costs nothing more.
type fence struct {
	sha    any // a string; made an interface once, because it is an argument of every call
	script *redis.Script
}

func newFence(serverKey string, server ServerState) *fence {
	// A server that becomes a replica and then a primary again still has its scripts, and may have lost
	// orders. So the term, which the replication id names, belongs into the hash as well.
	script := lua.ReserveFor(serverKey + " " + server.RunID + " " + server.ReplicationID)
	return &fence{sha: script.Hash(), script: script}
}

// admit loads the script of a partition if its server is known, and returns errUnverifiedServer if not. It
// asks and loads on one connection, so that both go to the same server, and loads nothing if the record
// of the server was touched in between (Distrust). An unverified server is distrusted: it may have
// loaded the script in a former term for others, who have not noticed yet.
func (s *Store) admit(ctx context.Context, partition int) (*fence, error) {
	return s.admitThrough(ctx, s.Rdb, partition)
}

func (s *Store) admitThrough(ctx context.Context, rdb redis.UniversalClient, partition int) (*fence, error) {
	key := s.Keys.Server(partition)
	var f *fence
	err := rdb.Watch(ctx, func(tx *redis.Tx) error {
		state, _, err := s.ask(ctx, tx, key)
		if err != nil {
			return err
		}
		_, err = tx.TxPipelined(ctx, func(p redis.Pipeliner) error {
			switch {
			case state.unverified:
				s.distrust(ctx, p, partition, "")
			case state.Known && !s.refused[partition].Load():
				f = newFence(key, state)
				return f.script.Load(ctx, p).Err()
			}
			return nil
		})
		if f == nil {
			return ErrUnverifiedServer // also where that could not be noted, as on a replica
		}
		return err
	}, key)
	if err != nil {
		s.fences[partition].Store(nil)
		return nil, fmt.Errorf("load the script of partition %d: %w", partition, err)
	}
	s.fences[partition].Store(f)
	return f, nil
}

package reservation

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"stampede/lua"
)

// fence is lua/reserve.lua under a hash for one partition on one server in one term as a primary.
// Redis drops loaded scripts with its process, and replicas do not get them. So a server that has
// the hash was verified before a client loaded it there. Any other server answers NOSCRIPT before it
// can make a wrong reservation. The normal path costs nothing extra.
type fence struct {
	sha    any // a string; made an interface once, because it is an argument of every call
	script *redis.Script
}

func newFence(serverKey string, server ServerState) *fence {
	// A server that becomes a replica and then a primary again keeps its scripts, but may have lost
	// orders. So the hash includes the replication id, which changes with the term.
	script := lua.ReserveFor(serverKey + " " + server.RunID + " " + server.ReplicationID)
	return &fence{sha: script.Hash(), script: script}
}

// admit loads the script of a partition if its server is known, and otherwise returns
// ErrUnverifiedServer. It checks and loads on one connection, so that both reach the same server,
// and loads nothing if the record of the server changed in between (Distrust). It marks an unverified
// server as distrusted, because the script may be loaded there from a former term.
func (s *Store) admit(ctx context.Context, partition int) (*fence, error) {
	return s.admitThrough(ctx, s.Redis, partition)
}

func (s *Store) admitThrough(ctx context.Context, rdb redis.UniversalClient, partition int) (*fence, error) {
	key := s.Keys.Server(partition)
	var f *fence
	// While the slot of a cluster moves, go-redis returns nil without a call of the function.
	err := rdb.Watch(ctx, func(tx *redis.Tx) error {
		state, err := s.ask(ctx, tx, key)
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
			return ErrUnverifiedServer // even if distrust failed, as on a replica
		}
		return err
	}, key)
	if err == nil && f == nil {
		err = ErrUnverifiedServer
	}
	if err != nil {
		s.fences[partition].Store(nil)
		return nil, fmt.Errorf("load the script of partition %d: %w", partition, err)
	}
	s.fences[partition].Store(f)
	return f, nil
}

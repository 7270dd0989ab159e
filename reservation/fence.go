package reservation

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"stampede/internal/retry"
	"stampede/lua"
)

// fence is the scripts of lua.Fenced under hashes for one partition on one server in one term as a primary.
// Redis drops loaded scripts with its process, and replicas do not get them. So a server that has
// the hash was verified before a client loaded it there. Any other server answers NOSCRIPT before it
// can make a wrong reservation. The normal path costs nothing extra.
type fence struct {
	scripts lua.Fenced
	// reserve is the hash of the script; made an interface once, because it is an argument of every call.
	reserve any
}

func newFence(serverKey string, server ServerState) *fence {
	// A server that becomes a replica and then a primary again keeps its scripts, but may have lost
	// orders. So the hash includes the replication id, which changes with the term.
	scripts := lua.FencedBy(serverKey + " " + server.RunID + " " + server.ReplicationID)
	return &fence{scripts: scripts, reserve: scripts.Reserve.Hash}
}

// admit loads the scripts of a partition if its server is known, and otherwise returns
// ErrUnverifiedServer. It checks and loads on one connection, so that both reach the same server,
// and loads nothing if the record of the server changed in between (Distrust). It withdraws the
// verification of an unverified server, because the script may be loaded there from a former term.
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
				for _, script := range f.scripts.All() {
					p.ScriptLoad(ctx, script.Source)
				}
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
		return nil, fmt.Errorf("load the scripts of partition %d: %w", partition, err)
	}
	s.fences[partition].Store(f)
	return f, nil
}

// fenced runs a script of the fence of a partition. A repeat of the script must be harmless: it is sent until Redis
// answers, at most tries times.
func (s *Store) fenced(
	ctx context.Context, partition int, script func(lua.Fenced) lua.FencedScript, key string, args ...any,
) (cmd *redis.Cmd) {
	for try := range tries {
		if try > 0 && !retry.Pause(time.Duration(try)*20*time.Millisecond, ctx.Done()) {
			break
		}
		f := s.fences[partition].Load()
		if f == nil {
			var err error
			if f, err = s.admit(ctx, partition); err != nil {
				cmd = redis.NewCmd(ctx)
				cmd.SetErr(err)
				return cmd
			}
		}
		cmd = s.Redis.EvalSha(ctx, script(f.scripts).Hash, []string{key}, args...)
		if _, temporary := refusal(cmd.Err()); !temporary {
			break
		}
		s.fences[partition].CompareAndSwap(f, nil)
	}
	return cmd
}

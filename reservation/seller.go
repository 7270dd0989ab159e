package reservation

import (
	"slices"
	"sync/atomic"

	"github.com/google/uuid"
)

// seller sells one sale in one epoch. It has a queue for each shard, and shares what it knows of the whole sale. It is
// safe for concurrent use.
type seller struct {
	shards
	queues []*queue // by shard

	counts shared[*saleCount]
	// counted are the last counts by shard. They belong to the count in progress.
	counted  []*shardCount
	soldOut  atomic.Pointer[soldOut]
	learning atomic.Bool // a goroutine creates or watches soldOut
}

func newSeller(s *Store, sale uuid.UUID, p place) *seller {
	of := &seller{
		shards:  shards{s, sale, p},
		queues:  make([]*queue, p.layout.Shards),
		counted: make([]*shardCount, p.layout.Shards),
	}
	for shard := range of.queues {
		partition := p.layout.Partition(shard)
		of.queues[shard] = &queue{
			seller: of, shard: shard, partition: partition, target: newTarget(s.Keys, sale, partition, p.epoch),
		}
	}
	return of
}

// queueOf returns the queue of the shard in which a user buys.
func (of *seller) queueOf(user string) *queue { return of.queues[of.place.layout.ShardOf(user)] }

// idle is true if the seller can be dropped without loss.
func (of *seller) idle() bool {
	return !of.learning.Load() && !slices.ContainsFunc(of.queues, func(q *queue) bool { return !q.idle() })
}

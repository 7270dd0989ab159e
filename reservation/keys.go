package reservation

import (
	"hash/fnv"
	"strconv"

	"github.com/google/uuid"
)

// Group is the consumer group in which the fulfillment workers read the stream of orders.
const Group = "fulfillment"

// DefaultPrefix is the first part of every key in Redis.
const DefaultPrefix = "stampede"

// MaxPartitions bounds STAMPEDE_PARTITIONS: a search for a sale of an unknown partition queries all
// of them.
const MaxPartitions = 64

// Keys names every key in Redis. The partition is the hash tag, so all keys of one script are in
// one slot of a cluster.
type Keys struct {
	Prefix string
	// Partitions is the number of partitions for new sales. Invariant: 1 <= Partitions <= MaxPartitions.
	Partitions int
}

// Partition returns the partition of a new sale.
func (k Keys) Partition(sale uuid.UUID) int { return PartitionAmong(sale, k.Partitions) }

// PartitionAmong returns the partition of a sale that was created when there were n.
func PartitionAmong(sale uuid.UUID, n int) int {
	h := fnv.New32a()
	_, _ = h.Write(sale[:])
	return int(h.Sum32() % uint32(n))
}

// Sale is the hash with the stock, the state and the terms of a sale.
func (k Keys) Sale(partition int, sale uuid.UUID) string {
	return k.in(partition, "sale:"+sale.String())
}

// Buyers is the hash from user to the reservation that the user holds in a sale.
func (k Keys) Buyers(partition int, sale uuid.UUID) string {
	return k.in(partition, "buyers:"+sale.String())
}

// Staged is the hash in which the rebuild with that token stages the buyers of a sale for its next
// epoch.
func (k Keys) Staged(partition int, sale uuid.UUID, token string) string {
	return k.Buyers(partition, sale) + ":" + token
}

// Ended is the hash of the ended orders that were made with an idempotency key (ended.go).
func (k Keys) Ended(partition int, sale uuid.UUID) string {
	return k.in(partition, "ended:"+sale.String())
}

// StagedEnded is the hash in which a rebuild stages Ended.
func (k Keys) StagedEnded(partition int, sale uuid.UUID, token string) string {
	return k.Ended(partition, sale) + ":" + token
}

// Server is the hash that names the Redis server on which this partition's stock was verified.
func (k Keys) Server(partition int) string { return k.in(partition, "server") }

// Outcomes is the stream on which workers publish the outcomes of orders to the ingresses. It
// belongs to no partition, and no script touches it.
func (k Keys) Outcomes() string { return k.Prefix + ":outcomes" }

// Orders is the stream of events of a partition.
func (k Keys) Orders(partition int) string { return k.in(partition, "orders") }

// Sales is the set of the sales that were opened in a partition.
func (k Keys) Sales(partition int) string { return k.in(partition, "sales") }

// Lock is the lock under which a worker handles one user's orders.
func (k Keys) Lock(partition int, user string) string { return k.in(partition, "lock:"+user) }

// Locker is the prefix of the keys that the workers' lock.Locker uses for its own data.
func (k Keys) Locker(partition int) string { return k.in(partition, "locker") }

func (k Keys) in(partition int, rest string) string {
	return k.Prefix + ":{" + strconv.Itoa(partition) + "}:" + rest
}

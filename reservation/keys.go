package reservation

import (
	"hash/fnv"

	"github.com/google/uuid"
)

// Group is the consumer group in which the fulfillment workers read the stream of orders.
const Group = "fulfillment"

// DefaultPrefix is the first part of every key in Redis.
const DefaultPrefix = "stampede"

// MaxPartitions bounds STAMPEDE_PARTITIONS: a search for a sale of an unknown partition queries all
// of them.
const MaxPartitions = 64

// partitionTags are the hash tags of the partitions: the number, and letters that choose the slot. The slots of the
// first 2, 4, 8 … partitions are spread evenly, so a cluster with as many masters of equal size has equally many on
// each. Tags are parts of names and must never change.
var partitionTags = [MaxPartitions]string{
	"0", "1ac", "2fd", "3", "4az", "5bk", "6dr", "7fy", "8p", "9h", "10fc", "11dh", "12db", "13fi", "14dq", "15fz",
	"16dr", "17fy", "18bx", "19ai", "20dx", "21fs", "22ap", "23ba", "24dy", "25fr", "26aq", "27bd", "28z", "29b", "30dk",
	"31fd", "32dd", "33fk", "34ds", "35fx", "36b", "37z", "38x", "39d", "40y", "41a", "42ga", "43dp", "44aa", "45bp",
	"46k", "47s", "48fr", "49dy", "50s", "51k", "52ap", "53ba", "54ac", "55br", "56aq", "57bd", "58fa", "59dj", "60nz",
	"61bj", "62i", "63q",
}

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

// Ended is the hash of the ended orders that were made with an idempotency key (release.go).
func (k Keys) Ended(partition int, sale uuid.UUID) string {
	return k.in(partition, "ended:"+sale.String())
}

// OfShard returns the keys of a sale in one of its partitions.
func (k Keys) OfShard(partition int, sale uuid.UUID) []string {
	return []string{k.Sale(partition, sale), k.Buyers(partition, sale), k.Ended(partition, sale)}
}

// StagedEnded is the hash in which a rebuild stages Ended.
func (k Keys) StagedEnded(partition int, sale uuid.UUID, token string) string {
	return k.Ended(partition, sale) + ":" + token
}

// Server is the hash that names the Redis server on which this partition's stock was verified.
func (k Keys) Server(partition int) string { return k.in(partition, "server") }

// Outcomes is the stream on which the outcomes of orders of a partition are published to the ingresses.
func (k Keys) Outcomes(partition int) string { return k.in(partition, "outcomes") }

// AllOutcomes are the streams that an ingress reads.
func (k Keys) AllOutcomes() []string {
	streams := make([]string, k.Partitions)
	for partition := range streams {
		streams[partition] = k.Outcomes(partition)
	}
	return streams
}

// Orders is the stream of events of a partition.
func (k Keys) Orders(partition int) string { return k.in(partition, "orders") }

// Sales is the set of the sales that were opened in a partition.
func (k Keys) Sales(partition int) string { return k.in(partition, "sales") }

// Lock is the lock under which a worker handles one user's orders.
func (k Keys) Lock(partition int, user string) string { return k.in(partition, "lock:"+user) }

// Locker is the prefix of the keys that the workers' lock.Locker uses for its own data.
func (k Keys) Locker(partition int) string { return k.in(partition, "locker") }

// RelayLock is the lock of a target of the relay. It lies in no partition, and with the keys of its Locker.
func (k Keys) RelayLock(target string) string { return k.Prefix + ":{relay}:lock:" + target }

// RelayLocker is the prefix of the keys that the relay's lock.Locker uses for its own data.
func (k Keys) RelayLocker() string { return k.Prefix + ":{relay}:locker" }

func (k Keys) in(partition int, rest string) string {
	return k.Prefix + ":{" + partitionTags[partition] + "}:" + rest
}

package reservation

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/reservation/order"
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

// Layout says in which partitions a sale sells. A sale has one shard or several; each shard has a share of the stock
// and sells to its own buyers, so that they can be on different masters. Shard 0 is in the sale's home partition, and
// the next ones are in the following partitions.
//
// Invariant: 0 <= Home < Partitions and 1 <= Shards <= Partitions <= MaxPartitions, so no two shards share a partition.
type Layout struct {
	// Home is the partition of shard 0.
	Home int
	// Partitions is the number of partitions when the sale was created.
	Partitions int
	// Shards is the number of shards. It changes only with the epoch of the sale.
	Shards int
}

// LayoutOf returns the layout of a sale that was created when there were so many partitions.
func LayoutOf(sale uuid.UUID, partitions, shards int) Layout {
	return Layout{Home: PartitionAmong(sale, partitions), Partitions: partitions, Shards: max(1, shards)}
}

// Partition returns the partition of a shard.
func (l Layout) Partition(shard int) int { return (l.Home + shard) % l.Partitions }

// All returns the partitions of all shards.
func (l Layout) All() []int {
	partitions := make([]int, l.Shards)
	for shard := range partitions {
		partitions[shard] = l.Partition(shard)
	}
	return partitions
}

// EachShard calls do for all shards, at the same time, and returns all errors.
func (l Layout) EachShard(do func(partition, shard int) error) error {
	return each(l.Shards, func(shard int) error { return do(l.Partition(shard), shard) })
}

// PartitionOf returns the partition of the shard of a user.
func (l Layout) PartitionOf(user string) int { return l.Partition(l.ShardOf(user)) }

// ShardOf returns the shard in which a user buys.
func (l Layout) ShardOf(user string) int {
	if l.Shards == 1 {
		return 0
	}
	// FNV-1a. The halves are mixed, because its low bits depend only on the low bits of the input.
	hash := uint64(14695981039346656037)
	for i := range len(user) {
		hash = (hash ^ uint64(user[i])) * 1099511628211
	}
	return int((hash ^ hash>>32) % uint64(l.Shards))
}

// ShardIn returns the shard in a partition, and false if the sale has none there.
func (l Layout) ShardIn(partition int) (shard int, ok bool) {
	shard = ((partition-l.Home)%l.Partitions + l.Partitions) % l.Partitions
	return shard, partition >= 0 && partition < l.Partitions && shard < l.Shards
}

// Moves are the names of the fields with the totals that a shard has given to each shard and got from it
// (lua/give.lua); none in a sale with one shard.
func (l Layout) Moves() (names []string) {
	for other := range l.Shards {
		if l.Shards > 1 {
			names = append(names, "given:"+strconv.Itoa(other), "got:"+strconv.Itoa(other))
		}
	}
	return names
}

// ShareOfItem is Share of the units of an item, by its place. What cannot be spread evenly of each item begins at
// another shard, so that many rare items are not all in the first one.
func (l Layout) ShareOfItem(item int, units int64, shard int) int64 {
	return l.Share(units, (shard+item)%l.Shards)
}

// Share returns the part of the units that a shard gets if they are spread evenly. Units below zero are spread too.
func (l Layout) Share(units int64, shard int) int64 {
	n := int64(l.Shards)
	share, rest := units/n, units%n
	switch {
	case rest > int64(shard):
		share++
	case -rest > int64(shard):
		share--
	}
	return share
}

// FirstSequence returns the sequence of a shard (lua/reserve.lua) that has given out no place, if places up to after
// are not to be given out again.
func (l Layout) FirstSequence(after int64, shard int) int64 {
	n := int64(l.Shards)
	return (after+n-1)/n*n + int64(shard)
}

// oneShard is the layout of a sale with one shard in that partition. How many partitions there were is not known.
func oneShard(partition int) Layout {
	return Layout{Home: partition, Partitions: MaxPartitions, Shards: 1}
}

// Field is the layout as a shard's hash holds it (lua/reserve.lua): empty for a sale with one shard.
func (l Layout) Field(shard int) string {
	if l.Shards == 1 {
		return ""
	}
	return fmt.Sprintf("%d %d %d", shard, l.Shards, l.Partitions)
}

// readLayout reads the field of the shard's hash in a partition.
func readLayout(field string, partition int) (Layout, error) {
	if field == "" {
		return oneShard(partition), nil
	}
	var numbers [3]int
	words := strings.Split(field, " ")
	if len(words) != len(numbers) {
		return Layout{}, fmt.Errorf("the shard is %.50q", field)
	}
	for i, word := range words {
		n, err := strconv.Atoi(word)
		if err != nil {
			return Layout{}, fmt.Errorf("the shard is %.50q", field)
		}
		numbers[i] = n
	}
	shard, shards, partitions := numbers[0], numbers[1], numbers[2]
	if shards < 2 || shards > partitions || partitions > MaxPartitions || shard < 0 || shard >= shards ||
		partition >= partitions {
		return Layout{}, errors.New("the shard is " + field)
	}
	return Layout{Home: (partition - shard + partitions) % partitions, Partitions: partitions, Shards: shards}, nil
}

// ShardHash is what the hash of a shard has in Redis (Keys.Sale). A number that it lacks, or that cannot be read, is
// -1.
type ShardHash struct {
	// Exists is false if Redis has no hash for the shard.
	Exists bool
	// Epoch is 0 while the shard is closed for a rebuild.
	Epoch                                       int64
	Revision, Generation, Sequence, Stock, Left int64
	ClosesAtMillis                              int64
	// State is that of the sale, and OpenState the one that it has while it is open.
	State, OpenState State
	// Layout is which shard of how many it is: Layout.Field.
	Layout string
	Items  []ItemHash
	// Moves are the totals given to and got from other shards (lua/give.lua), in the order in which they were asked for.
	Moves []string
}

// ItemHash is what the hash of a shard has of an item.
type ItemHash struct {
	Left  int64
	Quiet string
}

// IsOpen is true for a shard that is whole: not closed for a rebuild.
func (h *ShardHash) IsOpen() bool { return h.Epoch > 0 && h.Stock >= 0 }

// Moved is how many units of an item the shard has given to all others, and got from them, if its moves were asked for.
func (h *ShardHash) Moved(item int) (given, got int64) {
	for i, text := range h.Moves {
		if !totalText.MatchString(text) {
			continue
		}
		for its, units := range total(text).units() {
			switch {
			case its != item:
			case i%2 == 0:
				given += units
			default:
				got += units
			}
		}
	}
	return given, got
}

// number is where the number of a field goes; nil for a field that is a text.
func (h *ShardHash) number(name string) *int64 {
	switch name {
	case "epoch":
		return &h.Epoch
	case "revision":
		return &h.Revision
	case "generation":
		return &h.Generation
	case "sequence":
		return &h.Sequence
	case "stock":
		return &h.Stock
	case "left":
		return &h.Left
	case "closes_at_ms":
		return &h.ClosesAtMillis
	}
	return nil
}

func (h *ShardHash) setText(name, text string) {
	switch name {
	case "state":
		h.State = State(text)
	case "open_state":
		h.OpenState = State(text)
	case "shard":
		h.Layout = text
	default:
		if kind, _, _ := strings.Cut(name, ":"); kind != "given" && kind != "got" {
			panic("no field of a shard is read as " + name)
		}
		h.Moves = append(h.Moves, text)
	}
}

// ShardAnswer is the answer to AskShard.
type ShardAnswer struct {
	names  []string
	fields *redis.SliceCmd
}

// AskShard asks for these fields of the hash of a shard, and for those of so many items, through a client or a
// pipeline.
func (k Keys) AskShard(
	ctx context.Context, through redis.Cmdable, partition int, sale uuid.UUID, items int, names ...string,
) ShardAnswer {
	all := names[:len(names):len(names)]
	for place := range items {
		all = append(all, "left."+order.ItemLetter(place), "quiet."+order.ItemLetter(place))
	}
	return ShardAnswer{names, through.HMGet(ctx, k.Sale(partition, sale), all...)}
}

// Hash returns the fields that were asked for. It fails if the server did not answer; a key that is no hash exists, and
// has no number.
func (a ShardAnswer) Hash() (ShardHash, error) {
	fields, err := a.fields.Result()
	isForeign := err != nil && RefusalCode(err) == "WRONGTYPE"
	// The client of a cluster sets the error of one master in the answers of the others as well.
	if err != nil && len(fields) == 0 && !isForeign {
		return ShardHash{}, err
	}
	h := ShardHash{
		Exists: isForeign, Epoch: -1, Revision: -1, Generation: -1, Sequence: -1, Stock: -1, Left: -1, ClosesAtMillis: -1,
	}
	for i, field := range fields {
		text, has := field.(string)
		h.Exists = h.Exists || has
		switch {
		case i >= len(a.names) && (i-len(a.names))%2 == 0:
			h.Items = append(h.Items, ItemHash{Left: readNumber(text)})
			continue
		case i >= len(a.names):
			h.Items[len(h.Items)-1].Quiet = text
			continue
		}
		if to := h.number(a.names[i]); to != nil {
			*to = readNumber(text)
		} else {
			h.setText(a.names[i], text)
		}
	}
	return h, nil
}

func readNumber(text string) int64 {
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return n
	}
	return -1
}

package reservation

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/google/uuid"
)

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

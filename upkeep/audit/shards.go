package audit

import (
	"context"
	"fmt"
	"strconv"

	"github.com/google/uuid"

	"stampede/reservation"
	"stampede/sql"
)

// auditedSale is a sale to audit, and where it is in Redis.
type auditedSale struct {
	id     uuid.UUID
	layout reservation.Layout
	items  []string // their codes
}

// auditedShard is one of the shards of a sale to audit, and its partition.
type auditedShard struct {
	auditedSale
	shard, partition int
}

func (s auditedSale) shards() []auditedShard {
	shards := make([]auditedShard, s.layout.Shards)
	for i := range shards {
		shards[i] = auditedShard{auditedSale: s, shard: i, partition: s.layout.Partition(i)}
	}
	return shards
}

// wrongLayout says what is impossible about the sale's layout in Postgres, or is empty.
func (s auditedSale) wrongLayout() string {
	switch l := s.layout; {
	case l.Partitions > reservation.MaxPartitions:
		return fmt.Sprintf("sales.partitions is %d, and the maximum is %d", l.Partitions, reservation.MaxPartitions)
	case l.Shards > l.Partitions:
		return fmt.Sprintf("sales.shards is %d, and sales.partitions is %d", l.Shards, l.Partitions)
	}
	return ""
}

// isUnreachable reports whether the server of any shard of a sale does not answer.
func (l *look) isUnreachable(s auditedSale) bool {
	for _, shard := range s.shards() {
		if l.unreachable[shard.partition] != nil {
			return true
		}
	}
	return false
}

// label begins the findings about a shard. It is empty for the only one of a sale.
func (s auditedShard) label() string {
	if s.layout.Shards == 1 {
		return ""
	}
	return fmt.Sprintf("shard %d: ", s.shard)
}

// moves are the units that a shard has given to each other shard, and got from it, in its epoch (lua/give.lua).
type moves struct{ given, got []int64 }

// moveFields are the fields of moves, in the order in which readMoves reads them.
func (s auditedShard) moveFields() []string {
	if s.layout.Shards == 1 {
		return nil
	}
	fields := make([]string, 0, 2*s.layout.Shards)
	for _, kind := range []string{"given:", "got:"} {
		for other := range s.layout.Shards {
			fields = append(fields, kind+strconv.Itoa(other))
		}
	}
	return fields
}

// readMoves reads the fields of moveFields. It returns an error for the first that is damaged.
func (s auditedShard) readMoves(fields []any) (moves, error) {
	totals := make([]int64, len(fields))
	for i, field := range fields {
		if field == nil {
			continue // nothing was moved
		}
		text, _ := field.(string)
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || strconv.FormatInt(n, 10) != text || n < 0 || n > numberMax {
			return moves{}, fmt.Errorf("%s is %.50q", s.moveFields()[i], text)
		}
		totals[i] = n
	}
	return moves{given: totals[:len(totals)/2], got: totals[len(totals)/2:]}, nil
}

// onTheWay returns the units that the shards of a sale have given to each other and not yet got, as the shards were
// read one after another. It is 0 if they are not comparable: one is missing, or is being rebuilt.
func onTheWay(shards []redisShard) (units int64) {
	for _, s := range shards {
		if !s.present || *s.epoch == 0 || *s.epoch != *shards[0].epoch {
			return 0
		}
		for other := range s.given {
			units += s.given[other] - s.got[other]
		}
	}
	return units
}

// findStill notes the shards to which no unit returned while their buyers were read. It also reports units that a shard
// got before, and that no other has given even now.
func (l *look) findStill(ctx context.Context, before []redisShard) error {
	ids, shards := []uuid.UUID{}, []int{}
	given := make([][]int64, 0, len(before)) // nil where the shard is in another epoch now, or cannot be read
	err := l.eachShard(ctx,
		func(s auditedShard) []string { return append([]string{"generation", "epoch"}, s.moveFields()...) },
		func(s auditedShard, fields []any, err error) {
			b := before[len(given)]
			now, damage := s.readMoves(fields[2:])
			if err != nil || damage != nil || !b.present || !isNumber(fields[1], *b.epoch) {
				given = append(given, nil)
				return
			}
			given = append(given, now.given)
			if isNumber(fields[0], *b.generation) {
				ids, shards = append(ids, s.id), append(shards, s.shard)
			}
		})
	if err != nil {
		return err
	}
	for i, b := range before {
		first := i - b.shard // the sale's first shard
		for giver := range b.got {
			from := given[first+giver]
			if from == nil || !b.present || *b.epoch != *before[first+giver].epoch || b.got[giver] <= from[b.shard] {
				continue
			}
			l.note("S4", Finding{Sale: &b.id, Remedy: RemedyRebuild, What: fmt.Sprintf(
				"%sit has got %d units from shard %d, which has given it %d", b.label(), b.got[giver], giver, from[b.shard])})
		}
	}
	_, err = l.conn.Exec(ctx, sql.AuditNoteStill, ids, shards)
	return err
}

// isNumber reports whether a field of Redis is this number.
func isNumber(field any, n int64) bool {
	text, _ := field.(string)
	return text == strconv.FormatInt(n, 10)
}

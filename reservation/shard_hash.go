package reservation

import (
	"context"
	"strconv"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/reservation/order"
)

// ShardHash is what the hash of a shard has in Redis (Keys.Sale). A number that it lacks, or that cannot be read, is -1.
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
}

// ItemHash is what the hash of a shard has of an item.
type ItemHash struct {
	Left  int64
	Quiet string
}

// IsOpen is true for a shard that is whole: not closed for a rebuild.
func (h *ShardHash) IsOpen() bool { return h.Epoch > 0 && h.Stock >= 0 }

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
		panic("no field of a shard is read as " + name)
	}
}

// ShardAnswer is the answer to AskShard.
type ShardAnswer struct {
	names  []string
	fields *redis.SliceCmd
}

// AskShard asks for these fields of the hash of a shard, and for those of so many items, through a client or a pipeline.
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

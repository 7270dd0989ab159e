package stream

import (
	"context"
	"slices"

	"github.com/redis/go-redis/v9"
)

// Unfinished returns a range of ids that includes all entries of a stream that its group has not read or not
// acknowledged; to is empty for an empty stream. Without the group nothing was read.
func Unfinished(ctx context.Context, rdb redis.UniversalClient, key, group string) (from, to string, err error) {
	last, err := rdb.XRevRangeN(ctx, key, "+", "-", 1).Result()
	if err != nil || len(last) == 0 {
		return "", "", err
	}
	groups, err := rdb.XInfoGroups(ctx, key).Result()
	if err != nil {
		return "", "", err
	}
	at := slices.IndexFunc(groups, func(g redis.XInfoGroup) bool { return g.Name == group })
	if at < 0 {
		return "-", last[0].ID, nil // no worker has read it, or the group is lost
	}
	delivered := groups[at].LastDeliveredID
	from = "(" + delivered
	if groups[at].Pending > 0 {
		pending, err := rdb.XPending(ctx, key, group).Result()
		if err != nil {
			return "", "", err
		}
		// A group that was set back has pending entries above its last delivered one.
		if pending.Count > 0 && !EntryAfter(pending.Lower, delivered) {
			from = pending.Lower
		}
	}
	return from, last[0].ID, nil
}

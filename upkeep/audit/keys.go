package audit

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"stampede/lua"
	"stampede/reservation"
	"stampede/sql"
)

// typedKey is a key of Redis and its expected type.
type typedKey struct{ key, kind string }

// sharedKeys are the keys that the sales of a partition share. Those of a single sale are checked
// with the sale.
func sharedKeys(keys reservation.Keys, p int) []typedKey {
	return []typedKey{
		{keys.Orders(p), "stream"}, {keys.Sales(p), "set"}, {keys.Server(p), "hash"}, {keys.Outcomes(p), "stream"},
	}
}

// reportForeignKeys reports keys of a wrong type, which can be neither read nor written.
func (l *look) reportForeignKeys(ctx context.Context) error {
	if l.unreadError(theSales) != nil {
		return nil //nolint:nilerr // the unread part is reported elsewhere
	}
	var wanted []typedKey
	for p := range countPartitions(l.Keys, l.sales) {
		if l.unreachable[p] == nil {
			wanted = append(wanted, sharedKeys(l.Keys, p)...)
		}
	}
	asked, keys := make([]*redis.StatusCmd, len(wanted)), make([]string, len(wanted))
	var ends []*redis.DurationCmd
	_, _ = l.Redis.Pipelined(ctx, func(p redis.Pipeliner) error { // each command's own error counts
		for i, k := range wanted {
			asked[i], keys[i] = p.Type(ctx, k.key), k.key
		}
		ends = askTimeLimits(ctx, p, keys)
		return nil
	})
	for i, k := range wanted {
		switch kind, err := asked[i].Result(); {
		case err != nil:
			return l.noteUnread(ctx, theSales|theStreams, fmt.Errorf("read the type of %s: %w", k.key, err))
		case kind != k.kind && kind != "none":
			l.note("S7", Finding{
				Remedy: remedyAside, Key: k.key,
				What: fmt.Sprintf("the key %s in Redis has a wrong type: %s instead of %s", k.key, kind, k.kind),
			})
		}
	}
	return l.noteUnread(ctx, theSales|theStreams, l.reportTimeLimits(nil, keys, ends))
}

func askTimeLimits(ctx context.Context, p redis.Pipeliner, keys []string) []*redis.DurationCmd {
	asked := make([]*redis.DurationCmd, len(keys))
	for i, key := range keys {
		asked[i] = p.PTTL(ctx, key)
	}
	return asked
}

// reportTimeLimits reports keys that Redis will delete by itself. Stampede sets no limit on them.
func (l *look) reportTimeLimits(sale *uuid.UUID, keys []string, asked []*redis.DurationCmd) error {
	for i, key := range keys {
		left, err := asked[i].Result()
		if err != nil {
			return fmt.Errorf("read the time limit of %s: %w", key, err)
		}
		if left > 0 { // else a constant
			l.note("S7", Finding{
				Sale: sale, Remedy: remedyPersist, Key: key,
				What: fmt.Sprintf("Redis will delete the key %s: somebody has given it a time limit (TTL), of which %v are left",
					key, left.Round(time.Second)),
			})
		}
	}
	return nil
}

// persist removes the time limits that were found.
func (r *reconciler) persist(ctx context.Context) error {
	rows, _ := r.conn.Query(ctx, sql.ReconcileKeys, remedyPersist) // its error comes with the rows
	keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, key := range keys {
		if err := r.Redis.Persist(ctx, key).Err(); err != nil {
			return fmt.Errorf("remove the time limit of %s: %w", key, err)
		}
		r.Logger.Warn("removed the time limit of a key of Redis: find who sets it", "key", key)
	}
	return nil
}

// setAside renames the foreign keys that were found. Their content is restored automatically: users
// of streams create them and their groups, and lost events are appended again.
func (r *reconciler) setAside(ctx context.Context) error {
	rows, _ := r.conn.Query(ctx, sql.ReconcileKeys, remedyAside) // its error comes with the rows
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	var shared []typedKey
	for p := range reservation.MaxPartitions {
		shared = append(shared, sharedKeys(r.Keys, p)...)
	}
	for _, k := range shared {
		if !slices.Contains(found, k.key) {
			continue
		}
		aside := fmt.Sprintf("%s:set-aside:%d", k.key, time.Now().UnixMilli())
		word, err := lua.SetAside.Run(ctx, r.Redis, []string{k.key, aside}, k.kind).Text()
		if err != nil {
			return fmt.Errorf("rename %s: %w", k.key, err)
		}
		switch word {
		case "taken":
			return fmt.Errorf("rename %s: the key %s exists", k.key, aside)
		case "set-aside":
			r.Logger.Warn("renamed a key of Redis that has a wrong type: inspect it, then delete it", "key", k.key,
				"renamed_to", aside)
		}
	}
	return nil
}

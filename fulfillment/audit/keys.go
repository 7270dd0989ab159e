package audit

import (
	"context"
	"fmt"
	"slices"
	"time"

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
	for p := range partitionsOf(l.Keys, l.sales) {
		if l.dark[p] == nil {
			wanted = append(wanted, sharedKeys(l.Keys, p)...)
		}
	}
	asked := make([]*redis.StatusCmd, len(wanted))
	_, _ = l.Redis.Pipelined(ctx, func(p redis.Pipeliner) error { // each command's own error counts
		for i, k := range wanted {
			asked[i] = p.Type(ctx, k.key)
		}
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

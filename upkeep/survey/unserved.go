package survey

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/reservation"
	"stampede/sql"
)

// Unserved returns for how long an event has waited for an active target of the relay while no process has the lock of
// one: 0 if one has, or nothing waits. It asks the servers, so it needs no relay.
func Unserved(
	ctx context.Context, pool *pgxpool.Pool, rdb redis.UniversalClient, keys reservation.Keys,
) (time.Duration, error) {
	rows, _ := pool.Query(ctx, sql.SurveyRelayTargets) // its error comes with the rows
	var locks []string
	var name string
	var waited, longest float64
	_, err := pgx.ForEachRow(rows, []any{&name, &waited}, func() error {
		locks, longest = append(locks, keys.RelayLock(name)), max(longest, waited)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("look at the targets of the relay: %w", err)
	}
	if longest == 0 {
		return 0, nil
	}
	held, err := rdb.Exists(ctx, locks...).Result() // they are in one slot
	switch {
	case err != nil:
		return 0, fmt.Errorf("look for the locks of the relay: %w", err)
	case held > 0:
		return 0, nil
	}
	return time.Duration(longest * float64(time.Second)), nil
}

package rebuild

import (
	"context"
	"errors"

	"github.com/google/uuid"
)

// HealPartition rebuilds what has to be rebuilt in a partition, unless another process does. Tried is true if it began
// a rebuild. Postgres is read before Redis: required is its answer.
func (r *Rebuilder) HealPartition(
	ctx context.Context, partition int, required *Required,
) (tried bool, err error) {
	found, err := r.needsOf(ctx, partition, required)
	if err == nil {
		r.attempts.keep(partition, found)
	}
	if len(found) == 0 {
		return false, err
	}
	session, err := r.begin(ctx, partition)
	if errors.Is(err, ErrRunning) {
		r.logRival(ctx, found[0])
		return false, nil // it may rebuild the same
	} else if err != nil {
		return false, err
	}
	defer session.end()
	// Another process may have rebuilt it just before. With the lock this result is final.
	if required, err = r.Required(ctx, required.withEnded); err != nil {
		return false, err
	}
	found, err = r.needsOf(ctx, partition, required)
	failed := []error{err}
	for _, n := range found {
		if n.Sale == uuid.Nil {
			_, err = r.partition(ctx, session, n.partition, n.Reason)
		} else {
			_, err = r.sale(ctx, session, n)
		}
		if ctx.Err() != nil {
			return true, ctx.Err()
		}
		failed = append(failed, err)
	}
	return len(found) > 0, errors.Join(failed...)
}

package rebuild

import (
	"context"
	"errors"

	"github.com/google/uuid"
)

// Heal rebuilds what has to be rebuilt, unless another process does. Tried is true if it began a rebuild. An error in
// one partition does not stop the others.
func (r *Rebuilder) Heal(ctx context.Context, partitions int, withEnded bool) (tried bool, err error) {
	found, err := r.Needs(ctx, partitions, withEnded)
	if err == nil {
		r.attempts.keep(found)
	}
	if len(found) == 0 {
		return false, err
	}
	session, err := r.begin(ctx)
	if errors.Is(err, ErrRunning) {
		r.logRival(ctx, found)
		return false, nil // it may rebuild the same
	} else if err != nil {
		return false, err
	}
	defer session.end()
	// Another process may have rebuilt it just before. With the lock this result is final.
	found, err = r.Needs(ctx, partitions, withEnded)
	failed := []error{err}
	for _, n := range found {
		if n.Sale == uuid.Nil {
			_, err = r.partition(ctx, session, n.partition, n.Reason)
		} else {
			_, err = r.sale(ctx, session, n.Sale, n.Reason)
		}
		if ctx.Err() != nil {
			return true, ctx.Err()
		}
		failed = append(failed, err)
	}
	return len(found) > 0, errors.Join(failed...)
}

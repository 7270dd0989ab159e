package rebuild

import (
	"context"
	"errors"

	"github.com/google/uuid"
)

// Heal rebuilds what has to be, unless somebody else is at it. Tried is true if it began to. An error in one
// partition keeps it from no other.
func (r *Rebuilder) Heal(ctx context.Context, partitions int, withEnded bool) (tried bool, err error) {
	found, err := r.Needs(ctx, partitions, withEnded)
	if err == nil {
		r.trouble.keep(found)
	}
	if len(found) == 0 {
		return false, err
	}
	session, err := r.begin(ctx)
	if errors.Is(err, ErrRunning) {
		r.nameRival(ctx, found)
		return false, nil // it may be what was found
	} else if err != nil {
		return false, err
	}
	defer session.Close()
	// Somebody may have been at it a moment ago; from here on nobody is.
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

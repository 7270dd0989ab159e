package rebuild

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"
)

// HealPartition rebuilds what has to be rebuilt in a partition, unless another process does. Tried is true if it began
// a rebuild. Postgres is read before Redis: required is its answer.
func (r *Rebuilder) HealPartition(
	ctx context.Context, partition int, required *Required,
) (tried bool, err error) {
	found, err := r.findNeeds(ctx, partition, required)
	if err == nil {
		r.attempts.keep(partition, found)
	}
	isSharded := func(n Need) bool { return n.sharded }
	if own := slices.DeleteFunc(slices.Clone(found), isSharded); len(own) > 0 {
		tried, err = r.healOwn(ctx, partition, required.withEnded, own[0])
	}
	failed := []error{err}
	for _, n := range found {
		if !n.sharded || ctx.Err() != nil {
			continue
		}
		began, err := r.healSharded(ctx, n)
		tried, failed = tried || began, append(failed, err)
	}
	if ctx.Err() != nil {
		return tried, ctx.Err()
	}
	return tried, errors.Join(failed...)
}

// healOwn rebuilds the partition, or its sales that have one shard.
func (r *Rebuilder) healOwn(ctx context.Context, partition int, withEnded bool, first Need) (tried bool, err error) {
	session, err := r.begin(ctx, partition)
	if errors.Is(err, ErrRunning) {
		r.logRival(ctx, first)
		return false, nil // it may rebuild the same
	} else if err != nil {
		return false, err
	}
	report, tried, err := r.healLocked(ctx, session, partition, withEnded)
	session.end()
	finishErr := r.finishAll(ctx, &report)
	return tried, errors.Join(err, finishErr)
}

// healLocked is healOwn under the lock. It returns the report of the partition if it has rebuilt that.
func (r *Rebuilder) healLocked(
	ctx context.Context, session *lockSession, partition int, withEnded bool,
) (report Report, tried bool, err error) {
	// Another process may have rebuilt it just before. With the lock this result is final.
	required, err := r.Required(ctx, withEnded)
	if err != nil {
		return Report{}, false, err
	}
	found, err := r.findNeeds(ctx, partition, required)
	failed := []error{err}
	for _, n := range found {
		switch {
		case n.sharded:
			continue
		case n.Sale == uuid.Nil:
			report, err = r.partition(ctx, session, n.partition, n.Reason)
		default:
			_, err = r.sale(ctx, session, n, 0)
		}
		tried, failed = true, append(failed, err)
		if ctx.Err() != nil {
			return report, true, ctx.Err()
		}
	}
	return report, tried, errors.Join(failed...)
}

// healSharded rebuilds a sale with several shards. It is no error that the sale has to wait for another rebuild or for
// another of its servers: a later check finds it again.
func (r *Rebuilder) healSharded(ctx context.Context, n Need) (tried bool, err error) {
	report, err := r.Finish(ctx, n.Sale, n.Reason)
	switch {
	case errors.Is(err, ErrRunning):
		r.logRival(ctx, n)
		return false, nil
	case errors.Is(err, ErrServerUnverified):
		return false, nil
	}
	return report.Tries > 0, err
}

// finishAll rebuilds the sales with several shards that the rebuild of a partition has closed. It adds them to that
// rebuild's report.
func (r *Rebuilder) finishAll(ctx context.Context, whole *Report) error {
	closed := whole.Unfinished
	whole.Unfinished = nil
	var failed []error
	for _, sale := range closed {
		report, err := r.Finish(ctx, sale, whole.Reason)
		whole.add(report)
		if err == nil {
			continue
		}
		whole.Unfinished = append(whole.Unfinished, sale)
		if !errors.Is(err, ErrRunning) && !errors.Is(err, ErrServerUnverified) {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// Finish is Sale for a sale with several shards that may have been rebuilt since its need was noticed: then it returns
// an empty report. The error is ErrServerUnverified also if a server of the sale does not answer.
func (r *Rebuilder) Finish(ctx context.Context, sale uuid.UUID, reason string) (Report, error) {
	found, err := r.findSale(ctx, sale)
	if err == nil {
		err = r.askServers(ctx, found.layout)
	}
	var session *lockSession
	if err == nil {
		session, err = r.begin(ctx, found.layout.Home)
	}
	if err != nil {
		return Report{}, fmt.Errorf("rebuild sale=%s: %w", sale, err)
	}
	defer session.end()
	// Another process may have rebuilt it just before. With the lock this result is final.
	var needs []Need
	if found, err = r.findSale(ctx, sale); err == nil {
		needs, err = r.needsAmong(ctx, found.shards(), map[bool]int64{})
	}
	switch {
	case err != nil:
		return Report{}, fmt.Errorf("rebuild sale=%s: %w", sale, err)
	case len(needs) == 0:
		r.attempts.note(found.need(reason), nil)
		return Report{}, nil
	}
	return r.sale(ctx, session, found.need(reason), 0)
}

package reservation

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/lua"
	"stampede/sql"
)

// publishMax is how many sales PublishPending brings up to date in one call.
const publishMax = 100

// PublishPending tells Redis what could not be told when it was decided: a process died, or Redis was
// away. Workers call it now and then; any number of them may at once. It returns how many sales are up
// to date now that were not before.
func (c *Catalog) PublishPending(ctx context.Context) (int, error) {
	rows, err := c.pool.Query(ctx, sql.UnpublishedSales, publishMax)
	if err != nil {
		return 0, fmt.Errorf("list unpublished sales: %w", err)
	}
	var ids []uuid.UUID
	for rows.Next() {
		var id uuid.UUID
		if err := rows.Scan(&id); err != nil {
			rows.Close()
			return 0, fmt.Errorf("list unpublished sales: %w", err)
		}
		ids = append(ids, id)
	}
	if err := rows.Err(); err != nil {
		return 0, fmt.Errorf("list unpublished sales: %w", err)
	}
	published := 0
	var failed []error
	for _, id := range ids {
		if err := c.publish(ctx, id); err != nil {
			failed = append(failed, fmt.Errorf("publish sale=%s: %w", id, err))
			continue
		}
		published++
	}
	return published, errors.Join(failed...)
}

// publish brings Redis up to date with a sale: it applies, in order, the changes that Redis has not
// been told of. Repeats and rivals do no harm, because a script applies each revision once.
func (c *Catalog) publish(ctx context.Context, id uuid.UUID) error {
	found, err := findSale(ctx, c.pool, id)
	if err != nil {
		return err
	} else if len(found) == 0 {
		return ErrSaleNotFound
	}
	sale := found[0]
	applied := sale.publishedRevision
	for applied < sale.Revision {
		changes, err := c.changesAfter(ctx, id, applied)
		if err != nil {
			return err
		}
		for _, change := range changes {
			if err := c.apply(ctx, sale.Sale, change); err != nil {
				return err
			}
			applied = change.revision
		}
	}
	_, err = c.pool.Exec(ctx, sql.MarkPublished, id, applied)
	return err
}

type publishedChange struct {
	revision int64
	event    string
	stock    int64
}

func (c *Catalog) changesAfter(ctx context.Context, id uuid.UUID, revision int64) ([]publishedChange, error) {
	rows, err := c.pool.Query(ctx, sql.SaleChanges, id, revision)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var changes []publishedChange
	for rows.Next() {
		var ch publishedChange
		if err := rows.Scan(&ch.revision, &ch.event, &ch.stock); err != nil {
			return nil, err
		}
		changes = append(changes, ch)
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	if len(changes) == 0 {
		return nil, fmt.Errorf("sale=%s lacks the event of revision %d", id, revision+1)
	}
	return changes, nil
}

// apply runs the script of one change.
func (c *Catalog) apply(ctx context.Context, s Sale, ch publishedChange) error {
	k, p := c.store.keys, s.Partition()
	saleKey := k.Sale(p, s.ID)
	epoch, revision := strconv.FormatInt(s.Epoch, 10), strconv.FormatInt(ch.revision, 10)

	var answer *redis.Cmd
	switch ch.event {
	case eventCreated:
		answer = lua.Open.Run(ctx, c.store.rdb, []string{saleKey, k.Buyers(p, s.ID), k.Sales(p)},
			s.ID.String(), epoch, revision, ch.stock, s.PerOrderLimit, unixMilli(s.OpensAt), unixMilli(s.ClosesAt),
			int64(s.PaymentWindow/time.Second))
	case eventPaused:
		answer = lua.Pause.Run(ctx, c.store.rdb, []string{saleKey}, epoch, revision)
	case eventResumed:
		answer = lua.Resume.Run(ctx, c.store.rdb, []string{saleKey}, epoch, revision)
	case eventEnded:
		answer = lua.End.Run(ctx, c.store.rdb, []string{saleKey}, epoch, revision)
	case eventRestocked:
		answer = lua.Restock.Run(ctx, c.store.rdb, []string{saleKey}, epoch, revision, ch.stock)
	default:
		return fmt.Errorf("sale=%s has an event %q that this version does not know", s.ID, ch.event)
	}
	text, err := answer.Text()
	if err != nil {
		return err
	}
	switch word, rest, _ := strings.Cut(text, " "); word {
	case "opened", "paused", "resumed", "ended", "restocked", "unchanged":
		return nil
	case "unknown-sale", "buyers-remain", "gap":
		// Redis has been told before of what it lacks now: it lost data, and only a rebuild brings it back.
		return fmt.Errorf("%w (%s)", errLostSale, text)
	default:
		return fmt.Errorf("sale=%s: %s was refused by Redis: %s %s", s.ID, ch.event, word, rest)
	}
}

// unixMilli is 0 for the zero time: how a script is told "none".
func unixMilli(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

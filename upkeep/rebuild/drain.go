package rebuild

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/internal/retry"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

// drainPage is how many entries are read at a time.
const drainPage = 32

// Drained counts the entries of the stream that a rebuild read.
type Drained struct {
	// Entries counts all of them. Of their orders, Confirmed, Rejected and Voided were recorded by the rebuild.
	Entries   int64 `json:"entries"`
	Confirmed int64 `json:"confirmed"`
	Rejected  int64 `json:"rejected"`
	Voided    int64 `json:"voided"`
	// Recorded orders were in Postgres before.
	Recorded int64 `json:"recorded"`
	// Left counts entries for the workers: orders of other sales, and entries that cannot be applied.
	Left int64 `json:"left"`
}

// drainStream records the orders of closed sales in the unfinished entries of a partition's stream: unread ones, and
// pending ones, whose workers find them recorded. The entries stay in the stream. Closed sales add none, so there is a
// last one.
func (b *build) drainStream(ctx context.Context, partition int, closed map[uuid.UUID]bool) error {
	key := b.config.Keys.Orders(partition)
	limited, cancel := retry.ForCall(ctx)
	from, to, err := stream.Unfinished(limited, b.config.Redis, key, reservation.Group)
	cancel()
	if err != nil || to == "" {
		return err
	}
	for {
		entries, err := b.readEntries(ctx, key, from, to)
		if err != nil {
			return err
		}
		if len(entries) == 0 {
			return nil
		}
		if err := b.record(ctx, entries, closed); err != nil {
			return err
		}
		if err := b.session.ping(ctx); err != nil {
			return err
		}
		from = "(" + entries[len(entries)-1].ID
	}
}

func (b *build) readEntries(ctx context.Context, key, from, to string) ([]redis.XMessage, error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	return b.config.Redis.XRangeN(ctx, key, from, to, drainPage).Result()
}

// record records the orders of closed sales among these entries. Entries that cannot be applied are left to the
// workers, which park them as dead letters.
func (b *build) record(ctx context.Context, entries []redis.XMessage, closed map[uuid.UUID]bool) error {
	found := &b.report.Drained
	found.Entries += int64(len(entries))
	events := make([]order.OrderReserved, 0, len(entries))
	for _, entry := range entries {
		msg, err := stream.DecodeEntry(entry.ID, entry.Values, 0)
		var held []order.OrderReserved
		if err == nil {
			held, err = order.DecodeReserved(msg)
		}
		if err != nil {
			found.Left++
			continue
		}
		for _, event := range held {
			if closed[event.SaleID] {
				events = append(events, event)
			} else {
				found.Left++
			}
		}
	}
	slices.SortStableFunc(events, ledger.BySaleAndSequence)
	for batch := range slices.Chunk(events, ledger.BatchMax) {
		if err := b.recordBatch(ctx, batch); err != nil {
			return err
		}
	}
	return nil
}

func (b *build) recordBatch(ctx context.Context, events []order.OrderReserved) error {
	found := &b.report.Drained
	for _, out := range ledger.RecordWith(ctx, b.Ledger, b.try, events) {
		switch {
		case out.Err != nil && ledger.FaultOf(out.Err) == ledger.Transient:
			return out.Err
		case out.Err != nil:
			found.Left++
		case !out.Fresh:
			found.Recorded++
		case out.Status == order.StatusConfirmed:
			found.Confirmed++
		case out.Status == order.StatusVoided:
			found.Voided++
		default:
			found.Rejected++
		}
	}
	return nil
}

// try tries a transaction once, because callers retry a failed rebuild.
func (b *build) try(ctx context.Context, t ledger.Transaction) ([]ledger.Outcome, error) {
	outcomes, err := ledger.Attempt(ctx, b.log, t)
	if errors.Is(err, ledger.ErrEpochOver) {
		return nil, fmt.Errorf("%w: %w", errOvertaken, err)
	}
	return outcomes, err
}

package rebuild

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/fulfillment/ledger"
	"stampede/fulfillment/stream"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/reservation/order"
)

// drainPage is how many entries of the stream are recorded in one transaction.
const drainPage = 500

// Drained is what a rebuild found in the stream that was not known to be in Postgres.
type Drained struct {
	// Entries were looked at; of them, so many were recorded now.
	Entries   int64 `json:"entries"`
	Confirmed int64 `json:"confirmed"`
	Rejected  int64 `json:"rejected"`
	Voided    int64 `json:"voided"`
	// Recorded were in Postgres before.
	Recorded int64 `json:"recorded"`
	// Left are those of which the workers have to make something: they are no orders of these sales, or cannot be read.
	Left int64 `json:"left"`
}

// drainStream records the orders of closed sales that are in the stream and may not be in Postgres: those that no
// worker has read, and those that some worker has in hand, who will find them recorded. The entries stay where
// they are. Nothing is added to those sales meanwhile, so there is a last one.
func (b *build) drainStream(ctx context.Context, closed map[uuid.UUID]bool) error {
	stream := b.config.Keys.Orders(b.partition)
	from, to, err := b.unfinished(ctx, stream)
	if err != nil || to == "" {
		return err
	}
	for {
		entries, err := b.readEntries(ctx, stream, from, to)
		if err != nil {
			return err
		}
		if len(entries) == 0 {
			return nil
		}
		if err := b.record(ctx, entries, closed); err != nil {
			return err
		}
		if err := b.session.stayAwake(ctx); err != nil {
			return err
		}
		from = "(" + entries[len(entries)-1].ID
	}
}

// unfinished returns the ids between which entries may not be done with; to is empty if there are none.
func (b *build) unfinished(ctx context.Context, stream string) (from, to string, err error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	last, err := b.config.Redis.XRevRangeN(ctx, stream, "+", "-", 1).Result()
	if err != nil || len(last) == 0 {
		return "", "", err
	}
	groups, err := b.config.Redis.XInfoGroups(ctx, stream).Result()
	if err != nil {
		return "", "", err
	}
	at := slices.IndexFunc(groups, func(g redis.XInfoGroup) bool { return g.Name == reservation.Group })
	if at < 0 {
		return "-", last[0].ID, nil // nobody has read it yet, or the group is lost
	}
	from = groups[at].LastDeliveredID
	if groups[at].Pending > 0 {
		pending, err := b.config.Redis.XPending(ctx, stream, reservation.Group).Result()
		if err != nil {
			return "", "", err
		}
		// A group that was set back has pending entries above its last delivered one.
		if pending.Count > 0 && idBefore(pending.Lower, from) {
			from = pending.Lower
		}
	}
	return from, last[0].ID, nil
}

// idBefore compares two ids of entries.
func idBefore(x, y string) bool {
	xTime, xCount := idParts(x)
	yTime, yCount := idParts(y)
	return xTime < yTime || xTime == yTime && xCount < yCount
}

func idParts(id string) (ms, count uint64) {
	text, rest, _ := strings.Cut(id, "-")
	ms, _ = strconv.ParseUint(text, 10, 64)
	count, _ = strconv.ParseUint(rest, 10, 64)
	return ms, count
}

func (b *build) readEntries(ctx context.Context, stream, from, to string) ([]redis.XMessage, error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	return b.config.Redis.XRangeN(ctx, stream, from, to, drainPage).Result()
}

// record records the orders of closed sales among these entries. What is at fault by itself stays for the
// workers, who make a dead letter of it.
func (b *build) record(ctx context.Context, entries []redis.XMessage, closed map[uuid.UUID]bool) error {
	found := &b.report.Drained
	found.Entries += int64(len(entries))
	events := make([]order.OrderReserved, 0, len(entries))
	for _, entry := range entries {
		msg, err := stream.DecodeEntry(entry.ID, entry.Values, 0)
		if err == nil {
			var event order.OrderReserved
			if event, err = order.DecodeReserved(msg); err == nil && closed[event.SaleID] {
				events = append(events, event)
				continue
			}
		}
		found.Left++
	}
	slices.SortStableFunc(events, ledger.ByPlaceInSale)
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

// try tries a transaction once: a rebuild that fails is begun again, by whoever asked for it.
func (b *build) try(ctx context.Context, t ledger.Transaction) ([]ledger.Outcome, error) {
	outcomes, err := ledger.Attempt(ctx, b.log, t)
	if errors.Is(err, ledger.ErrEpochOver) {
		return nil, fmt.Errorf("%w: %w", errOvertaken, err)
	}
	return outcomes, err
}

package reservation

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/google/uuid"

	"stampede/lua"
	"stampede/reservation/order"
)

// AppendReserved appends lost orders of one sale to the stream again; duplicates are harmless. It
// returns for each order whether it was appended, which needs a readable reservation that is in
// force. After an error some may be appended. Errors wrap ErrUnavailable.
func (s *Store) AppendReserved(
	ctx context.Context, partition int, sale uuid.UUID, events []order.OrderReserved,
) ([]bool, error) {
	appended := make([]bool, 0, len(events))
	for len(events) > 0 {
		n := min(len(events), s.options.BatchMax)
		// Reservations of earlier epochs than the sale's say so themselves.
		last := slices.MaxFunc(events[:n], func(x, y order.OrderReserved) int { return cmp.Compare(x.Epoch, y.Epoch) })
		args := append(make([]any, 0, 1+2*n), order.ReservedMetadataPrefix(sale, last.Epoch))
		for _, e := range events[:n] {
			args = append(args, e.UserID, order.CompactID(e.OrderID))
		}
		keys := []string{s.Keys.Buyers(partition, sale), s.Keys.Orders(partition)}
		answers, err := lua.Append.Run(ctx, s.Redis, keys, args...).StringSlice()
		if err == nil && len(answers) != n {
			err = fmt.Errorf("the script returned %d answers for %d orders", len(answers), n)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: append events of sale=%s: %w", ErrUnavailable, sale, err)
		}
		for _, answer := range answers {
			appended = append(appended, answer == "appended")
		}
		events = events[n:]
	}
	return appended, nil
}

package reservation

import (
	"context"
	"fmt"

	"github.com/google/uuid"

	"stampede/lua"
	"stampede/reservation/order"
)

// AppendReserved appends lost events of accepted orders of one sale again; duplicates are harmless.
// It returns for each event whether it was appended, which requires a readable and current
// reservation. The fields that the script writes come from the reservation. After an error some
// events may be appended. Errors wrap ErrUnavailable.
func (s *Store) AppendReserved(
	ctx context.Context, partition int, sale uuid.UUID, events []order.OrderReserved,
) ([]bool, error) {
	appended := make([]bool, 0, len(events))
	for len(events) > 0 {
		n := min(len(events), s.options.BatchMax)
		args := append(make([]any, 0, 1+3*n), reserveMetadata)
		for _, e := range events[:n] {
			args = append(args, e.UserID, CompactID(e.OrderID), order.AppendReservedPayload(nil, e))
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

package reservation

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"stampede/internal/retry"
)

// EachAnswering calls do for those of the partitions whose server answers, each in its own goroutine and at most
// limit of them at a time, and returns all errors. Servers are asked at the same time and take no place of the limit,
// so one that does not answer delays no other.
func (s *Store) EachAnswering(
	ctx context.Context, partitions []int, limit int, do func(ctx context.Context, partition int) error,
) error {
	places := make(chan struct{}, limit)
	failed := make([]error, len(partitions))
	var doing sync.WaitGroup
	for i, partition := range partitions {
		doing.Go(func() {
			if failed[i] = s.answers(ctx, partition); failed[i] != nil {
				return
			}
			select {
			case places <- struct{}{}:
				defer func() { <-places }()
				failed[i] = do(ctx, partition)
			case <-ctx.Done():
				failed[i] = ctx.Err()
			}
		})
	}
	doing.Wait()
	return errors.Join(failed...)
}

func (s *Store) answers(ctx context.Context, partition int) error {
	limited, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	if _, err := s.Inspect(limited, partition); err != nil {
		return fmt.Errorf("partition %d: %w", partition, err)
	}
	return nil
}

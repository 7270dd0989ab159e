package reservation

import (
	"context"
	"fmt"

	"stampede/internal/retry"
)

// EachAnswering calls do for those of the partitions whose server answers, each in its own goroutine and at most
// limit of them at a time, and returns all errors. Servers are asked at the same time and take no place of the limit,
// so one that does not answer delays no other.
func (s *Store) EachAnswering(
	ctx context.Context, partitions []int, limit int, do func(ctx context.Context, partition int) error,
) error {
	places := make(chan struct{}, limit)
	return each(len(partitions), func(i int) error {
		if err := s.answers(ctx, partitions[i]); err != nil {
			return err
		}
		select {
		case places <- struct{}{}:
			defer func() { <-places }()
			return do(ctx, partitions[i])
		case <-ctx.Done():
			return ctx.Err()
		}
	})
}

func (s *Store) answers(ctx context.Context, partition int) error {
	limited, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	if _, err := s.Inspect(limited, partition); err != nil {
		return fmt.Errorf("partition %d: %w", partition, err)
	}
	return nil
}

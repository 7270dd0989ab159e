package reservation

import (
	"context"
	"fmt"
	"time"

	"stampede/internal/clocks"
	"stampede/internal/pg"
	"stampede/internal/retry"
)

// Times returns the time by the clocks of Postgres and of the servers of these partitions. A step that nothing undoes
// is taken when all of them say that its time has come, and waits while they are too far apart: the error is then
// clocks.ErrApart. It wraps ErrUnavailable if Redis does not answer, or is that of Postgres.
func (s *Store) Times(ctx context.Context, on pg.Querier, partitions ...int) (clocks.Times, error) {
	all := make([]clocks.Reading, 0, 1+len(partitions))
	for _, p := range partitions {
		r, err := clocks.Read(func() (time.Time, error) {
			limited, cancel := retry.ForCall(ctx)
			defer cancel()
			state, err := s.Inspect(limited, p)
			return state.Now, err
		})
		if err != nil {
			return clocks.Times{}, err
		}
		all = append(all, r)
	}
	r, err := pg.ReadClock(ctx, on)
	if err != nil {
		return clocks.Times{}, fmt.Errorf("read the clock of Postgres: %w", err)
	}
	return clocks.Agree(append(all, r)...)
}

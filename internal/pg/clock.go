package pg

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"stampede/internal/clocks"
)

// ReadClock reads the clock of Postgres.
func ReadClock(ctx context.Context, on Querier) (clocks.Reading, error) {
	return clocks.Read(func() (time.Time, error) {
		rows, _ := on.Query(ctx, "SELECT clock_timestamp()") // its error comes with the row
		return pgx.CollectExactlyOneRow(rows, pgx.RowTo[time.Time])
	})
}

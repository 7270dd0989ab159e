package doctor

import (
	"context"
	"fmt"
	"strconv"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/figure"
	"stampede/reservation"
	"stampede/sql"
)

// bytesPerUnit is what an accepted order takes in Redis until a worker has written it, for a sale in which each order
// holds one unit.
const bytesPerUnit = 500

// Memory tells whether Redis has room for the orders of all units that are on sale, or of those of one sale if it is
// not uuid.Nil. It fails where one of the servers cannot be asked, or with reservation.ErrSaleNotFound.
func Memory(ctx context.Context, rdb redis.UniversalClient, pool *pgxpool.Pool, sale uuid.UUID) ([]Finding, error) {
	var sales, units int64
	if err := pool.QueryRow(ctx, sql.DoctorUnitsOnSale,
		uuid.NullUUID{UUID: sale, Valid: sale != uuid.Nil}).Scan(&sales, &units); err != nil {
		return nil, fmt.Errorf("ask Postgres for the units on sale: %w", err)
	}
	if sale != uuid.Nil && sales == 0 {
		return nil, fmt.Errorf("sale=%s: %w", sale, reservation.ErrSaleNotFound)
	}
	text, err := rdb.Info(ctx, "memory").Result()
	if err != nil {
		return nil, fmt.Errorf("ask Redis for INFO: %w", err)
	}
	return roomFor(units, parseInfo(text)), nil
}

// roomFor holds what the units take against what the server may use.
func roomFor(units int64, info map[string]string) []Finding {
	limit, whose := number(info["maxmemory"]), "maxmemory"
	if limit == 0 {
		limit, whose = number(info["total_system_memory"]), "the memory of the machine"
	}
	used := number(info["used_memory"])
	need := used + units*bytesPerUnit
	if units == 0 || limit == 0 || need <= limit {
		return nil
	}
	return []Finding{{
		Severity: Unsafe, Server: "redis",
		What: fmt.Sprintf("%s units are on sale, which take about %s MB; of %s, %s MB, %s MB are left",
			figure.Count(units), megabytes(units*bytesPerUnit), whose, megabytes(limit), megabytes(max(0, limit-used))),
		Why: "when memory runs out the server refuses new orders, and the sale stops before it is sold out",
		Mend: fmt.Sprintf("set maxmemory to %s MB at least (CONFIG SET maxmemory %dmb, and the same in redis.conf) on a "+
			"machine that has them, or put fewer units on sale", megabytes(need), toMegabytes(need)),
	}}
}

// number is 0 for what the server does not tell.
func number(text string) int64 {
	n, _ := strconv.ParseInt(text, 10, 64)
	return n
}

// megabytes writes bytes in the megabytes of redis.conf, which are of 1024 kilobytes, and rounds up.
func megabytes(bytes int64) string { return figure.Count(toMegabytes(bytes)) }

func toMegabytes(bytes int64) int64 { return (bytes + 1<<20 - 1) >> 20 }

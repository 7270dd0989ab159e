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

// bytesPerUnit is the memory of an accepted order in Redis until a worker has written it, if each order has one unit.
const bytesPerUnit = 500

// Memory checks that Redis has room for the orders of all units on sale, or of one sale unless it is uuid.Nil.
// It fails if a server does not answer, or with reservation.ErrSaleNotFound.
func Memory(ctx context.Context, rdb redis.UniversalClient, pool *pgxpool.Pool, sale uuid.UUID) ([]Finding, error) {
	var sales, units int64
	if err := pool.QueryRow(ctx, sql.DoctorUnitsOnSale,
		uuid.NullUUID{UUID: sale, Valid: sale != uuid.Nil}).Scan(&sales, &units); err != nil {
		return nil, fmt.Errorf("read the units on sale from Postgres: %w", err)
	}
	if sale != uuid.Nil && sales == 0 {
		return nil, fmt.Errorf("sale=%s: %w", sale, reservation.ErrSaleNotFound)
	}
	text, err := rdb.Info(ctx, "memory").Result()
	if err != nil {
		return nil, fmt.Errorf("read INFO of Redis: %w", err)
	}
	return roomFor(units, parseInfo(text)), nil
}

// roomFor compares the memory that the units need with the limit of the server.
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
		Mend: fmt.Sprintf("set maxmemory to at least %s MB (CONFIG SET maxmemory %dmb, and the same in redis.conf) on a "+
			"machine with that much memory, or put fewer units on sale", megabytes(need), toMegabytes(need)),
	}}
}

// number is 0 for a missing value.
func number(text string) int64 {
	n, _ := strconv.ParseInt(text, 10, 64)
	return n
}

// megabytes formats bytes in megabytes of 1024 kilobytes, as in redis.conf, rounded up.
func megabytes(bytes int64) string { return figure.Count(toMegabytes(bytes)) }

func toMegabytes(bytes int64) int64 { return (bytes + 1<<20 - 1) >> 20 }

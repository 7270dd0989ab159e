package audit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/sql"
)

// Recorded is the verdict of a whole audit, as Record stored it.
type Recorded struct {
	At time.Time
	// Operator is who ran it.
	Operator string
	// Broken and Unchecked are names of promises, such as S4, in their order.
	Broken, Unchecked []string
	// Moving is true if units moved during the audit, so that what it found may have been on its way.
	Moving bool
}

// Record stores the verdict of an audit of all sales, with the time of Postgres. The newest 1000 verdicts are kept.
func Record(ctx context.Context, pool *pgxpool.Pool, report Report, operator string) error {
	broken, unchecked := []string{}, []string{}
	for _, p := range report.Promises {
		if p.Found > 0 {
			broken = append(broken, p.Name)
		}
		if len(p.Unchecked) > 0 {
			unchecked = append(unchecked, p.Name)
		}
	}
	_, err := pool.Exec(ctx, sql.AuditRecord, zeronull.Text(operator), broken, unchecked, report.Moved)
	if err != nil {
		return fmt.Errorf("record the audit: %w", err)
	}
	return nil
}

// Latest returns the newest recorded audit, nil if there is none.
func Latest(ctx context.Context, pool *pgxpool.Pool) (*Recorded, error) {
	rows, _ := pool.Query(ctx, sql.AuditLatest) // its error comes with the row
	recorded, err := pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByName[Recorded])
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the newest audit: %w", err)
	}
	return recorded, nil
}

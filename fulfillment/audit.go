package fulfillment

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/pause"
	"stampede/reservation"
	"stampede/sql"
)

// AuditConfig says what to audit.
type AuditConfig struct {
	Pool  *pgxpool.Pool
	Redis redis.UniversalClient
	Keys  reservation.Keys
	// Wait is how long to wait until nothing is under way. What then still is, is reported.
	Wait time.Duration
	// Sale is the sale to audit; uuid.Nil for all.
	Sale uuid.UUID
}

// findingsShown bounds how many findings of one check are named; the rest is counted.
const findingsShown = 10

// check is a query for what breaks a promise.
type check struct {
	promise string
	query   string
}

// checks are all that Postgres can answer once it holds what Redis says.
var checks = []check{
	{"S1", sql.AuditOversold},
	{"S2", sql.AuditTwoLiveOrders},
	{"S3", sql.AuditUnfinishedBuyers},
	{"S3", sql.AuditUnfinishedEvents},
	{"S4", sql.AuditCounters},
	{"S4", sql.AuditConservation},
	{"S4", sql.AuditReservations},
	{"S5", sql.AuditProjection},
	{"S5", sql.AuditSequence},
	{"S7", sql.AuditRedis},
}

// Audit holds Redis and Postgres against what is promised and reports every difference. It changes
// nothing. An error means that it could not look, and says nothing about the promises; with Sale set it
// may be reservation.ErrSaleNotFound.
//
// It looks at Redis first and at Postgres afterwards, at one snapshot, and leaves out the orders
// that were accepted meanwhile. So it may run beside a sale; only what is on its way then, units on
// their way back included, shows as a difference. The verdict is meant for a sale at rest.
//
// The comparison is made in Postgres, in temporary tables, so it takes little memory here however
// many orders there are.
func Audit(ctx context.Context, c AuditConfig) (AuditReport, error) {
	report, err := audit(ctx, c)
	if err != nil {
		return AuditReport{}, fmt.Errorf("audit: %w", err)
	}
	return report, nil
}

func audit(ctx context.Context, c AuditConfig) (AuditReport, error) {
	report := newAuditReport()
	// Redis first: a sale is in Postgres before it is in Redis.
	var inRedis []reservation.LocatedSale
	var err error
	if c.Sale == uuid.Nil {
		if inRedis, err = reservation.ListInRedis(ctx, c.Redis, c.Keys); err != nil {
			return report, err
		}
	}
	sales, err := auditScope(ctx, c)
	if err != nil {
		return report, err
	}
	if err := report.nameStrangers(ctx, c, inRedis, sales); err != nil {
		return report, err
	}
	streams := streamsOf(c.Keys, sales)
	if err := report.awaitRest(ctx, c, streams); err != nil {
		return report, err
	}

	conn, err := c.Pool.Acquire(ctx)
	if err != nil {
		return report, err
	}
	defer conn.Release()
	// Temporary tables live as long as the connection, which goes back to the pool.
	defer func() {
		ctx, cancel := forCall(ctx)
		defer cancel()
		if _, err := conn.Exec(ctx, sql.AuditDrop); err != nil {
			_ = conn.Conn().Close(ctx) // and so do they
		}
	}()
	if err := loadRedis(ctx, conn.Conn(), c, sales, &report); err != nil {
		return report, err
	}
	snapshot := pgx.TxOptions{IsoLevel: pgx.RepeatableRead}
	err = pgx.BeginTxFunc(ctx, conn, snapshot, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, sql.AuditFigures); err != nil {
			return fmt.Errorf("count: %w", err)
		}
		rows, _ := tx.Query(ctx, sql.AuditReadFigures) // its error comes with the rows
		if report.Sales, err = pgx.CollectRows(rows, pgx.RowToStructByPos[SaleFigures]); err != nil {
			return fmt.Errorf("count: %w", err)
		}
		for _, check := range checks {
			if err := report.run(ctx, tx, check); err != nil {
				return err
			}
		}
		return report.run(ctx, tx, check{"S3", sql.AuditDeadLetters}, streams)
	})
	return report, err
}

// run adds the findings of a check to the report.
func (r *AuditReport) run(ctx context.Context, tx pgx.Tx, c check, args ...any) error {
	query := fmt.Sprintf("SELECT sale_id, order_id, user_id, what, count(*) OVER () FROM (\n%s\n) AS found ORDER BY sale_id, order_id, what LIMIT %d",
		c.query, findingsShown)
	rows, _ := tx.Query(ctx, query, args...) // its error comes with the rows
	promise := r.promise(c.promise)
	var (
		sale, order *uuid.UUID
		user        *string
		what        string
		total       int64
	)
	_, err := pgx.ForEachRow(rows, []any{&sale, &order, &user, &what, &total}, func() error {
		finding := Finding{Sale: sale, Order: order, What: what}
		if user != nil {
			finding.User = *user
		}
		promise.Findings = append(promise.Findings, finding)
		return nil
	})
	if err != nil {
		return fmt.Errorf("check %s: %w", c.promise, err)
	}
	promise.Found += total
	return nil
}

// auditedSale is a sale to audit, and where in Redis it lives.
type auditedSale struct {
	id        uuid.UUID
	partition int
}

func auditScope(ctx context.Context, c AuditConfig) ([]auditedSale, error) {
	var only *uuid.UUID
	if c.Sale != uuid.Nil {
		only = &c.Sale
	}
	rows, _ := c.Pool.Query(ctx, sql.AuditScope, only) // its error comes with the rows
	sales, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (auditedSale, error) {
		var s auditedSale
		var partitions int
		err := row.Scan(&s.id, &partitions)
		if err == nil {
			s.partition = reservation.PartitionAmong(s.id, partitions)
		}
		return s, err
	})
	if err != nil {
		return nil, fmt.Errorf("list sales: %w", err)
	}
	if only != nil && len(sales) == 0 {
		return nil, fmt.Errorf("%w: %s", reservation.ErrSaleNotFound, c.Sale)
	}
	return sales, nil
}

// streamsOf are the streams that bear on the sales: all partitions in use, and those of older sales.
func streamsOf(keys reservation.Keys, sales []auditedSale) []string {
	partitions := keys.Partitions
	for _, s := range sales {
		partitions = max(partitions, s.partition+1)
	}
	streams := make([]string, partitions)
	for p := range streams {
		streams[p] = keys.Orders(p)
	}
	return streams
}

// restPause is how often it is looked whether everything rests.
const restPause = 20 * time.Millisecond

// awaitRest waits until no entry of the streams is waiting or in hand, for at most c.Wait.
func (r *AuditReport) awaitRest(ctx context.Context, c AuditConfig, streams []string) error {
	deadline := time.Now().Add(c.Wait)
	for {
		findings, waiting, err := unrest(ctx, c.Redis, streams)
		if err != nil {
			return err
		}
		if len(findings) == 0 || !time.Now().Before(deadline) {
			for _, finding := range findings {
				r.add("S3", finding)
			}
			r.Streams, r.EntriesWaiting = len(streams), waiting
			return nil
		}
		if !pause.For(restPause, ctx.Done()) {
			return ctx.Err()
		}
	}
}

func unrest(ctx context.Context, rdb redis.UniversalClient, streams []string) (findings []Finding, waiting int64, err error) {
	for _, stream := range streams {
		b, err := ReadBacklog(ctx, rdb, stream, reservation.Group)
		if err != nil {
			return nil, 0, err
		}
		entries, known := b.Waiting()
		switch {
		case !known:
			findings = append(findings, Finding{What: fmt.Sprintf(
				"Redis cannot tell how many entries of %s wait: some were deleted; %d are in hand", stream, b.Pending)})
		case entries > 0:
			findings = append(findings, Finding{What: fmt.Sprintf(
				"%d entries of %s are not done with: %d unread, %d in hand", entries, stream, b.Lag, b.Pending)})
			waiting += entries
		}
	}
	return findings, waiting, nil
}

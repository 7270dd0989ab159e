// Package audit compares Redis and Postgres with the promises S1 to S5, S7, S8 and, of draws, D1 to
// D6, and repairs differences.
//
// Run (audit.go) takes a look: at Postgres (checks.go, draws.go), at Redis (shards.go, redis.go,
// checks.go), and at the streams and the ended orders (shards.go), and reports each promise
// (report.go). Reconcile (reconcile.go) looks twice, and repairs what both looks found. File makes the checks
// that need no Redis.
package audit

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"stampede/internal/format"
	"stampede/internal/pg"
	"stampede/internal/progress"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/stream"
)

// Config says what to audit.
type Config struct {
	Catalog *catalog.Catalog
	// Wait is how long to wait until no order is in transit. What remains is reported.
	Wait time.Duration
	// Sale is the sale to audit; uuid.Nil for all.
	Sale uuid.UUID
}

const (
	// findingsShown bounds how many findings of one check are named; the others are only counted.
	findingsShown = 10
	// looksMax bounds the repeated looks while data changes.
	looksMax = 1000
)

// Run compares Redis and Postgres with the promises and reports every difference. It changes
// nothing. Promise.Unchecked names what could not be read; a partition whose server does not answer keeps
// no other from being checked. An error means that Postgres does not
// answer; with Sale set it may be reservation.ErrSaleNotFound.
//
// It reads Redis first, then one snapshot of Postgres, and leaves out orders that were accepted in
// between, so it may run during a sale: only orders and units in transit show as differences. If
// there are differences and data changed meanwhile, it looks again until Wait is over. The verdict
// is meant for a sale at rest.
//
// Postgres compares in temporary tables, so memory use here does not grow with the orders.
func Run(ctx context.Context, c Config) (Report, error) {
	report, err := audit(ctx, c)
	if err != nil {
		return Report{}, fmt.Errorf("audit: %w", err)
	}
	return report, nil
}

func audit(ctx context.Context, c Config) (Report, error) {
	deadline := time.Now().Add(c.Wait)
	conn, err := c.Catalog.Pool.Acquire(ctx)
	if err != nil {
		return Report{}, err
	}
	defer conn.Release()
	// Temporary tables belong to the connection, which returns to the pool.
	defer func() {
		ctx, cancel := retry.ForCall(ctx)
		defer cancel()
		if _, err := conn.Exec(ctx, sql.AuditDrop); err != nil {
			_ = conn.Conn().Close(ctx) // which drops them too
		}
	}()
	for range looksMax {
		l := newSnapshot(c, conn.Conn())
		if err := l.awaitRest(ctx, deadline); err != nil {
			return l.report, err
		}
		before, err := l.progress(ctx)
		if err != nil {
			return l.report, err
		}
		if err := l.compare(ctx, l.check); err != nil || !l.report.Broken() {
			return l.report, err
		}
		after, err := l.progress(ctx)
		if err != nil {
			return l.report, err
		}
		l.report.Moved = before != after
		if !l.report.Moved || !time.Now().Before(deadline) || !retry.Pause(restPause, ctx.Done()) {
			return l.report, ctx.Err()
		}
	}
	return Report{}, fmt.Errorf("the data changed during each of %d looks", looksMax)
}

// snapshot is what one look at Redis and Postgres reads, to be compared.
type snapshot struct {
	findings

	sales []auditedSale
	// readable are the shards of the sales whose servers all answer, and streams those of answering partitions.
	readable []auditedShard
	streams  []string
	// unreachable holds the errors of unreachable partitions, while others answer.
	unreachable map[int]error
}

// findings are what the checks of a snapshot find, and what could not be checked.
type findings struct {
	Config
	conn   *pgx.Conn
	report Report
	// isFile is set for the sale of an archive.
	isFile bool
	// noted are the first findings that come from Redis alone.
	noted []Finding
	// unread holds the errors of reading Redis.
	unread map[source]error
}

func newSnapshot(c Config, conn *pgx.Conn) *snapshot {
	return &snapshot{
		findings:    findings{Config: c, conn: conn, report: newReport(), unread: map[source]error{}},
		unreachable: map[int]error{},
	}
}

// notedMax bounds findings.noted. A few of them show which sale to repair.
const notedMax = 10_000

func (l *findings) note(promise string, f Finding) {
	l.report.add(promise, f)
	if len(l.noted) < notedMax {
		l.noted = append(l.noted, f)
	}
}

// selectSales reads the sales to audit.
func (l *snapshot) selectSales(ctx context.Context) error {
	// Redis first: a sale is in Postgres before it is in Redis.
	var inRedis []reservation.LocatedSale
	if l.Sale == uuid.Nil {
		var err error
		if inRedis, err = l.listSales(ctx); err != nil {
			return err
		}
	}
	sales, err := salesToAudit(ctx, l.Config)
	if err != nil {
		return err
	}
	for _, s := range sales {
		if wrong := s.wrongLayout(); wrong != "" {
			l.note("S7", Finding{Sale: &s.id, Remedy: remedyOperator, What: wrong + ": nothing else of the sale is checked"})
			continue
		}
		l.sales = append(l.sales, s)
		if !l.isUnreachable(s) {
			l.readable = append(l.readable, s.shards()...)
		}
	}
	l.selectStreams()
	if err := l.reportUnknownSales(ctx, inRedis, sales); err != nil {
		return err
	}
	if err := l.reportForeignKeys(ctx); err != nil {
		return err
	}
	return l.reportMissingGuards(ctx)
}

// listSales lists the sales in Redis. Partitions that do not answer, while others do, are in unreachable.
func (l *snapshot) listSales(ctx context.Context) ([]reservation.LocatedSale, error) {
	limited, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	found, failed := reservation.ListInRedis(limited, l.Catalog.Store.Redis, l.Catalog.Store.Keys)
	if len(failed) < reservation.MaxPartitions {
		maps.DeleteFunc(failed, func(partition int, err error) bool {
			if answered := redis.Error(nil); errors.As(err, &answered) && !redis.HasErrorPrefix(err, "CLUSTERDOWN") {
				return false
			}
			l.unreachable[partition] = err
			return true
		})
	}
	for _, partition := range slices.Sorted(maps.Keys(failed)) {
		if err := l.noteUnread(ctx, theSales, failed[partition]); err != nil {
			return nil, err
		}
	}
	return found, ctx.Err()
}

// selectStreams selects the streams of all partitions in use, and of older sales. What cannot be checked in
// unreachable ones is in the report.
func (l *snapshot) selectStreams() {
	for p := range countPartitions(l.Catalog.Store.Keys, l.sales) {
		err := l.unreachable[p]
		if err == nil {
			l.streams = append(l.streams, l.Catalog.Store.Keys.Orders(p))
			continue
		}
		for _, c := range checks {
			if c.needs != 0 {
				l.noteUnchecked(c.promise, err)
			}
		}
	}
}

// compare copies Redis's data to temporary tables in the order in which an order travels, so that an
// order that leaves one place is found in the next. Then it calls verify in a snapshot of Postgres.
func (l *snapshot) compare(ctx context.Context, verify func(context.Context, pgx.Tx) error) error {
	if err := l.loadRedis(ctx); err != nil {
		return err
	}
	return pgx.BeginTxFunc(ctx, l.conn, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		if err := l.loadParked(ctx, tx); err != nil {
			return err
		}
		if err := l.noteUnread(ctx, theSales, l.findLatest(ctx, tx)); err != nil {
			return err
		}
		if err := l.noteUnread(ctx, theSales, pgx.BeginFunc(ctx, tx,
			func(tx pgx.Tx) error { return l.loadEnded(ctx, tx) })); err != nil {
			return err
		}
		return l.verify(ctx, tx, verify)
	})
}

// verify counts what the tables have, and calls check.
func (l *snapshot) verify(ctx context.Context, tx pgx.Tx, check func(context.Context, pgx.Tx) error) error {
	steps := "'" + strings.Join(order.PaymentSteps(), "', '") + "'"
	for _, tables := range []string{sql.AuditBuyers, strings.ReplaceAll(sql.AuditPayments, "{{steps}}", steps)} {
		if _, err := tx.Conn().PgConn().Exec(ctx, tables).ReadAll(); err != nil {
			return fmt.Errorf("index the buyers and the payments: %w", err)
		}
	}
	for _, figures := range []string{sql.AuditRebuilds, sql.AuditShardFigures, sql.AuditFigures, sql.AuditItemFigures} {
		if _, err := tx.Exec(ctx, figures); err != nil {
			return fmt.Errorf("count: %w", err)
		}
	}
	if err := l.checkDraws(ctx, tx); err != nil {
		return err
	}
	return check(ctx, tx)
}

// File checks the promises for the sale of a file, whose rows tx sees in the place of those of Postgres. Whatever needs
// Redis is left out. Nothing of the sale may be open.
func File(ctx context.Context, tx pgx.Tx) (Report, error) {
	l := newSnapshot(Config{}, tx.Conn())
	l.isFile = true
	err := pg.Run(ctx, l.conn, sql.AuditTables+sql.AuditFile)
	if err == nil {
		err = l.verify(ctx, tx, l.check)
	}
	if err == nil {
		err = l.report.run(ctx, tx, check{"S3", sql.AuditInUse, 0})
	}
	return l.report, err
}

func salesToAudit(ctx context.Context, c Config) ([]auditedSale, error) {
	var only *uuid.UUID
	if c.Sale != uuid.Nil {
		only = &c.Sale
	}
	rows, _ := c.Catalog.Pool.Query(ctx, sql.AuditSelectedSales, only) // its error comes with the rows
	sales, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (auditedSale, error) {
		var s auditedSale
		var partitions, shards int
		var archived bool
		err := row.Scan(&s.id, &partitions, &shards, &archived, &s.items)
		if err == nil && archived {
			err = order.ErrArchived
		}
		s.layout = reservation.LayoutOf(s.id, max(1, partitions), shards)
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

// countPartitions returns the number of partitions in use, and those of older sales.
func countPartitions(keys reservation.Keys, sales []auditedSale) int {
	partitions := keys.Partitions
	for _, s := range sales {
		for _, shard := range s.shards() {
			partitions = max(partitions, shard.partition+1)
		}
	}
	return partitions
}

// restPause is the interval of checks for rest.
const restPause = 20 * time.Millisecond

// awaitRest waits until no entry of the streams is unread or pending, until the deadline at most.
func (l *snapshot) awaitRest(ctx context.Context, deadline time.Time) error {
	if err := l.selectSales(ctx); err != nil {
		return err
	}
	for {
		began := time.Now()
		var findings []Finding
		var waiting int64
		if l.unreadError(theStreams) == nil {
			var err error
			findings, waiting, err = unfinishedEntries(ctx, l.Catalog.Store.Redis, l.streams)
			if err := l.noteUnread(ctx, theStreams, err); err != nil {
				return err
			}
		}
		if len(findings) == 0 || !time.Now().Before(deadline) {
			for _, finding := range findings {
				l.note("S3", finding)
			}
			l.report.Streams, l.report.EntriesWaiting = len(l.streams), waiting
			return nil
		}
		progress.Step(ctx, "waiting until no order is in flight")
		progress.At(ctx, waiting, 0, "entries left")
		// After a slow check Redis gets a pause of the same length.
		if !retry.Pause(max(restPause, time.Since(began)), ctx.Done()) {
			return ctx.Err()
		}
	}
}

func unfinishedEntries(
	ctx context.Context, rdb redis.UniversalClient, streams []string,
) (findings []Finding, waiting int64, err error) {
	for _, key := range streams {
		b, err := stream.ReadBacklog(ctx, rdb, key, reservation.Group)
		if stream.IsWrongType(err) {
			continue // reported as a foreign key
		} else if err != nil {
			return nil, 0, err
		}
		entries, known := b.Waiting()
		switch {
		case !known:
			findings = append(findings, Finding{Remedy: remedyWorker, What: fmt.Sprintf(
				"the number of unread entries in %s is unknown: Redis has lost count, and more than %s are unread; %d pending", key,
				format.Count(stream.LagCountMax), b.Pending)})
		case entries > 0:
			findings = append(findings, Finding{Remedy: remedyWorker, What: fmt.Sprintf(
				"%s in %s: %d unread, %d pending", unfinished(entries), key, b.Lag, b.Pending)})
			waiting += entries
		}
	}
	return findings, waiting, nil
}

func unfinished(entries int64) string {
	if entries == 1 {
		return "1 unfinished entry"
	}
	return format.Count(entries) + " unfinished entries"
}

// progress returns a text that changes with the data.
func (l *snapshot) progress(ctx context.Context) (string, error) {
	var text string
	if err := l.conn.QueryRow(ctx, sql.AuditProgress).Scan(&text); err != nil {
		return "", fmt.Errorf("look for changes: %w", err)
	}
	hash := fnv.New64a()
	moving := []string{"epoch", "sequence", "generation", "left"}
	err := l.eachShard(ctx, func(auditedShard) []string { return moving }, func(_ auditedShard, fields []any, _ error) {
		_, _ = fmt.Fprintln(hash, fields...) // returns no error
	})
	return fmt.Sprint(text, " ", hash.Sum64()), l.noteUnread(ctx, theSales, err)
}

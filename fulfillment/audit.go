package fulfillment

import (
	"context"
	"fmt"
	"hash/fnv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/figure"
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

const (
	// findingsShown bounds how many findings of one check are named; the rest is counted.
	findingsShown = 10
	// looksMax bounds how often is looked again because something moved meanwhile.
	looksMax = 1000
)

// check is a query for what breaks a promise. It gives the sale, order and user, what is wrong, and the remedy. Where the
// words tell figures that change while a sale goes on, it gives as same what does not, by which a second look knows
// the difference again.
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
	{"S3", sql.AuditDeadlines},
	{"S4", sql.AuditCounters},
	{"S4", sql.AuditConservation},
	{"S4", sql.AuditReservations},
	{"S5", sql.AuditProjection},
	{"S5", sql.AuditSequence},
	{"S5", sql.AuditRevisions},
	{"S7", sql.AuditRedis},
}

// namedFindings gives the first findings of a check, how many there are in all, and the last event of the
// order, or of the sale where a finding names no order.
const namedFindings = `SELECT sale_id, order_id, user_id, what, remedy, total, coalesce(
	CASE WHEN order_id IS NOT NULL THEN
		(SELECT concat(type, ' at version ', version) FROM order_events AS e WHERE e.order_id = found.order_id ORDER BY version DESC LIMIT 1)
	ELSE
		(SELECT concat(type, ' at revision ', revision) FROM sale_events AS e WHERE e.sale_id = found.sale_id ORDER BY revision DESC LIMIT 1)
	END, '')
FROM (SELECT *, count(*) OVER () AS total FROM (
%s
) AS checked ORDER BY sale_id, order_id, what LIMIT %d) AS found ORDER BY sale_id, order_id, what`

// Audit holds Redis and Postgres against what is promised and reports every difference. It changes
// nothing. An error means that it could not look, and says nothing about the promises; with Sale set it
// may be reservation.ErrSaleNotFound.
//
// It looks at Redis first and at Postgres afterwards, at one snapshot, and leaves out the orders
// that were accepted meanwhile. So it may run beside a sale; only what is on its way then, units on
// their way back included, shows as a difference. Where there are differences and something moved while
// it looked, it looks again until Wait is over. The verdict is meant for a sale at rest.
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
	deadline := time.Now().Add(c.Wait)
	conn, err := c.Pool.Acquire(ctx)
	if err != nil {
		return AuditReport{}, err
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
	for range looksMax {
		l := look{AuditConfig: c, conn: conn.Conn(), report: newAuditReport()}
		if err := l.awaitRest(ctx, deadline); err != nil {
			return l.report, err
		}
		before, err := l.motion(ctx)
		if err != nil {
			return l.report, err
		}
		if err := l.take(ctx, l.judge); err != nil || !l.report.Broken() {
			return l.report, err
		}
		after, err := l.motion(ctx)
		if err != nil {
			return l.report, err
		}
		l.report.Moved = before != after
		if !l.report.Moved || !time.Now().Before(deadline) || !pause.For(restPause, ctx.Done()) {
			return l.report, ctx.Err()
		}
	}
	return AuditReport{}, fmt.Errorf("something moved each of %d times that was looked", looksMax)
}

// look is one look at Redis and Postgres.
type look struct {
	AuditConfig
	conn   *pgx.Conn
	report AuditReport
	// noted are the findings that come from Redis alone, the first ones of them.
	noted []Finding

	sales   []auditedSale
	streams []string
}

// notedMax bounds look.noted. Which sale to mend is known from few of them.
const notedMax = 10_000

func (l *look) note(promise string, f Finding) {
	l.report.add(promise, f)
	if len(l.noted) < notedMax {
		l.noted = append(l.noted, f)
	}
}

// scope finds out what is to be looked at.
func (l *look) scope(ctx context.Context) error {
	// Redis first: a sale is in Postgres before it is in Redis.
	var inRedis []reservation.LocatedSale
	var err error
	if l.Sale == uuid.Nil {
		if inRedis, err = reservation.ListInRedis(ctx, l.Redis, l.Keys); err != nil {
			return err
		}
	}
	if l.sales, err = auditScope(ctx, l.AuditConfig); err != nil {
		return err
	}
	l.streams = streamsOf(l.Keys, l.sales)
	if err = l.nameStrangers(ctx, inRedis); err != nil {
		return err
	}
	return l.nameGuards(ctx)
}

// nameGuards reports constraints and indexes that were taken away from Postgres.
func (l *look) nameGuards(ctx context.Context) error {
	wanted, missing, err := sql.Guards(ctx, l.conn)
	if err != nil {
		return err
	}
	for _, m := range missing {
		if m.ForSpeed {
			wanted--
			continue
		}
		l.note("DB", Finding{Remedy: remedyGuard, What: fmt.Sprintf("%s: put it back with %s", m.What, m.Mend)})
	}
	l.report.Guards = wanted
	return nil
}

// take copies what Redis says to temporary tables, in the order in which an order travels: so what had left
// one place has come to the next one when that is looked at. Then it gives Postgres' own snapshot to judge.
func (l *look) take(ctx context.Context, judge func(context.Context, pgx.Tx) error) error {
	if err := l.loadRedis(ctx); err != nil {
		return err
	}
	return inSnapshot(ctx, l.conn, func(tx pgx.Tx) error {
		if err := l.loadParked(ctx, tx); err != nil {
			return err
		}
		if err := l.findLatest(ctx, tx); err != nil {
			return err
		}
		if _, err := tx.Conn().PgConn().Exec(ctx, sql.AuditBuyers).ReadAll(); err != nil {
			return fmt.Errorf("index the buyers: %w", err)
		}
		if _, err := tx.Exec(ctx, sql.AuditFigures); err != nil {
			return fmt.Errorf("count: %w", err)
		}
		return judge(ctx, tx)
	})
}

// judge runs all checks.
func (l *look) judge(ctx context.Context, tx pgx.Tx) (err error) {
	rows, _ := tx.Query(ctx, sql.AuditReadFigures) // its error comes with the rows
	if l.report.Sales, err = pgx.CollectRows(rows, pgx.RowToStructByPos[SaleFigures]); err != nil {
		return fmt.Errorf("count: %w", err)
	}
	for _, check := range checks {
		if err := l.report.run(ctx, tx, check); err != nil {
			return err
		}
	}
	return l.report.run(ctx, tx, check{"S3", sql.AuditDeadLetters}, l.streams)
}

// run adds the findings of a check to the report.
func (r *AuditReport) run(ctx context.Context, tx pgx.Tx, c check, args ...any) error {
	rows, _ := tx.Query(ctx, fmt.Sprintf(namedFindings, c.query, findingsShown), args...) // its error comes with the rows
	promise := r.promise(c.promise)
	var (
		f     Finding
		user  *string
		total int64
	)
	_, err := pgx.ForEachRow(rows, []any{&f.Sale, &f.Order, &user, &f.What, &f.Remedy, &total, &f.LastEvent}, func() error {
		f.User = ""
		if user != nil {
			f.User = *user
		}
		promise.Findings = append(promise.Findings, f)
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

// awaitRest waits until no entry of the streams is waiting or in hand, until the deadline at most.
func (l *look) awaitRest(ctx context.Context, deadline time.Time) error {
	if err := l.scope(ctx); err != nil {
		return err
	}
	for {
		began := time.Now()
		findings, waiting, err := unrest(ctx, l.Redis, l.streams)
		if err != nil {
			return err
		}
		if len(findings) == 0 || !time.Now().Before(deadline) {
			for _, finding := range findings {
				l.note("S3", finding)
			}
			l.report.Streams, l.report.EntriesWaiting = len(l.streams), waiting
			return nil
		}
		// Where it takes long to look, Redis rests as long as it was busy.
		if !pause.For(max(restPause, time.Since(began)), ctx.Done()) {
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
			findings = append(findings, Finding{Remedy: remedyWorker, What: fmt.Sprintf(
				"nobody can tell how many entries of %s wait: some were deleted, and more than %s are unread; %d in hand", stream, figure.Count(lagCounted), b.Pending)})
		case entries > 0:
			findings = append(findings, Finding{Remedy: remedyWorker, What: fmt.Sprintf(
				"%s in %s: %d unread, %d in hand", notDoneWith(entries), stream, b.Lag, b.Pending)})
			waiting += entries
		}
	}
	return findings, waiting, nil
}

func notDoneWith(entries int64) string {
	if entries == 1 {
		return "1 entry is not done with"
	}
	return figure.Count(entries) + " entries are not done with"
}

// motion is a text that is another one when something has moved.
func (l *look) motion(ctx context.Context) (string, error) {
	var text string
	if err := l.conn.QueryRow(ctx, sql.AuditMotion).Scan(&text); err != nil {
		return "", fmt.Errorf("look for changes: %w", err)
	}
	hash := fnv.New64a()
	err := l.eachOfSales(ctx, []string{"epoch", "sequence", "generation", "left"}, func(_ auditedSale, fields []any, _ error) {
		_, _ = fmt.Fprintln(hash, fields...) // returns no error
	})
	return fmt.Sprint(text, " ", hash.Sum64()), err
}

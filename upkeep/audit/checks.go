package audit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/redis/go-redis/v9"

	"stampede/internal/progress"
	"stampede/lua"
	"stampede/reservation"
	"stampede/sql"
	"stampede/upkeep/projection"
)

// check is a query for violations of a promise. It returns the sale, order and user, the violation,
// and the remedy. If the text has figures that change during a sale, the column same has a stable
// text, so that a second look recognizes the difference.
type check struct {
	promise string
	query   string
	// needs are the parts of Redis that it compares. Without them the check is skipped.
	needs source
}

// within inserts the check into a query. A check of Redis leaves out the sales that could not be read.
func (c *check) within(query string) string {
	text := c.query
	if c.needs != 0 {
		text = "SELECT * FROM (\n" + text + "\n) AS of_redis WHERE NOT EXISTS (" +
			"SELECT FROM audit_sales AS unreachable WHERE unreachable.sale_id = of_redis.sale_id AND unreachable.unread)"
	}
	return strings.Replace(query, "{{check}}", text, 1)
}

// source is a part of the data in Redis, as a bit.
type source uint8

const (
	// theSales are the hashes of sales and buyers.
	theSales source = 1 << iota
	// theStreams are the unfinished entries.
	theStreams
)

// audited is the condition of sale_id that selects the audited sales.
const audited = "sale_id IN (SELECT sale_id FROM audit_sales)"

// checks are the queries that run once the temporary tables hold Redis's data.
var checks = []check{
	{"S1", sql.AuditOversold, 0},
	{"S2", sql.AuditTwoLiveOrders, 0},
	{"S3", sql.AuditUnfinishedBuyers, theSales | theStreams},
	{"S3", sql.AuditDeadlines, 0},
	{"S3", sql.AuditDeadLetters, 0},
	{"S4", projection.Counted(sql.AuditCounters, audited), 0},
	{"S4", sql.AuditConservation, theSales},
	{"S4", sql.AuditReservations, theSales | theStreams},
	{"S5", projection.Differences(audited), 0},
	{"S5", sql.AuditSequence, theSales},
	{"S5", sql.AuditRevisions, 0},
	{"S7", sql.AuditRedis, theSales},
	{"S7", sql.AuditRetired, theSales},
	{"S7", sql.AuditTerms, 0},
	{"S7", sql.AuditEnded, theSales | theStreams},
	{"S8", sql.AuditMoney, 0},
	{"D2", sql.AuditEntrants, 0},
	{"D5", sql.AuditOffers, 0},
	{"D6", sql.AuditOffered, 0},
}

// eachCheck makes all checks, each in a nested transaction of tx. A failed one is noted and stops no
// other.
func (l *findings) eachCheck(ctx context.Context, tx pgx.Tx, do func(context.Context, pgx.Tx, check) error) error {
	progress.Step(ctx, "comparing Redis, the log and the orders")
	for i, c := range checks {
		progress.At(ctx, int64(i), int64(len(checks)), "checks")
		if !l.report.has(c.promise) || l.isFile && c.needs != 0 {
			continue
		}
		if why := l.unreadError(c.needs); why != nil {
			l.noteUnchecked(c.promise, why)
			continue
		}
		err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return do(ctx, tx, c) })
		if l.isFatal(ctx, err) {
			return fmt.Errorf("check %s: %w", c.promise, err)
		} else if err != nil {
			l.noteUnchecked(c.promise, err)
		}
	}
	return nil
}

// isFatal reports whether an error ends the whole look: nothing can be compared without Postgres.
func (l *findings) isFatal(ctx context.Context, err error) bool {
	return err != nil && (ctx.Err() != nil || l.conn.IsClosed())
}

// noteUnchecked notes that a check of a promise could not be made.
func (l *findings) noteUnchecked(promise string, why error) {
	p := l.report.Promise(promise)
	if text := why.Error(); !slices.Contains(p.Unchecked, text) {
		p.Unchecked = append(p.Unchecked, text)
	}
}

// noteUnread notes that a part of Redis could not be read, so that promises that need it are
// unchecked. It returns an error only if the whole look must end.
func (l *findings) noteUnread(ctx context.Context, what source, err error) error {
	if err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	var answered redis.Error
	if !errors.As(err, &answered) {
		what = theSales | theStreams // Redis is unavailable: do not ask it again
	}
	for _, one := range []source{theSales, theStreams} {
		if what&one != 0 && l.unread[one] == nil {
			l.unread[one] = err
		}
	}
	return nil
}

// unreadError returns the error of reading these parts of Redis, if any.
func (l *findings) unreadError(needed source) error {
	for what, err := range l.unread {
		if needed&what != 0 {
			return err
		}
	}
	return nil
}

// check makes all checks and reports their findings.
func (l *findings) check(ctx context.Context, tx pgx.Tx) (err error) {
	rows, _ := tx.Query(ctx, sql.AuditReadFigures) // its error comes with the rows
	if l.report.Sales, err = pgx.CollectRows(rows, pgx.RowToStructByName[SaleFigures]); err != nil {
		return fmt.Errorf("count: %w", err)
	}
	rows, _ = tx.Query(ctx, sql.AuditPaymentSums) // its error comes with the rows
	if l.report.Payments, err = pgx.CollectRows(rows, pgx.RowToStructByName[PaymentFigures]); err != nil {
		return fmt.Errorf("count payments: %w", err)
	}
	return l.eachCheck(ctx, tx, l.report.run)
}

// run adds the findings of a check to the report.
func (r *Report) run(ctx context.Context, tx pgx.Tx, c check) error {
	rows, _ := tx.Query(ctx, c.within(sql.AuditFind), findingsShown) // its error comes with the rows
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[struct {
		findingRow
		Total int64
	}])
	if err != nil {
		return err
	}
	promise := r.Promise(c.promise)
	for _, f := range found {
		promise.Findings = append(promise.Findings, f.finding())
	}
	if len(found) > 0 {
		promise.Found += found[0].Total
	}
	return nil
}

// findingRow is a finding as returned by queries.
type findingRow struct {
	SaleID    *uuid.UUID
	OrderID   *uuid.UUID
	UserID    zeronull.Text
	What      string
	Remedy    Remedy
	LastEvent string
}

func (r *findingRow) finding() Finding {
	return Finding{
		Sale: r.SaleID, Order: r.OrderID, User: string(r.UserID), What: r.What, Remedy: r.Remedy, LastEvent: r.LastEvent,
	}
}

// reportMissingGuards reports missing constraints and indexes of Postgres.
func (l *findings) reportMissingGuards(ctx context.Context) error {
	wanted, missing, err := sql.Guards(ctx, l.conn)
	if l.isFatal(ctx, err) {
		return err
	} else if err != nil {
		l.noteUnchecked("DB", err)
		return nil
	}
	for _, m := range missing {
		if m.ForSpeed {
			wanted--
			continue
		}
		l.note("DB", Finding{Remedy: remedyGuard, What: fmt.Sprintf("%s: restore it with %s", m.What, m.Mend)})
	}
	l.report.Guards = wanted
	return nil
}

// typedKey is a key of Redis and its expected type.
type typedKey struct{ key, kind string }

// sharedKeys are the keys that the sales of a partition share. Those of a single sale are checked
// with the sale.
func sharedKeys(keys reservation.Keys, p int) []typedKey {
	return []typedKey{
		{keys.Orders(p), "stream"}, {keys.Sales(p), "set"}, {keys.Server(p), "hash"}, {keys.Outcomes(p), "stream"},
	}
}

// reportForeignKeys reports keys of a wrong type, which can be neither read nor written.
func (l *snapshot) reportForeignKeys(ctx context.Context) error {
	if l.unreadError(theSales) != nil {
		return nil //nolint:nilerr // the unread part is reported elsewhere
	}
	var wanted []typedKey
	for p := range countPartitions(l.Catalog.Store.Keys, l.sales) {
		if l.unreachable[p] == nil {
			wanted = append(wanted, sharedKeys(l.Catalog.Store.Keys, p)...)
		}
	}
	asked, keys := make([]*redis.StatusCmd, len(wanted)), make([]string, len(wanted))
	var ends []*redis.DurationCmd
	_, _ = l.Catalog.Store.Redis.Pipelined(ctx, func(p redis.Pipeliner) error { // each command's own error counts
		for i, k := range wanted {
			asked[i], keys[i] = p.Type(ctx, k.key), k.key
		}
		ends = askTimeLimits(ctx, p, keys)
		return nil
	})
	for i, k := range wanted {
		switch kind, err := asked[i].Result(); {
		case err != nil:
			return l.noteUnread(ctx, theSales|theStreams, fmt.Errorf("read the type of %s: %w", k.key, err))
		case kind != k.kind && kind != "none":
			l.note("S7", Finding{
				Remedy: remedyAside, Key: k.key,
				What: fmt.Sprintf("the key %s in Redis has a wrong type: %s instead of %s", k.key, kind, k.kind),
			})
		}
	}
	return l.noteUnread(ctx, theSales|theStreams, l.reportTimeLimits(nil, keys, ends))
}

func askTimeLimits(ctx context.Context, p redis.Pipeliner, keys []string) []*redis.DurationCmd {
	asked := make([]*redis.DurationCmd, len(keys))
	for i, key := range keys {
		asked[i] = p.PTTL(ctx, key)
	}
	return asked
}

// reportTimeLimits reports keys that Redis will delete by itself. Stampede sets no limit on them.
func (l *findings) reportTimeLimits(sale *uuid.UUID, keys []string, asked []*redis.DurationCmd) error {
	for i, key := range keys {
		left, err := asked[i].Result()
		if err != nil {
			return fmt.Errorf("read the time limit of %s: %w", key, err)
		}
		if left > 0 { // else a constant
			l.note("S7", Finding{
				Sale: sale, Remedy: remedyPersist, Key: key,
				What: fmt.Sprintf("Redis will delete the key %s: somebody has given it a time limit (TTL), of which %v are left",
					key, left.Round(time.Second)),
			})
		}
	}
	return nil
}

// persist removes the time limits that were found.
func (r *reconciler) persist(ctx context.Context) error {
	rows, _ := r.conn.Query(ctx, sql.ReconcileKeys, remedyPersist) // its error comes with the rows
	keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, key := range keys {
		if err := r.Catalog.Store.Redis.Persist(ctx, key).Err(); err != nil {
			return fmt.Errorf("remove the time limit of %s: %w", key, err)
		}
		r.Logger.Warn("removed the time limit of a key of Redis: find who sets it", "key", key)
	}
	return nil
}

// setAside renames the foreign keys that were found. Their content is restored automatically: users
// of streams create them and their groups, and lost events are appended again.
func (r *reconciler) setAside(ctx context.Context) error {
	rows, _ := r.conn.Query(ctx, sql.ReconcileKeys, remedyAside) // its error comes with the rows
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	var shared []typedKey
	for p := range reservation.MaxPartitions {
		shared = append(shared, sharedKeys(r.Catalog.Store.Keys, p)...)
	}
	for _, k := range shared {
		if !slices.Contains(found, k.key) {
			continue
		}
		aside := fmt.Sprintf("%s:set-aside:%d", k.key, time.Now().UnixMilli())
		word, err := lua.SetAside.Run(ctx, r.Catalog.Store.Redis, []string{k.key, aside}, k.kind).Text()
		if err != nil {
			return fmt.Errorf("rename %s: %w", k.key, err)
		}
		switch word {
		case "taken":
			return fmt.Errorf("rename %s: the key %s exists", k.key, aside)
		case "set-aside":
			r.Logger.Warn("renamed a key of Redis that has a wrong type: inspect it, then delete it", "key", k.key,
				"renamed_to", aside)
		}
	}
	return nil
}

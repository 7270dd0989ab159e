package rebuild

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/internal/pg"
	"stampede/internal/retry"
	"stampede/sql"
)

const (
	// stepSlowAfter is how long a step of a rebuild may take until the log names it and the sessions it waits for.
	stepSlowAfter = 2 * time.Second
	// stepLoggedEvery is how often it is logged again.
	stepLoggedEvery = 10 * time.Second
	// rivalLoggedEvery is how often a worker that needs a rebuild logs which session has the lock.
	rivalLoggedEvery = 10 * time.Second
)

// Texts of the log.
const (
	logSlowStep       = "the rebuild is still at this step"
	logWaiting        = "the rebuild waits for locks in Postgres"
	logFailed         = "cannot rebuild the stock: the rebuild is retried, and sales stay closed until then"
	logOtherRebuild   = "a rebuild is needed: waiting for another rebuild to end"
	logBegunPartition = "rebuilding the stock of a partition from Postgres: its sales are closed meanwhile"
	logBegunSale      = "rebuilding the stock of a sale from Postgres: it is closed meanwhile"
)

// step is the current step of a rebuild.
type step struct {
	doing string
	sale  uuid.UUID // uuid.Nil for all of them
	since time.Time
}

// at sets the current step.
func (b *build) at(doing string) { b.atSale(doing, uuid.Nil) }

func (b *build) atSale(doing string, sale uuid.UUID) {
	b.step.Store(&step{doing, sale, time.Now()})
	b.line.Step(doing)
	b.line.At(b.salesDone.Load(), b.salesTotal.Load(), "sales")
}

// watch logs slow steps until stop is called.
func (b *build) watch(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		ticks := time.NewTicker(stepSlowAfter / 2)
		defer ticks.Stop()
		var named *step
		var due time.Time
		for {
			select {
			case <-ctx.Done():
				return
			case now := <-ticks.C:
				current := b.step.Load()
				if current != named {
					named, due = current, current.since.Add(stepSlowAfter)
				}
				if !now.Before(due) {
					due = now.Add(stepLoggedEvery)
					b.logStep(ctx, current, now)
				}
			}
		}
	})
	return func() {
		cancel()
		watching.Wait()
	}
}

// logStep logs a slow step, with the sessions that block others.
func (b *build) logStep(ctx context.Context, current *step, now time.Time) {
	fields := []any{"step", current.doing, "for", now.Sub(current.since).Round(time.Millisecond)}
	if current.sale != b.need.Sale { // b.log names this one
		fields = append(fields, "sale", current.sale)
	}
	limited, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	found, err := pg.Blockers(limited, b.config.Catalog.Pool)
	switch {
	case ctx.Err() != nil: // the rebuild has ended
	case err != nil:
		b.log.Warn(logSlowStep, append(fields, "error", err)...)
	case len(found) == 0:
		b.log.Warn(logSlowStep, fields...)
	default:
		b.log.Warn(logWaiting, append(fields, "held_by", sessionNames(found))...)
	}
}

// attempts are the failed attempts of a Rebuilder at what still has to be rebuilt, for the log.
type attempts struct {
	mu     sync.Mutex
	failed map[Need]failure
	// rivalLogged is when the rebuild of a partition by another process was last logged.
	rivalLogged map[int]time.Time
}

type failure struct {
	tries int
	last  string // the last error
}

// logFields returns the fields of the log for earlier attempts at n.
func (t *attempts) logFields(n Need) []any {
	t.mu.Lock()
	defer t.mu.Unlock()
	if f, failed := t.failed[n.target()]; failed {
		return []any{"failed_tries", f.tries, "last_error", f.last}
	}
	return nil
}

// note records the end of an attempt. It returns true for another error than that of the attempt before: a repeated
// error is logged with the next attempt.
func (t *attempts) note(n Need, err error) (isNew bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n = n.target()
	if err == nil {
		delete(t.failed, n)
		return false
	}
	if t.failed == nil {
		t.failed = map[Need]failure{}
	}
	f := t.failed[n]
	isNew = f.last != err.Error()
	t.failed[n] = failure{f.tries + 1, err.Error()}
	return isNew
}

// keep removes the attempts at what need not be rebuilt any more in a partition. A sale with several shards is kept:
// another partition may need it.
func (t *attempts) keep(partition int, found []Need) {
	t.mu.Lock()
	defer t.mu.Unlock()
	is := make(map[Need]bool, len(found))
	for _, n := range found {
		is[n.target()] = true
	}
	for n := range t.failed {
		if n.partition == partition && !n.sharded && !is[n] {
			delete(t.failed, n)
		}
	}
}

// target returns the need without its reason.
func (n Need) target() Need {
	n.Reason = ""
	return n
}

// logRival logs which session rebuilds a partition, at most once in rivalLoggedEvery.
func (r *Rebuilder) logRival(ctx context.Context, n Need) {
	if !r.attempts.rivalDue(n.partition) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	holder, err := pg.Holder(ctx, r.config.Catalog.Pool, pg.PartitionLock(n.partition))
	if errors.Is(err, pgx.ErrNoRows) {
		return // the other rebuild has ended
	}
	fields := []any{"reason", n.Reason, "partition", n.partition}
	if err != nil {
		fields = append(fields, "error", err)
	} else {
		fields = append(fields, "held_by", holder.String())
	}
	r.config.Logger.Warn(logOtherRebuild, fields...)
}

// rivalDue returns whether the rebuild of a partition by another process is to be logged now.
func (t *attempts) rivalDue(partition int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if time.Since(t.rivalLogged[partition]) < rivalLoggedEvery {
		return false
	}
	if t.rivalLogged == nil {
		t.rivalLogged = map[int]time.Time{}
	}
	t.rivalLogged[partition] = time.Now()
	return true
}

// blockersLogged bounds the sessions that a line of the log names.
const blockersLogged = 5

func sessionNames(found []pg.Activity) []string {
	names := make([]string, 0, blockersLogged)
	for i := range found[:min(len(found), blockersLogged)] {
		names = append(names, found[i].String())
	}
	return names
}

const (
	// noteAfter is how long a rebuild runs until it is noted: most are done before.
	noteAfter = 300 * time.Millisecond
	// noteInterval is the time between two notes, which are also the rebuild's heartbeat.
	noteInterval = time.Second
	// noteTimeout bounds a note. The last one, which the end of the rebuild waits for, takes no longer either.
	noteTimeout = 500 * time.Millisecond
)

// note writes the progress of the rebuild to the table rebuilds until stop is called, for who watches it. It uses a
// connection of the pool, never the session of the rebuild. A note that fails is left out: the row of a rebuild whose
// notes fail looks like that of a process that died.
func (b *build) note(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var noting sync.WaitGroup
	noting.Go(func() {
		id, noted := uuid.New(), false
		defer func() {
			if noted {
				b.forget(ctx, id)
			}
		}()
		due := time.NewTimer(noteAfter)
		defer due.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-due.C:
				noted = true // also if the answer is lost
				b.noteOnce(ctx, id)
				due.Reset(noteInterval)
			}
		}
	})
	return func() {
		cancel()
		noting.Wait()
	}
}

func (b *build) noteOnce(ctx context.Context, id uuid.UUID) {
	ctx, cancel := context.WithTimeout(ctx, noteTimeout)
	defer cancel()
	var sale *uuid.UUID
	if b.need.Sale != uuid.Nil {
		sale = &b.need.Sale
	}
	current := b.step.Load()
	doing := current.doing
	if current.sale != uuid.Nil && current.sale != b.need.Sale {
		doing += ", sale " + current.sale.String()
	}
	_, err := b.config.Catalog.Pool.Exec(ctx, sql.RebuildNoteProgress, id, b.partition, sale, b.need.Reason, thisProcess(),
		time.Since(b.began).Milliseconds(), doing, b.salesDone.Load(), b.salesTotal.Load())
	if err != nil && ctx.Err() == nil {
		b.log.Debug("cannot note the progress of the rebuild", "error", err)
	}
}

// forget removes the note of a rebuild that has ended.
func (b *build) forget(ctx context.Context, id uuid.UUID) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), noteTimeout)
	defer cancel()
	if _, err := b.config.Catalog.Pool.Exec(ctx, sql.RebuildEndProgress, id); err != nil {
		b.log.Debug("cannot remove the progress of the rebuild", "error", err)
	}
}

// thisProcess names the process that rebuilds, for operators.
var thisProcess = sync.OnceValue(func() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	return fmt.Sprintf("%s, process %d", host, os.Getpid())
})

// Report is the result of a rebuild.
type Report struct {
	Partition int    `json:"partition"`
	Reason    string `json:"reason"`
	// Tries counts the tries: each loss of Redis during a rebuild starts another one. The fields below are of the last.
	Tries   int     `json:"tries"`
	Seconds float64 `json:"seconds"`
	Drained Drained `json:"drained"`
	// Sales are the rebuilt sales in the order in which they were opened.
	Sales []SaleReport `json:"sales"`
	// Unfinished are sales with several shards of which the rebuild has closed the one in this partition, and which are
	// not rebuilt yet: another of their partitions has to be rebuilt first, or another process rebuilds them.
	Unfinished []uuid.UUID `json:"unfinished,omitempty"`
}

// SaleReport is a rebuilt sale, with the sums over its shards. Stock = Left + Held, unless it is retired.
type SaleReport struct {
	ID       uuid.UUID `json:"id"`
	Epoch    int64     `json:"epoch"`
	Revision int64     `json:"revision"`
	// Ended is true if the sale is over.
	Ended bool `json:"ended,omitempty"`
	// Retired is true if Redis has no buyers of it any more; Left and Held are 0 then.
	Retired bool  `json:"retired,omitempty"`
	Shards  int   `json:"shards"`
	Stock   int64 `json:"stock"`
	Left    int64 `json:"left"`
	// Held counts the units of the live orders, and Orders the orders.
	Held   int64 `json:"held"`
	Orders int64 `json:"orders"`
	// Sequence is the highest place that Postgres or Redis knows of. If there are several shards, the next few places
	// may count as given out.
	Sequence int64   `json:"sequence"`
	Seconds  float64 `json:"seconds"`
}

// held sums the units and the orders of the sales.
func (r *Report) held() (units, orders int64) {
	for _, s := range r.Sales {
		units, orders = units+s.Held, orders+s.Orders
	}
	return units, orders
}

// add adds the rebuild of a sale with several shards, which followed that of the partition.
func (r *Report) add(other Report) {
	r.Seconds += other.Seconds
	r.Sales = append(r.Sales, other.Sales...)
	d, more := &r.Drained, other.Drained
	d.Entries, d.Confirmed, d.Rejected = d.Entries+more.Entries, d.Confirmed+more.Confirmed, d.Rejected+more.Rejected
	d.Voided, d.Recorded, d.Left = d.Voided+more.Voided, d.Recorded+more.Recorded, d.Left+more.Left
}

// WriteText writes the report for operators.
func (r *Report) WriteText(w io.Writer) error {
	took := time.Duration(r.Seconds * float64(time.Second)).Round(time.Millisecond)
	s := r.Drained
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "partition %d was rebuilt in %v (%s)\n", r.Partition, took, r.Reason)
	fmt.Fprintf(t,
		"stream: unfinished entries: %d; confirmed now: %d, rejected: %d, voided: %d, in Postgres before: %d, left to "+
			"the workers: %d\n",
		s.Entries, s.Confirmed, s.Rejected, s.Voided, s.Recorded, s.Left)
	if len(r.Sales) > 0 {
		fmt.Fprintln(t, "SALE\tEPOCH\tSHARDS\tSTOCK\tLEFT\tHELD\tORDERS\tPLACE\tTIME")
	}
	for _, s := range r.Sales {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%v\n", s.ID, s.Epoch, s.Shards, s.Stock, s.Left, s.Held,
			s.Orders, s.Sequence, time.Duration(s.Seconds*float64(time.Second)).Round(time.Millisecond))
	}
	for _, id := range r.Unfinished {
		fmt.Fprintf(t, "sale %s is closed until its other partitions are rebuilt as well\n", id)
	}
	return t.Flush()
}

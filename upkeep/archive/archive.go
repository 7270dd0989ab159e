// Package archive moves the orders of a sale that is over from Postgres into a file, and brings them back.
//
// A file has the sale's row, its events, the events of its orders, and those of their payments; the rows of the orders
// follow from those. That of goods also has their draw or their waiting list, which stays in Postgres. It is written,
// read back and compared before anything is deleted. Postgres keeps the row of the sale, which says where the orders
// are.
package archive

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/clocks"
	"stampede/internal/crashpoint"
	"stampede/internal/format"
	"stampede/internal/pg"
	"stampede/internal/progress"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/sql"
	"stampede/upkeep/audit"
	"stampede/upkeep/projection"
)

var (
	// ErrRunning is returned while another process archives sales of the same database, or brings one back.
	ErrRunning = errors.New("another process is archiving")
	// ErrRefused is returned for a sale that cannot be archived yet; its text says why. Nothing was changed.
	ErrRefused = errors.New("the sale cannot be archived")
)

// deletedAtOnce is how many orders one transaction deletes.
const deletedAtOnce = 5000

// Config configures an Archiver. All fields are required.
type Config struct {
	Catalog *catalog.Catalog
	// Dir is where the files are.
	Dir string
	// Keep is how long ago the end of the sale and the last change of its orders must be.
	Keep   time.Duration
	Logger *slog.Logger
}

// Archived is a sale that was archived.
type Archived struct {
	Sale uuid.UUID `json:"sale_id"`
	Path string    `json:"path"`
	Trailer
	// Bytes is the size of the file.
	Bytes int64 `json:"bytes"`
	// Took is the duration, with the deletion.
	Took time.Duration `json:"took_ns"`
}

// Archiver archives sales, one at a time. Close ends its session.
type Archiver struct {
	Config
	conn pg.Session
}

// New returns an Archiver, or ErrRunning.
func New(ctx context.Context, c Config) (_ *Archiver, err error) {
	if c.Dir, err = filepath.Abs(c.Dir); err != nil {
		return nil, err
	}
	a := &Archiver{Config: c}
	a.conn, err = begin(ctx, c.Catalog.Pool)
	return a, err
}

func begin(ctx context.Context, pool *pgxpool.Pool) (pg.Session, error) {
	conn, err := pg.Begin(ctx, pool, pg.ArchiveLock, 0)
	if errors.Is(err, pg.ErrLockHeld) {
		err = ErrRunning
	}
	return conn, err
}

// Close lets another process archive.
func (a *Archiver) Close() { a.conn.End() }

// Due returns the sales that may be archived: those that have left Redis, and those whose archiving was begun. Sale
// says of each whether it can be.
func (a *Archiver) Due(ctx context.Context) ([]uuid.UUID, error) {
	rows, _ := a.conn.Query(ctx, sql.ArchiveDueSales) // its error comes with the rows
	due, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return nil, fmt.Errorf("list sales to archive: %w", err)
	}
	return due, nil
}

// Sale archives a sale. After a crash at any instant a repeat finishes it; a sale that is archived stays as it is. The
// error wraps ErrRefused, reservation.ErrSaleNotFound, or is one of the file or of a server.
func (a *Archiver) Sale(ctx context.Context, id uuid.UUID) (Archived, error) {
	began := time.Now()
	done, err := a.archive(ctx, id)
	if err != nil {
		return done, fmt.Errorf("archive sale=%s: %w", id, err)
	}
	done.Sale, done.Took = id, time.Since(began)
	if info, err := os.Stat(done.Path); err == nil {
		done.Bytes = info.Size()
	}
	return done, nil
}

// state is what archive/sale.sql returns.
type state struct {
	Row, Items         json.RawMessage
	Revision           int64
	Partitions, Shards int
	Archived, Deleted  bool
	// Drawn: its units are offered by rank, or to those who wait.
	Drawn bool
	// Remembered: archived_payments has its payments.
	Remembered   bool
	Path, SHA256 string
}

func (a *Archiver) archive(ctx context.Context, id uuid.UUID) (Archived, error) {
	s, err := readState(ctx, a.conn, id)
	if err != nil {
		return Archived{}, err
	}
	done := Archived{Path: s.Path}
	switch {
	case s.Deleted && s.Remembered:
		return done, fmt.Errorf("%w: it is archived in %s", ErrRefused, s.Path)
	case s.Archived: // the rest of an interrupted call, or what an older version left out
		if done, err = a.find(id, s); err != nil {
			return done, err
		}
	default:
		if done, err = a.write(ctx, id, s); err != nil {
			return done, err
		}
	}
	if !s.Remembered {
		if err := a.remember(ctx, id, done.Path); err != nil {
			return done, err
		}
	}
	if s.Deleted {
		return done, nil
	}
	return done, a.delete(ctx, id, s)
}

// find verifies the file that Postgres names, where it was written or in Dir, to which it may have been moved since.
func (a *Archiver) find(id uuid.UUID, s state) (done Archived, err error) {
	var missing error
	for _, path := range []string{s.Path, a.path(id)} {
		_, end, err := Verify(path)
		if err == nil && end.SHA256 != s.SHA256 {
			err = fmt.Errorf("%s: %w: it is another one", path, ErrDamagedFile)
		}
		if err == nil {
			return Archived{Path: path, Trailer: end}, nil
		}
		missing = cmp.Or(missing, err)
	}
	return Archived{Path: s.Path}, fmt.Errorf("it needs the file that Postgres names, here or in --dir: %w", missing)
}

// path is that of the file of a sale.
func (a *Archiver) path(id uuid.UUID) string { return filepath.Join(a.Dir, id.String()+".stampede") }

// version is the version of the file's format.
func (s *state) version() int {
	switch {
	case s.Drawn:
		return versionWithDraw
	case s.Items != nil:
		return versionWithItems
	}
	return 1
}

func readState(ctx context.Context, on pg.Querier, id uuid.UUID) (state, error) {
	rows, _ := on.Query(ctx, sql.ArchiveSale, id) // its error comes with the rows
	s, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[state])
	if errors.Is(err, pgx.ErrNoRows) {
		err = reservation.ErrSaleNotFound
	}
	return s, err
}

// write writes the file of a sale and records it in Postgres.
func (a *Archiver) write(ctx context.Context, id uuid.UUID, s state) (Archived, error) {
	times, err := a.Catalog.Store.Times(ctx, a.conn, reservation.LayoutOf(id, s.Partitions, s.Shards).All()...)
	if errors.Is(err, clocks.ErrApart) {
		err = fmt.Errorf("%w: %w", ErrRefused, err)
	}
	if err == nil {
		err = refuse(ctx, a.conn, id, a.Keep, times.Latest)
	}
	if err != nil {
		return Archived{}, err
	}
	done := Archived{Path: a.path(id)}
	temporary := done.Path + ".tmp"
	written, err := a.writeTemporary(ctx, id, s, temporary)
	if err != nil {
		_ = os.Remove(temporary)
		return done, err
	}
	crashpoint.Hit(crashpoint.ArchiveWritten)
	if err := os.Rename(temporary, done.Path); err != nil {
		return done, err
	}
	if err := syncDir(a.Dir); err != nil {
		return done, err
	}
	crashpoint.Hit(crashpoint.ArchiveNamed)
	if _, done.Trailer, err = Verify(done.Path); err != nil {
		return done, fmt.Errorf("read the file back: %w", err)
	}
	if done.Trailer != written {
		return done, fmt.Errorf("read the file back: %w: it is another one", ErrDamagedFile)
	}
	return done, a.mark(ctx, id, s, done)
}

// refuse returns ErrRefused with all reasons why a sale cannot be archived.
func refuse(ctx context.Context, on pg.Querier, id uuid.UUID, keep time.Duration, agreed time.Time) error {
	// Its error comes with the rows.
	rows, _ := on.Query(ctx, sql.ArchiveBlockers, id, keep.Seconds(), zeronull.Timestamptz(agreed))
	reasons, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	why, err := catalog.Check(ctx, on, catalog.OpArchive, id)
	if why != "" {
		reasons = append(reasons, why)
	}
	if err == nil && len(reasons) > 0 {
		err = fmt.Errorf("%w: %s", ErrRefused, strings.Join(reasons, "; "))
	}
	return err
}

// writeTemporary writes the file under another name, in one snapshot of Postgres, and has the disk take it.
func (a *Archiver) writeTemporary(ctx context.Context, id uuid.UUID, s state, path string) (end Trailer, err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return end, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	snapshot := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}
	err = pgx.BeginTxFunc(ctx, a.conn, snapshot, func(tx pgx.Tx) error {
		h := Header{Version: s.version(), SaleID: id, WrittenAt: time.Now().UTC(), Sale: s.Row, Items: s.Items}
		var f Figures
		for query, into := range map[string][]any{
			sql.ArchiveSaleEvents: {&h.SaleEvents}, sql.ArchiveFigures: {
				&f.Events, &f.Orders, &f.PaymentEvents, &f.DrawRows, &f.LastPosition,
			},
		} {
			if err := tx.QueryRow(ctx, query, id).Scan(into...); err != nil {
				return err
			}
		}
		if err := tx.QueryRow(ctx, sql.ArchiveColumns).Scan(&h.Columns, &h.PaymentColumns); err != nil {
			return err
		}
		section := func(query string, n int64) func(io.Writer) error {
			query = strings.ReplaceAll(query, "$1", "'"+id.String()+"'") // COPY takes no parameters
			return func(w io.Writer) error {
				counted := &countedLines{Writer: w, ctx: ctx, of: n}
				_, err := tx.Conn().PgConn().CopyTo(ctx, counted, "COPY ("+query+") TO STDOUT")
				return err
			}
		}
		progress.Step(ctx, "writing the events of sale "+id.String())
		sections := []func(io.Writer) error{
			section(sql.ArchiveEvents, f.Events), section(sql.ArchivePaymentEvents, f.PaymentEvents),
			section(sql.ArchiveDraw, f.DrawRows),
		}
		end, err = writeFile(file, h, f, sections[:len(f.sections(h.Version))]...)
		return err
	})
	if err == nil {
		err = file.Sync()
	}
	return end, err
}

// countedLines counts what passes, a line for each event.
type countedLines struct {
	io.Writer
	ctx   context.Context //nolint:containedctx // of the copy that it counts
	n, of int64
}

// Write implements io.Writer.
func (c *countedLines) Write(p []byte) (int, error) {
	c.n += int64(bytes.Count(p, []byte{'\n'}))
	progress.At(c.ctx, c.n, c.of, "events")
	return c.Writer.Write(p)
}

// syncDir makes the names in a folder durable.
func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// mark records the file in Postgres, if nothing of the sale has changed since it was written.
func (a *Archiver) mark(ctx context.Context, id uuid.UUID, s state, done Archived) error {
	file := map[string]any{
		"format": s.version(), "path": done.Path, "sha256": done.SHA256, "orders": done.Orders, "events": done.Events,
		"payment_events": done.PaymentEvents,
	}
	err := pg.InTransaction(ctx, a.conn, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, sql.ArchiveLockSale, id); err != nil {
			return err
		}
		if err := refuse(ctx, tx, id, 0, time.Time{}); err != nil {
			return err
		}
		marked, err := tx.Exec(ctx, sql.ArchiveMark, id, file, s.Revision, done.Events, done.PaymentEvents,
			done.LastPosition)
		if err == nil && marked.RowsAffected() == 0 {
			err = fmt.Errorf("%w: it has changed while its file was written", ErrRefused)
		}
		return err
	})
	if err == nil {
		crashpoint.Hit(crashpoint.ArchiveMarked)
	}
	return err
}

// remember keeps what became of the payments of an archived sale, before their events are deleted.
func (a *Archiver) remember(ctx context.Context, id uuid.UUID, path string) error {
	err := pgx.BeginFunc(ctx, a.conn, func(tx pgx.Tx) error {
		if err := load(ctx, tx, path); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, sql.ArchiveRememberPayments, id); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, sql.ArchiveMarkRemembered, id)
		return err
	})
	if err != nil {
		return fmt.Errorf("remember its payments: %w", err)
	}
	crashpoint.Hit(crashpoint.ArchiveRemembered)
	return nil
}

// delete deletes the orders of an archived sale in Postgres, and what is left of the sale in Redis.
func (a *Archiver) delete(ctx context.Context, id uuid.UUID, s state) error {
	progress.Step(ctx, "deleting the orders of sale "+id.String())
	deleted := int64(0)
	for last := uuid.Nil; ; deleted += deletedAtOnce {
		progress.At(ctx, deleted, 0, "orders")
		err := a.conn.QueryRow(ctx, sql.ArchiveDeleteSome, id, last, deletedAtOnce).Scan(&last)
		if errors.Is(err, pgx.ErrNoRows) {
			break
		} else if err != nil {
			return fmt.Errorf("delete its orders: %w", err)
		}
		crashpoint.Hit(crashpoint.ArchiveDeleting)
	}
	if _, err := a.conn.Exec(ctx, sql.ArchiveDeleteRest, id); err != nil {
		return fmt.Errorf("delete its events: %w", err)
	}
	crashpoint.Hit(crashpoint.ArchiveDeleted)
	err := reservation.LayoutOf(id, s.Partitions, s.Shards).EachShard(func(partition, _ int) error {
		ctx, cancel := retry.ForCall(ctx)
		defer cancel()
		k := a.Catalog.Store.Keys
		return errors.Join(
			a.Catalog.Store.Redis.SRem(ctx, k.Sales(partition), id.String()).Err(),
			a.Catalog.Store.Redis.Unlink(ctx, k.OfShard(partition, id)...).Err(),
		)
	})
	if err != nil {
		return fmt.Errorf("delete its keys in Redis: %w", err)
	}
	if _, err := a.conn.Exec(ctx, sql.ArchiveMarkDeleted, id); err != nil {
		return fmt.Errorf("record that its orders are deleted: %w", err)
	}
	return nil
}

// Report is the audit of one file.
type Report struct {
	Path string    `json:"path"`
	Sale uuid.UUID `json:"sale_id"`
	Name string    `json:"name"`
	Trailer
	WrittenAt time.Time `json:"written_at"`
	Stock     int64     `json:"stock"`
	Sold      int64     `json:"sold"`
	Findings  []Finding `json:"findings"` // the first ones of each check
	Found     int64     `json:"found"`
}

// Finding is one violation of a promise in a file.
type Finding struct {
	Promise string     `json:"promise"`
	Order   *uuid.UUID `json:"order_id,omitempty"`
	What    string     `json:"what"`
}

// Audit checks a file: that it is whole, and what package audit checks of its sale without Redis. Postgres compares in
// temporary tables and is not changed. The error is ErrDamagedFile, or one of the file or of Postgres.
func Audit(ctx context.Context, pool *pgxpool.Pool, path string) (Report, error) {
	header, trailer, err := Verify(path)
	if err != nil {
		return Report{}, err
	}
	r := Report{Path: path, Sale: header.SaleID, Trailer: trailer, WrittenAt: header.WrittenAt, Findings: []Finding{}}
	found, err := r.check(ctx, pool, header)
	for _, s := range found.Sales { // the one
		r.Name, r.Stock, r.Sold = s.Name, s.Stock, s.Sold
	}
	var unchecked []string
	for _, p := range found.Promises {
		unchecked, r.Found = append(unchecked, p.Unchecked...), r.Found+p.Found
		for _, f := range p.Findings {
			r.Findings = append(r.Findings, Finding{Promise: p.Name, Order: f.Order, What: f.String()})
		}
	}
	if err == nil && r.Found == 0 && len(unchecked) > 0 {
		err = errors.New("not checked: " + strings.Join(unchecked, "; "))
	}
	if err != nil {
		err = fmt.Errorf("audit %s: %w", path, err)
	}
	return r, err
}

// check makes the one audit of what the file would bring back. Its tables go with its transaction.
func (r *Report) check(ctx context.Context, pool *pgxpool.Pool, h Header) (found audit.Report, err error) {
	tx, err := pool.Begin(ctx)
	if err != nil {
		return found, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if err = load(ctx, tx, r.Path); err == nil {
		_, err = tx.Exec(ctx, sql.ArchiveHeaderRows, h.Sale, cmp.Or(string(h.Items), "[]"), h.SaleEvents)
	}
	if err == nil {
		scratch := strings.Replace(sql.ArchiveScratch, "{{replay}}", projection.Replayed("order_events"), 1)
		err = pg.Run(ctx, tx.Conn(), scratch)
	}
	if err == nil {
		found, err = audit.File(ctx, tx)
	}
	return found, err
}

// WriteText writes the report for operators.
func (r *Report) WriteText(w io.Writer) error {
	verdict := "kept"
	if r.Found > 0 {
		verdict = "BROKEN"
	}
	const line = "%s  sale %s %s: S1 to S5 and S8 %s, %s orders with %s events, %s units sold of %s\n"
	_, err := fmt.Fprintf(w, line, r.Path, r.Sale, format.Printable(r.Name), verdict,
		format.Count(r.Orders), format.Count(r.Events), format.Count(r.Sold), format.Count(r.Stock))
	for _, f := range r.Findings {
		if err == nil {
			_, err = fmt.Fprintf(w, "      - %s %s\n", f.Promise, f.What)
		}
	}
	if more := r.Found - int64(len(r.Findings)); more > 0 && err == nil {
		_, err = fmt.Fprintf(w, "      … and %s more\n", format.Count(more))
	}
	return err
}

package archive

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/internal/progress"
	"stampede/sql"
	"stampede/upkeep/projection"
)

// ErrNotArchived is returned by Restore for a sale whose orders are in Postgres, or in another file.
var ErrNotArchived = errors.New("the sale is not archived in this file")

// Restored is a sale whose orders are back in Postgres.
type Restored struct {
	Sale uuid.UUID `json:"sale_id"`
	Figures
	// Took is the duration.
	Took time.Duration `json:"took_ns"`
}

// Restore brings the events of a file back, and makes the orders from them, in one transaction. The sale stays out of
// Redis. A sale that Postgres does not have is created, and its events get positions of this database, which no target
// of the relay lacks. The error may be ErrRunning, ErrDamagedFile or ErrNotArchived.
func Restore(ctx context.Context, pool *pgxpool.Pool, path string) (Restored, error) {
	began := time.Now()
	restored, err := restore(ctx, pool, path)
	if err != nil {
		return Restored{}, fmt.Errorf("restore %s: %w", path, err)
	}
	restored.Took = time.Since(began)
	return restored, nil
}

func restore(ctx context.Context, pool *pgxpool.Pool, path string) (Restored, error) {
	header, trailer, err := Verify(path)
	if err != nil {
		return Restored{}, err
	}
	conn, err := begin(ctx, pool)
	if err != nil {
		return Restored{}, err
	}
	defer conn.End()
	id := header.SaleID
	err = pg.InTransaction(ctx, conn, pgx.TxOptions{}, func(tx pgx.Tx) error {
		foreign, err := lockArchived(ctx, tx, header, trailer)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, sql.LedgerMakeMonths, []uuid.UUID{id}); err != nil {
			return err
		}
		if err := load(ctx, tx, path); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, sql.ArchiveForgetPayments, id); err != nil {
			return err
		}
		for _, statement := range []string{
			insert(sql.ArchiveInsertEvents, header.Columns, foreign),
			insert(sql.ArchiveInsertPayments, header.PaymentColumns, foreign),
		} {
			if _, err := tx.Exec(ctx, statement); err != nil {
				return fmt.Errorf("insert the events: %w", err)
			}
		}
		if err := insertDraw(ctx, tx, id); err != nil {
			return fmt.Errorf("insert the draw: %w", err)
		}
		progress.Step(ctx, "making the orders")
		if _, err := projection.RebuildSale(ctx, tx, id); err != nil {
			return fmt.Errorf("make the orders: %w", err)
		}
		crashpoint.Hit(crashpoint.ArchiveRestoring)
		return nil
	})
	return Restored{Sale: id, Figures: trailer.Figures}, err
}

// lockArchived locks the sale of a file, and marks it as not archived. A sale that Postgres lacks is created: then the
// file is of another database, or of this one after a time to which it was restored, and so are the positions in it.
func lockArchived(ctx context.Context, tx pgx.Tx, h Header, end Trailer) (foreign bool, err error) {
	var row map[string]any
	var events, items []map[string]any
	if err := errors.Join(json.Unmarshal(h.Sale, &row), json.Unmarshal(h.SaleEvents, &events),
		json.Unmarshal([]byte(cmp.Or(string(h.Items), "[]")), &items)); err != nil {
		return false, fmt.Errorf("%w: its sale: %w", ErrDamagedFile, err)
	}
	if _, err := tx.Exec(ctx, sql.CatalogLockItems, h.SaleID); err != nil {
		return false, err
	}
	locked, err := tx.Exec(ctx, sql.CatalogLockSale, h.SaleID)
	if err != nil {
		return false, err
	}
	if locked.RowsAffected() == 0 {
		foreign = true
		if _, err := tx.Exec(ctx, insert(sql.ArchiveInsertSale, slices.Collect(maps.Keys(row)), false), h.Sale); err != nil {
			return false, fmt.Errorf("create the sale: %w", err)
		}
		if len(items) > 0 {
			into := insert(sql.ArchiveInsertItems, slices.Collect(maps.Keys(items[0])), false)
			if _, err := tx.Exec(ctx, into, h.Items); err != nil {
				return false, fmt.Errorf("create its items: %w", err)
			}
		}
	} else {
		s, err := readState(ctx, tx, h.SaleID)
		switch {
		case err != nil:
			return false, err
		case !s.Archived:
			return false, fmt.Errorf("%w: its orders are in Postgres", ErrNotArchived)
		case s.SHA256 != end.SHA256:
			return false, fmt.Errorf("%w: Postgres names %s", ErrNotArchived, s.Path)
		}
	}
	if len(events) > 0 {
		into := insert(sql.ArchiveInsertSaleEvents, slices.Collect(maps.Keys(events[0])), foreign)
		if _, err := tx.Exec(ctx, into, h.SaleEvents); err != nil {
			return false, fmt.Errorf("add the events of the sale: %w", err)
		}
	}
	_, err = tx.Exec(ctx, sql.ArchiveMarkRestored, h.SaleID)
	return foreign, err
}

// drawTables are the tables of archive/draw.sql.
var drawTables = []string{"draws", "draw_chunks", "draw_ranks", "draw_offers"}

// insertDraw creates the draw of a file, unless Postgres has it.
func insertDraw(ctx context.Context, tx pgx.Tx, goods uuid.UUID) error {
	rows, _ := tx.Query(ctx, sql.ArchiveDrawTables, goods) // its error comes with the rows
	type table struct {
		Name    string
		Columns []string
	}
	tables, err := pgx.CollectRows(rows, pgx.RowToStructByName[table])
	if err != nil {
		return err
	}
	for _, t := range tables {
		if !slices.Contains(drawTables, t.Name) {
			return fmt.Errorf("%w: it has rows of %.50q", ErrDamagedFile, t.Name)
		}
		into := strings.ReplaceAll(sql.ArchiveInsertDraw, "{{table}}", t.Name)
		if _, err := tx.Exec(ctx, insert(into, t.Columns, false), goods); err != nil {
			return err
		}
	}
	return nil
}

// insert returns a statement for the columns that a file has: others of this version get their defaults.
func insert(statement string, columns []string, foreign bool) string {
	list := columnList(columns)
	values := list
	if foreign {
		values = strings.Replace(list, `"position"`, "-next_position()", 1)
	}
	return strings.NewReplacer("{{columns}}", list, "{{values}}", values).Replace(statement)
}

// load copies a file to the tables file_events, file_payments and file_draw.
func load(ctx context.Context, tx pgx.Tx, path string) error {
	if _, err := tx.Exec(ctx, sql.ArchiveTable); err != nil {
		return err
	}
	file, err := open(path)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	progress.Step(ctx, "copying the events of "+path)
	sections := []string{
		"file_events (" + columnList(file.Columns), "file_payments (" + columnList(file.PaymentColumns),
		"file_draw (name, row",
	}
	for _, into := range sections[:len(file.lines)] {
		if _, err := tx.Conn().PgConn().CopyFrom(ctx, file, "COPY "+into+") FROM STDIN"); err != nil {
			return fmt.Errorf("copy the events of %s: %w", path, err)
		}
	}
	return nil
}

func columnList(columns []string) string {
	quoted := make([]string, len(columns))
	for i, c := range columns {
		quoted[i] = pgx.Identifier{c}.Sanitize()
	}
	return strings.Join(quoted, ", ")
}

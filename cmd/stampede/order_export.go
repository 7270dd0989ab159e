package main

import (
	"bufio"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/figure"
	"stampede/internal/progress"
	"stampede/ledger"
	"stampede/relay/target"
	"stampede/reservation/order"
)

type orderExportCmd struct {
	look
	databaseFlag
	outputFlag
	orderFilter
	Since        moment `env:"STAMPEDE_ORDER_SINCE" placeholder:"TIME" help:"Only orders reserved at this time or later: RFC 3339, a date in UTC, or -1h for an hour ago."`
	Until        moment `env:"STAMPEDE_ORDER_UNTIL" placeholder:"TIME" help:"Only orders reserved before this time, written in the same ways."`
	ChangedSince string `env:"STAMPEDE_ORDER_CHANGED_SINCE" placeholder:"PLACE" help:"Only orders that changed after the cursor that the last such export has printed, 0 for all, or since a time, written in the same ways, for which all events are read. Each is written once, as it is now."`
	Format       string `enum:",csv,jsonl" default:"" env:"STAMPEDE_ORDER_FORMAT" placeholder:"FORMAT" help:"csv, where an apostrophe stands before what a spreadsheet could take for a formula, or jsonl, which has all values as they are (default: csv, with --output json jsonl)."`
	To           string `env:"STAMPEDE_ORDER_TO" placeholder:"FILE" help:"File to write, which appears when it is complete (default: standard output)."`
}

func (c *orderExportCmd) Run(ctx context.Context, s *streams) error {
	filter, err := c.filter()
	if err != nil {
		return err
	}
	if c.To != "" || !isTerminal(s.out) {
		var stop func()
		ctx, stop = s.watch(ctx, "exporting")
		defer stop()
	}
	return c.withPool(ctx, 1, func(pool *pgxpool.Pool) error { return c.export(ctx, s, pool, filter) })
}

func (c *orderExportCmd) export(ctx context.Context, s *streams, pool *pgxpool.Pool, filter order.Filter) error {
	span, err := c.span(ctx, pool)
	if err != nil {
		return err
	}
	var written int64
	err = writeWhole(c.To, s.out, func(w io.Writer) error {
		each, flush := c.writer(w)
		err := ledger.New(pool).Export(ctx, filter, span, func(o order.Placed) error {
			written++
			progress.At(ctx, written, 0, "orders")
			return each(o)
		})
		return errors.Join(err, flush())
	})
	if err != nil {
		return err
	}
	var cursor *int64
	next := ""
	if c.ChangedSince != "" {
		cursor, next = &span.ChangedTo, fmt.Sprintf("the next export of changes has --changed-since=%d\n", span.ChangedTo)
	}
	if c.To == "" {
		_, err := io.WriteString(s.err, next)
		return err
	}
	return c.print(s.out, struct {
		Path   string `json:"path"`
		Orders int64  `json:"orders"`
		Cursor *int64 `json:"cursor,omitempty"`
	}{c.To, written, cursor}, "%s orders are in %s\n%s", figure.Count(written), c.To, next)
}

// span returns what bounds the export. Its end is settled, so that no change is missing that is committed later; and it
// is read first, so that the first change since a time is visible.
func (c *orderExportCmd) span(ctx context.Context, pool *pgxpool.Pool) (span ledger.Span, err error) {
	span = ledger.Span{Since: c.Since.Time, Until: c.Until.Time}
	if c.ChangedSince == "" {
		return span, nil
	}
	if span.ChangedTo, err = target.PositionAt(ctx, pool, "now"); err != nil {
		return span, err
	}
	if span.ChangedAfter, err = strconv.ParseInt(c.ChangedSince, 10, 64); err == nil {
		return span, checkFlag(span.ChangedAfter >= 0 && span.ChangedAfter <= span.ChangedTo, "--changed-since",
			span.ChangedAfter, fmt.Sprintf("the cursor of an export of this database, 0 to %d", span.ChangedTo))
	}
	var from moment
	if err := from.UnmarshalText([]byte(c.ChangedSince)); err != nil {
		return span, usagef("--changed-since: %w, or the cursor of an export", err)
	}
	span.ChangedAfter, err = target.PositionAt(ctx, pool, from.Format(time.RFC3339Nano))
	return span, err
}

// writer returns what writes an order, and what completes the text.
func (c *orderExportCmd) writer(w io.Writer) (each func(order.Placed) error, flush func() error) {
	if c.Format == "jsonl" || c.Format == "" && c.json() {
		buffered := bufio.NewWriterSize(w, 1<<16)
		lines := json.NewEncoder(buffered)
		return func(o order.Placed) error { return lines.Encode(o.View()) }, buffered.Flush
	}
	rows := csv.NewWriter(w)
	_ = rows.Write([]string{ // Flush returns the error
		"order_id", "sale_id", "user_id", "quantity", "status", "version", "reserved_at", "updated_at", "paid_at",
		"pay_from", "expires_at", "amount", "currency", "payment_reference", "reason", "sequence", "epoch",
		"items", "entry_for", "kind",
	})
	row := make([]string, 0, 20)
	return func(o order.Placed) error {
			line := o.View()
			amount := ""
			if line.Currency != "" {
				amount = strconv.FormatInt(line.Amount, 10)
			}
			entryFor := ""
			if line.EntryFor != uuid.Nil {
				entryFor = line.EntryFor.String()
			}
			row = append(row[:0],
				line.OrderID.String(), line.SaleID.String(), figure.Cell(line.UserID), strconv.FormatInt(line.Quantity, 10),
				string(line.Status), strconv.Itoa(line.Version), line.ReservedAt, line.UpdatedAt, line.PaidAt, line.PayFrom,
				line.ExpiresAt, amount, line.Currency, figure.Cell(line.PaymentReference), figure.Cell(line.Reason),
				strconv.FormatInt(line.Sequence, 10), strconv.FormatInt(line.Epoch, 10), string(line.Items), entryFor,
				string(line.Kind))
			return rows.Write(row)
		}, func() error {
			rows.Flush()
			return rows.Error()
		}
}

// writeWhole writes to a file, which appears under its name when write has succeeded, or to out if the name is empty.
func writeWhole(name string, out io.Writer, write func(io.Writer) error) (err error) {
	if name == "" {
		return write(out)
	}
	file, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*.part")
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	defer func() {
		if err != nil {
			_ = file.Close()
			_ = os.Remove(file.Name())
		}
	}()
	if err := write(file); err != nil {
		return err
	}
	if err := errors.Join(file.Sync(), file.Close(), os.Rename(file.Name(), name)); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

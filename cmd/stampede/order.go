package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/apiclient"
	"stampede/internal/connect"
	"stampede/internal/format"
	"stampede/internal/progress"
	"stampede/ledger"
	"stampede/relay/target"
	"stampede/reservation/order"
	"stampede/sql"
)

type orderCmd struct {
	Show   orderShowCmd   `cmd:"" help:"Show an order with everything that happened to it."`
	List   orderListCmd   `cmd:"" help:"List orders of a user or a sale, newest first."`
	Cancel orderCancelCmd `cmd:"" help:"Cancel an order, also a paid one: its units go back to the sale, and its payment has to be refunded. Repeating it changes nothing."`
	Export orderExportCmd `cmd:"" help:"Write orders as CSV or JSON lines."`
}

// orderID is the id of an order on the command line.
type orderID struct{ uuid.UUID }

// UnmarshalText implements encoding.TextUnmarshaler.
func (id *orderID) UnmarshalText(text []byte) (err error) {
	if id.UUID, err = uuid.Parse(string(text)); err != nil {
		return usagef("%q is not an order id: want one like 01a1fef0-cb72-76d5-818b-64550bc6ed90", text)
	}
	return nil
}

type orderArg struct {
	Order orderID `arg:"" help:"Id of the order."`
}

// orderFilter selects orders.
type orderFilter struct {
	Sale   uuid.UUID `env:"STAMPEDE_ORDER_SALE" placeholder:"ID" help:"Only orders of this sale."`
	User   string    `env:"STAMPEDE_ORDER_USER" placeholder:"USER" help:"Only orders of this user."`
	Status string    `env:"STAMPEDE_ORDER_STATUS" placeholder:"STATUS" help:"Only orders with this status: confirmed, paid, cancelled, expired, rejected or voided."`
}

func (f orderFilter) filter() (order.Filter, error) {
	filter := order.Filter{Sale: f.Sale, User: f.User, Status: order.Status(f.Status)}
	if f.User != "" {
		if err := order.ValidateUser(f.User); err != nil {
			return filter, err
		}
	}
	if f.Status != "" && !slices.Contains(order.Recorded(), filter.Status) {
		names := make([]string, len(order.Recorded()))
		for i, status := range order.Recorded() {
			names[i] = string(status)
		}
		return filter, usagef("--status is %q, want one of %s", f.Status, strings.Join(names, ", "))
	}
	return filter, nil
}

// withPool calls do with a pool of connections to Postgres, if this version can work with its schema.
func (f databaseFlag) withPool(ctx context.Context, conns int32, do func(*pgxpool.Pool) error) error {
	pool, err := connect.Postgres(ctx, f.DatabaseURL, conns)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := sql.Check(ctx, pool); err != nil {
		return err
	}
	return do(pool)
}

// withLedger calls do with the orders in Postgres.
func (f databaseFlag) withLedger(ctx context.Context, do func(*ledger.Ledger) error) error {
	return f.withPool(ctx, 1, func(pool *pgxpool.Pool) error { return do(ledger.New(pool)) })
}

type orderShowCmd struct {
	readOnly
	optionalDatabases
	serverFlag
	keysFlags
	outputFlag
	orderArg
	User string `env:"STAMPEDE_ORDER_USER" placeholder:"USER" help:"Its buyer: with it, an order that is reserved and not in Postgres yet is found in Redis."`
}

func (c *orderShowCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	o, err := c.find(ctx, logger)
	if err != nil {
		return withHint(err, c.User)
	}
	return c.write(s.out, o, func(w io.Writer) error { return writeHistory(w, o) })
}

func writeHistory(w io.Writer, o order.HistoryView) error {
	t := newTable(w)
	for _, row := range [][2]string{
		{"order", o.OrderID.String()},
		{"sale", o.SaleID.String()},
		{"user", printable(o.UserID)},
		{"units", fmt.Sprint(o.Quantity)},
		{"items", string(o.Items)},
		{"status", string(o.Status)},
		{"reason", printable(o.Reason)},
		{"kind", string(o.Kind)},
		{"entry for", idOrDash(o.EntryFor)},
		{"amount", format.Money(o.Amount, o.Currency)},
		{"payment", printable(o.PaymentReference)},
		{"pay from", o.PayFrom},
		{"pay until", o.ExpiresAt},
	} {
		if row[1] != "" {
			t.row(row[0], row[1])
		}
	}
	t.row("\nTIME", "VERSION", "EVENT", "DETAILS")
	for _, e := range o.Events {
		t.row(e.OccurredAt, e.Version, e.Type, details(e.Data))
	}
	return t.Flush()
}

func (c *orderShowCmd) find(ctx context.Context, logger *slog.Logger) (o order.HistoryView, err error) {
	if err := c.check(c.optionalDatabases); err != nil {
		return o, err
	}
	if c.Server != "" {
		err = c.withClient(func(client *apiclient.Client) (err error) {
			o, err = client.Order(ctx, c.Order.UUID, c.User)
			return err
		})
		return o, err
	}
	err = c.stores(c.keysFlags).with(ctx, 2, logger, func(b *backend) error {
		found, log, err := ledger.New(b.pool).History(ctx, c.Order.UUID)
		if errors.Is(err, order.ErrNotFound) && c.User != "" {
			if found.Order, err = b.store.FindReserved(ctx, c.Order.UUID, c.User); err == nil {
				log = []order.Logged{{
					Version: found.Version, Type: order.EventReserved, OccurredAt: found.ReservedAt, Data: []byte("{}"),
				}}
			}
		}
		o = found.ViewWith(log)
		return err
	})
	return o, err
}

// withHint adds to the error for a missing order where else it may be. With a user Redis was asked as well.
func withHint(err error, user string) error {
	switch {
	case !errors.Is(err, order.ErrNotFound):
		return err
	case user != "":
		return fmt.Errorf("%w in Postgres, nor in Redis for this user; if it was lost with Redis, its receipt says so: "+
			"GET /v1/orders/ORDER?receipt=RECEIPT", err)
	default:
		return fmt.Errorf("%w in Postgres; an order of the last seconds may be in Redis: "+
			"`stampede order show ORDER --user USER` finds it there", err)
	}
}

type orderListCmd struct {
	readOnly
	postgresOrServer
	outputFlag
	orderFilter
	Limit int `default:"50" env:"STAMPEDE_ORDER_LIMIT" placeholder:"N" help:"Most orders to list (${default})."`
}

func (c *orderListCmd) Run(ctx context.Context, s *streams) error {
	filter, err := c.filter()
	if err == nil {
		err = cmp.Or(c.checkPlace(), wantAtLeast("--limit", c.Limit, 1))
	}
	if err != nil {
		return err
	}
	if filter.User == "" && filter.Sale == uuid.Nil {
		return usagef("missing flags: --user or --sale; `stampede order export` reads the orders of all users and sales")
	}
	var all []order.PlacedView
	if c.Server != "" {
		err = c.withClient(func(client *apiclient.Client) (err error) {
			all, err = client.Orders(ctx, filter, c.Limit)
			return err
		})
	} else {
		all, err = c.read(ctx, filter)
	}
	if err != nil {
		return err
	}
	return writeAll(c.outputFlag, s.out, all, asIs, writeOrders)
}

func writeOrders(w io.Writer, orders []order.PlacedView) error {
	t := newTable(w, "ORDER", "STATUS", "UNITS", "USER", "SALE", "RESERVED", "CHANGED", "PAY FROM", "AMOUNT", "PAYMENT")
	for _, o := range orders {
		reserved, _ := time.Parse(time.RFC3339, o.ReservedAt) // "" is no time
		changed, _ := time.Parse(time.RFC3339, o.UpdatedAt)
		payFrom, _ := time.Parse(time.RFC3339, o.PayFrom)
		t.row(o.OrderID, o.Status, o.Quantity, printable(o.UserID), o.SaleID, second(reserved), second(changed),
			second(payFrom), orDash(format.Money(o.Amount, o.Currency)), orDash(o.PaymentReference))
	}
	return t.Flush()
}

func (c *orderListCmd) read(ctx context.Context, filter order.Filter) (all []order.PlacedView, err error) {
	const pageMax = 1000
	err = c.databaseFlag().withLedger(ctx, func(l *ledger.Ledger) error {
		for before := uuid.Nil; len(all) < c.Limit; {
			page, next, err := l.ListOrders(ctx, filter, before, min(c.Limit-len(all), pageMax))
			if err != nil {
				return err
			}
			for _, o := range page {
				all = append(all, o.View())
			}
			if before = next; next == uuid.Nil {
				break
			}
		}
		return nil
	})
	return all, err
}

type orderCancelCmd struct {
	postgresOrServer
	outputFlag
	yesFlag
	operatorFlag
	orderArg
	Reason string `required:"" env:"STAMPEDE_ORDER_REASON" placeholder:"TEXT" help:"Why the order is cancelled, at most 500 characters; recorded with it and not shown to its buyer."`
}

func (c *orderCancelCmd) Run(ctx context.Context, s *streams) error {
	name, err := c.name()
	if err := cmp.Or(err, order.ValidateReason(c.Reason), c.checkPlace(), c.askable(s)); err != nil {
		return err
	}
	var o order.PlacedView
	if c.Server != "" {
		err = c.withClient(func(client *apiclient.Client) error {
			err := c.confirm(ctx, s, func() (string, error) {
				o, err := client.Order(ctx, c.Order.UUID, "")
				return c.question(o.PlacedView), err
			})
			if err == nil {
				o, err = client.CancelOrder(ctx, c.Order.UUID, c.Reason)
			}
			return err
		})
	} else {
		err = c.databaseFlag().withLedger(ctx, func(l *ledger.Ledger) error {
			err := c.confirm(ctx, s, func() (string, error) {
				o, _, err := l.History(ctx, c.Order.UUID)
				return c.question(o.View()), err
			})
			if err != nil {
				return err
			}
			cancelled, err := l.Withdraw(ctx, c.Order.UUID, c.Reason, name)
			o = cancelled.View()
			return err
		})
	}
	switch {
	case errors.Is(err, apiclient.ErrUnknown):
		return fmt.Errorf("%w; it may be repeated", err)
	case err != nil:
		return withHint(err, "")
	}
	text := fmt.Sprintf("order %s is cancelled; its units go back to the sale\n", o.OrderID)
	if o.PaymentReference != "" {
		text += fmt.Sprintf("refund the payment %s: `stampede payment list --order %s` shows it\n",
			printable(o.PaymentReference), o.OrderID)
	}
	return c.print(s.out, o, "%s", text)
}

func (c *orderCancelCmd) question(o order.PlacedView) string {
	text := fmt.Sprintf("Order %s of %s (%s) is cancelled; its %d units go back to the sale.", o.OrderID,
		printable(o.UserID), o.Status, o.Quantity)
	if o.PaymentReference != "" {
		text += fmt.Sprintf(" Its payment %s has to be refunded.", printable(o.PaymentReference))
	}
	return text
}

type orderExportCmd struct {
	readOnly
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
	}{c.To, written, cursor}, "%s orders are in %s\n%s", format.Count(written), c.To, next)
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
				line.OrderID.String(), line.SaleID.String(), format.Cell(line.UserID), strconv.FormatInt(line.Quantity, 10),
				string(line.Status), strconv.Itoa(line.Version), line.ReservedAt, line.UpdatedAt, line.PaidAt, line.PayFrom,
				line.ExpiresAt, amount, line.Currency, format.Cell(line.PaymentReference), format.Cell(line.Reason),
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

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"stampede/internal/apiclient"
	"stampede/internal/format"
	"stampede/internal/pg"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/upkeep/archive"
)

type saleCmd struct {
	Create  saleCreateCmd  `cmd:"" help:"Create a sale."`
	List    saleListCmd    `cmd:"" help:"List the sales, newest first."`
	Show    saleShowCmd    `cmd:"" help:"Show a sale: its terms, its state and its unit counts."`
	Pause   salePauseCmd   `cmd:"" help:"Pause a sale: purchases are refused until it is resumed."`
	Resume  saleResumeCmd  `cmd:"" help:"Resume a paused sale."`
	End     saleEndCmd     `cmd:"" help:"End a sale permanently."`
	Restock saleRestockCmd `cmd:"" help:"Add units to a sale, or remove unsold ones."`
	Rename  saleRenameCmd  `cmd:"" help:"Change the name of a sale, or those of its items."`
	History saleHistoryCmd `cmd:"" help:"Show every change of a sale, and who made it."`
	Archive saleArchiveCmd `cmd:"" help:"Move the orders of sales that are over from Postgres into files. A repeat finishes what was interrupted."`
}

// saleStore is where sales are: the databases, or an ingress in front of them.
type saleStore interface {
	CreateOnce(
		ctx context.Context, terms reservation.Terms, key string,
	) (sale catalog.CountedSale, replayed bool, err error)
	List(ctx context.Context, after uuid.UUID, limit int) ([]catalog.CountedSale, error)
	Show(ctx context.Context, id uuid.UUID) (catalog.CountedSale, error)
	Pause(ctx context.Context, id uuid.UUID) (catalog.CountedSale, error)
	Resume(ctx context.Context, id uuid.UUID) (catalog.CountedSale, error)
	End(ctx context.Context, id uuid.UUID) (catalog.CountedSale, error)
	Restock(ctx context.Context, id uuid.UUID, units int64, key string) (catalog.CountedSale, error)
	RestockItems(ctx context.Context, id uuid.UUID, units map[string]int64, key string) (catalog.CountedSale, error)
	Rename(ctx context.Context, id uuid.UUID, to catalog.Names) (catalog.CountedSale, error)
	History(ctx context.Context, id uuid.UUID, limit int) ([]catalog.Change, error)
}

// catalogFlags are what every command on sales needs.
type catalogFlags struct {
	optionalDatabases
	serverFlag
	keysFlags
	outputFlag
}

// open calls do with the sales.
func (f *catalogFlags) open(ctx context.Context, logger *slog.Logger, do func(saleStore) error) error {
	return f.reach(ctx, logger, func(c *apiclient.Client) error { return do(c) },
		func(b *backend) error { return do(b.catalog) })
}

// reach calls one of two: over with a client of the server, if there is one, or else on with the databases.
func (f *catalogFlags) reach(
	ctx context.Context, logger *slog.Logger, over func(*apiclient.Client) error, on func(*backend) error,
) error {
	if err := f.check(f.optionalDatabases); err != nil {
		return err
	}
	if f.Server != "" {
		return f.withClient(over)
	}
	return f.stores(f.keysFlags).with(ctx, 2, logger, on)
}

// with opens the sales, calls do with them and prints the sales that do returns, as text by write.
func (f *catalogFlags) with(
	ctx context.Context, s *streams, logger *slog.Logger, write func(io.Writer, []catalog.CountedSale) error,
	do func(context.Context, saleStore) ([]catalog.CountedSale, error),
) error {
	return f.open(ctx, logger, func(store saleStore) error {
		sales, err := do(ctx, store)
		if err != nil {
			return err
		}
		return writeAll(f.outputFlag, s.out, sales, asIs, write)
	})
}

func writeSales(w io.Writer, sales []catalog.CountedSale) error {
	t := newTable(w, "ID", "STATE", "STOCK", "AVAILABLE", "HELD", "SOLD", "PRICE", "OPENS", "CLOSES", "NAME")
	for _, s := range sales {
		name := printable(s.Name)
		if len(s.Items) > 0 {
			name += fmt.Sprintf(" (%d items)", len(s.Items))
		}
		t.row(s.ID, s.State, s.Stock, s.Available, s.Held, s.Sold, price(s.UnitPrice, s.Currency),
			second(s.OpensAt), second(s.ClosesAt), name)
	}
	return t.Flush()
}

// price is a dash for none, also in a sale whose items have prices.
func price(minor int64, currency string) string {
	if minor == 0 {
		currency = ""
	}
	return orDash(format.Money(minor, currency))
}

// writeSale shows all of a sale.
func writeSale(w io.Writer, all []catalog.CountedSale) error {
	t := newTable(w)
	for _, s := range all {
		window := "none: confirmed orders are final"
		if s.PaymentWindow > 0 {
			window = s.PaymentWindow.String()
		}
		pace := "none: all orders can be paid at once"
		if s.PaymentsPerSecond > 0 {
			pace = fmt.Sprintf("%d orders a second", s.PaymentsPerSecond)
		}
		for _, row := range [][2]any{
			{"sale", s.ID},
			{"name", printable(s.Name)},
			{"state", s.State},
			{"stock", s.Stock},
			{"available", s.Available},
			{"held", s.Held},
			{"sold", s.Sold},
			{"per-order limit", s.PerOrderLimit},
			{"unit price", price(s.UnitPrice, s.Currency)},
			{"payment window", window},
			{"payment grace", s.PaymentGrace},
			{"payment pace", pace},
			{"shards", s.Shards},
			{"opens", second(s.OpensAt)},
			{"closes", second(s.ClosesAt)},
			{"created", second(s.CreatedAt)},
		} {
			t.row(row[:]...)
		}
		switch {
		case s.Waitlist:
			t.row("waiting", s.Waiting)
		case s.EntriesID != uuid.Nil:
			t.row("drawn", "among the entries in sale "+s.EntriesID.String())
		case s.OffersOnly:
			t.row("orders", "places in the waiting list of another sale")
		}
		for _, i := range s.Items {
			limit := ""
			if i.PerOrderLimit > 0 {
				limit = fmt.Sprintf("at most %d, ", i.PerOrderLimit)
			}
			t.row("item "+i.Code, fmt.Sprintf("%d of %d left, %s, %s%s", i.Available, i.Stock, price(i.UnitPrice, s.Currency),
				limit, printable(i.Name)))
		}
	}
	return t.Flush()
}

func (f *catalogFlags) withOne(
	ctx context.Context, s *streams, logger *slog.Logger,
	do func(context.Context, saleStore) (catalog.CountedSale, error),
) error {
	return f.with(ctx, s, logger, writeSales, func(ctx context.Context, sales saleStore) ([]catalog.CountedSale, error) {
		sale, err := do(ctx, sales)
		return []catalog.CountedSale{sale}, err
	})
}

// changeFlags are what every command needs that changes sales.
type changeFlags struct {
	catalogFlags
	operatorFlag
}

// withOne is catalogFlags.withOne, for a change by the operator.
func (f *changeFlags) withOne(
	ctx context.Context, s *streams, logger *slog.Logger,
	do func(context.Context, saleStore) (catalog.CountedSale, error),
) error {
	name, err := f.name()
	if err != nil {
		return err
	}
	return f.catalogFlags.withOne(catalog.WithOperator(ctx, name), s, logger, do)
}

// saleArg names the sale that a command is about.
type saleArg struct {
	Sale uuid.UUID `arg:"" help:"Id of the sale."`
}

// moment is a time as an operator writes it: RFC 3339, a date, which begins in UTC, or +5m or -5m, from now.
type moment struct{ time.Time }

// UnmarshalText implements encoding.TextUnmarshaler.
func (m *moment) UnmarshalText(text []byte) error {
	written := string(text)
	if strings.HasPrefix(written, "+") || strings.HasPrefix(written, "-") {
		if from, err := time.ParseDuration(written); err == nil {
			m.Time = time.Now().Add(from)
			return nil
		}
	}
	for _, layout := range []string{time.RFC3339, time.DateOnly} {
		if t, err := time.Parse(layout, written); err == nil && !t.IsZero() { // which would stand for none
			m.Time = t
			return nil
		}
	}
	return usagef("%q is not a time: want one like 2026-11-27T09:00:00Z, a date like 2026-11-27 (in UTC), or +5m or -1h, "+
		"from now", text)
}

type saleCreateCmd struct {
	changeFlags
	Name              string        `required:"" env:"STAMPEDE_SALE_NAME" help:"Name of the sale."`
	Stock             int64         `env:"STAMPEDE_SALE_STOCK" placeholder:"UNITS" help:"Units for sale; left out with --item."`
	Item              []saleItem    `env:"STAMPEDE_SALE_ITEM" placeholder:"CODE:STOCK[:PRICE]" help:"An item that the sale sells, such as a size: its code, units, and the price of one in minor units of the currency. Repeat it for each."`
	PerOrderLimit     int64         `default:"1" env:"STAMPEDE_SALE_PER_ORDER_LIMIT" placeholder:"UNITS" help:"Most units per order (${default})."`
	OpensAt           moment        `env:"STAMPEDE_SALE_OPENS_AT" placeholder:"TIME" help:"When it opens, RFC 3339, a date in UTC, or +5m (default: immediately)."`
	ClosesAt          moment        `env:"STAMPEDE_SALE_CLOSES_AT" placeholder:"TIME" help:"When it closes, RFC 3339, a date in UTC, or +5m (default: never)."`
	PaymentWindow     time.Duration `default:"0s" env:"STAMPEDE_SALE_PAYMENT_WINDOW" placeholder:"DURATION" help:"Time to pay for a confirmed order, in whole seconds. Until they are paid, confirmed orders count as held; with 0s confirmed is final (${default})."`
	PaymentGrace      time.Duration `default:"0s" env:"STAMPEDE_SALE_PAYMENT_GRACE" placeholder:"DURATION" help:"How long after its deadline an order still takes money, in whole seconds. Buyers are not told of it (${default})."`
	PaymentsPerSecond int64         `default:"0" env:"STAMPEDE_SALE_PAYMENTS_PER_SECOND" placeholder:"N" help:"Pace: how many confirmed orders a second may begin to pay, such as the limit of the payment provider. The payment window of an order begins with its turn; 0 is no limit (${default})."`
	UnitPrice         int64         `default:"0" env:"STAMPEDE_SALE_UNIT_PRICE" placeholder:"AMOUNT" help:"Price of a unit in minor units of the currency (ISO 4217): 1290 is 12.90 EUR, and 5000 is 5,000 ISK, whatever a payment provider counts. With it a payment of another sum is due for refund; 0 is none (${default})."`
	Currency          string        `env:"STAMPEDE_SALE_CURRENCY" placeholder:"CODE" help:"Currency of the price, a code of ISO 4217 such as EUR."`
	Shards            int           `default:"1" env:"STAMPEDE_SALE_SHARDS" placeholder:"N" help:"Partitions that share the stock and sell at the same time, at most STAMPEDE_PARTITIONS (${default})."`
	Waitlist          bool          `env:"STAMPEDE_SALE_WAITLIST" help:"Offer units that return when none are left to those who wait, in their order. In a sale with items each has a list of its own."`
	keyFlag
}

func (c *saleCreateCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	if err := wantAtLeast("--shards", c.Shards, 1); err != nil {
		return err
	}
	return c.withOne(ctx, s, logger, func(ctx context.Context, sales saleStore) (catalog.CountedSale, error) {
		key := c.key()
		items, stock := itemTerms(c.Item)
		stock += c.Stock // not the sum of the items if there is a stock: Validate refuses it
		sale, _, err := sales.CreateOnce(ctx, reservation.Terms{
			Name: c.Name, Stock: stock, Items: items, PerOrderLimit: c.PerOrderLimit,
			OpensAt: c.OpensAt.Time, ClosesAt: c.ClosesAt.Time, PaymentWindow: c.PaymentWindow,
			PaymentGrace: c.PaymentGrace, PaymentsPerSecond: c.PaymentsPerSecond, UnitPrice: c.UnitPrice, Currency: c.Currency,
			Shards: c.Shards, Waitlist: c.Waitlist,
		}, key)
		return sale, mayBeDone(err, key)
	})
}

// saleItem is an item on the command line. Its name is its code.
type saleItem reservation.Item

// UnmarshalText implements encoding.TextUnmarshaler.
func (i *saleItem) UnmarshalText(text []byte) (err error) {
	parts := strings.Split(string(text), ":")
	if len(parts) < 2 || len(parts) > 3 {
		return fmt.Errorf("%q is not CODE:STOCK or CODE:STOCK:PRICE, such as m:100:12900", text)
	}
	i.Code, i.Name = parts[0], parts[0]
	for n, to := range []*int64{&i.Stock, &i.UnitPrice}[:len(parts)-1] {
		if *to, err = strconv.ParseInt(parts[n+1], 10, 64); err != nil {
			return fmt.Errorf("%q of %q is not a whole number", parts[n+1], text)
		}
	}
	return nil
}

// itemTerms returns the items and the sum of their units.
func itemTerms(all []saleItem) (items []reservation.Item, stock int64) {
	for _, i := range all {
		items = append(items, reservation.Item(i))
		stock += i.Stock
	}
	return items, stock
}

type saleListCmd struct {
	readOnly
	catalogFlags
	After uuid.UUID `env:"STAMPEDE_SALE_AFTER" placeholder:"ID" help:"List sales older than this one."`
	Limit int       `default:"50" env:"STAMPEDE_SALE_LIMIT" placeholder:"N" help:"Most sales to list (${default})."`
}

func (c *saleListCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	if err := wantAtLeast("--limit", c.Limit, 1); err != nil {
		return err
	}
	return c.with(ctx, s, logger, writeSales, func(ctx context.Context, sales saleStore) ([]catalog.CountedSale, error) {
		return sales.List(ctx, c.After, c.Limit)
	})
}

type saleShowCmd struct {
	readOnly
	catalogFlags
	saleArg
}

func (c *saleShowCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	return c.with(ctx, s, logger, writeSale, func(ctx context.Context, sales saleStore) ([]catalog.CountedSale, error) {
		sale, err := sales.Show(ctx, c.Sale)
		return []catalog.CountedSale{sale}, err
	})
}

type salePauseCmd struct {
	changeFlags
	saleArg
}

func (c *salePauseCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	return c.withOne(ctx, s, logger, func(ctx context.Context, sales saleStore) (catalog.CountedSale, error) {
		return sales.Pause(ctx, c.Sale)
	})
}

type saleResumeCmd struct {
	changeFlags
	saleArg
}

func (c *saleResumeCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	return c.withOne(ctx, s, logger, func(ctx context.Context, sales saleStore) (catalog.CountedSale, error) {
		return sales.Resume(ctx, c.Sale)
	})
}

type saleEndCmd struct {
	changeFlags
	yesFlag
	saleArg
}

func (c *saleEndCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	if err := c.askable(s); err != nil {
		return err
	}
	return c.withOne(ctx, s, logger, func(ctx context.Context, sales saleStore) (catalog.CountedSale, error) {
		err := c.confirm(ctx, s, func() (string, error) {
			sale, err := sales.Show(ctx, c.Sale)
			return fmt.Sprintf("The sale %q ends: of %s units %s are sold, %s held, %s unsold.", sale.Name,
				format.Count(sale.Stock), format.Count(sale.Sold), format.Count(sale.Held), format.Count(sale.Available)), err
		})
		if err != nil {
			return catalog.CountedSale{}, err
		}
		return sales.End(ctx, c.Sale)
	})
}

type saleRestockCmd struct {
	changeFlags
	saleArg
	Units int64      `arg:"" optional:"" help:"Units to add; -50 removes 50 unsold units. Left out with --item."`
	Item  []saleItem `env:"STAMPEDE_SALE_ITEM" placeholder:"CODE:UNITS" help:"Units of an item to add; m:-50 removes 50 unsold units of m. Repeat it for each."`
	keyFlag
}

func (c *saleRestockCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	return c.withOne(ctx, s, logger, func(ctx context.Context, sales saleStore) (catalog.CountedSale, error) {
		key := c.key()
		if len(c.Item) == 0 {
			sale, err := sales.Restock(ctx, c.Sale, c.Units, key)
			return sale, mayBeDone(err, key)
		}
		units := make(map[string]int64)
		for _, i := range c.Item {
			if i.UnitPrice != 0 {
				return catalog.CountedSale{}, &order.InvalidError{Field: "--item", Reason: "must be CODE:UNITS, without a price"}
			}
			units[i.Code] += i.Stock
		}
		if c.Units != 0 {
			return catalog.CountedSale{}, &order.InvalidError{Field: "units", Reason: "must be left out with --item"}
		}
		sale, err := sales.RestockItems(ctx, c.Sale, units, key)
		return sale, mayBeDone(err, key)
	})
}

type saleRenameCmd struct {
	changeFlags
	saleArg
	Name *string    `arg:"" optional:"" help:"New name of the sale. Left out to rename items only."`
	Item []itemName `sep:"none" env:"STAMPEDE_SALE_ITEM" placeholder:"CODE:NAME" help:"New name of an item. Repeat it for each."`
}

func (c *saleRenameCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	return c.withOne(ctx, s, logger, func(ctx context.Context, sales saleStore) (catalog.CountedSale, error) {
		to := catalog.Names{Sale: c.Name}
		for _, i := range c.Item {
			if to.Items == nil {
				to.Items = make(map[string]string)
			}
			to.Items[i.code] = i.name
		}
		return sales.Rename(ctx, c.Sale, to)
	})
}

// itemName is the new name of an item on the command line.
type itemName struct{ code, name string }

// UnmarshalText implements encoding.TextUnmarshaler.
func (i *itemName) UnmarshalText(text []byte) (err error) {
	var named bool
	if i.code, i.name, named = strings.Cut(string(text), ":"); !named {
		err = fmt.Errorf("%q is not CODE:NAME, such as m:Medium", text)
	}
	return err
}

type saleHistoryCmd struct {
	readOnly
	catalogFlags
	saleArg
	Limit int `default:"1000" env:"STAMPEDE_SALE_LIMIT" placeholder:"N" help:"Most changes to show, the newest ones (${default})."`
}

func (c *saleHistoryCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	if err := wantAtLeast("--limit", c.Limit, 1); err != nil {
		return err
	}
	var changes []catalog.Change
	err := c.open(ctx, logger, func(sales saleStore) (err error) {
		changes, err = sales.History(ctx, c.Sale, c.Limit)
		return err
	})
	if err != nil {
		return err
	}
	return writeAll(c.outputFlag, s.out, changes, catalog.Change.View, writeChanges)
}

func writeChanges(w io.Writer, changes []catalog.Change) error {
	t := newTable(w, "TIME", "REVISION", "CHANGE", "OPERATOR", "DETAILS")
	for _, c := range changes {
		t.row(second(c.OccurredAt), c.Revision, c.Name(), orDash(c.Operator), details(c.Data))
	}
	return t.Flush()
}

// keyFlag is for commands that take effect again if they are repeated without a key.
type keyFlag struct {
	IdempotencyKey string `env:"STAMPEDE_SALE_IDEMPOTENCY_KEY" placeholder:"KEY" help:"Name of this request: repeating it with the same key changes nothing more (default: random)."`
}

func (f keyFlag) key() string {
	if f.IdempotencyKey == "" {
		return uuid.NewString()
	}
	return f.IdempotencyKey
}

// mayBeDone adds how to repeat the request to an error after which it may still have taken effect.
func mayBeDone(err error, key string) error {
	if errors.Is(err, reservation.ErrUnavailable) || errors.Is(err, pg.ErrChangeUnknown) ||
		errors.Is(err, apiclient.ErrUnknown) {
		return fmt.Errorf("%w; repeat it with --idempotency-key=%s, or it may be done twice", err, key)
	}
	return err
}

type saleArchiveCmd struct {
	noServerFlag
	storesFlags
	outputFlag
	Sale uuid.UUID     `arg:"" optional:"" help:"Id of the sale (default: all that can be archived)."`
	Dir  string        `required:"" env:"STAMPEDE_SALE_DIR" placeholder:"DIR" type:"existingdir" help:"Where the files are written, one for each sale."`
	Keep time.Duration `default:"2160h" env:"STAMPEDE_SALE_KEEP" placeholder:"DURATION" help:"How long ago the end of a sale and the last change of its orders must be (${default})."`
}

// Validate is called by kong.
func (c *saleArchiveCmd) Validate() error {
	return cmp.Or(c.keysFlags.Validate(), c.validate("it moves orders from Postgres into files on this machine"))
}

// Run archives one sale, or all that can be archived. Of all sales, one that cannot be archived yet stops no other.
func (c *saleArchiveCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	if err := wantAtLeast("--keep", c.Keep, 0); err != nil {
		return err
	}
	return c.with(ctx, 2, logger, func(b *backend) error { return c.archive(ctx, s, b, logger) })
}

func (c *saleArchiveCmd) archive(ctx context.Context, s *streams, b *backend, logger *slog.Logger) error {
	archiver, err := archive.New(ctx, archive.Config{
		Catalog: b.catalog, Dir: c.Dir, Keep: c.Keep, Logger: logger,
	})
	if err != nil {
		return err
	}
	defer archiver.Close()
	ctx, stop := s.watch(ctx, "looking for sales")
	defer stop()
	due := []uuid.UUID{c.Sale}
	if c.Sale == uuid.Nil {
		if due, err = archiver.Due(ctx); err != nil {
			return err
		}
	}
	var failed []error
	archived := []archive.Archived{}
	for _, sale := range due {
		done, err := archiver.Sale(ctx, sale)
		switch {
		case err == nil:
			archived = append(archived, done)
			if !c.json() {
				const line = "sale %s: %s orders with %s events are in %s (%s bytes), and were deleted, in %v\n"
				_, err = fmt.Fprintf(s.out, line, sale, format.Count(done.Orders), format.Count(done.Events), done.Path,
					format.Count(done.Bytes), done.Took.Round(time.Millisecond))
			}
		case errors.Is(err, archive.ErrRefused) && c.Sale == uuid.Nil:
			_, err = fmt.Fprintln(s.err, err)
		}
		failed = append(failed, err)
	}
	if c.json() {
		failed = append(failed, writeJSON(s.out, archived))
	}
	return errors.Join(failed...)
}

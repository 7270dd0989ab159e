// Package catalog holds the definitions of sales in Postgres: it creates and changes them
// (catalog.go), publishes them to Redis (publish.go), changes their stock and that of their items
// (restock.go) and the names of both (publish.go), joins them to draws and waiting lists (draw.go),
// and counts their units in both (sale_count.go).
package catalog

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

// The names of the events of a sale.
const (
	eventCreated = "SaleCreated"
	// eventItemsCreated is eventCreated of a sale with items. Versions without them do not publish it.
	eventItemsCreated = "SaleWithItemsCreated"
	eventPaused       = "SalePaused"
	eventResumed      = "SaleResumed"
	eventEnded        = "SaleEnded"
	eventRestocked    = "SaleRestocked"
	eventRebuilt      = "SaleRebuilt"
	eventLowering     = "SaleLowering"
	// eventRenamed: Redis has no names. A version without them stops at one that was not published yet.
	eventRenamed = "SaleRenamed"
	// eventReconciled: differences between Redis and Postgres were repaired. It changes no terms.
	eventReconciled = "SaleReconciled"
	// Versions without draws and waiting lists stop at these. Of the steps of a draw Redis knows nothing.
	eventDrawCreated = "DrawCreated"
	eventDrawFrozen  = "DrawFrozen"
	eventDrawSeeded  = "DrawSeeded"
	eventDrawVoided  = "DrawVoided"
	// eventDrawOpening: an operator has what is left sold to everybody when each rank had its turn. A worker does so.
	eventDrawOpening     = "DrawOpening"
	eventDrawOpened      = "DrawOpened"
	eventWaitlistCreated = "WaitlistCreated"
	// eventWaitlistClosed: nobody can join any more. A worker sells plainly when nobody waits.
	eventWaitlistClosed = "WaitlistClosed"
)

var (
	// ErrIdempotencyKeyReused is returned for a change whose idempotency key was used for another one.
	ErrIdempotencyKeyReused = errors.New("this idempotency key was used for another change")
	// ErrNotInForce is returned for a change that is stored in Postgres and could not be published
	// to Redis. A worker will publish it. A retry is safe, except for a restock without an
	// idempotency key, which would be a second one. It wraps ErrUnavailable.
	ErrNotInForce = fmt.Errorf(
		"the change is recorded, and takes effect when it can be published to Redis: %w", reservation.ErrUnavailable,
	)
)

// Catalog holds the definitions of sales. A change is made in Postgres and then published to Redis
// (publish.go); a worker retries what could not be published. Safe for concurrent use.
type Catalog struct {
	stores
	publisher
	reader
}

// stores are where sales are.
type stores struct {
	// Pool and Store are what New got: what works on sales in Postgres and in Redis needs no more. They never change.
	Pool  *pgxpool.Pool
	Store *reservation.Store
}

// New returns a catalog of the sales in Postgres whose stock is in store.
func New(pool *pgxpool.Pool, store *reservation.Store) *Catalog {
	both := stores{pool, store}
	return &Catalog{both, publisher{both}, reader{both}}
}

// Create makes a sale. It returns an *InvalidError for invalid terms. While Redis is unavailable
// the sale is created too, and opens once it can be published.
func (c *Catalog) Create(ctx context.Context, t reservation.Terms) (CountedSale, error) {
	sale, _, err := c.CreateOnce(ctx, t, "")
	return sale, err
}

// CreateOnce is Create with an idempotency key, which is unique among all sales. A repeat creates
// nothing and returns the sale as it was created. If the key was used for other terms, the error is
// ErrIdempotencyKeyReused.
func (c *Catalog) CreateOnce(
	ctx context.Context, t reservation.Terms, idempotencyKey string,
) (sale CountedSale, replayed bool, err error) {
	if err := t.Validate(); err != nil {
		return CountedSale{}, false, err
	}
	if idempotencyKey != "" {
		if err := order.ValidateIdempotencyKey(idempotencyKey); err != nil {
			return CountedSale{}, false, err
		}
	}
	sale, err = c.createdBefore(ctx, t, idempotencyKey)
	replayed = err == nil
	if errors.Is(err, reservation.ErrSaleNotFound) {
		sale, err = c.insert(ctx, t, idempotencyKey)
		if errors.Is(err, pgx.ErrNoRows) { // the same request was served elsewhere first
			sale, err = c.createdBefore(ctx, t, idempotencyKey)
			replayed = true
		}
	}
	var invalid *order.InvalidError
	switch {
	case errors.Is(err, ErrIdempotencyKeyReused), errors.As(err, &invalid):
		return CountedSale{}, false, err
	case errors.Is(err, pg.ErrChangeUnknown):
		return CountedSale{}, false, fmt.Errorf("create sale: %w", err)
	case err != nil:
		return CountedSale{}, false, fmt.Errorf("%w: create sale: %w", reservation.ErrUnavailable, err)
	}
	for _, id := range []uuid.UUID{sale.ID, sale.EntriesID} {
		if id == uuid.Nil {
			continue
		}
		if err := c.publish(ctx, id); err != nil {
			c.Store.Logger.Warn("a new sale opens later: it could not be published to Redis", "sale", id, "error", err)
		}
	}
	return sale, replayed, nil
}

// insert creates a sale in Postgres. The error is pgx.ErrNoRows if another one was created with the idempotency key.
func (c *Catalog) insert(ctx context.Context, t reservation.Terms, idempotencyKey string) (CountedSale, error) {
	if !t.ClosesAt.IsZero() && !t.ClosesAt.After(time.Now()) {
		return CountedSale{}, &order.InvalidError{Field: "closes_at", Reason: "must be in the future"}
	}
	sale := reservation.Sale{ID: uuid.Must(uuid.NewV7()), Terms: t, Partitions: c.Store.Keys.Partitions}
	sale.Shards = max(1, t.Shards)
	if sale.Shards > sale.Partitions {
		return CountedSale{}, &order.InvalidError{Field: "shards", Reason: fmt.Sprintf(
			"must be at most the number of partitions, which is %d (STAMPEDE_PARTITIONS)", sale.Partitions)}
	}
	if t.Waitlist {
		err := c.insertWithWaitlist(ctx, &sale, idempotencyKey)
		return initialCount(sale, t.Stock, sale.Shards, t.Items), err
	}
	err := pg.InOneStatement(ctx, c.Pool, []any{&sale.Epoch, &sale.Revision, &sale.CreatedAt},
		sql.CatalogInsertSale, insertArgs(ctx, sale, idempotencyKey)...)
	return initialCount(sale, t.Stock, sale.Shards, t.Items), err
}

// insertArgs are the arguments of catalog/insert_sale.sql.
func insertArgs(ctx context.Context, s reservation.Sale, idempotencyKey string) []any {
	t := s.Terms.View()
	return []any{
		s.ID, t.Name, t.Stock, t.PerOrderLimit, t.OpensAt, t.ClosesAt, t.PaymentWindowSeconds, s.Partitions,
		zeronull.Text(idempotencyKey), t.Shards, zeronull.Text(operatorIn(ctx)), t.PaymentGraceSeconds, t.PaymentsPerSecond,
		t.UnitPrice, t.Currency, s.Items,
	}
}

// createdBefore returns the sale that was created with the idempotency key, or ErrSaleNotFound.
func (c *Catalog) createdBefore(ctx context.Context, t reservation.Terms, idempotencyKey string) (CountedSale, error) {
	if idempotencyKey == "" {
		return CountedSale{}, reservation.ErrSaleNotFound
	}
	var id uuid.UUID
	var name string
	var stock int64
	var shards int
	var items []reservation.Item
	err := c.Pool.QueryRow(ctx, sql.CatalogFindCreatedSale, idempotencyKey).Scan(&id, &name, &stock, &shards, &items)
	if errors.Is(err, pgx.ErrNoRows) {
		return CountedSale{}, reservation.ErrSaleNotFound
	} else if err != nil {
		return CountedSale{}, err
	}
	found, err := findSale(ctx, c.Pool, id)
	if err != nil {
		return CountedSale{}, err
	}
	sale := initialCount(found[0].Sale, stock, shards, items)
	sale.Name = name
	if !sale.Terms.Equal(t) {
		return CountedSale{}, ErrIdempotencyKeyReused
	}
	return sale, nil
}

// initialCount returns the sale as it was created.
func initialCount(s reservation.Sale, stock int64, shards int, items []reservation.Item) CountedSale {
	s.Stock, s.Shards, s.State, s.CreatedAt = stock, shards, reservation.StateOpen, s.CreatedAt.UTC()
	s.Items = items
	counted := CountedSale{Sale: s, State: s.StateAt(s.CreatedAt), Available: stock}
	for _, item := range items {
		counted.Items = append(counted.Items, CountedItem{item, item.Stock})
	}
	return counted
}

// Pause halts a sale. Like Resume and End it may be repeated.
func (c *Catalog) Pause(ctx context.Context, id uuid.UUID) (CountedSale, error) {
	return c.setState(ctx, id, OpPause, eventPaused, reservation.StatePaused)
}

// Resume opens a paused sale again.
func (c *Catalog) Resume(ctx context.Context, id uuid.UUID) (CountedSale, error) {
	return c.setState(ctx, id, OpResume, eventResumed, reservation.StateOpen)
}

// End ends a sale permanently, with those who enter or wait for its units. The end of the places of a waiting list
// closes the list (closeList).
func (c *Catalog) End(ctx context.Context, id uuid.UUID) (CountedSale, error) {
	return c.setState(ctx, id, OpEnd, eventEnded, reservation.StateEnded)
}

func (c *Catalog) setState(
	ctx context.Context, id uuid.UUID, op Operation, event string, to reservation.State,
) (CountedSale, error) {
	next := func(_ context.Context, _ pgx.Tx, s reservation.Sale) (saleChange, error) {
		switch {
		case to != reservation.StateEnded && s.StateAt(time.Now()) == reservation.StateEnded:
			return saleChange{}, &reservation.IllegalTransitionError{Action: string(op), State: reservation.StateEnded}
		case s.State == to:
			return saleChange{}, nil
		}
		return saleChange{event, to, s.Stock, map[string]any{"stock": s.Stock}}, nil
	}
	other := func(ctx context.Context, tx pgx.Tx, s reservation.Sale) (saleChange, error) {
		if s.Waitlist { // the goods: only their list ends
			return closeList(s), nil
		}
		return next(ctx, tx, s)
	}
	if _, err := c.change(ctx, id, op, "", next, other); err != nil {
		return CountedSale{}, err
	}
	return c.publishAndShow(ctx, id, op, ErrNotInForce)
}

// saleChange is the next revision of a sale; the zero value changes nothing.
type saleChange struct {
	event string
	state reservation.State
	stock int64
	// data goes into the event; catalog/sale_changes.sql and catalog/find_sale_change.sql read
	// parts of it. Its name and items, if it has some, become those of the sale.
	data map[string]any
}

// lockSale excludes other changes of a sale, and of its items, until the end of the transaction.
func lockSale(ctx context.Context, tx pgx.Tx, id uuid.UUID) error {
	if _, err := tx.Exec(ctx, sql.CatalogLockItems, id); err != nil {
		return err
	}
	return tx.QueryRow(ctx, sql.CatalogLockSale, id).Scan(new(uuid.UUID))
}

// nextChange decides how a sale changes, which is locked.
type nextChange func(context.Context, pgx.Tx, reservation.Sale) (saleChange, error)

// change makes the next revision of a sale in one transaction that excludes other changes of it,
// and returns it; 0 if next changes nothing. If the operation has an effect on both halves of a pair (pair.go), other
// changes the other half. The error is a refusal, or wraps ErrUnavailable or pg.ErrChangeUnknown.
func (c *Catalog) change(
	ctx context.Context, id uuid.UUID, op Operation, idempotencyKey string, next, other nextChange,
) (revision int64, err error) {
	err = pg.InTransaction(ctx, c.Pool, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
		revision, err = c.changeIn(ctx, tx, id, op, idempotencyKey, next, other)
		return err
	})
	var illegal *reservation.IllegalTransitionError
	var invalid *order.InvalidError
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, reservation.ErrSaleNotFound
	case errors.As(err, &illegal), errors.As(err, &invalid),
		errors.Is(err, ErrIdempotencyKeyReused), errors.Is(err, errLoweringOpen):
		return 0, err
	case errors.Is(err, pg.ErrChangeUnknown):
		return 0, fmt.Errorf("%s sale=%s: %w", op, id, err)
	case err != nil:
		return 0, fmt.Errorf("%w: %s sale=%s: %w", reservation.ErrUnavailable, op, id, err)
	}
	return revision, nil
}

// publishAndShow publishes the change, also that of the other half of the sale's pair, and returns the sale. If that
// fails, the error wraps otherwise.
func (c *Catalog) publishAndShow(
	ctx context.Context, id uuid.UUID, op Operation, otherwise error,
) (CountedSale, error) {
	err := c.publishBoth(ctx, id)
	if err == nil {
		var sale CountedSale
		if sale, err = c.Show(ctx, id); err == nil {
			return sale, nil
		}
		// The change may be published, but Redis could not be read: the operator gets the same answer.
	}
	return CountedSale{}, fmt.Errorf("%s sale=%s: %w: %w", op, id, otherwise, err)
}

// operatorKey is the key of WithOperator.
type operatorKey struct{}

// WithOperator has changes of sales that are made with the context recorded as those of the operator.
func WithOperator(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, operatorKey{}, name)
}

// operatorIn returns the operator of a change; "" if Stampede makes it by itself.
func operatorIn(ctx context.Context) string {
	name, _ := ctx.Value(operatorKey{}).(string)
	return name
}

// Change is a revision of a sale.
type Change struct {
	Revision int64
	// Type is the name of the event: SaleCreated, SalePaused and so on.
	Type       string
	OccurredAt time.Time
	// Operator made the change. It is empty if Stampede made it by itself, or before operators were recorded.
	Operator string
	// Data is a JSON object.
	Data []byte
}

// Name returns the type in lower case and without the prefix Sale: created, paused, draw-frozen and so on.
func (c Change) Name() string {
	if c.Type == eventItemsCreated {
		return "created"
	}
	for _, of := range []string{"Draw", "Waitlist"} {
		if what, found := strings.CutPrefix(c.Type, of); found {
			return strings.ToLower(of + "-" + what)
		}
	}
	return strings.ToLower(strings.TrimPrefix(c.Type, "Sale"))
}

// ChangeView is a change as the HTTP API and the commands show it.
type ChangeView struct {
	Revision   int64           `json:"revision"`
	Change     string          `json:"change"`
	OccurredAt string          `json:"occurred_at"`
	Operator   string          `json:"operator,omitempty"`
	Data       json.RawMessage `json:"data"`
}

// View returns the change as it is shown.
func (c Change) View() ChangeView {
	return ChangeView{c.Revision, c.Name(), order.TimeText(c.OccurredAt), c.Operator, c.Data}
}

// History returns the newest changes of a sale, at most limit, oldest first. It returns ErrSaleNotFound for an
// unknown sale.
func (c *reader) History(ctx context.Context, sale uuid.UUID, limit int) ([]Change, error) {
	rows, _ := c.Pool.Query(ctx, sql.CatalogSaleHistory, sale, limit) // its error comes with the rows
	changes, err := pgx.CollectRows(rows, pgx.RowToStructByName[Change])
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: history of sale=%s: %w", reservation.ErrUnavailable, sale, err)
	case len(changes) == 0: // a sale is created with its first change
		return nil, reservation.ErrSaleNotFound
	}
	return changes, nil
}

// eventRetired: the buyers of a sale that is over leave Redis. Postgres answers for them from then on.
const eventRetired = "SaleRetired"

// ErrNotRetired is returned by Retire for a sale that has changed since the caller has looked, is not over, or has an
// order that is not final. Nothing was changed.
var ErrNotRetired = errors.New("the sale cannot be retired now")

// Retire makes the change of a sale that deletes its buyers in Redis (lua/retire.lua), and publishes it. Of a sale in
// that epoch and revision the caller knows that it is over, and that Redis has the same orders as Postgres. After
// ErrNotInForce a worker publishes the change.
func (c *Catalog) Retire(ctx context.Context, id uuid.UUID, epoch, revision int64) error {
	err := pg.InTransaction(ctx, c.Pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, sql.CatalogLockSale, id).Scan(new(uuid.UUID)); err != nil {
			return err
		}
		if why, err := Check(ctx, tx, OpRetire, id); err != nil || why != "" {
			return cmp.Or(err, ErrNotRetired)
		}
		return tx.QueryRow(ctx, sql.CatalogRetireSale, id, epoch, revision).Scan(new(int64))
	})
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotRetired
	}
	if err != nil {
		return fmt.Errorf("retire sale=%s: %w", id, err)
	}
	crashpoint.Hit(crashpoint.SaleRetired)
	if err := c.publish(ctx, id); err != nil {
		return fmt.Errorf("retire sale=%s: %w: %w", id, ErrNotInForce, err)
	}
	return nil
}

// retireShard deletes the buyers of one shard.
func (c *publisher) retireShard(
	ctx context.Context, sale uuid.UUID, partition int, epoch, revision string,
) *redis.Cmd {
	answer := lua.Retire.Run(ctx, c.Store.Redis, c.Store.Keys.OfShard(partition, sale), epoch, revision)
	crashpoint.Hit(crashpoint.ShardRetired)
	return answer
}

package catalog

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

// A raised stock takes effect in Postgres first. A lowered one does not, because only Redis knows
// how many units are taken: Postgres records a request (SaleLowering) and keeps the stock; Redis
// grants or refuses it in one step when it is published (publish.go); a granted one becomes the
// stock in Postgres (SaleRestocked). So Postgres never has less stock than Redis. The next publisher
// of the sale finishes an interrupted lowering. A rebuild sets the stock in Redis from Postgres, which
// withdraws an undecided request.

// TakenError is returned for a stock below the units that are taken.
type TakenError struct {
	// Taken is the number of units taken at the refusal: the lowest possible stock, of all Items together.
	Taken int64
	// Items are the taken units of the items that have too few left; empty in a sale without items.
	Items order.Items
}

func (e *TakenError) Error() string {
	if e.Items != "" {
		return "cannot lower the stock of items below the units that are taken: " + string(e.Items)
	}
	return fmt.Sprintf("cannot lower the stock of a sale below the %d units that are taken", e.Taken)
}

var (
	// ErrRestockUndecided is returned for a lowering while Redis is unavailable. The request stays;
	// a retry with the same idempotency key returns its outcome. It wraps ErrUnavailable.
	ErrRestockUndecided = fmt.Errorf(
		"the lower stock is recorded, and takes effect if Redis grants it: %w", reservation.ErrUnavailable,
	)
	// ErrRestockWithdrawn is returned for a lowering that a rebuild withdrew. Nothing was changed;
	// a retry with the same idempotency key makes a new attempt.
	ErrRestockWithdrawn = errors.New(
		"the stock was rebuilt before it could be lowered: nothing was changed, and the restock can be retried",
	)
)

// errLoweringOpen: Redis has not decided an earlier lowering, so the current stock is unknown.
var errLoweringOpen = errors.New("an earlier change of the stock is not published yet")

// restockTries bounds how many concurrent lowerings one restock finishes before its own.
const restockTries = 100

// Restock adds units to a sale, or removes some if units is negative. The error is a *TakenError if
// that many are not left. With an idempotency key a retry changes nothing and gets the first
// answer, a refusal included; a key that was used for other units returns ErrIdempotencyKeyReused.
// ErrRestockUndecided and ErrRestockWithdrawn occur for negative units, ErrNotInForce for positive
// ones.
func (c *Catalog) Restock(ctx context.Context, id uuid.UUID, units int64, idempotencyKey string) (CountedSale, error) {
	if units == 0 || units < -order.MaxStock || units > order.MaxStock {
		return CountedSale{}, &order.InvalidError{
			Field:  "units",
			Reason: fmt.Sprintf("must be a whole number from 1 to %d, or below zero to remove units", order.MaxStock),
		}
	}
	return c.restockBy(ctx, id, units, nil, idempotencyKey)
}

// restockBy is Restock, and RestockItems if the units are the sum of those of items.
func (c *Catalog) restockBy(
	ctx context.Context, id uuid.UUID, units int64, items map[string]int64, idempotencyKey string,
) (CountedSale, error) {
	if idempotencyKey != "" {
		if err := order.ValidateIdempotencyKey(idempotencyKey); err != nil {
			return CountedSale{}, err
		}
	}
	revision, err := c.changeStock(ctx, id, units, items, idempotencyKey)
	for try := 1; errors.Is(err, errLoweringOpen) && try < restockTries; try++ {
		if err := c.publish(ctx, id); err != nil {
			return CountedSale{}, fmt.Errorf("%w: restock sale=%s: %w: %w", reservation.ErrUnavailable, id, errLoweringOpen, err)
		}
		revision, err = c.changeStock(ctx, id, units, items, idempotencyKey)
	}
	if errors.Is(err, errLoweringOpen) {
		return CountedSale{}, fmt.Errorf("%w: restock sale=%s: %w", reservation.ErrUnavailable, id, err)
	} else if err != nil {
		return CountedSale{}, err
	}
	if units > 0 {
		return c.publishAndShow(ctx, id, OpRestock, ErrNotInForce)
	}
	sale, err := c.publishAndShow(ctx, id, OpRestock, ErrRestockUndecided)
	if err != nil {
		return CountedSale{}, err
	}
	state, err := findLowering(ctx, c.Pool, id, revision)
	switch {
	case err != nil:
		return CountedSale{}, fmt.Errorf("restock sale=%s: %w: %w", id, ErrRestockUndecided, err)
	case state.Taken != nil:
		return CountedSale{}, &TakenError{*state.Taken, state.TakenItems}
	case state.withdrawn():
		return CountedSale{}, fmt.Errorf("restock sale=%s: %w", id, ErrRestockWithdrawn)
	}
	return sale, nil
}

// changeStock records the change of the stock. It returns the revision that this made, or that an
// earlier call with this idempotency key made.
func (c *Catalog) changeStock(
	ctx context.Context, id uuid.UUID, units int64, items map[string]int64, idempotencyKey string,
) (revision int64, err error) {
	var before int64
	decide := func(ctx context.Context, tx pgx.Tx, s reservation.Sale) (saleChange, error) {
		if before, err = madeBefore(ctx, tx, id, idempotencyKey, units, items); before > 0 || err != nil {
			return saleChange{}, err
		}
		if s.StateAt(time.Now()) == reservation.StateEnded {
			return saleChange{}, &reservation.IllegalTransitionError{Action: "restock", State: reservation.StateEnded}
		}
		if latest, err := findLowering(ctx, tx, id, 0); err != nil {
			return saleChange{}, err
		} else if latest.Open {
			return saleChange{}, errLoweringOpen
		}
		stock := s.Stock + units
		change := saleChange{eventRestocked, s.State, stock, map[string]any{"stock": stock, "units": units}}
		if len(items)+len(s.Items) > 0 {
			if s.Items, err = restocked(s.Items, items); err != nil {
				return saleChange{}, err
			}
			change.data["item_units"], change.data["items"] = items, s.Items
		}
		switch {
		case stock > order.MaxStock:
			return saleChange{}, &order.InvalidError{
				Field: "units", Reason: fmt.Sprintf("must leave the stock at %d or below", order.MaxStock),
			}
		case stock < 1:
			return saleChange{}, &order.InvalidError{
				Field: "units", Reason: "must leave a stock of at least 1; to stop selling, end or pause the sale",
			}
		case units < 0:
			change.event, change.stock = eventLowering, s.Stock
			delete(change.data, "items")
		}
		return change, nil
	}
	revision, err = c.change(ctx, id, OpRestock, idempotencyKey, decide, nil)
	return max(revision, before), err
}

// madeBefore returns the revision that was made with this idempotency key, or 0. It frees the key of
// a withdrawn change.
func madeBefore(
	ctx context.Context, tx pgx.Tx, id uuid.UUID, idempotencyKey string, units int64, items map[string]int64,
) (revision int64, err error) {
	if idempotencyKey == "" {
		return 0, nil
	}
	var its int64
	var itsItems map[string]int64
	err = tx.QueryRow(ctx, sql.CatalogFindSaleChange, id, idempotencyKey).Scan(&revision, &its, &itsItems)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, nil
	case err != nil:
		return 0, err
	}
	if its < 0 {
		if l, err := findLowering(ctx, tx, id, revision); err != nil {
			return 0, err
		} else if l.withdrawn() {
			_, err := tx.Exec(ctx, sql.CatalogFreeSaleKey, id, revision)
			return 0, err
		}
	}
	if its != units || !maps.Equal(itsItems, items) {
		return 0, ErrIdempotencyKeyReused
	}
	return revision, nil
}

// lowering is the state of a request to lower the stock.
type lowering struct {
	Revision int64
	Done     bool
	// Taken is the number of units taken when Redis refused the request, TakenItems that of each item that had too few
	// left; nil, and empty, if it did not.
	Taken      *int64
	TakenItems order.Items
	// Open: the request is undecided.
	Open bool
}

// withdrawn reports whether a rebuild dropped the request.
func (l lowering) withdrawn() bool { return !l.Done && l.Taken == nil && !l.Open }

// findLowering returns the state of the request of that revision, or of the latest one if revision
// is 0; the zero value if there is none.
func findLowering(ctx context.Context, q pg.Querier, id uuid.UUID, revision int64) (lowering, error) {
	rows, _ := q.Query(ctx, sql.CatalogFindLowering, id, revision) // its error comes with the rows
	l, err := pgx.CollectOneRow(rows, pgx.RowToStructByName[lowering])
	if errors.Is(err, pgx.ErrNoRows) {
		return lowering{}, nil
	}
	return l, err
}

// lower asks Redis for a lower stock, records the answer, and returns the latest revision of the sale.
//
// With several shards each one removes units that it has left, until they are enough, of each item by itself. A shard
// remembers what it has removed for this revision, so every publisher gets the same answers. If all have too few, the
// refusal is recorded first, and then each shard puts back what it has removed; the next publisher completes that.
func (c *publisher) lower(
	ctx context.Context, asked reservation.Sale, wish publishedChange,
) (revision int64, err error) {
	state, err := findLowering(ctx, c.Pool, asked.ID, wish.Revision)
	if err != nil {
		return 0, err
	}
	if state.Taken == nil {
		refused, isLast, err := c.askToLower(ctx, asked, wish)
		if err != nil || !isLast {
			return asked.Revision, err
		}
		if refused == nil {
			return c.finishLowering(ctx, asked, wish)
		}
		if _, err = c.Pool.Exec(ctx, sql.CatalogRefuseLowering, asked.ID, wish.Revision, refused.Taken,
			zeronull.Text(refused.Items)); err != nil {
			return 0, err
		}
	}
	crashpoint.Hit(crashpoint.LoweringRefused)
	return asked.Revision, asked.Layout().EachShard(func(partition, _ int) error {
		word, err := lua.PutBack.Run(ctx, c.Store.Redis, []string{c.Store.Keys.Sale(partition, asked.ID)},
			asked.Epoch, wish.Revision).Text()
		if err == nil && word != "put-back" && word != "unchanged" {
			err = fmt.Errorf("%w (%s)", reservation.ErrLostSale, word)
		}
		return err
	})
}

// askToLower asks one shard after the other for units. If they have too few, it is refused: taken is the lowest stock
// that was possible, or a little more if units were moving between the shards. isLast is false if a shard has a later
// revision, so that another publisher has decided this one.
func (c *publisher) askToLower(
	ctx context.Context, asked reservation.Sale, wish publishedChange,
) (refused *TakenError, isLast bool, err error) {
	layout, wanted := asked.Layout(), map[int]int64{0: -wish.Units}
	for place, item := range asked.Items {
		wanted[place] = -wish.ItemUnits[item.Code]
	}
	// Units on their way between two shards are in neither.
	if err := c.Store.HelpUnits(ctx, asked.ID, layout, asked.Epoch); err != nil {
		return nil, false, err
	}
	missing := int64(0)
	for shard := range layout.Shards {
		change := func(item int) (units, least int64) {
			if layout.Shards == 1 {
				least = wanted[item]
			}
			return -wanted[item], least
		}
		answer, err := c.restock(ctx, asked, shard, wish.Revision, change)
		switch {
		case err != nil || answer.word == "unchanged":
			return nil, false, err
		case answer.word == "taken" && len(asked.Items) > 0:
			return takenOf(asked, answer.units), true, nil
		case answer.word == "taken":
			return &TakenError{Taken: answer.units[0]}, true, nil
		case layout.Shards == 1: // which removes all or nothing
			return nil, true, nil
		}
		missing = 0
		for item := range wanted {
			wanted[item] += answer.units[item]
			missing += wanted[item]
		}
		crashpoint.Hit(crashpoint.LoweringAsked)
	}
	switch {
	case missing == 0:
		return nil, true, nil
	case len(asked.Items) == 0:
		return &TakenError{Taken: asked.Stock + wish.Units + missing}, true, nil
	}
	taken := map[int]int64{}
	for place, item := range asked.Items {
		if wanted[place] > 0 {
			taken[place] = item.Stock + wish.ItemUnits[item.Code] + wanted[place]
		}
	}
	return takenOf(asked, taken), true, nil
}

// takenOf is the refusal for items of which so many units are taken.
func takenOf(s reservation.Sale, units map[int]int64) *TakenError {
	var lines []byte
	for _, place := range slices.Sorted(maps.Keys(units)) {
		lines = strconv.AppendInt(append(lines, order.ItemLetter(place)...), units[place], 10)
	}
	taken := order.Lines(lines)
	return &TakenError{taken.Units(), taken.Named(s.Codes())}
}

// restockAnswer is an answer of lua/restock.lua or lua/restock_items.lua: its word, and the units by the places of the
// items. In a sale without items the place is 0.
type restockAnswer struct {
	word  string
	units map[int]int64
}

// restockedUnits are units by the letters of items, as restock_items.lua writes them; without letters those of a sale
// without items. Unlike those of an order they may be 0, many, or below it.
var restockedUnits = regexp.MustCompile(`^([a-zA-Z]-?[0-9]+)*$|^-?[0-9]+$`)

// restock changes the stock of a shard, or that of its items: by so many units of each, and by at least so many below
// zero.
func (c *publisher) restock(
	ctx context.Context, s reservation.Sale, shard int, revision int64, change func(item int) (units, least int64),
) (answer restockAnswer, err error) {
	script, args := lua.Restock, []any{s.Epoch, revision}
	if len(s.Items) == 0 {
		units, least := change(0)
		args = append(args, units, least)
	} else {
		script = lua.RestockItems
	}
	for place := range s.Items {
		if units, least := change(place); units != 0 {
			args = append(args, order.ItemLetter(place), units, least)
		}
	}
	key := c.Store.Keys.Sale(s.Layout().Partition(shard), s.ID)
	text, err := script.Run(ctx, c.Store.Redis, []string{key}, args...).Text()
	if err != nil {
		return restockAnswer{}, err
	}
	word, rest, _ := strings.Cut(text, " ")
	answer = restockAnswer{word, map[int]int64{}}
	switch {
	case word == "unchanged":
		return answer, nil
	case word != "restocked" && word != "taken" || !restockedUnits.MatchString(rest):
		return restockAnswer{}, notRestocked(s.ID, text)
	}
	for _, line := range restockedLine.FindAllStringSubmatch(rest, -1) {
		place := max(0, strings.Index(order.ItemLetters(order.MaxItems), line[1]))
		if answer.units[place], err = strconv.ParseInt(line[2], 10, 64); err != nil {
			return restockAnswer{}, notRestocked(s.ID, text)
		}
	}
	return answer, nil
}

var restockedLine = regexp.MustCompile(`([a-zA-Z]?)(-?[0-9]+)`)

// notRestocked is the error of a script that could not change the stock.
func notRestocked(sale uuid.UUID, answer string) error {
	if answer == "unknown-sale" || strings.HasPrefix(answer, "gap ") {
		return fmt.Errorf("%w (%s)", reservation.ErrLostSale, answer)
	}
	return fmt.Errorf("sale=%s: a change of its stock was refused by Redis: %s", sale, answer)
}

// finishLowering applies a granted stock to Postgres, unless another process has, and returns the
// latest revision of the sale.
func (c *publisher) finishLowering(
	ctx context.Context, granted reservation.Sale, wish publishedChange,
) (revision int64, err error) {
	err = pg.InTransaction(ctx, c.Pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := lockSale(ctx, tx, granted.ID); err != nil {
			return err
		}
		found, err := findSale(ctx, tx, granted.ID)
		if err != nil {
			return err
		}
		now := found[0].Sale
		l, err := findLowering(ctx, tx, now.ID, wish.Revision)
		switch {
		case err != nil:
			return err
		case l.Done:
			revision = now.Revision
			return nil
		case now.Epoch != granted.Epoch:
			// A rebuild replaced the stock after the grant, which is void.
			return fmt.Errorf("%w: its stock was rebuilt meanwhile", reservation.ErrUnavailable)
		}
		data := map[string]any{"stock": wish.Stock, "lowering": wish.Revision}
		if len(now.Items) > 0 {
			if data["items"], err = restocked(now.Items, wish.ItemUnits); err != nil {
				return err
			}
		}
		// The operator is the one who asked for it: this process may be another one.
		return tx.QueryRow(ctx, sql.CatalogChangeSale, now.ID, now.State, wish.Stock, eventRestocked, data,
			nil, nil).Scan(&revision)
	})
	if err != nil {
		return 0, fmt.Errorf("lower the stock of sale=%s: %w", granted.ID, err)
	}
	return revision, nil
}

// RestockItems is Restock of items of a sale, by their codes: all are changed, or none. An item's stock may become 0,
// that of the sale may not. A *TakenError names the items that have too few left.
func (c *Catalog) RestockItems(
	ctx context.Context, id uuid.UUID, units map[string]int64, idempotencyKey string,
) (CountedSale, error) {
	var sum, moved int64
	for _, n := range units {
		if n == 0 || n < -order.MaxStock || n > order.MaxStock {
			return CountedSale{}, invalidItems("must each have 1 to %d units, or below zero to remove some", order.MaxStock)
		}
		sum, moved = sum+n, moved+max(n, -n)
	}
	if moved == 0 {
		return CountedSale{}, invalidItems("must be one or more")
	} else if max(sum, -sum) != moved {
		return CountedSale{}, invalidItems("must all be raised, or all be lowered")
	}
	return c.restockBy(ctx, id, sum, units, idempotencyKey)
}

func invalidItems(reason string, args ...any) error {
	return &order.InvalidError{Field: "items", Reason: fmt.Sprintf(reason, args...)}
}

// restocked returns the items of a sale with these units more.
func restocked(items []reservation.Item, units map[string]int64) ([]reservation.Item, error) {
	switch {
	case len(items) == 0:
		return nil, invalidItems("must be left out: the sale has none")
	case len(units) == 0:
		return nil, &order.InvalidError{Field: "units", Reason: "must be left out: the sale has items, each with its own"}
	}
	items = slices.Clone(items)
	for code, n := range units {
		item, err := itemOf(items, code)
		if err != nil {
			return nil, err
		}
		if item.Stock += n; item.Stock < 0 {
			return nil, invalidItems("must leave the stock of %s at 0 or above", code)
		}
	}
	return items, nil
}

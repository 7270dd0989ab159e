package catalog

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/internal/pg"
	"stampede/reservation"
	"stampede/sql"
)

// A draw, and a waiting list, is a pair of sales: the goods, and the entries, which are places in a waiting list.
// An operator of one of them alone could strand the other: units that nobody is offered, or people who wait for
// nothing. This file says for each operation what it does to each half.

// Operation is what an operator does to a sale, or Stampede by itself.
type Operation string

// The operations. They read as verbs: "cannot restock a sale that is …".
const (
	OpPause   Operation = "pause"
	OpResume  Operation = "resume"
	OpEnd     Operation = "end"
	OpRestock Operation = "restock"
	OpRename  Operation = "rename"
	OpDraw    Operation = "draw"
	// OpOpen sells to everybody what a draw has left.
	OpOpen  Operation = "open"
	OpShard Operation = "raise the shards of"
	// OpRetire: the buyers leave Redis. OpArchive: the orders leave Postgres.
	OpRetire  Operation = "retire"
	OpArchive Operation = "archive"
)

// Half is what a sale is in its pair.
type Half string

// The halves.
const (
	DrawGoods   Half = "drawn"
	DrawEntries Half = "the entries of a draw"
	ListGoods   Half = "sold with a waiting list"
	ListPlaces  Half = "the places of a waiting list"
)

// Effect is what an operation does to the pair of a sale.
type Effect int

// The effects.
const (
	_ Effect = iota // an operation without a rule
	// Alone: it changes this half only, and both go on as they should.
	Alone
	// Both: it changes both halves, in one transaction.
	Both
	// Later: it waits until no unit of the goods will be offered any more.
	Later
	// Refused: it fits this half never; Rule.Instead says what does.
	Refused
)

// Rule is the effect of an operation on one half of a pair.
type Rule struct {
	Effect
	// Instead is what to do in the place of one that is Refused. In it GOODS stands for the id of the goods.
	Instead string
}

var (
	alone, both, later = Rule{Effect: Alone}, Rule{Effect: Both}, Rule{Effect: Later}
	inPair             = Rule{Refused, "create another sale for another draw"}
	sellsByItself      = Rule{Refused, "the sale GOODS sells to everybody when nobody waits"}
	oneShard           = Rule{Refused, "its units are drawn in one shard"}
	placesShard        = Rule{Refused, "places have one order"}
)

// pairRules has the rule of each operation for each half. docs/draws.md has them in words.
var pairRules = map[Operation]map[Half]Rule{
	// A sale that is paused offers nothing, and its list takes who comes. Paused entries take nobody.
	OpPause:  {DrawGoods: alone, DrawEntries: alone, ListGoods: alone, ListPlaces: alone},
	OpResume: {DrawGoods: alone, DrawEntries: alone, ListGoods: alone, ListPlaces: alone},
	// Nobody enters for goods that have ended. The times of a draw stay when its entries end early. A list whose places
	// end is closed, and the goods know it.
	OpEnd: {DrawGoods: both, DrawEntries: alone, ListGoods: both, ListPlaces: both},
	OpRestock: {
		DrawGoods: alone, DrawEntries: alone, ListGoods: alone,
		ListPlaces: {Refused, "restock the sale GOODS, whose units are offered"},
	},
	OpRename: {
		DrawGoods: alone, DrawEntries: alone, ListGoods: both,
		ListPlaces: {Refused, "rename the sale GOODS, after which they are named"},
	},
	OpDraw: {DrawGoods: inPair, DrawEntries: inPair, ListGoods: inPair, ListPlaces: inPair},
	OpOpen: {
		DrawGoods:   alone,
		DrawEntries: {Refused, "open the sale GOODS, whose units are drawn"},
		ListGoods:   sellsByItself,
		ListPlaces:  sellsByItself,
	},
	OpShard: {DrawGoods: oneShard, DrawEntries: alone, ListGoods: alone, ListPlaces: placesShard},
	// The list of a draw is in Postgres from the freeze on. Those who wait are looked up in Redis, too.
	OpRetire:  {DrawGoods: alone, DrawEntries: alone, ListGoods: alone, ListPlaces: later},
	OpArchive: {DrawGoods: alone, DrawEntries: later, ListGoods: alone, ListPlaces: later},
}

// RuleOf returns the rule of an operation for one half of a pair. What has none is refused.
func RuleOf(op Operation, half Half) Rule {
	if rule, known := pairRules[op][half]; known {
		return rule
	}
	return Rule{Refused, "this version does not know what that does to its other half"}
}

// pair is two sales that belong together.
type pair struct {
	Goods, Entries uuid.UUID
	Kind           string
	Over           bool
}

// half returns which one of them the sale is; "" for the zero value.
func (p *pair) half(sale uuid.UUID) Half {
	switch {
	case p.Goods == uuid.Nil:
		return ""
	case p.Kind == kindDraw && sale == p.Goods:
		return DrawGoods
	case p.Kind == kindDraw:
		return DrawEntries
	case sale == p.Goods:
		return ListGoods
	}
	return ListPlaces
}

// findPair returns the pair of a sale; the zero value if it is in none.
func findPair(ctx context.Context, on pg.Querier, sale uuid.UUID) (pair, error) {
	rows, _ := on.Query(ctx, sql.CatalogFindPair, sale) // its error comes with the rows
	p, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[pair])
	if errors.Is(err, pgx.ErrNoRows) {
		return pair{}, nil
	}
	return p, err
}

// rule returns the rule of an operation on the sale, or an *IllegalTransitionError if it is refused. A sale that is in
// no pair is changed alone.
func (p *pair) rule(op Operation, sale uuid.UUID) (Rule, error) {
	half := p.half(sale)
	if half == "" {
		return alone, nil
	}
	rule := RuleOf(op, half)
	if rule.Effect != Refused {
		return rule, nil
	}
	return rule, &reservation.IllegalTransitionError{
		Action: string(op), State: reservation.State(half),
		Instead: strings.ReplaceAll(rule.Instead, "GOODS", p.Goods.String()),
	}
}

// changeIn is change in a transaction. It locks goods before their entries.
func (c *Catalog) changeIn(
	ctx context.Context, tx pgx.Tx, id uuid.UUID, op Operation, idempotencyKey string, next, other nextChange,
) (revision int64, err error) {
	p, err := findPair(ctx, tx, id)
	if err != nil {
		return 0, err
	}
	if rule, err := p.rule(op, id); err == nil && rule.Effect == Both && id == p.Entries {
		if err := lockSale(ctx, tx, p.Goods); err != nil {
			return 0, err
		}
	}
	if err := lockSale(ctx, tx, id); err != nil {
		return 0, err
	}
	if p, err = findPair(ctx, tx, id); err != nil { // it may have been made while this waited for the lock
		return 0, err
	}
	rule, refusal := p.rule(op, id)
	if rule.Effect == Both && id == p.Entries {
		if _, err := changeOne(ctx, tx, p.Goods, "", nil, other); err != nil {
			return 0, err
		}
	}
	revision, err = changeOne(ctx, tx, id, idempotencyKey, refusal, next)
	if err != nil || rule.Effect != Both || id == p.Entries {
		return revision, err
	}
	if err := lockSale(ctx, tx, p.Entries); err != nil {
		return 0, err
	}
	_, err = changeOne(ctx, tx, p.Entries, "", nil, other)
	return revision, err
}

// changeOne changes a sale that is locked, unless there is a refusal: what changes nothing is not refused.
func changeOne(
	ctx context.Context, tx pgx.Tx, id uuid.UUID, idempotencyKey string, refusal error, next nextChange,
) (revision int64, err error) {
	found, err := findSale(ctx, tx, id)
	if err != nil {
		return 0, err
	}
	to, err := next(ctx, tx, found[0].Sale)
	switch {
	case refusal != nil && (err != nil || to.event != ""):
		return 0, refusal
	case err != nil || to.event == "":
		return 0, err
	}
	err = tx.QueryRow(ctx, sql.CatalogChangeSale, id, to.state, to.stock, to.event, to.data,
		zeronull.Text(idempotencyKey), zeronull.Text(operatorIn(ctx))).Scan(&revision)
	return revision, err
}

// publishBoth publishes the changes of a sale and of the other half of its pair.
func (c *Catalog) publishBoth(ctx context.Context, id uuid.UUID) error {
	if err := c.publish(ctx, id); err != nil {
		return err
	}
	p, err := findPair(ctx, c.Pool, id)
	switch {
	case err != nil || p.Goods == uuid.Nil:
		return err
	case id == p.Goods:
		return c.publish(ctx, p.Entries)
	}
	return c.publish(ctx, p.Goods)
}

// closeList notes in the log of goods that their list is closed, unless it was before, or they have ended. Who waits
// keeps the place. When nobody does, a worker has the sale sell to everybody, as one without a list.
func closeList(goods reservation.Sale) saleChange {
	if goods.WaitlistClosed || goods.StateAt(time.Now()) == reservation.StateEnded {
		return saleChange{}
	}
	data := map[string]any{"stock": goods.Stock, "sale_id": goods.ID, "entries_sale_id": goods.EntriesID}
	return saleChange{eventWaitlistClosed, goods.State, goods.Stock, data}
}

// Check returns why the operation has to wait for the other half of the sale's pair, or "". The error is an
// *IllegalTransitionError if it is refused, or one of Postgres.
func Check(ctx context.Context, on pg.Querier, op Operation, sale uuid.UUID) (waits string, err error) {
	p, err := findPair(ctx, on, sale)
	if err != nil {
		return "", fmt.Errorf("find the pair of sale=%s: %w", sale, err)
	}
	rule, err := p.rule(op, sale)
	if err != nil || rule.Effect != Later || p.Over {
		return "", err
	}
	return fmt.Sprintf("its orders are the entries of the sale %s, whose units are offered", p.Goods), nil
}

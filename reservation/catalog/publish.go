package catalog

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

const (
	// publishMax bounds how many sales one call of PublishPending publishes.
	publishMax = 1000
	// publishPartitions bounds the partitions in which it publishes at a time. Each uses a connection to Postgres.
	publishPartitions = 4
)

// publisher sends the changes of sales from Postgres to Redis.
type publisher struct{ stores }

// PublishPending publishes changes that could not be published when they were made, because a
// process crashed or Redis was unavailable. Any number of workers may call it concurrently. It
// returns the number of sales that it published. Partitions are independent: one whose server does
// not answer is asked once, and delays no other.
func (c *publisher) PublishPending(ctx context.Context) (int, error) {
	rows, _ := c.Pool.Query(ctx, sql.CatalogUnpublishedSales, publishMax) // its error comes with the rows
	pending := map[int][]uuid.UUID{}                                      // by home partition
	var id uuid.UUID
	var partitions int
	_, err := pgx.ForEachRow(rows, []any{&id, &partitions}, func() error {
		p := reservation.PartitionAmong(id, partitions)
		pending[p] = append(pending[p], id)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("list unpublished sales: %w", err)
	}
	var published atomic.Int64
	err = c.Store.EachAnswering(ctx, slices.Sorted(maps.Keys(pending)), publishPartitions,
		func(ctx context.Context, partition int) error {
			var failed []error
			for _, id := range pending[partition] {
				if err := c.publishInTime(ctx, id); err != nil {
					failed = append(failed, fmt.Errorf("publish sale=%s: %w", id, err))
					continue
				}
				published.Add(1)
			}
			return errors.Join(failed...)
		})
	return int(published.Load()), err
}

// publishWait bounds the time for one sale while others wait: its row may be locked.
const publishWait = 3 * time.Second

func (c *publisher) publishInTime(ctx context.Context, id uuid.UUID) error {
	ctx, cancel := context.WithTimeout(ctx, publishWait)
	defer cancel()
	return c.publish(ctx, id)
}

// publish applies the changes of a sale that Redis lacks, in order. Repeats and concurrent calls
// are safe, because a script applies each revision once.
func (c *publisher) publish(ctx context.Context, id uuid.UUID) error {
	found, err := findSale(ctx, c.Pool, id)
	if err != nil {
		return err
	} else if len(found) == 0 {
		return reservation.ErrSaleNotFound
	}
	sale := found[0]
	applied := sale.publishedRevision
	if applied < sale.Revision {
		err := sale.Layout().EachShard(func(partition, _ int) error { return c.verifyFirstUse(ctx, partition) })
		if err != nil {
			return err
		}
	}
	for applied < sale.Revision {
		changes, err := c.changesAfter(ctx, id, applied)
		if err != nil {
			return err
		}
		for _, change := range changes {
			if change.Type == eventLowering {
				sale.Revision, err = c.lower(ctx, sale.Sale, change)
			} else {
				err = sale.Layout().EachShard(func(_, shard int) error { return c.apply(ctx, sale.Sale, shard, change) })
			}
			if err != nil {
				return err
			}
			applied = change.Revision
		}
	}
	_, err = c.Pool.Exec(ctx, sql.CatalogMarkPublished, id, applied)
	return err
}

// verifyFirstUse ensures that the server of a partition is known. The first user of a partition
// verifies its server, which cannot have lost anything yet. If Redis has a record of another
// server, or a sale of the partition was published, only a rebuild verifies it. The row is written
// before the record in Redis, so that a partition with a record always has a row and is not
// verified a second time.
func (c *publisher) verifyFirstUse(ctx context.Context, partition int) error {
	state, err := c.Store.Inspect(ctx, partition)
	if err != nil {
		return err
	}
	switch {
	case state.Known:
		return nil
	case state.Recorded:
		return reservation.ErrUnverifiedServer
	}
	used, err := c.usedBefore(ctx, partition)
	if err != nil {
		return err
	} else if used {
		// Another process may have been first since the check.
		if state, err = c.Store.Inspect(ctx, partition); err == nil && !state.Known {
			err = reservation.ErrUnverifiedServer
		}
		return err
	}
	claimed, err := c.Pool.Exec(ctx, sql.CatalogClaimPartition, partition, state.RunID, state.ReplicationID)
	if err != nil {
		return err
	} else if claimed.RowsAffected() == 1 {
		return c.Store.MarkVerified(ctx, partition, state, reservation.FirstUse)
	}
	// Either another process has just claimed it, or the server was replaced; a record of another
	// server shows which.
	if state, err = c.Store.AwaitFirstUse(ctx, partition); err != nil {
		return err
	}
	if !state.Known {
		return reservation.ErrUnverifiedServer
	}
	return nil
}

// usedBefore reports whether any sale of the partition was ever published to Redis.
func (c *publisher) usedBefore(ctx context.Context, partition int) (used bool, err error) {
	rows, _ := c.Pool.Query(ctx, sql.CatalogPublishedSales) // its error comes with the rows
	var sale uuid.UUID
	var partitions, shards int
	_, err = pgx.ForEachRow(rows, []any{&sale, &partitions, &shards}, func() error {
		_, hasShard := reservation.LayoutOf(sale, partitions, shards).ShardIn(partition)
		used = used || hasShard
		return nil
	})
	return used, err
}

type publishedChange struct {
	Revision     int64
	Type         string
	Stock, Units int64
	// Items are those of a sale with items as the change left them, and ItemUnits the Units of each by its code.
	Items     []reservation.Item
	ItemUnits map[string]int64
}

func (c *publisher) changesAfter(ctx context.Context, id uuid.UUID, revision int64) ([]publishedChange, error) {
	rows, _ := c.Pool.Query(ctx, sql.CatalogSaleChanges, id, revision) // its error comes with the rows
	changes, err := pgx.CollectRows(rows, pgx.RowToStructByName[publishedChange])
	if err == nil && len(changes) == 0 {
		err = fmt.Errorf("sale=%s lacks the event of revision %d", id, revision+1)
	}
	return changes, err
}

// apply runs the script of one change on a shard.
func (c *publisher) apply(ctx context.Context, s reservation.Sale, shard int, ch publishedChange) error {
	k, layout := c.Store.Keys, s.Layout()
	p := layout.Partition(shard)
	saleKey := k.Sale(p, s.ID)
	epoch, revision := strconv.FormatInt(s.Epoch, 10), strconv.FormatInt(ch.Revision, 10)

	change := func(args ...any) *redis.Cmd {
		return lua.Change.Run(ctx, c.Store.Redis, []string{saleKey}, append([]any{epoch, revision}, args...)...)
	}
	var answer *redis.Cmd
	switch ch.Type {
	case eventCreated, eventItemsCreated:
		s.Items = ch.Items
		return c.Store.OpenShard(ctx, s, shard, ch.Revision, ch.Stock)
	case eventPaused:
		answer = change("pause")
	case eventResumed:
		answer = change("resume")
	case eventEnded:
		answer = change("end")
	case eventRebuilt:
		// The rebuild wrote this revision itself.
		return c.hasRevision(ctx, p, s.ID, ch.Revision)
	case eventRetired:
		answer = c.retireShard(ctx, s.ID, p, epoch, revision)
	case eventDrawCreated, eventDrawOpened, eventWaitlistCreated:
		open := reservation.StateOffers
		switch {
		case ch.Type == eventDrawOpened:
			open = reservation.StateOpen
		case s.Waitlist:
			open = reservation.StateWaitlist
		}
		answer = change("open", string(open))
	case eventReconciled, eventRenamed, eventDrawFrozen, eventDrawSeeded, eventDrawVoided, eventDrawOpening,
		eventWaitlistClosed:
		answer = change("note")
	case eventRestocked:
		_, err := c.restock(ctx, s, shard, ch.Revision, func(item int) (units, least int64) {
			if len(s.Items) > 0 {
				return layout.ShareOfItem(item, ch.ItemUnits[s.Items[item].Code], shard), 0
			}
			return layout.Share(ch.Units, shard), 0
		})
		return err
	default:
		return fmt.Errorf("sale=%s has an event %q that this version does not know", s.ID, ch.Type)
	}
	text, err := answer.Text()
	if err != nil {
		return err
	}
	switch word, rest, _ := strings.Cut(text, " "); word {
	case "changed", "retired", "unchanged":
		return nil
	case "unknown-sale", "gap":
		// Redis lacks a revision that was published: it lost data, which only a rebuild restores.
		return fmt.Errorf("%w (%s)", reservation.ErrLostSale, text)
	default:
		return fmt.Errorf("sale=%s: %s was refused by Redis: %s %s", s.ID, ch.Type, word, rest)
	}
}

func (c *publisher) hasRevision(ctx context.Context, partition int, sale uuid.UUID, revision int64) error {
	has, err := c.Store.Keys.AskShard(ctx, c.Store.Redis, partition, sale, 0, "revision").Hash()
	switch {
	case err != nil:
		return err
	case has.Revision < revision:
		return fmt.Errorf("%w (a rebuild is in progress)", reservation.ErrLostSale)
	}
	return nil
}

// Names are new names of a sale, and of its items by their codes. What is not in them keeps its name.
type Names struct {
	Sale  *string           `json:"name,omitempty"`
	Items map[string]string `json:"items,omitempty"`
}

// UnknownItemError is returned for an item that the sale does not have. It is an *InvalidError as well.
type UnknownItemError struct{ Code string }

func (e *UnknownItemError) Error() string { return e.Unwrap().Error() }

// Unwrap returns the *InvalidError.
func (e *UnknownItemError) Unwrap() error {
	return invalidItems("must be those of the sale: it has no %q", e.Code)
}

// itemOf returns the item with the code, to be changed, or an *UnknownItemError.
func itemOf(items []reservation.Item, code string) (*reservation.Item, error) {
	for place := range items {
		if items[place].Code == code {
			return &items[place], nil
		}
	}
	return nil, &UnknownItemError{code}
}

// Rename changes the names of a sale and of its items. A repeat changes nothing.
func (c *Catalog) Rename(ctx context.Context, id uuid.UUID, to Names) (CountedSale, error) {
	if err := to.validate(); err != nil {
		return CountedSale{}, err
	}
	next := func(_ context.Context, _ pgx.Tx, s reservation.Sale) (saleChange, error) {
		if s.StateAt(time.Now()) == reservation.StateEnded {
			return saleChange{}, &reservation.IllegalTransitionError{Action: "rename", State: reservation.StateEnded}
		}
		data := map[string]any{}
		if to.Sale != nil && *to.Sale != s.Name {
			data["name"], data["previous_name"] = *to.Sale, s.Name
		}
		items, err := to.renamed(s.Items)
		switch {
		case err != nil:
			return saleChange{}, err
		case !slices.Equal(items, s.Items):
			data["items"], data["item_names"] = items, to.Items
		case len(data) == 0:
			return saleChange{}, nil
		}
		return saleChange{eventRenamed, s.State, s.Stock, data}, nil
	}
	list := func(_ context.Context, _ pgx.Tx, s reservation.Sale) (saleChange, error) {
		if to.Sale == nil || s.Name == listName(*to.Sale) {
			return saleChange{}, nil
		}
		data := map[string]any{"name": listName(*to.Sale), "previous_name": s.Name}
		return saleChange{eventRenamed, s.State, s.Stock, data}, nil
	}
	if _, err := c.change(ctx, id, OpRename, "", next, list); err != nil {
		return CountedSale{}, err
	}
	return c.publishAndShow(ctx, id, OpRename, ErrNotInForce)
}

// validate returns an *InvalidError for names that no sale or item can have, and for none.
func (n Names) validate() error {
	switch {
	case n.Sale == nil && n.Items == nil:
		return &order.InvalidError{Field: "name", Reason: "must be given, or items with names by their codes"}
	case n.Sale != nil:
		if err := order.ValidateText("name", *n.Sale, order.MaxNameRunes); err != nil {
			return err
		}
	}
	if _, empty := n.Items[""]; empty || n.Items != nil && len(n.Items) == 0 {
		return invalidItems("must be one or more, each with its code")
	}
	for _, code := range slices.Sorted(maps.Keys(n.Items)) {
		if err := order.ValidateText("the name of an item", n.Items[code], order.MaxNameRunes); err != nil {
			return err
		}
	}
	return nil
}

// renamed returns the items of a sale with their new names.
func (n Names) renamed(items []reservation.Item) ([]reservation.Item, error) {
	if len(items) == 0 && n.Items != nil {
		return nil, invalidItems("must be left out: the sale has none, rename it by its name")
	}
	items = slices.Clone(items)
	for _, code := range slices.Sorted(maps.Keys(n.Items)) {
		item, err := itemOf(items, code)
		if err != nil {
			return nil, err
		}
		item.Name = n.Items[code]
	}
	return items, nil
}

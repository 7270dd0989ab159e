package reservation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"stampede/lua"
	"stampede/reservation/order"
)

// Offer is one unit of a sale for one entrant.
type Offer struct {
	// OrderID is the id of the order that the offer becomes. It belongs to the sale (order.MayBelongTo).
	OrderID uuid.UUID
	// Key identifies the offer in retries, together with the user, also if it has another OrderID by then: OfferKey; if
	// it is empty, the OrderID does.
	Key string
	// UserID is the entrant, as order.ValidateUser accepts it.
	UserID string
	// Item is the code of the item; empty in a sale without items.
	Item string
}

// offerPrefix begins the keys of offers. Buyers' keys have no spaces.
const offerPrefix = "stampede offer "

// OfferKey is the key of what is offered to an entry.
func OfferKey(entry uuid.UUID) string { return offerPrefix + entry.String() }

// request asks for the unit. Its idempotency key has the script recognize the offer when its order has ended, too.
func (o Offer) request(sale uuid.UUID) *Request {
	key := cmp.Or(o.Key, OfferKey(o.OrderID))
	return &Request{Sale: sale, User: o.UserID, IdempotencyKey: key, Quantity: 1}
}

// Offer reserves the units of offers, at most order.MaxPerMessage of one sale, in the order given: after one that is
// SoldOut, no later one of the same item is Reserved. It also sells units that are offered only. The answers are in the
// order of the offers. A repeat of an offer that became an order is Replayed, or OrderEnded if the order has ended, and
// reserves nothing; both have the OrderID of the first one. One that is Withdrawn reserves nothing either.
//
// In a sale with one shard that is one atomic step. With several it is one for each offer, with the units of any shard
// that are offered. If that takes long, or a shard does not answer, the last offers are SoldOut although units may be
// left.
//
// Unless the epoch of the sale is 0, the units are reserved in this one, or the error wraps ErrUnavailable.
//
// An error is for all offers and wraps ErrSaleNotFound, ErrUnavailable, ErrReservationDamaged or ErrOutcomeUnknown.
// Only with the last two may units have been taken: repeat all offers, with the same ids.
func (s *Store) Offer(ctx context.Context, sale Sale, offers []Offer) ([]Answer, error) {
	answers, err := s.offer(ctx, sale, offers)
	if err != nil {
		return nil, fmt.Errorf("offer units of sale=%s: %w", sale.ID, err)
	}
	return answers, nil
}

func (s *Store) offer(ctx context.Context, sale Sale, offers []Offer) ([]Answer, error) {
	if len(offers) == 0 || len(offers) > order.MaxPerMessage {
		return nil, fmt.Errorf("%d offers are not 1 to %d", len(offers), order.MaxPerMessage)
	}
	ctx, cancel := context.WithTimeout(ctx, s.options.CallTimeout)
	defer cancel()
	of, err := s.findSeller(ctx, sale.ID)
	if err != nil {
		return nil, err
	}
	batch := make([]*call, len(offers))
	for i, o := range offers {
		lines, err := of.linesOf(o.Item)
		if err != nil {
			return nil, err
		}
		batch[i] = newCall(o.request(sale.ID), lines, 0)
		batch[i].order, batch[i].orderID = o.OrderID, order.CompactID(o.OrderID)
	}
	offer := of.queues[0].offer
	if len(of.queues) > 1 {
		offer = of.offerEach
	}
	if err := offer(ctx, cmp.Or(sale.Epoch, of.address.epoch), batch); err != nil {
		return nil, err
	}
	answers := make([]Answer, len(batch))
	for i, c := range batch {
		answers[i], err = c.answer, cmp.Or(err, c.err)
	}
	return answers, err
}

// Withdraw makes sure that an offer which its entrant does not want gives no unit, also not by a call of Offer that is
// on its way. If it gave one before, nothing changes, and made is its order, which may have ended; else made is
// uuid.Nil. The error wraps ErrSaleNotFound or ErrUnavailable.
func (s *Store) Withdraw(ctx context.Context, sale uuid.UUID, o Offer) (made uuid.UUID, err error) {
	made, err = s.withdraw(ctx, sale, o)
	if err != nil {
		err = fmt.Errorf("withdraw an offer of sale=%s: %w", sale, err)
	}
	return made, err
}

func (s *Store) withdraw(ctx context.Context, sale uuid.UUID, o Offer) (made uuid.UUID, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.options.CallTimeout)
	defer cancel()
	of, err := s.findSeller(ctx, sale)
	if err != nil {
		return uuid.Nil, err
	}
	lines, err := of.linesOf(o.Item)
	if err != nil {
		return uuid.Nil, err
	}
	partition := of.queueFor(o.UserID).partition
	if s.refused[partition].Load() {
		return uuid.Nil, ErrUnverifiedServer
	}
	answer, err := lua.Withdraw.Run(ctx, s.Redis, s.Keys.OfShard(partition, sale), o.UserID,
		o.request(sale).KeyFingerprint(), cmp.Or(string(lines), "1")).Text()
	id, isMade := strings.CutPrefix(answer, "made ")
	switch {
	case err != nil:
		return uuid.Nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	case isMade:
		return order.ParseCompactID(id)
	case answer == "withdrawn":
		return uuid.Nil, nil
	case answer == "unknown-sale":
		return uuid.Nil, ErrLostSale
	}
	return uuid.Nil, fmt.Errorf("the script answered %q", answer)
}

// linesOf are the lines of one unit of the item; empty in a sale without items.
func (of *seller) linesOf(item string) (order.Lines, error) {
	place := slices.Index(of.address.codes, item)
	switch {
	case item == "" && of.address.codes == nil:
		return "", nil
	case place < 0:
		return "", fmt.Errorf("it has no item %q", item)
	}
	return order.Lines(order.ItemLetter(place) + "1"), nil
}

// offer runs the script at once, without a queue: a worker's offers come as one batch, and joins are few.
func (q *queue) offer(ctx context.Context, epoch int64, batch []*call) error {
	if q.store.refused[q.partition].Load() {
		return ErrUnverifiedServer
	}
	if epoch != q.address.epoch {
		return q.rebuilt(ctx)
	}
	t := newTarget(q.store.Keys, q.sale, q.partition, q.address)
	t.epochArg = strconv.FormatInt(epoch, 10) + "+"
	t.see(q.target.seen.Load())
	reply, err := new(reserveScript).run(ctx, q.store, t, batch)
	q.target.see(reply.sequence)
	switch {
	case err != nil:
		return err
	case reply.rewound:
		return q.store.lostOrders(ctx, q)
	case reply.staleEpoch:
		return q.rebuilt(ctx)
	}
	return nil
}

// rebuilt learns the epoch of Redis for the next call, and returns the error of this one.
func (q *queue) rebuilt(ctx context.Context) error {
	if _, err := q.lookAgain(ctx); err != nil {
		return err
	}
	return fmt.Errorf("%w: its stock was rebuilt", ErrUnavailable)
}

// offerEach makes the offers one after the other, each in the shard of its user: of a batch, those to one shard could
// get units before an offer to another one that gets none.
func (of *seller) offerEach(ctx context.Context, epoch int64, batch []*call) error {
	began, over := time.Now(), false
	for i, c := range batch {
		if over = over || time.Since(began) > of.store.options.CallTimeout/2; over {
			c.answer = Answer{Verdict: SoldOut}
			continue
		}
		err := of.queueFor(c.request.User).offerOne(ctx, epoch, c)
		if err != nil && (i == 0 || !errors.Is(err, ErrUnavailable)) {
			return err
		}
		if err != nil { // nothing was reserved for this one: the next call, which begins with it, says why
			c.answer, c.err = Answer{Verdict: SoldOut}, nil
		}
		over = c.err != nil || c.answer.Verdict == SoldOut
	}
	return nil
}

// offerOne makes an offer in this shard, with a unit that another one offers if it has none.
func (q *queue) offerOne(ctx context.Context, epoch int64, c *call) error {
	err := q.offer(ctx, epoch, []*call{c})
	if err != nil || c.err != nil || c.answer.Verdict != SoldOut {
		return err
	}
	line := 0
	for line = range c.units() { // an offer is one unit
	}
	if got, err := q.fetchOffered(ctx, line); !got {
		return err
	}
	return q.offer(ctx, epoch, []*call{c})
}

// fetchOffered gets units of a line that other shards offer. It returns true if this shard may have some now.
func (q *queue) fetchOffered(ctx context.Context, line int) (got bool, err error) {
	wanted, items := make([]int64, line+1), ""
	if wanted[line] = 1; q.address.codes != nil {
		items = order.ItemLetter(line)
	}
	for range fillMax {
		count, err := q.countSince(ctx, time.Now())
		if err != nil {
			return false, fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		here, gifts, wishes := count.shards[q.shard], count.onTheWay(), count.wishes(q.shard, offered, wanted)
		switch {
		case here == nil:
			return false, fmt.Errorf("%w: %w", errShardSilent, count.failed)
		case here.lines[line].left > 0:
			return true, nil
		case len(gifts) > 0:
			err = q.shards.take(ctx, gifts)
		case len(wishes) > 0:
			// From now on, whoever takes the units on their way, they are offered.
			if _, err = q.store.sayWhose(ctx, q.sale, q.partition, q.address.epoch, StateOffers, items); err == nil {
				err = q.shards.take(ctx, q.give(ctx, offered, wishes))
			}
		case count.failed != nil:
			return false, fmt.Errorf("%w: %w", errShardSilent, count.failed)
		default:
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
	}
	return false, errUnitsMove
}

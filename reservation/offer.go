package reservation

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/google/uuid"

	"stampede/reservation/order"
)

// Offer is one unit of a sale for one entrant.
type Offer struct {
	// OrderID is the id of the order that the offer becomes. It belongs to the sale (order.MayBelongTo).
	OrderID uuid.UUID
	// Key identifies the offer in retries, together with the user, also if it has another OrderID by then; if it is empty,
	// the OrderID does.
	Key string
	// UserID is the entrant, as order.ValidateUser accepts it.
	UserID string
	// Item is the code of the item; empty in a sale without items.
	Item string
}

// request asks for the unit. Its idempotency key has the script recognize the offer when its order has ended, too.
func (o Offer) request(sale uuid.UUID) *Request {
	key := cmp.Or(o.Key, "stampede offer "+o.OrderID.String())
	return &Request{Sale: sale, User: o.UserID, IdempotencyKey: key, Quantity: 1}
}

// Offer reserves the units of offers, at most order.MaxPerMessage of one sale with one shard, in one atomic step and in
// the order given: after one that is SoldOut, no later one of the same item is Reserved. It also sells units that are
// offered only. The answers are in the order of the offers. A repeat of an offer that became an order is Replayed, or
// OrderEnded if the order has ended, and reserves nothing; both have the OrderID of the first one.
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
	q := of.queues[0]
	switch {
	case len(of.queues) > 1:
		return nil, fmt.Errorf("it has %d shards", len(of.queues))
	case s.refused[q.partition].Load():
		return nil, ErrUnverifiedServer
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
	if err := q.offer(ctx, cmp.Or(sale.Epoch, q.place.epoch), batch); err != nil {
		return nil, err
	}
	answers := make([]Answer, len(batch))
	for i, c := range batch {
		answers[i], err = c.answer, cmp.Or(err, c.err)
	}
	return answers, err
}

// linesOf are the lines of one unit of the item; empty in a sale without items.
func (of *seller) linesOf(item string) (order.Lines, error) {
	place := slices.Index(of.place.codes, item)
	switch {
	case item == "" && of.place.codes == nil:
		return "", nil
	case place < 0:
		return "", fmt.Errorf("it has no item %q", item)
	}
	return order.Lines(order.ItemLetter(place) + "1"), nil
}

// offer runs the script at once, without a queue: a worker's offers come as one batch, and joins are few.
func (q *queue) offer(ctx context.Context, epoch int64, batch []*call) error {
	if epoch != q.place.epoch {
		return q.rebuilt(ctx)
	}
	t := newTarget(q.store.Keys, q.sale, q.partition, q.place)
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

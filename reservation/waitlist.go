package reservation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/lua"
	"stampede/reservation/order"
)

// ErrNotSoldOut is returned for the waiting list of a sale, or of an item, of which everybody can buy units.
var ErrNotSoldOut = errors.New("units of the sale are for everybody")

// ErrWaitlistClosed is returned for a waiting list that an operator has closed.
var ErrWaitlistClosed = errors.New("the waiting list is closed")

// Join gives a user a place in the waiting list of a sale: the sequence of an order in the sale of the entries, which
// is Reserved. In a sale with items it is in the list of the item with that code, and item is empty in all others; an
// item that the sale does not have is an UnknownItem, and one that is missing, or too much, an *InvalidError. The order
// of a user who waits is Replayed, whatever the sale sells now, and for whichever item. A user with a reservation in
// the sale itself gets AlreadyPurchased. Who repeats a request with an idempotency key, "" for none, after they have
// left gets OrderEnded.
//
// The error wraps ErrNotSoldOut or ErrWaitlistClosed, or is one of Offer. While the sale is reopened, a place may be
// given by mistake: its user is the next one who is offered a unit.
func (s *Store) Join(ctx context.Context, sale Sale, item, user, idempotencyKey string) (Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.options.CallTimeout)
	defer cancel()
	codes := sale.Codes()
	switch {
	case codes == nil && item != "":
		return Answer{}, &order.InvalidError{Field: "item", Reason: "must be left out: the sale has none"}
	case codes != nil && item == "":
		return Answer{}, &order.InvalidError{Field: "item", Reason: "must say for which one, such as " + codes[0]}
	case codes != nil && !slices.Contains(codes, item):
		return Answer{Verdict: UnknownItem, Of: &OfItems{Codes: []string{item}}}, nil
	}
	answer, err := s.join(ctx, sale, item, user, idempotencyKey)
	if err != nil {
		return Answer{}, fmt.Errorf("join the waiting list of sale=%s: %w", sale.ID, err)
	}
	return answer, nil
}

func (s *Store) join(ctx context.Context, sale Sale, item, user, idempotencyKey string) (Answer, error) {
	_, err := s.WaitingPlace(ctx, sale, user)
	if errors.Is(err, order.ErrNotFound) {
		if answer, err := s.mayWait(ctx, sale, item, user); err != nil || answer.Verdict != "" {
			return answer, err
		}
	} else if err != nil {
		return Answer{}, err
	}
	entry := Offer{OrderID: order.NewOrderID(sale.EntriesID), UserID: user, Key: idempotencyKey, Item: item}
	answers, err := s.offer(ctx, Sale{ID: sale.EntriesID}, []Offer{entry})
	if err != nil {
		return Answer{}, err
	}
	switch answers[0].Verdict {
	case AlreadyPurchased:
		answers[0].Verdict = Replayed
	case Ended:
		if sale.StateAt(time.Now()) != StateEnded { // the list ends with the sale, too
			return Answer{}, ErrWaitlistClosed
		}
	}
	return answers[0], nil
}

// mayWait returns the answer to a user who cannot wait for units of the sale, or of the item, now.
func (s *Store) mayWait(ctx context.Context, sale Sale, item, user string) (Answer, error) {
	held, err := s.held(ctx, sale.ID, user)
	if err == nil {
		return Answer{Verdict: AlreadyPurchased, Reservation: held}, nil
	} else if !errors.Is(err, order.ErrNotFound) {
		return Answer{}, err
	}
	found, err := s.LookWhose(ctx, []Sale{sale})
	if err != nil {
		return Answer{}, err
	}
	switch now := found[0]; {
	case now.IsLost:
		return Answer{}, ErrLostSale
	case now.Epoch == 0:
		return Answer{}, errSaleClosed
	case now.State == StateEnded, now.State == State(Retired):
		return Answer{Verdict: Ended}, nil
	case now.Units[max(0, slices.Index(sale.Codes(), item))].ForSale == 0:
		return Answer{}, nil
	case now.State == StatePaused:
		return Answer{Verdict: Paused}, nil
	}
	switch sale.StateAt(time.Now()) { // as a purchase is answered
	case StateEnded:
		return Answer{Verdict: Ended}, nil
	case StateScheduled:
		return Answer{Verdict: NotOpen, OpensAt: sale.OpensAt}, nil
	}
	return Answer{}, ErrNotSoldOut
}

// WaitingPlace returns the place of a user in the waiting list of a sale, as Redis has it: the sequence of the
// reservation in the sale of the entries, whose lines name the item. The error is order.ErrNotFound, or wraps
// ErrUnavailable.
func (s *Store) WaitingPlace(ctx context.Context, sale Sale, user string) (order.Reservation, error) {
	return s.held(ctx, sale.EntriesID, user)
}

// held returns the reservation of a user in a sale.
func (s *Store) held(ctx context.Context, sale uuid.UUID, user string) (order.Reservation, error) {
	of, err := s.findSeller(ctx, sale)
	if err != nil {
		return order.Reservation{}, err
	}
	q := of.queueFor(user)
	if s.refused[q.partition].Load() {
		return order.Reservation{}, ErrUnverifiedServer
	}
	text, err := s.Redis.HGet(ctx, s.Keys.Buyers(q.partition, sale), user).Result()
	switch {
	case errors.Is(err, redis.Nil):
		return order.Reservation{}, order.ErrNotFound
	case err != nil:
		return order.Reservation{}, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	held, _, err := order.ParseReservation(text)
	if err != nil {
		return order.Reservation{}, fmt.Errorf("%w: %w", ErrReservationDamaged, err)
	}
	return held, nil
}

// Whose is what Redis has of the units of a sale with a waiting list, or of one that is drawn.
type Whose struct {
	// IsLost is true if a shard is missing. Epoch is 0 then, and while a rebuild has a shard closed.
	IsLost bool
	Epoch  int64
	State  State
	// IsPlain is true if the sale offers nothing, also not what returns later.
	IsPlain bool
	// Units are those of each item, in their order, or of the sale.
	Units []WhoseUnits
}

// WhoseUnits are the units that are left.
type WhoseUnits struct {
	// IsOffered is true if some are offered, or would be if some were left.
	IsOffered bool
	// Offered is how many are, and ForSale how many everybody can buy.
	Offered, ForSale int64
}

// Left is how many units are left.
func (u WhoseUnits) Left() int64 { return u.Offered + u.ForSale }

// Left is how many units are left, of all items.
func (w *Whose) Left() (units int64) {
	for _, u := range w.Units {
		units += u.Left()
	}
	return units
}

// Offered is how many of them are offered.
func (w *Whose) Offered() (units int64) {
	for _, u := range w.Units {
		units += u.Offered
	}
	return units
}

// LookWhose returns for each of the sales whom its units are for. It needs their layouts and how many items they have.
// After an error, which wraps ErrUnavailable, those sales are lost whose servers did not answer.
func (s *Servers) LookWhose(ctx context.Context, sales []Sale) ([]Whose, error) {
	asked := make([][]ShardAnswer, len(sales))
	_, err := s.Redis.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, sale := range sales {
			layout := sale.Layout()
			for shard := range layout.Shards {
				asked[i] = append(asked[i], s.Keys.AskShard(ctx, p, layout.Partition(shard), sale.ID, len(sale.Items),
					"epoch", "state", "open_state", "left"))
			}
		}
		return nil
	})
	found := make([]Whose, len(sales))
	for i, shards := range asked {
		found[i] = Whose{IsPlain: true, Units: make([]WhoseUnits, max(1, len(sales[i].Items)))}
		for shard, answer := range shards {
			hash, _ := answer.Hash() // the zero one of a server that did not answer
			found[i].add(shard, hash)
		}
	}
	if err != nil {
		err = fmt.Errorf("%w: look whom units are for: %w", ErrUnavailable, err)
	}
	return found, err
}

// add adds a shard.
func (w *Whose) add(shard int, h ShardHash) {
	w.IsLost = w.IsLost || !h.Exists
	w.IsPlain = w.IsPlain && h.OpenState == StateOpen
	epoch := max(0, h.Epoch)
	if shard == 0 {
		w.Epoch, w.State = epoch, h.State
	} else if w.Epoch != epoch {
		w.Epoch = 0
	}
	for i := range w.Units {
		left, isOffered := max(0, h.Left), h.OpenState == StateOffers
		if i < len(h.Items) {
			left, isOffered = max(0, h.Items[i].Left), isOffered || strings.HasPrefix(h.Items[i].Quiet, string(StateOffers))
		}
		units := &w.Units[i]
		if units.IsOffered = units.IsOffered || isOffered; isOffered {
			units.Offered += left
		} else {
			units.ForSale += left
		}
	}
}

// Reopen sells the units that are left of a sale with a waiting list to everybody again, or those of the items at these
// places; if the list is closed and nobody waits for any item, also all that return later. The caller knows that nobody
// waits for them, nor can join a list that is closed. It returns false if it changed nothing. The error wraps
// ErrUnavailable.
func (s *Servers) Reopen(ctx context.Context, sale Sale, items []int) (reopened bool, err error) {
	if !sale.Waitlist {
		return false, fmt.Errorf("reopen sale=%s: it has no waiting list", sale.ID)
	}
	var letters strings.Builder
	for _, place := range items[:min(len(items), len(sale.Items))] {
		letters.WriteString(order.ItemLetter(place))
	}
	open := StateWaitlist
	if sale.WaitlistClosed {
		open = StateOpen
	}
	layout := sale.Layout()
	for shard := range layout.Shards {
		changed, err := s.sayWhose(ctx, sale.ID, layout.Partition(shard), sale.Epoch, open, letters.String())
		if err != nil {
			return reopened, fmt.Errorf("%w: reopen sale=%s: %w", ErrUnavailable, sale.ID, err)
		}
		reopened = reopened || changed
	}
	return reopened, nil
}

// sayWhose says whom the units of a shard are for (lua/waitlist.lua).
func (s *Servers) sayWhose(
	ctx context.Context, sale uuid.UUID, partition int, epoch int64, open State, letters string,
) (changed bool, err error) {
	keys := []string{s.Keys.Sale(partition, sale)}
	answer, err := lua.Waitlist.Run(ctx, s.Redis, keys, epoch, string(open), letters).Text()
	switch {
	case err != nil:
		return false, err
	case answer == "changed" || answer == "unchanged":
		return answer == "changed", nil
	}
	return false, errors.New("the script answered " + answer)
}

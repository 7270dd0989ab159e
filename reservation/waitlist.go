package reservation

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/lua"
	"stampede/reservation/order"
)

// ErrNotSoldOut is returned for the waiting list of a sale of which everybody can buy units.
var ErrNotSoldOut = errors.New("units of the sale are for everybody")

// ErrWaitlistClosed is returned for a waiting list that an operator has closed.
var ErrWaitlistClosed = errors.New("the waiting list is closed")

// Join gives a user a place in the waiting list of a sale: the sequence of an order in the sale of the entries, which
// is Reserved. The order of a user who waits is Replayed, whatever the sale sells now. A user with a reservation in the
// sale itself gets AlreadyPurchased. Who repeats a request with an idempotency key, "" for none, after they have left
// gets OrderEnded.
//
// The error wraps ErrNotSoldOut or ErrWaitlistClosed, or is one of Offer. While the sale is reopened, a place may be
// given by mistake: its user is the next one who is offered a unit.
func (s *Store) Join(ctx context.Context, sale Sale, user, idempotencyKey string) (Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.options.CallTimeout)
	defer cancel()
	answer, err := s.join(ctx, sale, user, idempotencyKey)
	if err != nil {
		return Answer{}, fmt.Errorf("join the waiting list of sale=%s: %w", sale.ID, err)
	}
	return answer, nil
}

func (s *Store) join(ctx context.Context, sale Sale, user, idempotencyKey string) (Answer, error) {
	_, err := s.WaitingPlace(ctx, sale, user)
	if errors.Is(err, order.ErrNotFound) {
		if answer, err := s.mayWait(ctx, sale, user); err != nil || answer.Verdict != "" {
			return answer, err
		}
	} else if err != nil {
		return Answer{}, err
	}
	entry := Offer{OrderID: order.NewOrderID(sale.EntriesID), UserID: user, Key: idempotencyKey}
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

// mayWait returns the answer to a user who cannot wait for units of the sale now.
func (s *Store) mayWait(ctx context.Context, sale Sale, user string) (Answer, error) {
	held, err := s.held(ctx, sale.ID, user)
	if err == nil {
		return Answer{Verdict: AlreadyPurchased, Reservation: held}, nil
	} else if !errors.Is(err, order.ErrNotFound) {
		return Answer{}, err
	}
	of, err := s.findSeller(ctx, sale.ID)
	if err != nil {
		return Answer{}, err
	}
	var now struct {
		State     State  `redis:"state"`
		OpenState State  `redis:"open_state"`
		Left      string `redis:"left"`
		Epoch     string `redis:"epoch"`
	}
	key := s.Keys.Sale(of.queues[0].partition, sale.ID)
	if err := s.Redis.HMGet(ctx, key, "state", "open_state", "left", "epoch").Scan(&now); err != nil {
		return Answer{}, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	switch {
	case now.Epoch == "":
		return Answer{}, ErrLostSale
	case now.Epoch == "0":
		return Answer{}, errSaleClosed
	case now.State == StateEnded, now.State == State(Retired):
		return Answer{Verdict: Ended}, nil
	case now.OpenState == StateOffers || now.Left == "0":
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
// reservation in the sale of the entries. The error is order.ErrNotFound, or wraps ErrUnavailable.
func (s *Store) WaitingPlace(ctx context.Context, sale Sale, user string) (order.Reservation, error) {
	return s.held(ctx, sale.EntriesID, user)
}

// held returns the reservation of a user in a sale with one shard.
func (s *Store) held(ctx context.Context, sale uuid.UUID, user string) (order.Reservation, error) {
	of, err := s.findSeller(ctx, sale)
	if err != nil {
		return order.Reservation{}, err
	}
	q := of.queues[0]
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

// Reopen sells the units that are left of a sale with a waiting list to everybody again; if the list is closed, also
// all that return later. The caller knows that nobody waits, nor can join a list that is closed. It returns false if it
// changed nothing: nothing is left, or the sale sells to everybody. The error wraps ErrUnavailable.
func (s *Store) Reopen(ctx context.Context, sale Sale) (bool, error) {
	if !sale.Waitlist {
		return false, fmt.Errorf("reopen sale=%s: it has no waiting list", sale.ID)
	}
	keys := []string{s.Keys.Sale(sale.Layout().Partition(0), sale.ID)}
	open := StateWaitlist
	if sale.WaitlistClosed {
		open = StateOpen
	}
	answer, err := lua.Reopen.Run(ctx, s.Redis, keys, sale.Epoch, string(open)).Text()
	switch {
	case err != nil:
		return false, fmt.Errorf("%w: reopen sale=%s: %w", ErrUnavailable, sale.ID, err)
	case answer == "reopened" || answer == "unchanged":
		return answer == "reopened", nil
	}
	return false, fmt.Errorf("%w: reopen sale=%s: %s", ErrUnavailable, sale.ID, answer)
}

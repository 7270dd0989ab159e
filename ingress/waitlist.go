package ingress

import (
	"context"
	"errors"
	"net/http"
	"sort"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/draw"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/reservation/problems"
)

// Waitlists are the waiting lists in Postgres: *draws.Store.
type Waitlists interface {
	// Waiter returns the place of a user, or order.ErrNotFound.
	Waiter(ctx context.Context, goods uuid.UUID, user string) (draws.Waiter, error)
	// WaitingPlaces returns the places of all who wait, in their order.
	WaitingPlaces(ctx context.Context, goods uuid.UUID) ([]int64, error)
}

var (
	problemNoWaitlist = fixed(problem{Kind: problems.WaitlistNotFound, detail: "The sale has no waiting list."})
	problemNotWaiting = fixed(problem{
		Kind: problems.WaitlistNotFound, detail: "You have no place in the waiting list of the sale.",
	})
	problemNotSoldOut = fixed(problem{
		Kind: problems.NotSoldOut, detail: "Everybody can buy units of the sale now: POST /v1/sales/{sale}/orders.",
	})
)

// waitlistService serves what buyers do with the waiting list of a sale.
type waitlistService struct {
	*core
	sales  *saleService
	orders *orderService
	lines  waitingLines
}

// find returns the sale of a request, with its waiting list.
func (s *waitlistService) find(c echo.Context) (reservation.Sale, error) {
	id, ok := parseID(c.Param("sale"))
	if !ok {
		return reservation.Sale{}, problemSaleNotFound
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), catalogTimeout)
	defer cancel()
	current, err := s.sales.feed.get(ctx, id)
	switch {
	case err != nil:
		return reservation.Sale{}, err
	case !current.sales[0].Waitlist:
		return reservation.Sale{}, problemNoWaitlist
	}
	return current.sales[0].Sale, nil
}

// join serves POST /v1/sales/{sale}/waitlist.
func (s *waitlistService) join(c echo.Context) error {
	r, now := c.Request(), time.Now()
	if err := s.limits.admitAddress(&s.limits.purchases, r, now); err != nil {
		return err
	}
	user, err := s.auth.user(r)
	if err != nil {
		return err
	}
	if err := s.limits.admitUser(&s.limits.purchases, user, now); err != nil {
		return err
	}
	key, err := idempotencyKey(r.Header)
	if err != nil {
		return err
	}
	if err := readEmptyObject(c); err != nil {
		return err
	}
	sale, err := s.find(c)
	if err != nil {
		return err
	}
	var answer reservation.Answer
	err = s.inFlight.purchases.hold(func() error {
		if s.receipts.signer.Load() == nil { // no entry is accepted without a receipt
			return problemNoSecret
		}
		answer, err = s.config.Reservations.Join(context.WithoutCancel(r.Context()), sale, user, key)
		return err
	})
	switch {
	case errors.Is(err, reservation.ErrNotSoldOut):
		return problemNotSoldOut
	case err != nil:
		return err
	case answer.Verdict == reservation.Replayed:
		c.Response().Header()["Idempotency-Replayed"] = headerTrue
	case answer.Verdict != reservation.Reserved:
		return problemForVerdict(answer, time.Now())
	}
	held, receipt := &answer.Reservation, &reservation.Request{Sale: sale.EntriesID, User: user}
	return writeJSON(c, http.StatusAccepted, struct {
		OrderID    uuid.UUID `json:"order_id"`
		SaleID     uuid.UUID `json:"sale_id"`
		Place      int64     `json:"place"`
		ReservedAt string    `json:"reserved_at"`
		Receipt    string    `json:"receipt"`
	}{
		held.OrderID, sale.EntriesID, held.Sequence, string(order.AppendTime(nil, held.ReservedAt)),
		string(s.receipts.append(nil, receipt, held)),
	})
}

// waiterView is the place of a buyer in a waiting list.
type waiterView struct {
	EntryOrderID uuid.UUID `json:"entry_order_id"`
	Place        int64     `json:"place"`
	// State is waiting, offered, skipped or left; or over for who waited until the sale ended.
	State string `json:"state"`
	// Before is how many wait before, if that is known.
	Before  *int        `json:"before,omitempty"`
	Reason  draw.Reason `json:"reason,omitempty"`
	OrderID uuid.UUID   `json:"order_id,omitzero"`
}

// show serves GET /v1/sales/{sale}/waitlist.
func (s *waitlistService) show(c echo.Context) error {
	user, err := s.orders.authenticate(c, s.orders.requestUser)
	if err != nil {
		return err
	}
	sale, err := s.find(c)
	if err != nil {
		return err
	}
	return s.answer(c, sale, user)
}

func (s *waitlistService) answer(c echo.Context, sale reservation.Sale, user string) error {
	w, err := s.waiter(c.Request().Context(), sale, user)
	if err != nil {
		return err
	}
	v := waiterView{
		EntryOrderID: w.EntryID, Place: w.Place, State: string(w.Outcome), Reason: w.Reason, OrderID: w.OrderID,
	}
	switch {
	case w.HasLeft:
		v.State = "left"
	case w.Outcome != "":
	case sale.StateAt(time.Now()) == reservation.StateEnded:
		v.State = "over"
	default:
		v.State, v.Before = "waiting", s.before(sale.ID, w.Place)
	}
	return writeJSON(c, http.StatusOK, v)
}

// waiter finds the place of a user in Postgres, and then in Redis, which has it earlier.
func (s *waitlistService) waiter(ctx context.Context, sale reservation.Sale, user string) (w draws.Waiter, err error) {
	inPostgres := func() error {
		return s.core.orders.query(ctx, orderTimeout, func(ctx context.Context) (err error) {
			w, err = s.config.Waitlists.Waiter(ctx, sale.ID, user)
			return err
		})
	}
	if err = inPostgres(); err == nil && !w.HasLeft || err != nil && !errors.Is(err, order.ErrNotFound) {
		return w, err
	}
	limited, cancel := context.WithTimeout(ctx, reservedTimeout)
	defer cancel()
	held, redisErr := s.config.Reservations.WaitingPlace(limited, sale, user)
	switch {
	case redisErr == nil && held.OrderID != w.EntryID:
		return draws.Waiter{EntryID: held.OrderID, Place: held.Sequence, ReservedAt: held.ReservedAt}, nil
	case redisErr == nil || errors.Is(redisErr, order.ErrNotFound):
		if err != nil {
			err = problemNotWaiting
		}
		return w, err
	}
	return w, redisErr
}

// before returns how many wait before a place; nil if that is not known now.
func (s *waitlistService) before(sale uuid.UUID, place int64) *int {
	places, err := s.lines.of(sale).get(func() (places []int64, err error) {
		err = s.core.orders.query(s.background.ctx, orderTimeout, func(ctx context.Context) (err error) {
			places, err = s.config.Waitlists.WaitingPlaces(ctx, sale)
			return err
		})
		return places, err
	})
	if err != nil {
		return nil
	}
	n := sort.Search(len(places), func(i int) bool { return places[i] >= place })
	return &n
}

// leave serves POST /v1/sales/{sale}/waitlist/leave.
func (s *waitlistService) leave(c echo.Context) error {
	user, err := s.orders.authenticate(c, s.orders.requestUser)
	if err != nil {
		return err
	}
	if err := readEmptyObject(c); err != nil {
		return err
	}
	sale, err := s.find(c)
	if err != nil {
		return err
	}
	return s.inFlight.orders.hold(func() error {
		w, err := s.waiter(c.Request().Context(), sale, user)
		if err != nil {
			return err
		}
		if !w.HasLeft {
			err := s.core.orders.change(c.Request().Context(), w.EntryID, user, func(ctx context.Context) error {
				_, err := s.config.Orders.Withdraw(ctx, w.EntryID, "the buyer has left the waiting list", "buyer")
				return err
			})
			if err != nil {
				return err
			}
		}
		return s.answer(c, sale, user)
	})
}

const (
	// lineMaxAge is how old the places may be; those of a very long list may be lineCost times as old as it takes to
	// read them.
	lineMaxAge = time.Second
	lineCost   = 10
	// linesMax bounds the lists in memory.
	linesMax = 1000
)

// waitingLines remember who waits for which sale, for a crowd that asks how many are before them. They are read only
// when somebody asks.
type waitingLines struct {
	mu    sync.Mutex
	lines map[uuid.UUID]*waitingLine
}

func (l *waitingLines) of(sale uuid.UUID) *waitingLine {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lines == nil || len(l.lines) >= linesMax && l.lines[sale] == nil {
		l.lines = map[uuid.UUID]*waitingLine{}
	}
	if l.lines[sale] == nil {
		l.lines[sale] = &waitingLine{}
	}
	return l.lines[sale]
}

// waitingLine is the places of those who wait for a sale, in their order.
type waitingLine struct {
	mu     sync.Mutex
	until  time.Time
	places []int64
	err    error
}

// get returns the places, or the error of the last reading. Its callers wait for one reading together.
func (l *waitingLine) get(read func() ([]int64, error)) ([]int64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if began := time.Now(); began.After(l.until) {
		l.places, l.err = read()
		l.until = began.Add(max(lineMaxAge, lineCost*time.Since(began)))
	}
	return l.places, l.err
}

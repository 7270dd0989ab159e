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
	"stampede/ledger/problems"
	"stampede/reservation"
	"stampede/reservation/order"
)

var (
	problemNoWaitlist = fixed(problem{Kind: problems.WaitlistNotFound, detail: "The sale has no waiting list."})
	problemNotWaiting = fixed(problem{
		Kind: problems.WaitlistNotFound, detail: "You have no place in the waiting list of the sale.",
	})
)

// waitlistService serves what buyers do with the waiting list of a sale.
type waitlistService struct {
	*orderService
	sales *saleService
	lists waitingLists
}

func newWaitlistService(c *core, sales *saleService, reads *line) *waitlistService {
	s := &waitlistService{orderService: &orderService{c}, sales: sales}
	s.lists.start = c.background.start
	s.lists.read = func(ctx context.Context, of waitingFor) (places []int64, err error) {
		err = reads.take(ctx, func() error {
			return s.orders.query(ctx, waitingTimeout, func(ctx context.Context) (err error) {
				places, err = s.config.Draws.WaitingPlaces(ctx, of.sale, of.item)
				return err
			})
		})
		return places, err
	}
	return s
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
func (s *waitlistService) join(c echo.Context, user string) error {
	r := c.Request()
	key, err := idempotencyKey(r.Header)
	if err != nil {
		return err
	}
	var body struct {
		Item string `json:"item"`
	}
	if err := readObjectIfAny(c, &body); err != nil {
		return err
	}
	sale, err := s.find(c)
	if err != nil {
		return err
	}
	var answer reservation.Answer
	err = s.inFlight.purchases.withSlot(func() error {
		if s.receipts.signer.Load() == nil { // no entry is accepted without a receipt
			return problemNoSecret
		}
		answer, err = s.config.Reservations.Join(context.WithoutCancel(r.Context()), sale, body.Item, user, key)
		return err
	})
	held := &answer.Reservation
	w := inRedis(held)
	switch {
	case err != nil:
		return err
	case answer.Verdict == reservation.Replayed:
		// The user may have had a turn, or have left a moment ago, which Redis learns after Postgres.
		err = s.inFlight.orders.withSlot(func() error {
			w, err = s.waiter(r.Context(), sale, user)
			return err
		})
		if err == nil && w.HasLeft {
			err = problemJustLeft(w.EntryID)
		}
		if err != nil {
			return err
		}
		c.Response().Header()["Idempotency-Replayed"] = headerTrue
	case answer.Verdict != reservation.Reserved:
		return problemForVerdict(answer, time.Now())
	}
	return writeJSON(c, http.StatusAccepted, struct {
		waiterView
		SaleID     uuid.UUID `json:"sale_id"`
		ReservedAt string    `json:"reserved_at"`
		Receipt    string    `json:"receipt"`
	}{
		viewWaiter(w, sale), sale.ID, string(order.AppendTime(nil, held.ReservedAt)),
		string(s.receipts.append(nil, &reservation.Request{Sale: sale.EntriesID, User: user}, held)),
	})
}

// inRedis is the place of a user who has had no turn.
func inRedis(held *order.Reservation) draws.Waiter {
	return draws.Waiter{EntryID: held.OrderID, Place: held.Sequence, Item: string(held.Lines[:min(1, len(held.Lines))])}
}

// problemJustLeft is for a buyer whose old place Redis still has.
func problemJustLeft(entry uuid.UUID) *problem {
	return &problem{
		Kind: problems.OrderEnded, location: orderPath(entry), orderID: entry, orderStatus: order.StatusCancelled,
		retryAfter: retrySoon,
		detail:     "You have just left the waiting list. Join again in a moment, with another Idempotency-Key.",
	}
}

// waiting is the state of a buyer who has had no turn.
const waiting = "waiting"

// waiterView is the place of a buyer in a waiting list.
type waiterView struct {
	EntryOrderID uuid.UUID `json:"entry_order_id"`
	Place        int64     `json:"place"`
	// Item is the code of the item for which the buyer waits.
	Item string `json:"item,omitempty"`
	// State is waiting, offered, skipped or left; or over for who waited until the sale ended.
	State string `json:"state"`
	// Before is how many wait before, if that is known.
	Before  *int        `json:"before,omitempty"`
	Reason  draw.Reason `json:"reason,omitempty"`
	OrderID uuid.UUID   `json:"order_id,omitzero"`
}

func viewWaiter(w draws.Waiter, sale reservation.Sale) waiterView {
	v := waiterView{
		EntryOrderID: w.EntryID, Place: w.Place, Item: itemOf(w, sale), State: string(w.Outcome), Reason: w.Reason,
		OrderID: w.OrderID,
	}
	switch {
	case w.HasLeft && !w.Holds:
		v.State = "left"
	case w.Outcome != "":
	case sale.StateAt(time.Now()) == reservation.StateEnded:
		v.State = "over"
	default:
		v.State = waiting
	}
	return v
}

// itemOf is the code of the item for which a buyer waits, if the sale has any.
func itemOf(w draws.Waiter, sale reservation.Sale) string {
	for place, code := range sale.Codes() {
		if order.ItemLetter(place) == w.Item {
			return code
		}
	}
	return ""
}

// show serves GET /v1/sales/{sale}/waitlist.
func (s *waitlistService) show(c echo.Context, user string) error {
	sale, err := s.find(c)
	if err != nil {
		return err
	}
	return s.inFlight.orders.withSlot(func() error { return s.answer(c, sale, user) })
}

func (s *waitlistService) answer(c echo.Context, sale reservation.Sale, user string) error {
	w, err := s.waiter(c.Request().Context(), sale, user)
	if err == nil && w.HasLeft && w.Outcome == "" && sale.StateAt(time.Now()) != reservation.StateEnded {
		err = s.withdraw(c.Request().Context(), sale, user, &w)
	}
	if err != nil {
		return err
	}
	v := viewWaiter(w, sale)
	if v.State == waiting {
		v.Before = s.before(c.Request().Context(), waitingFor{sale.ID, w.Item}, w.Place)
	}
	return writeJSON(c, http.StatusOK, v)
}

// withdraw makes sure that a user who has left has, and gets, no unit; or finds the order of one that was on its way.
func (s *waitlistService) withdraw(
	ctx context.Context, sale reservation.Sale, user string, w *draws.Waiter,
) error {
	ctx, cancel := context.WithTimeout(ctx, reservedTimeout)
	defer cancel()
	made, err := s.config.Reservations.Withdraw(ctx, sale.ID, reservation.Offer{
		UserID: user, Key: reservation.OfferKey(w.EntryID), Item: itemOf(*w, sale),
	})
	if w.Holds = made != uuid.Nil; w.Holds {
		w.Outcome, w.OrderID = draw.Offered, made
	}
	return err
}

// waiter finds the place of a user in Postgres, and then in Redis, which has it earlier.
func (s *waitlistService) waiter(ctx context.Context, sale reservation.Sale, user string) (w draws.Waiter, err error) {
	inPostgres := func() error {
		return s.orders.query(ctx, orderTimeout, func(ctx context.Context) (err error) {
			w, err = s.config.Draws.Waiter(ctx, sale.ID, user)
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
		return inRedis(&held), nil
	case redisErr == nil || errors.Is(redisErr, order.ErrNotFound):
		if err != nil {
			err = problemNotWaiting
		}
		return w, err
	}
	return w, redisErr
}

// before returns how many wait before a place; nil if that is not known now.
func (s *waitlistService) before(ctx context.Context, of waitingFor, place int64) *int {
	ctx, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	places, known := s.lists.get(ctx, of)
	n := sort.Search(len(places), func(i int) bool { return places[i] >= place })
	if !known || n == draws.WaitingPlacesMax { // that many or more
		return nil
	}
	return &n
}

// leave serves POST /v1/sales/{sale}/waitlist/leave.
func (s *waitlistService) leave(c echo.Context, user string) error {
	if err := readEmptyObject(c); err != nil {
		return err
	}
	sale, err := s.find(c)
	if err != nil {
		return err
	}
	return s.inFlight.orders.withSlot(func() error {
		w, err := s.waiter(c.Request().Context(), sale, user)
		if err != nil {
			return err
		}
		if !w.HasLeft && !w.Holds {
			err := s.orders.change(c.Request().Context(), w.EntryID, user, func(ctx context.Context) error {
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
	// waitingMaxAge is after what time who waits is read again, and waitingCost how many times as long as the reading
	// takes that is for a very long list. What is shown may be twice as old.
	waitingMaxAge  = time.Second
	waitingCost    = 10
	waitingTimeout = 5 * time.Second
	// waitingListsMax bounds the lists in memory, and waitingPlacesMax their places: 32 MB.
	waitingListsMax  = 1000
	waitingPlacesMax = 2 * draws.WaitingPlacesMax
)

// waitingLists remember who waits for which sale, for a crowd that asks how many are before them. They are read in the
// background, only when somebody asks, and nobody waits for that who can be told what was read before.
type waitingLists struct {
	read  func(ctx context.Context, of waitingFor) ([]int64, error)
	start func(func(context.Context))

	mu     sync.Mutex
	lists  map[waitingFor]*waitingList
	places int // of all lists
}

// waitingFor is a sale, and an item of it by its letter if it has any.
type waitingFor struct {
	sale uuid.UUID
	item string
}

// waitingList is the places of those who wait for one of them, in their order.
type waitingList struct {
	places []int64
	known  bool
	// began is when the last reading began, and maxAge after what time the next one begins.
	began  time.Time
	maxAge time.Duration
	// reading is closed by the reading in progress; nil if there is none.
	reading chan struct{}
}

// get returns the places; known is false if they cannot be read, or not before ctx ends.
func (l *waitingLists) get(ctx context.Context, of waitingFor) (places []int64, known bool) {
	list, reading := l.look(of)
	if reading != nil {
		select {
		case <-reading:
		case <-ctx.Done():
			return nil, false
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return list.places, list.known
}

// look returns a list, which it has read again if it is old. If it is too old to be shown, the channel is
// closed by the reading, and is nil otherwise.
func (l *waitingLists) look(of waitingFor) (*waitingList, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lists == nil || len(l.lists) >= waitingListsMax && l.lists[of] == nil {
		l.lists, l.places = map[waitingFor]*waitingList{}, 0
	}
	list := l.lists[of]
	if list == nil {
		list = &waitingList{}
		l.lists[of] = list
	}
	age := time.Since(list.began)
	if age > list.maxAge && list.reading == nil {
		list.reading = make(chan struct{})
		l.start(func(ctx context.Context) { l.refresh(ctx, of, list) })
	}
	if age > 2*list.maxAge {
		return list, list.reading
	}
	return list, nil
}

func (l *waitingLists) refresh(ctx context.Context, of waitingFor, list *waitingList) {
	began := time.Now()
	places, err := l.read(ctx, of)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lists[of] == list {
		if l.places += len(places) - len(list.places); l.places > waitingPlacesMax {
			l.lists, l.places = map[waitingFor]*waitingList{of: list}, len(places)
		}
	}
	list.places, list.known = places, err == nil
	list.began, list.maxAge = began, max(waitingMaxAge, waitingCost*time.Since(began))
	close(list.reading)
	list.reading = nil
}

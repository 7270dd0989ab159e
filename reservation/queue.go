package reservation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"stampede/internal/tracing"
	"stampede/reservation/order"
)

// Verdict is the word of lua/reserve.lua for its answer to one request. A refusal is an answer, not an error.
type Verdict string

// The verdicts of lua/reserve.lua, in the order of its checks.
const (
	// Reserved: the buyer has the units, and the event is in the stream.
	Reserved Verdict = "reserved"
	// Replayed: the same request was answered Reserved before; Answer.Reservation is the first one.
	Replayed Verdict = "replayed"
	// OrderEnded: the same request made an order that has ended; see Answer.Reservation and
	// Answer.Status.
	OrderEnded Verdict = "order-ended"
	// Withdrawn: the request is an Offer, and Withdraw came before.
	Withdrawn Verdict = "withdrawn"
	// KeyReused: the buyer's reservation was made with the same idempotency key and another quantity.
	KeyReused Verdict = "key-reused"
	// AlreadyPurchased: the buyer holds Answer.Reservation in this sale.
	AlreadyPurchased Verdict = "already-purchased"
	// Paused: an operator halted the sale.
	Paused Verdict = "paused"
	// OffersOnly: the units of the sale are offered to entrants (Store.Offer).
	OffersOnly Verdict = "offers-only"
	// Retired: the sale has ended, and its buyers are only in Postgres, which knows the answer.
	Retired Verdict = "retired"
	// Ended: the sale was ended, or its closing time has passed.
	Ended Verdict = "ended"
	// NotOpen: the sale opens at Answer.OpensAt.
	NotOpen Verdict = "not-open"
	// OverLimit: more units than one order may hold, which are Answer.Limit.
	OverLimit Verdict = "over-limit"
	// SoldOut: fewer units are left than requested, in a sale with items of the items Answer.Of.Codes.
	SoldOut Verdict = "sold-out"
	// UnknownItem: the sale has no item with the codes Answer.Of.Codes.
	UnknownItem Verdict = "unknown-item"
	// UnknownSale: Redis has no such sale.
	UnknownSale Verdict = "unknown-sale"
)

var (
	// ErrOverloaded is returned when too many requests wait for Redis, or this one has waited too
	// long, or its client has left. Nothing was reserved.
	ErrOverloaded = errors.New("too many reservations are waiting")
	// ErrUnavailable is returned when Redis could not be reached or refused the call. Nothing was reserved.
	ErrUnavailable = errors.New("the sale cannot be reached")
	// ErrReservationDamaged is returned when the buyer's reservation in Redis cannot be read.
	// Nothing was reserved, and retries do not help until the sale is rebuilt.
	ErrReservationDamaged = errors.New("the stored reservation of the buyer is damaged")
	// ErrOutcomeUnknown is returned when the request may have reached Redis and no try got an answer,
	// or when ctx ended after it was sent. The buyer may hold a reservation: a retry with the same
	// idempotency key returns the outcome and cannot reserve twice.
	ErrOutcomeUnknown = errors.New("the outcome of the reservation is unknown")
)

// Request asks for units of one sale for one user.
type Request struct {
	Sale uuid.UUID
	// User is the buyer's id, as ValidateUser accepts it.
	User string
	// IdempotencyKey identifies the purchase in retries; at most 255 bytes, empty for none.
	IdempotencyKey string
	// Quantity is the number of units, at least 1; 0 with Items.
	Quantity int64
	// Items are the units by code, of a sale with items.
	Items map[string]int64
	// Arrived is when the request came, of a monotonic clock; the zero time is that of the call of Reserve.
	Arrived time.Time
	// Client waits for the answer. It may be nil.
	Client Client
}

// Client is who sent a request.
type Client interface {
	// HasLeft reports whether the client no longer waits for an answer. It is asked seldom, and must not block.
	HasLeft() bool
}

// Answer is the outcome of a request.
type Answer struct {
	Verdict Verdict
	// Reservation is set for Reserved, Replayed and AlreadyPurchased; for OrderEnded only its OrderID and Quantity.
	Reservation order.Reservation
	// Status is set for OrderEnded: cancelled, expired or rejected.
	Status order.Status
	// OpensAt is set for NotOpen.
	OpensAt time.Time
	// Limit is set for OverLimit.
	Limit int64
	// Of is what the answer says of items; nil for nothing, and in a sale without items.
	Of *OfItems
}

// OfItems is what an answer says of the items of a sale. It must not be changed.
type OfItems struct {
	// Units are the reservation's Lines by code; for SoldOut what is left of each item of the sale, if that is known.
	Units order.Items
	// Codes are the items that fewer units are left of than requested (SoldOut), that the sale does not have
	// (UnknownItem), or the one whose limit it is (OverLimit).
	Codes []string
}

// callsInFlightMax is 2: one call is decided while the other one is made or answered. More would only wait in Redis.
const callsInFlightMax = 2

// askClientAfter is the age from which on a client is asked whether it still waits. Few clients give up before, and
// most requests are younger, so that the system call is seldom made.
const askClientAfter = 250 * time.Millisecond

// queue holds the requests to one shard of a sale. Requests that arrive during a call of the script leave together
// in the next one. A second call starts during another one only for half of a full batch. There is no timer: a
// single request leaves immediately, and load makes the batches (group commit; with appendfsync always
// it is one fsync per batch).
type queue struct {
	*seller
	shard, partition int
	target           *target

	mu sync.Mutex
	// waiting may hold abandoned calls, which are skipped.
	waiting []*call
	// running is the number of goroutines that send batches. Invariant: waiting is empty if it is 0.
	running int
}

// call is one request in progress. Its strings are made once, by the goroutine of the request, so
// that the queue's own goroutine has little left to do per request.
type call struct {
	request Request
	arrived int64 // Store.sinceStart when the request came
	// span is the span of the request, and wait the span of its wait in the queue.
	span, wait tracing.Span

	order    uuid.UUID
	orderID  string      // the CompactID of order
	key      string      // fingerprint of the idempotency key, or noKey
	lines    order.Lines // of a sale with items
	quantity string      // or the lines, as the script takes it

	phase atomic.Int32
	done  chan struct{} // receives one value when answer and err are set
	// answer and err belong to the queue until done, and to the caller afterwards.
	answer Answer
	err    error
}

const (
	phaseWaiting int32 = iota
	phaseSent
	phaseAbandoned
)

var calls = sync.Pool{New: func() any { return &call{done: make(chan struct{}, 1)} }}

func newCall(r *Request, lines order.Lines, arrived int64) *call {
	c := calls.Get().(*call)
	c.request, c.arrived, c.order = *r, arrived, order.NewOrderID(r.Sale)
	c.orderID, c.key = order.CompactID(c.order), order.NoKey
	// The script has doubles for numbers: this one is above every limit, and exact.
	if c.lines, c.quantity = lines, string(lines); lines == "" {
		c.quantity = strconv.FormatInt(min(r.Quantity, order.MaxPerOrder+1), 10)
	}
	if r.IdempotencyKey != "" {
		c.key = r.KeyFingerprint()
	}
	c.phase.Store(phaseWaiting)
	c.err = nil
	c.span, c.wait = tracing.Span{}, tracing.Span{}
	return c
}

// KeyFingerprint is that of the idempotency key. It is empty if there is none.
func (r Request) KeyFingerprint() string {
	switch {
	case r.IdempotencyKey == "":
		return ""
	case strings.HasPrefix(r.IdempotencyKey, offerPrefix):
		return order.OfferFingerprint(r.IdempotencyKey)
	}
	return order.Fingerprint(r.IdempotencyKey)
}

// reserve sets the answer of a request, if there is no error. Requests and answers go from hand to hand by pointer: a
// copy is on a part of the stack that no cache has any more when the goroutine of one of many requests gets its turn.
func (q *queue) reserve(ctx context.Context, r *Request, lines order.Lines, arrived int64, answer *Answer) error {
	c := newCall(r, lines, arrived)
	if c.span = tracing.Current(ctx); c.span.On() {
		c.wait = c.span.Start(tracing.Internal, "wait in line")
	}
	if err := q.join(c); err != nil {
		c.wait.Fail(err)
		c.wait.End()
		return err
	}
	if err := c.await(ctx); err != nil {
		return err
	}
	err := c.err
	if err == nil {
		*answer = c.answer
	}
	c.request = Request{}
	calls.Put(c) // only here: the queue still owns an abandoned call
	return err
}

// await returns nil when the call is answered, or the error of ctx if that ends first.
func (c *call) await(ctx context.Context) error {
	ended := ctx.Done()
	if ended == nil { // a plain receive costs half
		<-c.done
		return nil
	}
	select {
	case <-c.done:
		return nil
	case <-ended:
	}
	if c.phase.CompareAndSwap(phaseWaiting, phaseAbandoned) {
		c.wait.Fail(ctx.Err())
		c.wait.End()
		return ctx.Err()
	}
	select {
	case <-c.done: // the answer came at the same time
		return nil
	default:
		return fmt.Errorf("%w: %w", ErrOutcomeUnknown, ctx.Err())
	}
}

func (q *queue) join(c *call) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) >= q.store.options.QueueMax {
		return ErrOverloaded
	}
	if q.running < q.sendersFor(len(q.waiting)+1) {
		if !q.store.goBackground(q.run) {
			return errClosed
		}
		q.running++
	}
	q.waiting = append(q.waiting, c)
	return nil
}

// sendersFor is how many goroutines may run while so many calls wait.
func (q *queue) sendersFor(waiting int) int {
	switch {
	case waiting == 0:
		return 0
	case waiting < (q.store.options.BatchMax+1)/2:
		return 1
	default:
		return callsInFlightMax
	}
}

// idle is true if the queue can be dropped without loss.
func (q *queue) idle() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.running == 0
}

// run sends batches until fewer senders are needed.
func (q *queue) run() {
	var script reserveScript
	var batch []*call
	for {
		if batch = q.take(batch[:0]); len(batch) == 0 {
			return
		}
		q.decide(&script, batch)
		clear(batch) // calls go back to their pool: do not keep them
	}
}

// take appends the next batch to an empty one. It stays empty if the sender is to end.
func (q *queue) take(batch []*call) []*call {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.running > q.sendersFor(len(q.waiting)) {
		q.running--
		return batch
	}
	n := min(len(q.waiting), q.store.options.BatchMax)
	batch = append(batch, q.waiting[:n]...)
	q.waiting = slices.Delete(q.waiting, 0, n)
	return batch
}

// isLate reports whether a call of this age must not be decided any more: its client may have been told otherwise by
// another process since.
func (c *call) isLate(age, most time.Duration) bool {
	return age > most || age > askClientAfter && c.request.Client != nil && c.request.Client.HasLeft()
}

// decide runs the script for a batch and answers every call of it. It skips abandoned calls and rejects late ones.
func (q *queue) decide(script *reserveScript, batch []*call) {
	sent := batch[:0:len(batch)]
	now := q.store.sinceStart()
	for _, c := range batch {
		if !c.phase.CompareAndSwap(phaseWaiting, phaseSent) {
			continue
		}
		c.wait.End()
		if c.isLate(time.Duration(now-c.arrived), q.store.options.WaitMax) {
			c.err = ErrOverloaded
			c.done <- struct{}{}
			continue
		}
		sent = append(sent, c)
	}
	if len(sent) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), q.store.options.CallTimeout)
	defer cancel()

	if short := q.ask(ctx, script, sent); len(short) > 0 {
		q.fill(ctx, script, short)
	}
}

// ask runs the script for these calls and answers them. It returns those that this shard has too few units for, which
// are not answered: other shards may have more.
func (q *queue) ask(ctx context.Context, script *reserveScript, sent []*call) (short []*call) {
	sale, err := script.run(ctx, q.store, q.target, sent)
	if err == nil && sale.staleEpoch {
		sale, err = q.retryInNewEpoch(ctx, script, sent)
	}
	if sale.rewound {
		if lost := q.store.lostOrders(ctx, q); err == nil {
			err = lost
		}
	}
	if err == nil && sale.soldOut && len(q.queues) == 1 {
		q.learnSoldOut([]int64{sale.generation})
	}
	if memory := q.soldItems.Load(); memory != nil {
		memory.addBuyers(q.store.seed, sent)
	}
	for _, c := range sent {
		if err != nil {
			c.err = err
		}
		if c.err == nil && c.answer.Verdict == SoldOut && len(q.queues) > 1 {
			short = append(short, c)
			continue
		}
		c.done <- struct{}{}
	}
	return short
}

// retryInNewEpoch looks the sale up again and repeats once a batch that was refused for its epoch.
func (q *queue) retryInNewEpoch(ctx context.Context, script *reserveScript, sent []*call) (saleReply, error) {
	p, err := q.lookAgain(ctx)
	if err != nil {
		return saleReply{}, err
	}
	if p.layout.Shards != q.address.layout.Shards {
		return saleReply{}, fmt.Errorf("%w: its shards have just changed", ErrUnavailable)
	}
	sale, err := script.run(ctx, q.store, newTarget(q.store.Keys, q.sale, q.partition, p), sent)
	if err == nil && sale.staleEpoch {
		err = fmt.Errorf("%w: its epoch keeps changing", ErrUnavailable)
	}
	return sale, err
}

// lookAgain looks up a sale whose epoch is stale, for the next requests too.
func (q *queue) lookAgain(ctx context.Context) (address, error) {
	p, err := q.store.look(ctx, q.partition, q.sale)
	switch {
	case errors.Is(err, ErrSaleNotFound):
		return address{}, ErrLostSale
	case err != nil:
		return address{}, err
	case p.epoch < q.address.epoch:
		// Epochs only grow: this server is an old one that was replaced.
		return address{}, ErrUnverifiedServer
	}
	q.store.renew(q.seller, p)
	return p, nil
}

// errWrongItems: the sale in Redis has other items than its seller knows, which a damaged sale may have.
var errWrongItems = fmt.Errorf("%w: its items have changed", ErrUnavailable)

// reserveItems is reserve for a request for items, or of a sale with items.
func (q *queue) reserveItems(ctx context.Context, r Request, arrived int64) (answer Answer, err error) {
	codes := q.address.codes
	switch {
	case codes == nil:
		return Answer{}, &order.InvalidError{Field: "items", Reason: "must be left out: the sale has none"}
	case r.Items == nil:
		such := `must say how many of which, such as {"` + codes[0] + `":1}`
		return Answer{}, &order.InvalidError{Field: "items", Reason: such}
	}
	var all [order.MaxItems]int64
	wanted := all[:len(codes)]
	var unknown []string
	for code, n := range r.Items {
		if n < 1 {
			return Answer{}, &order.InvalidError{Field: "items", Reason: "must have at least 1 unit of each item"}
		}
		if place := slices.Index(codes, code); place >= 0 {
			wanted[place] = min(n, order.MaxPerOrder+1) // as in newCall
			r.Quantity += wanted[place]
		} else {
			unknown = append(unknown, code)
		}
	}
	if unknown != nil {
		slices.Sort(unknown)
		return Answer{Verdict: UnknownItem, Of: &OfItems{Codes: unknown}}, nil
	}
	if answer, soldOut := q.remembersSoldOutItems(r.User, wanted); soldOut {
		return answer, nil
	}
	err = q.reserve(ctx, &r, order.MakeLines(wanted), arrived, &answer)
	return answer, err
}

func (r *Request) validateItems() error {
	switch {
	case r.Items != nil && r.Quantity != 0:
		return &order.InvalidError{Field: "items", Reason: "must not come with a quantity"}
	case r.Items != nil && len(r.Items) == 0:
		return &order.InvalidError{Field: "items", Reason: "must have at least one item"}
	}
	return nil
}

// nameItems adds what a call's answer says of items, with their codes. Short are the items that fewer units are left of
// than requested, or that are offered, with what is left, and left that of all items. It returns true if nothing is
// left of one of the first kind.
func (c *call) nameItems(codes []string, short order.Lines, left order.Items) (soldOut bool) {
	of := OfItems{Units: c.answer.Reservation.Lines.Named(codes)}
	switch c.answer.Verdict {
	case SoldOut:
		of.Units = left
		for place, units := range short.Each() {
			of.Codes = append(of.Codes, codes[place])
			soldOut = soldOut || units == 0
		}
	case OffersOnly:
		for place := range short.Each() {
			of.Codes = append(of.Codes, codes[place])
		}
	case OverLimit:
		if _, lines, _ := order.ParseUnits(string(short)); lines != "" {
			for place := range lines.Each() {
				of.Codes = append(of.Codes, codes[place])
			}
		}
	}
	if of.Units != "" || of.Codes != nil {
		c.answer.Of = &of
	}
	return soldOut
}

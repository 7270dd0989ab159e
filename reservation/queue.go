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

// callsInFlightMax is 2: one call is decided while the other one is made or answered. More would only wait in Redis.
const callsInFlightMax = 2

// askClientAfter is the age from which on a client is asked whether it still waits. Few clients give up before, and
// most requests are younger, so that the system call is seldom made.
const askClientAfter = 250 * time.Millisecond

// queue holds the requests to one shard of a sale. Requests that arrive during a call of the script leave together
// in the next one. A second call starts during another one only for a full batch. There is no timer: a
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
	case waiting < q.store.options.BatchMax:
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
	if p.layout.Shards != q.place.layout.Shards {
		return saleReply{}, fmt.Errorf("%w: its shards have just changed", ErrUnavailable)
	}
	sale, err := script.run(ctx, q.store, newTarget(q.store.Keys, q.sale, q.partition, p), sent)
	if err == nil && sale.staleEpoch {
		err = fmt.Errorf("%w: its epoch keeps changing", ErrUnavailable)
	}
	return sale, err
}

// lookAgain looks up a sale whose epoch is stale, for the next requests too.
func (q *queue) lookAgain(ctx context.Context) (place, error) {
	p, err := q.store.look(ctx, q.partition, q.sale)
	switch {
	case errors.Is(err, ErrSaleNotFound):
		return place{}, ErrLostSale
	case err != nil:
		return place{}, err
	case p.epoch < q.place.epoch:
		// Epochs only grow: this server is an old one that was replaced.
		return place{}, ErrUnverifiedServer
	}
	q.store.renew(q.seller, p)
	return p, nil
}

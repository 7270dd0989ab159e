package designs

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/bench/front"
)

var (
	//go:embed sql/lock_sale.sql
	lockSaleSQL string
	//go:embed sql/sell_batch.sql
	sellBatchSQL string
)

// postgresBatched is Postgres alone with what makes us fast: whoever arrives while a transaction is under way
// leaves with the next one, as soon as the last one is back, and nobody waits for a timer
// (reservation/queue.go does the same in front of Redis). A batch is two prepared statements in one round
// trip and one transaction: lock the sale, then multi-row inserts and one update of its counter. The
// strongest rival of all.
//
// What it gets right: what postgres-row does, at ten times its speed; an accepted order is in Postgres, so
// there is nothing to lose and no second system to run.
//
// How it fails: every buyer waits for the disk of the database, and the database serves every buyer: a
// crowd that gets nothing costs it as much work as one that buys, next to everything else that it has to do, and
// while it is away or slow, nothing is sold and nobody can be told so but by an error.
type postgresBatched struct {
	postgresStock
	batchMax int
	// inFlight is how many transactions may be under way, each on its own connection.
	inFlight int

	mu      sync.Mutex
	waiting []*purchase
	// moving is how many goroutines send batches. Invariant: waiting is empty if it is 0.
	moving int
	movers sync.WaitGroup
}

// Measured at 256 connections, with everything on two busy cores, in turns: a second transaction in flight hides the
// wait for the disk and for the front behind the first, and makes 1.1 to 1.2 × of one, though Postgres needs a
// tenth more for each order. The row of the sale is locked first and puts them in line, which is no limit: a batch of
// 256 takes Postgres 6 ms of one core, and the front and the crowd want more than that of both. Four in
// flight, and batches of 64 or 128, cost a fifth more CPU and are slower; a batch of 512 or 1024 is never full, as
// no more than 256 wait. The statement was tried with other forms of its parts (an arbiter index, no ON CONFLICT, two
// inserts of events, JSON made from text): they are alike, as nearly all of it are the rows and their indexes.
const (
	batchedMax      = 256
	batchedInFlight = 2
	// batchedQueueMax bounds those who wait, as ours does.
	batchedQueueMax = 8192
	// batchedTimeout bounds one try of a transaction, as ours bounds a call of the script.
	batchedTimeout = 3 * time.Second
)

var errOverloaded = errors.New("too many buyers wait")

func newPostgresBatched(ctx context.Context, b front.Backend) (front.Design, error) {
	inFlight, err := option(b, "postgres-connections", batchedInFlight)
	if err != nil {
		return nil, err
	}
	batchMax, err := option(b, "batch", batchedMax)
	if err != nil {
		return nil, err
	}
	stock, err := openPostgresStock(ctx, b, inFlight)
	if err != nil {
		return nil, err
	}
	return &postgresBatched{postgresStock: stock, batchMax: batchMax, inFlight: inFlight}, nil
}

// Run implements front.Design.
func (d *postgresBatched) Run(ctx context.Context) error {
	<-ctx.Done()
	d.movers.Wait() // for purchases whose buyers went away
	return nil
}

// purchase is an order on its way.
type purchase struct {
	order front.Order
	done  chan struct{} // receives one value when verdict and err are set
	// verdict and err belong to the batch until done, and to the caller afterwards.
	verdict front.Verdict
	err     error
}

var purchases = sync.Pool{New: func() any { return &purchase{done: make(chan struct{}, 1)} }}

// Buy implements front.Design.
func (d *postgresBatched) Buy(ctx context.Context, o front.Order) (front.Verdict, error) {
	p := purchases.Get().(*purchase)
	p.order = o
	if err := d.join(p); err != nil {
		return none, err
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		return none, ctx.Err() // the purchase is still in the hands of its batch
	}
	verdict, err := p.verdict, p.err
	purchases.Put(p)
	return verdict, err
}

func (d *postgresBatched) join(p *purchase) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.waiting) >= batchedQueueMax {
		return errOverloaded
	}
	d.waiting = append(d.waiting, p)
	if d.moving < d.inFlight {
		d.moving++
		d.movers.Go(d.move)
	}
	return nil
}

// move sends batches until nobody waits.
func (d *postgresBatched) move() {
	b := newBatch(d.batchMax)
	for d.take(b) {
		d.decide(b)
	}
}

// take fills the batch with those who wait. If there is nobody, it counts the caller out.
func (d *postgresBatched) take(b *batch) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	rest := d.waiting[:0]
	for _, p := range d.waiting {
		if !b.add(p) {
			rest = append(rest, p)
		}
	}
	clear(d.waiting[len(rest):])
	d.waiting = rest
	if len(b.purchases) == 0 {
		d.moving--
	}
	return len(b.purchases) > 0
}

// decide sells to a batch and answers it, and leaves in it those who have to go on with the next one.
func (d *postgresBatched) decide(b *batch) {
	again, err := d.sell(b)
	if err != nil {
		// It may be that only the answer was lost: what was written is found by its id.
		again, err = d.sell(b)
	}
	all := b.empty()
	for i, p := range all {
		if err == nil && again[i] {
			b.add(p)
			continue
		}
		p.err = err
		p.done <- struct{}{}
	}
}

// sell runs one transaction: without a BEGIN, what travels together is one. It sets the verdicts, and
// returns for each purchase whether it was passed over, though there are enough units: somebody before it
// in the batch had an order already or wanted too many.
func (d *postgresBatched) sell(b *batch) (again []bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), batchedTimeout)
	defer cancel()
	statements := &pgx.Batch{}
	sale := b.purchases[0].order.Sale // a front has one
	statements.Queue(lockSaleSQL, sale)
	statements.Queue(sellBatchSQL, sale, b.ids, b.users, b.quantities)
	answers := d.pool.SendBatch(ctx, statements)
	again, err = b.read(answers)
	if err := errors.Join(err, answers.Close()); err != nil {
		return nil, fmt.Errorf("sell to %d: %w", len(b.purchases), err)
	}
	return again, nil
}

// batch is what travels in one transaction: purchases, and the same as columns.
type batch struct {
	max        int
	purchases  []*purchase
	seen       map[string]struct{} // users
	ids        []uuid.UUID
	users      []string
	quantities []int64
}

func newBatch(most int) *batch { return &batch{max: most, seen: make(map[string]struct{}, most)} }

// add takes a purchase unless the batch is full, or has one of the same user, which has to be decided first.
func (b *batch) add(p *purchase) bool {
	if len(b.purchases) == b.max {
		return false
	}
	if _, twice := b.seen[p.order.User]; twice {
		return false
	}
	b.seen[p.order.User] = struct{}{}
	b.purchases = append(b.purchases, p)
	b.ids, b.users, b.quantities = append(b.ids, p.order.ID), append(b.users, p.order.User),
		append(b.quantities, p.order.Quantity)
	return true
}

// empty returns the purchases, of which the batch keeps none.
func (b *batch) empty() []*purchase {
	all := b.purchases
	b.purchases = nil // the caller may add some of them while it goes through all
	clear(b.seen)
	b.ids, b.users, b.quantities = b.ids[:0], b.users[:0], b.quantities[:0]
	return all
}

func (b *batch) read(answers pgx.BatchResults) (again []bool, err error) {
	if _, err := answers.Exec(); err != nil {
		return nil, err
	}
	rows, err := answers.Query()
	if err != nil {
		return nil, err
	}
	for _, p := range b.purchases {
		p.verdict = front.Confirmed
	}
	again = make([]bool, len(b.purchases))
	var place, room int64
	var held *uuid.UUID
	_, err = pgx.ForEachRow(rows, []any{&place, &held, &room}, func() error {
		p := b.purchases[place-1]
		switch {
		case held != nil && *held == p.order.ID: // written by an earlier try
		case held != nil:
			p.verdict = front.AlreadyPurchased
		case p.order.Quantity > room:
			p.verdict = front.SoldOut
		default:
			again[place-1] = true
		}
		return nil
	})
	return again, err
}

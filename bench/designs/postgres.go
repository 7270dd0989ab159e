package designs

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/bench/front"
	"stampede/internal/connect"
)

//go:embed sql/sell_one.sql
var sellOneSQL string

// postgresStock is common to the designs that use only Postgres.
type postgresStock struct {
	idle
	pool *pgxpool.Pool
}

// openPostgresStock opens the number of connections that suits the design best.
func openPostgresStock(ctx context.Context, b front.Backend, connections int) (postgresStock, error) {
	pool, err := connect.Postgres(ctx, b.DatabaseURL, int32(connections))
	return postgresStock{pool: pool}, err
}

// Prepare implements front.Design: the row of the sale is all that is needed.
func (s postgresStock) Prepare(ctx context.Context, _ uuid.UUID, _ int64) error {
	return s.pool.Ping(ctx)
}

func (s postgresStock) close() { s.pool.Close() }

// sellVerdict converts the result word of a statement that sells to one buyer.
func sellVerdict(o front.Order, word string, err error) (front.Verdict, error) {
	if hasOrder(err) {
		return front.AlreadyPurchased, nil
	}
	if err != nil {
		return none, fmt.Errorf("sell order=%s: %w", o.ID, err)
	}
	switch word {
	case "confirmed":
		return front.Confirmed, nil
	case "already-purchased":
		return front.AlreadyPurchased, nil
	case "sold-out":
		return front.SoldOut, nil
	}
	return none, fmt.Errorf("sell order=%s: Postgres answered %q", o.ID, word)
}

// uniqueViolation is the code of Postgres for a row that a unique index refuses.
const uniqueViolation = "23505"

// hasOrder reports whether a statement failed because its user has an order in the sale.
func hasOrder(err error) bool {
	var refusal *pgconn.PgError
	return errors.As(err, &refusal) && refusal.Code == uniqueViolation &&
		strings.HasSuffix(refusal.ConstraintName, "_one_live_per_user") // of a month
}

// postgresRow does without Redis: the stock is a number in the row of the sale, and one transaction per
// purchase takes from it with UPDATE … WHERE sold < stock and writes the order.
//
// What it gets right: everything. The database takes the unit and writes the order together or not at
// all, a CHECK and a unique index protect both against errors in the program, an answer is as durable
// as possible, and there is no second system to run, to lose or to compare with. For a sale of a few
// hundred orders a second it is the design to choose.
//
// How it fails: it is slow. All buyers want the same row, and each transaction holds it until its
// COMMIT is on disk; group commit does not help transactions that wait for each other. More connections
// make it slower: they wait inside Postgres, which wakes them one by one.
//
// Tutorials send BEGIN, UPDATE, INSERT and COMMIT separately, and hold the row for four round trips.
// Here it is one prepared statement, and so one transaction in one round trip.
type postgresRow struct{ postgresStock }

// rowConnections have the next statements ready in Postgres while a COMMIT is written to disk. Of 1, 2,
// 4, 8 and 16, one is the slowest by far; 2 to 8 are alike, and from 8 on each order costs Postgres a
// fifth more.
//
// Also tried: the rows first and the counter last, which holds the row of the sale only during the
// COMMIT. It is not faster, and the order then needs another source for its sequence.
const rowConnections = 4

func newPostgresRow(ctx context.Context, b front.Backend) (front.Design, error) {
	stock, err := openPostgresStock(ctx, b, rowConnections)
	return postgresRow{stock}, err
}

// Buy implements front.Design.
func (d postgresRow) Buy(ctx context.Context, o front.Order) (front.Verdict, error) {
	var word string
	err := d.pool.QueryRow(ctx, sellOneSQL, o.ID, o.Sale, o.User, o.Quantity).Scan(&word)
	return sellVerdict(o, word, err)
}

var (
	//go:embed sql/create_units.sql
	createUnitsSQL string
	//go:embed sql/fill_units.sql
	fillUnitsSQL string
	//go:embed sql/sell_units.sql
	sellUnitsSQL string
)

// postgresUnits is the usual answer to the question how to avoid the hot row: each unit is its own row,
// and SELECT … FOR UPDATE SKIP LOCKED gives every buyer a row that no other transaction has locked.
//
// What it gets right: what postgres-row does, and buyers no longer wait for each other, so that many of
// them share the wait for the disk (group commit), and more connections make it faster. It is the
// natural form if units differ, as seats do.
//
// How it fails: there is still one transaction per buyer, and now also a row per unit, which must be
// inserted before the sale. SKIP LOCKED does not know whether a locked unit will be sold: the last
// buyers may get "sold out" while another purchase is about to be refused, and its unit then stays
// until another buyer asks. The number of units left is unknown without counting.
//
// A sold unit is deleted: marking its row would write a second version. The index still leads to
// deleted units until VACUUM runs, so a search for the lowest free unit would visit all of them.
// Therefore a process searches from where it sold last, and searches all units only if it finds none
// there. sales.sold stays 0: it would be the hot row again.
type postgresUnits struct {
	postgresStock
	// from is the lowest unit to look at first. Units below it are searched only if none is found from
	// there on.
	from atomic.Int64
}

const (
	// unitsConnections: of 4, 8, 16, 32 and 64 the fastest with 256 buyers.
	unitsConnections = 16
	// unitsBehind is how far below the highest sold unit other transactions may still be selling.
	unitsBehind = 256
)

func newPostgresUnits(ctx context.Context, b front.Backend) (front.Design, error) {
	stock, err := openPostgresStock(ctx, b, unitsConnections)
	if err != nil {
		return nil, err
	}
	return &postgresUnits{postgresStock: stock}, nil
}

// Prepare implements front.Design.
func (d *postgresUnits) Prepare(ctx context.Context, sale uuid.UUID, stock int64) error {
	return pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, lockSaleSQL, sale)
		if err == nil {
			_, err = tx.Exec(ctx, createUnitsSQL)
		}
		if err == nil {
			_, err = tx.Exec(ctx, fillUnitsSQL, sale, stock)
		}
		return err
	})
}

// Buy implements front.Design.
func (d *postgresUnits) Buy(ctx context.Context, o front.Order) (front.Verdict, error) {
	from := d.from.Load()
	verdict, err := d.buyFrom(ctx, o, from)
	if verdict == front.SoldOut && from > 0 {
		return d.buyFrom(ctx, o, 0)
	}
	return verdict, err
}

func (d *postgresUnits) buyFrom(ctx context.Context, o front.Order, lowest int64) (front.Verdict, error) {
	var unit int64
	var word string
	err := d.pool.QueryRow(ctx, sellUnitsSQL, o.ID, o.Sale, o.User, o.Quantity, lowest).Scan(&unit, &word)
	for from := d.from.Load(); from < unit-unitsBehind; from = d.from.Load() {
		if d.from.CompareAndSwap(from, unit-unitsBehind) {
			break
		}
	}
	return sellVerdict(o, word, err)
}

var (
	//go:embed sql/lock_sale.sql
	lockSaleSQL string
	//go:embed sql/sell_batch.sql
	sellBatchSQL string
)

// postgresBatched is Postgres alone with the batching that makes Stampede fast: purchases that arrive
// while a transaction is running go into the next one, which starts as soon as the last one has ended,
// without a timer (reservation/queue.go does the same in front of Redis). A batch is two prepared
// statements in one round trip and one transaction: lock the sale, then multi-row inserts and one
// update of its counter. It is the strongest rival.
//
// What it gets right: what postgres-row does, at ten times its speed; an accepted order is in Postgres,
// so nothing can be lost and no second system is needed.
//
// How it fails: every buyer waits for the disk of the database, and the database serves every buyer: a
// refused buyer costs it as much work as an accepted one, in addition to everything else that it has to
// do. While it is unavailable or slow, nothing is sold, and buyers get only errors.
type postgresBatched struct {
	postgresStock

	mu      sync.Mutex
	waiting []*purchase
	// sending is the number of goroutines that send batches. Invariant: waiting is empty if it is 0.
	sending int
	senders sync.WaitGroup
}

// Measured at 256 connections, with everything on two busy cores, in turns: a second transaction in
// flight hides the wait for the disk and for the front behind the first, and gives 1.1 to 1.2 × the
// rate of one, though Postgres needs a tenth more CPU for each order. Locking the row of the sale first
// serializes them, which is no limit: a batch of 256 takes 6 ms of one core in Postgres, and the front
// and the crowd need more than that of both. Four in flight, and batches of 64 or 128, cost a fifth
// more CPU and are slower; a batch of 512 or 1024 is never full, as no more than 256 wait. Other forms
// of the statement's parts (an arbiter index, no ON CONFLICT, two inserts of events, JSON made from
// text) make no difference: nearly all of its cost is the rows and their indexes.
const (
	batchedMax = 256
	// batchedInFlight is the maximum of concurrent transactions, each on its own connection.
	batchedInFlight = 2
	// batchedQueueMax bounds the waiting purchases, as ours does.
	batchedQueueMax = 8192
	// batchedTimeout bounds one attempt of a transaction, as ours bounds a call of the script.
	batchedTimeout = 3 * time.Second
)

var errOverloaded = errors.New("too many buyers are waiting")

func newPostgresBatched(ctx context.Context, b front.Backend) (front.Design, error) {
	stock, err := openPostgresStock(ctx, b, batchedInFlight)
	if err != nil {
		return nil, err
	}
	return &postgresBatched{postgresStock: stock}, nil
}

// Run implements front.Design.
func (d *postgresBatched) Run(ctx context.Context) error {
	<-ctx.Done()
	d.senders.Wait() // for purchases whose buyers have disconnected
	return nil
}

// purchase is an order that waits or is in a batch.
type purchase struct {
	order front.Order
	done  chan struct{} // receives one value when verdict and err are set
	// verdict and err belong to the batch until done, and to the caller afterwards.
	verdict front.Verdict
	err     error
}

var purchasePool = sync.Pool{New: func() any { return &purchase{done: make(chan struct{}, 1)} }}

// Buy implements front.Design.
func (d *postgresBatched) Buy(ctx context.Context, o front.Order) (front.Verdict, error) {
	p := purchasePool.Get().(*purchase)
	p.order = o
	if err := d.join(p); err != nil {
		return none, err
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		return none, ctx.Err() // the batch still uses the purchase, so it is not put back
	}
	verdict, err := p.verdict, p.err
	purchasePool.Put(p)
	return verdict, err
}

func (d *postgresBatched) join(p *purchase) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.waiting) >= batchedQueueMax {
		return errOverloaded
	}
	d.waiting = append(d.waiting, p)
	if d.sending < batchedInFlight {
		d.sending++
		d.senders.Go(d.send)
	}
	return nil
}

// send sends batches until no purchase is waiting.
func (d *postgresBatched) send() {
	b := newBatch(batchedMax)
	for d.take(b) {
		d.decide(b)
	}
}

// take fills the batch with waiting purchases. If there are none, it subtracts the caller from sending.
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
		d.sending--
	}
	return len(b.purchases) > 0
}

// decide sells to a batch and answers it. Purchases that were skipped stay in it for the next
// transaction.
func (d *postgresBatched) decide(b *batch) {
	skipped, err := d.sell(b)
	if err != nil {
		// If only the answer was lost, the retry finds the written orders by their ids.
		skipped, err = d.sell(b)
	}
	all := b.empty()
	for i, p := range all {
		if err == nil && skipped[i] {
			b.add(p)
			continue
		}
		p.err = err
		p.done <- struct{}{}
	}
}

// sell runs one transaction: statements that are sent together form one, without a BEGIN. It sets the
// verdicts, and returns for each purchase whether it was skipped although enough units are left: an
// earlier purchase in the batch had an order already or wanted too many units.
func (d *postgresBatched) sell(b *batch) (skipped []bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), batchedTimeout)
	defer cancel()
	statements := &pgx.Batch{}
	sale := b.purchases[0].order.Sale // a front sells one sale
	statements.Queue(lockSaleSQL, sale)
	statements.Queue(sellBatchSQL, sale, b.ids, b.users, b.quantities)
	answers := d.pool.SendBatch(ctx, statements)
	skipped, err = b.read(answers)
	if err := errors.Join(err, answers.Close()); err != nil {
		return nil, fmt.Errorf("sell to %d buyers: %w", len(b.purchases), err)
	}
	return skipped, nil
}

// batch is the purchases of one transaction, also as columns.
type batch struct {
	max        int
	purchases  []*purchase
	seen       map[string]struct{} // users
	ids        []uuid.UUID
	users      []string
	quantities []int64
}

func newBatch(size int) *batch { return &batch{max: size, seen: make(map[string]struct{}, size)} }

// add adds a purchase unless the batch is full, or holds one of the same user, which must be decided
// first.
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

// empty removes and returns all purchases.
func (b *batch) empty() []*purchase {
	all := b.purchases
	b.purchases = nil // not reused: the caller may add some of them while it iterates over all
	clear(b.seen)
	b.ids, b.users, b.quantities = b.ids[:0], b.users[:0], b.quantities[:0]
	return all
}

func (b *batch) read(answers pgx.BatchResults) (skipped []bool, err error) {
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
	skipped = make([]bool, len(b.purchases))
	var place, unitsLeft int64
	var held *uuid.UUID
	_, err = pgx.ForEachRow(rows, []any{&place, &held, &unitsLeft}, func() error {
		p := b.purchases[place-1]
		switch {
		case held != nil && *held == p.order.ID: // written by an earlier attempt
		case held != nil:
			p.verdict = front.AlreadyPurchased
		case p.order.Quantity > unitsLeft:
			p.verdict = front.SoldOut
		default:
			skipped[place-1] = true
		}
		return nil
	})
	return skipped, err
}

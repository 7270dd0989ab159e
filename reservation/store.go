// Package reservation owns the stock of a sale in Redis, and the one atomic step in which a buyer's
// request becomes a reservation and an event.
//
// It stands between the ingress, which requests units, and the workers, which read the events from
// the stream. Follow a request in this order: Store.Reserve (store.go), the queue of its sale
// (queue.go), lua/reserve.lua (script.go), and order.OrderReserved.
//
// Package order defines orders, and package catalog holds the definitions of sales in Postgres.
package reservation

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/internal/retry"
	"stampede/lua"
	"stampede/reservation/order"
)

// A Store answers within DefaultWaitMax + DefaultCallTimeout.
const (
	DefaultWaitMax     = 2 * time.Second
	DefaultCallTimeout = 3 * time.Second
)

// StoreOptions bounds a Store. The zero value of a field stands for its default.
type StoreOptions struct {
	// BatchMax bounds the requests in one call of the script. Default and maximum are
	// order.MaxPerMessage: Redis is blocked meanwhile, and larger batches hardly make a reservation
	// cheaper.
	BatchMax int
	// QueueMax is how many requests may wait for one shard of a sale; further ones get ErrOverloaded. Default 8192.
	QueueMax int
	// SalesMax is how many sales the store keeps queues of. Default 4096.
	SalesMax int
	// WaitMax is the age at which a waiting request gets ErrOverloaded. It is checked when a
	// call of the script ends, after CallTimeout at most: a timer per request would cost more than
	// deciding it. Default DefaultWaitMax.
	WaitMax time.Duration
	// CallTimeout bounds one call of the script with all its tries. Default DefaultCallTimeout.
	CallTimeout time.Duration
	// ReplicaAcks is how many replicas must confirm a reservation. One that they did not confirm within 50 ms has an
	// unknown outcome. Default 0: a reservation is in one server only.
	ReplicaAcks int
	// Logger gets errors that have no caller. Default slog.Default().
	Logger *slog.Logger
	// Observer receives each call of the script.
	Observer Observer
}

// Observer receives the calls of scripts, in the goroutines that make them. A function that is nil is not called.
type Observer struct {
	// Reserve gets each try of a call of lua/reserve.lua that was sent, also without an answer: for how many requests, and
	// how long it took.
	Reserve func(requests int, took time.Duration)
}

func (o *StoreOptions) setDefaults() {
	if o.BatchMax <= 0 || o.BatchMax > order.MaxPerMessage {
		o.BatchMax = order.MaxPerMessage
	}
	if o.QueueMax <= 0 {
		o.QueueMax = 8192
	}
	if o.SalesMax <= 0 {
		o.SalesMax = 4096
	}
	if o.WaitMax <= 0 {
		o.WaitMax = DefaultWaitMax
	}
	if o.CallTimeout <= 0 {
		o.CallTimeout = DefaultCallTimeout
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Observer.Reserve == nil {
		o.Observer.Reserve = func(int, time.Duration) {}
	}
}

// Store is the stock of all sales, in Redis. It is safe for concurrent use.
type Store struct {
	Servers

	options StoreOptions
	started time.Time
	seed    maphash.Seed // of the hashes in soldOut
	index   shared[*saleIndex]
	looks   saleLooks

	mu      sync.RWMutex
	sellers map[uuid.UUID]*seller

	// Queues and sold-out watchers run in the background until Close. closing excludes Close while
	// another one starts. It is not mu, because keep locks queues while it holds mu, and a locked
	// queue starts its goroutine.
	closing    sync.RWMutex
	background sync.WaitGroup
	ctx        context.Context
	cancel     context.CancelFunc
}

// NewStore makes a store that works through rdb, which it does not close.
func NewStore(rdb redis.UniversalClient, keys Keys, o StoreOptions) *Store {
	o.setDefaults()
	ctx, cancel := context.WithCancel(context.Background())
	return &Store{
		Servers: Servers{Redis: rdb, Keys: keys, Logger: o.Logger}, options: o,
		started: time.Now(), seed: maphash.MakeSeed(),
		sellers: make(map[uuid.UUID]*seller),
		ctx:     ctx, cancel: cancel,
	}
}

// Close waits for the requests in flight and answers later ones ErrUnavailable.
func (s *Store) Close() {
	s.closing.Lock()
	s.cancel()
	s.closing.Unlock()
	s.background.Wait()
}

// goBackground runs f unless the store is closed.
func (s *Store) goBackground(f func()) bool {
	s.closing.RLock()
	defer s.closing.RUnlock()
	if s.ctx.Err() != nil {
		return false
	}
	s.background.Go(f)
	return true
}

// Ping returns nil if the server of any partition answers, also if it is full or a replica and refuses writes.
func (s *Store) Ping(ctx context.Context) error {
	return s.anyPartition(func(p int) error { return s.Redis.HLen(ctx, s.Keys.Server(p)).Err() })
}

// Writable returns nil if the server of any partition takes the writes of a purchase.
func (s *Store) Writable(ctx context.Context) error {
	return s.anyPartition(func(p int) error { return TryWrite(ctx, s.Redis, s.Keys, p) })
}

// TryWrite returns the error with which the server of a partition would refuse the first write of a purchase. Without
// one it changes nothing: it appends to a stream that is not there.
func TryWrite(ctx context.Context, rdb redis.Cmdable, keys Keys, partition int) error {
	err := rdb.XAdd(ctx, &redis.XAddArgs{
		Stream: keys.in(partition, "no-stream"), NoMkStream: true, Values: []string{"f", "v"},
	}).Err()
	if errors.Is(err, redis.Nil) {
		return nil
	}
	return err
}

// ProbeWrite writes a mark of a second, which is to survive a crash if logged is true, so that its caller can measure
// how long that takes.
func ProbeWrite(ctx context.Context, rdb redis.Scripter, keys Keys, partition int, logged bool) error {
	flag := 0
	if logged {
		flag = 1
	}
	return lua.Probe.Run(ctx, rdb, []string{keys.in(partition, "probe")}, flag).Err()
}

// RefusalCode returns the first word of an answer of Redis that is an error, such as OOM; it is empty for other errors.
func RefusalCode(err error) string {
	var answer redis.Error
	if !errors.As(err, &answer) {
		return ""
	}
	code, _, _ := strings.Cut(answer.Error(), " ")
	return code
}

// anyPartition returns nil as soon as ask does for a partition.
func (s *Store) anyPartition(ask func(partition int) error) error {
	answers := make(chan error, s.Keys.Partitions)
	for partition := range s.Keys.Partitions {
		if !s.goBackground(func() { answers <- ask(partition) }) {
			return errClosed
		}
	}
	var failed []error
	for range s.Keys.Partitions {
		err := <-answers
		if err == nil {
			return nil
		}
		failed = append(failed, err)
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, retry.Join(failed...))
}

// Reserve requests units. An Answer is the sale's decision, possibly a refusal. An error is an
// *InvalidError, or wraps ErrOverloaded, ErrUnavailable, ErrReservationDamaged or
// ErrOutcomeUnknown, or is the error of ctx if it ended before the request was sent. Only with
// ErrOutcomeUnknown may units have been taken.
//
// Requests for one shard of a sale that arrive during a call of the script are sent together in the next one.
// SoldOut is the answer only if all shards together have too few units left.
// Reserve returns within WaitMax and CallTimeout; ctx needs no deadline.
func (s *Store) Reserve(ctx context.Context, r Request) (answer Answer, err error) {
	arrived := s.sinceStart()
	if !r.Arrived.IsZero() {
		arrived = int64(r.Arrived.Sub(s.started))
	}
	if err := r.validate(); err != nil {
		return Answer{}, err
	}
	of, err := s.findSeller(ctx, r.Sale)
	if errors.Is(err, ErrSaleNotFound) {
		return Answer{Verdict: UnknownSale}, nil
	} else if err != nil {
		return Answer{}, fmt.Errorf("reserve sale=%s user=%s: %w", r.Sale, r.User, err)
	}
	q := of.queueFor(r.User)
	if s.refused[q.partition].Load() {
		return Answer{}, fmt.Errorf("reserve sale=%s user=%s: %w", r.Sale, r.User, ErrUnverifiedServer)
	}
	switch {
	case r.Items != nil || of.address.codes != nil:
		answer, err = q.reserveItems(ctx, r, arrived)
	case of.remembersSoldOut(r.User):
		return Answer{Verdict: SoldOut}, nil
	default:
		err = q.reserve(ctx, &r, "", arrived, &answer)
	}
	if err != nil {
		return Answer{}, fmt.Errorf("reserve sale=%s user=%s: %w", r.Sale, r.User, err)
	}
	return answer, nil
}

func (r *Request) validate() error {
	if err := order.ValidateUser(r.User); err != nil {
		return err
	}
	if r.Items == nil && r.Quantity < 1 {
		return &order.InvalidError{Field: "quantity", Reason: "must be at least 1"}
	}
	if err := r.validateItems(); err != nil {
		return err
	}
	if r.IdempotencyKey != "" {
		return order.ValidateIdempotencyKey(r.IdempotencyKey)
	}
	return nil
}

// findSeller returns the seller of a sale, looking the sale up in Redis the first time.
func (s *Store) findSeller(ctx context.Context, sale uuid.UUID) (*seller, error) {
	if known := s.knownSeller(sale); known != nil {
		return known, nil
	}
	at, err := s.lookOnce(ctx, sale)
	if err != nil {
		return nil, err
	}
	return s.keep(newSeller(s, sale, at))
}

func (s *Store) knownSeller(sale uuid.UUID) *seller {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.sellers[sale]
}

// keep stores a seller and returns it, or the one that another request stored first.
func (s *Store) keep(of *seller) (*seller, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if first := s.sellers[of.sale]; first != nil {
		return first, nil
	}
	if len(s.sellers) >= s.options.SalesMax {
		for sale, other := range s.sellers {
			if other.idle() {
				delete(s.sellers, sale)
				break
			}
		}
		if len(s.sellers) >= s.options.SalesMax {
			return nil, ErrOverloaded
		}
	}
	s.sellers[of.sale] = of
	return of, nil
}

// renew starts a seller for the sale's new epoch.
func (s *Store) renew(of *seller, p address) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sellers[of.sale] == of {
		s.sellers[of.sale] = newSeller(s, of.sale, p)
	}
}

// address is where a sale is in Redis, its epoch, and the codes of its items, which never change.
type address struct {
	layout Layout
	epoch  int64
	codes  []string
}

var errClosed = fmt.Errorf("%w: the store is closed", ErrUnavailable)

// ErrLostSale: Redis lost the sale, which sells nothing until a rebuild from Postgres. A process that
// has never seen the sale cannot distinguish it from one that does not exist.
var ErrLostSale = fmt.Errorf("%w: Redis has lost it", ErrUnavailable)

// find finds a sale in Redis. The partition follows from the sale's id and the number of partitions
// at its creation, which may differ from the current one: a sale that is not in its current partition
// is looked up in the index. The index is read at most once in indexTrust for this, so a sale that
// does not exist costs one lookup.
//
// Any shard of a sale shows where the others are, so the sale is found while one of them answers.
//
// ErrSaleNotFound is certain. If a server may have lost the sale, the error wraps ErrUnavailable.
func (s *Store) find(ctx context.Context, sale uuid.UUID) (address, error) {
	partition := s.Keys.Partition(sale)
	at, missing := s.look(ctx, partition, sale)
	if missing == nil {
		return at, nil
	}
	index, err := s.indexSince(ctx, time.Now().Add(-indexTrust))
	if err != nil {
		return address{}, fmt.Errorf("%w: look up sale=%s: %w", ErrUnavailable, sale, err)
	}
	elsewhere := false
	for _, found := range index.sales {
		if found.ID == sale && found.Partition != partition {
			at, err := s.look(ctx, found.Partition, sale)
			if err == nil {
				return at, nil
			}
			if !elsewhere && errors.Is(missing, ErrSaleNotFound) {
				missing = err
			}
			elsewhere = true
		}
	}
	switch { // it may be in another partition
	case elsewhere || !errors.Is(missing, ErrSaleNotFound) && !errors.Is(missing, ErrUnverifiedServer):
		return address{}, missing
	case s.refusesAny():
		return address{}, ErrUnverifiedServer
	case index.silent:
		return address{}, fmt.Errorf("%w: look up sale=%s: a partition does not answer", ErrUnavailable, sale)
	}
	return address{}, missing
}

// seller sells one sale in one epoch. It has a queue for each shard, and shares what it knows of the whole sale. It is
// safe for concurrent use.
type seller struct {
	shards
	queues []*queue // by shard

	counts shared[*saleCount]
	// counted are the last counts by shard. They belong to the count in progress.
	counted []*shardCount
	soldOut atomic.Pointer[soldOut]
	// soldItems takes its place in a sale with items.
	soldItems atomic.Pointer[soldItems]
	learning  atomic.Bool // a goroutine creates or watches one of them
}

func newSeller(s *Store, sale uuid.UUID, p address) *seller {
	of := &seller{
		shards:  shards{s, sale, p},
		queues:  make([]*queue, p.layout.Shards),
		counted: make([]*shardCount, p.layout.Shards),
	}
	for shard := range of.queues {
		partition := p.layout.Partition(shard)
		of.queues[shard] = &queue{
			seller: of, shard: shard, partition: partition, target: newTarget(s.Keys, sale, partition, p),
		}
	}
	return of
}

// queueFor returns the queue of the shard in which a user buys.
func (of *seller) queueFor(user string) *queue { return of.queues[of.address.layout.ShardOf(user)] }

// idle is true if the seller can be dropped without loss.
func (of *seller) idle() bool {
	return !of.learning.Load() && !slices.ContainsFunc(of.queues, func(q *queue) bool { return !q.idle() })
}

package rebuild

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/retry"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/sql"
)

// ErrOtherServer is returned for a Redis server whose record says that it is verified, while Postgres names another
// server: an old one was put back, or one was cut off and replaced. Only an operator knows which one is right, and
// rebuilds the partition on it.
var ErrOtherServer = errors.New("this is not the Redis server that Postgres names")

// Need is what has to be rebuilt: a partition, or one sale.
type Need struct {
	partition int // of a sale its home, under whose lock it is rebuilt
	// sharded is true for a sale with several shards. Each of their partitions may notice that it has to be rebuilt.
	sharded bool
	Sale    uuid.UUID // uuid.Nil for the partition with all sales that have one shard
	Reason  string
}

// finder finds what must be rebuilt.
type finder struct {
	config Config
	Ledger *ledger.Ledger
	behind behind

	// What this worker's orders show about Redis (proof.go).
	refused refusals
	Probes  probes
	logged  logged
}

// Needs finds what has to be rebuilt in the first partitions: whole partitions whose server may have lost sales, and
// single sales that Redis lacks or that differ from Postgres. Ended sales are checked only if withEnded, and may be
// missing, because operators may delete their keys. A partition that cannot be checked is in the error, and hides no
// need of the others.
//
// Sales are created and rebuilt concurrently, so only the holder of a partition's lock gets a lasting answer.
func (r *finder) Needs(ctx context.Context, partitions int, withEnded bool) ([]Need, error) {
	required, err := r.Required(ctx, withEnded)
	if err != nil {
		return nil, err
	}
	found := make([][]Need, partitions)
	err = reservation.EachPartition(partitions, func(p int) (err error) {
		found[p], err = r.findNeeds(ctx, p, required)
		return err
	})
	// Several partitions may notice the same sale.
	named := map[Need]bool{}
	return slices.DeleteFunc(slices.Concat(found...), func(n Need) (again bool) {
		again, named[n.target()] = named[n.target()], true
		return again
	}), err
}

// Shut counts the open sales that sell nothing until they are rebuilt, of the first partitions.
func (r *finder) Shut(ctx context.Context, partitions int) (int, error) {
	required, err := r.Required(ctx, false)
	if err != nil {
		return 0, err
	}
	shut := make([][]uuid.UUID, partitions)
	err = reservation.EachPartition(partitions, func(p int) (err error) {
		shut[p], err = r.shutIn(ctx, p, required)
		return err
	})
	all := map[uuid.UUID]struct{}{} // a sale may have several shards
	for _, sale := range slices.Concat(shut...) {
		all[sale] = struct{}{}
	}
	return len(all), err
}

func (r *finder) shutIn(ctx context.Context, partition int, required *Required) (sales []uuid.UUID, err error) {
	reason, err := r.needOfPartition(ctx, partition, required)
	if err != nil && !errors.Is(err, ErrOtherServer) {
		return nil, err
	}
	for page := range slices.Chunk(required.sales[partition], salesPerPage) {
		var found []reservation.ShardHash
		if reason == "" && err == nil {
			inRedis, err := r.readShards(ctx, page)
			if err != nil {
				return nil, err
			}
			found = inRedis
		}
		for i := range page {
			if page[i].open && (found == nil || needOfShard(&page[i], found[i]) != "") {
				sales = append(sales, page[i].id)
			}
		}
	}
	return sales, nil
}

// findNeeds finds what has to be rebuilt in one partition. The needs are also valid with an error.
func (r *finder) findNeeds(ctx context.Context, partition int, required *Required) (found []Need, err error) {
	reason, err := r.needOfPartition(ctx, partition, required)
	switch {
	case err != nil:
		return nil, fmt.Errorf("partition %d: %w", partition, err)
	case reason != "":
		r.behind.set(partition, required.withEnded, map[bool]int64{})
		return []Need{{partition: partition, Reason: reason}}, nil
	}
	counted := map[bool]int64{}
	for page := range slices.Chunk(required.sales[partition], salesPerPage) {
		needs, err := r.needsAmong(ctx, page, counted)
		found = append(found, needs...)
		if err != nil {
			return found, fmt.Errorf("partition %d: %w", partition, err)
		}
	}
	r.behind.set(partition, required.withEnded, counted)
	return found, nil
}

// needsAmong finds because of which of these shards their sales have to be rebuilt. For the others it adds to counted
// how far Postgres is behind, by whether the sale is over.
func (r *finder) needsAmong(
	ctx context.Context, shards []requiredShard, counted map[bool]int64,
) (found []Need, err error) {
	inRedis, err := r.readShards(ctx, shards)
	if err != nil {
		return nil, err
	}
	var agreeing []requiredShard
	for i := range shards {
		s := &shards[i]
		if reason := needOfShard(s, inRedis[i]); reason != "" {
			found = append(found, s.need(reason))
		} else if inRedis[i].Exists {
			counted[s.ended] += s.behind(inRedis[i].Sequence)
			if s.retired { // its orders prove nothing: Redis does not have them
				r.Probes.forget(s)
				continue
			}
			agreeing = append(agreeing, *s)
		}
	}
	reasons, err := r.proofsIn(ctx, agreeing)
	for i, reason := range reasons {
		if reason != "" {
			found = append(found, agreeing[i].need(reason))
		}
	}
	return found, err
}

// need returns the need to rebuild a sale.
func (s *requiredSale) need(reason string) Need {
	return Need{s.layout.Home, s.isSharded(), s.id, reason}
}

// lastPlace returns the highest place in Postgres if the shard has given it out, and otherwise 0: the highest places
// of the other shards are not known.
func (s *requiredShard) lastPlace() int64 {
	if int((s.lastSequence-1)%int64(s.layout.Shards)) != s.shard {
		return 0
	}
	return s.lastSequence
}

// behind returns how many places a shard with this sequence has given out after the last one in Postgres.
func (s *requiredShard) behind(sequence int64) int64 {
	return max(0, sequence-s.lastSequence) / int64(s.layout.Shards)
}

// needOfPartition returns the reason to rebuild a partition, or "" if its server is the verified one.
func (r *finder) needOfPartition(
	ctx context.Context, partition int, required *Required,
) (reason string, err error) {
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	state, err := r.config.Catalog.Store.Inspect(limited, partition)
	if err != nil {
		return "", err
	}
	runID, verified := required.servers[partition]
	switch {
	case verified && state.Known && state.RunID == runID:
		return "", nil
	case verified && state.Known:
		return "", ErrOtherServer
	}
	used, err := required.used()
	if err != nil {
		return "", err
	}
	if verified && !used[partition] {
		// Its first user may have recorded the server in Postgres, and not yet in Redis.
		state, err = r.config.Catalog.Store.AwaitFirstUse(limited, partition)
		if err != nil || state.Known {
			return "", err // the next call compares the servers
		}
	}
	switch {
	case verified:
		return ReasonServer, nil
	case !used[partition]:
		return "", nil
	}
	// The server is recorded before the first sale is published: this may have happened since the first read.
	servers, err := r.verifiedServers(ctx)
	if err != nil {
		return "", err
	}
	if _, verified = servers[partition]; verified {
		return "", nil // the next call compares the servers
	}
	return ReasonUnverified, nil
}

// needOfShard returns the reason to rebuild the sale of a shard, or "" if its numbers agree or Redis need not have it.
func needOfShard(s *requiredShard, found reservation.ShardHash) (reason string) {
	switch {
	case found.Exists && (found.Epoch != s.epoch || found.Layout != s.layout.Field(s.shard)):
		return ReasonUnfinished
	case found.Exists && found.Sequence < s.lastPlace():
		return ReasonSetBack
	case found.Exists:
		return ""
	case s.publishedRevision == 0 && s.epoch == 1:
		return "" // never published: its creation publishes it
	case s.ended && s.publishedRevision == s.revision:
		return "" // deleted to free memory
	}
	return ReasonSaleLost
}

// readShards reads shards from Redis, in their order.
func (r *finder) readShards(ctx context.Context, shards []requiredShard) ([]reservation.ShardHash, error) {
	if len(shards) == 0 {
		return nil, nil
	}
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	asked := make([]reservation.ShardAnswer, len(shards))
	_, _ = r.config.Catalog.Store.Redis.Pipelined(ctx, func(p redis.Pipeliner) error { // each command's own error counts
		for i := range shards {
			s := &shards[i]
			asked[i] = r.config.Catalog.Store.Keys.AskShard(ctx, p, s.partition(), s.id, 0, "epoch", "sequence", "shard")
		}
		return nil
	})
	found := make([]reservation.ShardHash, len(shards))
	for i := range shards {
		var err error
		if found[i], err = asked[i].Hash(); err != nil {
			return nil, fmt.Errorf("look up sale=%s in Redis: %w", shards[i].id, err)
		}
	}
	return found, nil
}

// behind is how many orders Postgres is behind Redis by the sequences of sales, as of the last check of the sales that
// are over (true) and of those that are not (false).
type behind struct {
	mu     sync.Mutex
	orders map[int]map[bool]int64 // by partition
}

// set replaces the counts of a partition. Sales that are over keep theirs unless withEnded.
func (b *behind) set(partition int, withEnded bool, counted map[bool]int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.orders == nil {
		b.orders = map[int]map[bool]int64{}
	}
	if !withEnded {
		counted[true] = b.orders[partition][true]
	}
	b.orders[partition] = counted
}

// Behind returns how many places Redis has assigned in the sales of a partition after the last one that Postgres has
// recorded, as of the last call of HealPartition, and 0 after Leave. Its rejected and voided orders count until a later
// order is confirmed.
func (r *finder) Behind(partition int) (orders int64) {
	r.behind.mu.Lock()
	defer r.behind.mu.Unlock()
	return r.behind.orders[partition][false] + r.behind.orders[partition][true]
}

// Leave forgets how far Postgres was behind in a partition: from now on somebody else checks it, if at all.
func (r *finder) Leave(partition int) {
	r.behind.mu.Lock()
	defer r.behind.mu.Unlock()
	delete(r.behind.orders, partition)
}

// requiredSale is a sale, as Postgres has it, that Redis must have.
type requiredSale struct {
	id                          uuid.UUID
	layout                      reservation.Layout
	epoch, lastSequence         int64
	revision, publishedRevision int64
	ended                       bool
	// open is true if it sells now.
	open bool
	// retired is true if Redis has no buyers of it any more.
	retired bool

	// closed is what Redis knew of each shard when the rebuild closed it.
	closed []reservation.ClosedSale
}

// isSharded is true for a sale with several shards. It is rebuilt under the lock of its home partition, and not with
// one of its partitions.
func (s *requiredSale) isSharded() bool { return s.layout.Shards > 1 }

// shards returns all shards of the sale.
func (s *requiredSale) shards() []requiredShard {
	all := make([]requiredShard, s.layout.Shards)
	for shard := range all {
		all[shard] = requiredShard{*s, shard}
	}
	return all
}

// requiredShard is a shard of a sale.
type requiredShard struct {
	requiredSale
	shard int
}

func (s *requiredShard) partition() int { return s.layout.Partition(s.shard) }

// Required is what Postgres required of Redis when it was read. It is safe for concurrent use.
type Required struct {
	withEnded bool
	// sales are the shards of those that are not over, or of all if withEnded, by partition.
	sales map[int][]requiredShard
	// servers are the run ids of the verified servers, by partition.
	servers map[int]string
	// used reads, once, of which partitions a sale was ever published.
	used func() (map[int]bool, error)
}

// Required reads once for all partitions what Redis must have. The sales that are over are included only if withEnded.
func (r *finder) Required(ctx context.Context, withEnded bool) (*Required, error) {
	required := &Required{
		withEnded: withEnded, sales: map[int][]requiredShard{},
		used: sync.OnceValues(func() (map[int]bool, error) { return r.usedPartitions(ctx) }),
	}
	err := r.eachSale(ctx, withEnded, func(page []requiredSale) error {
		for _, sale := range page {
			for _, s := range sale.shards() {
				required.sales[s.partition()] = append(required.sales[s.partition()], s)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	// Last, because a rebuild by another process changes them, and they are compared with the servers next.
	required.servers, err = r.verifiedServers(ctx)
	return required, err
}

// ShardedSale is a sale with several shards that is not over.
type ShardedSale struct {
	ID     uuid.UUID
	Layout reservation.Layout
	Epoch  int64
}

// ShardedAt returns the sales with several shards whose home is this partition and which are not over.
func (r *Required) ShardedAt(partition int) (sales []ShardedSale) {
	for _, s := range r.sales[partition] {
		if s.isSharded() && s.shard == 0 && !s.ended {
			sales = append(sales, ShardedSale{s.id, s.layout, s.epoch})
		}
	}
	return sales
}

func (r *finder) usedPartitions(ctx context.Context) (map[int]bool, error) {
	used := map[int]bool{}
	err := r.eachSale(ctx, true, func(page []requiredSale) error {
		for _, sale := range page {
			for _, s := range sale.shards() {
				used[s.partition()] = used[s.partition()] || sale.publishedRevision > 0
			}
		}
		return nil
	})
	return used, err
}

// verifiedServers returns the run id of the verified server of each partition.
func (r *finder) verifiedServers(ctx context.Context) (map[int]string, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	return reservation.VerifiedServers(ctx, r.config.Catalog.Pool)
}

// Partitions returns the number of partitions of new and older sales.
func (r *finder) Partitions(ctx context.Context) (int, error) {
	return CountPartitions(ctx, r.config.Catalog.Pool, r.config.Catalog.Store.Keys)
}

// salesPerPage is how many sales are read at a time.
const salesPerPage = 1000

// eachSale calls f with the sales that are not over, or all if withEnded, a page at a time.
func (r *finder) eachSale(ctx context.Context, withEnded bool, f func([]requiredSale) error) error {
	after := uuid.Nil
	for {
		page, err := r.salePage(ctx, after, salesPerPage, withEnded)
		if err != nil || len(page) == 0 {
			return err
		}
		full, last := len(page) == salesPerPage, page[len(page)-1].id
		if err := f(page); err != nil || !full {
			return err
		}
		after = last
	}
}

func (r *finder) salePage(ctx context.Context, after uuid.UUID, limit int, withEnded bool) ([]requiredSale, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	// Its error comes with the rows.
	rows, _ := r.config.Catalog.Pool.Query(ctx, sql.RebuildSalesInRedis, after, limit, withEnded)
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (requiredSale, error) {
		s, err := pgx.RowToStructByName[struct {
			ID                                               uuid.UUID
			Partitions, Shards                               int
			Epoch, LastSequence, Revision, PublishedRevision int64
			Ended, Retired, Open                             bool
		}](row)
		if err != nil {
			return requiredSale{}, err
		}
		return requiredSale{
			id: s.ID, layout: reservation.LayoutOf(s.ID, s.Partitions, s.Shards), epoch: s.Epoch,
			lastSequence: s.LastSequence, revision: s.Revision, publishedRevision: s.PublishedRevision, ended: s.Ended,
			retired: s.Retired, open: s.Open,
		}, nil
	})
}

// salesIn returns all sales with a shard in a partition.
func (r *finder) salesIn(ctx context.Context, partition int) (sales []requiredSale, err error) {
	err = r.eachSale(ctx, true, func(page []requiredSale) error {
		for _, sale := range page {
			if _, is := sale.layout.ShardIn(partition); is {
				sales = append(sales, sale)
			}
		}
		return nil
	})
	return sales, err
}

// findSale returns one sale, or reservation.ErrSaleNotFound.
func (r *finder) findSale(ctx context.Context, id uuid.UUID) (requiredSale, error) {
	sales, err := r.salePage(ctx, idBelow(id), 1, true)
	if err == nil && (len(sales) == 0 || sales[0].id != id) {
		err = reservation.ErrSaleNotFound
	}
	if err != nil {
		return requiredSale{}, err
	}
	return sales[0], nil
}

// idBelow returns the next lower id.
func idBelow(id uuid.UUID) uuid.UUID {
	for i := len(id) - 1; i >= 0; i-- {
		id[i]--
		if id[i] != 0xff {
			break
		}
	}
	return id
}

// CountPartitions returns the number of partitions of new and older sales.
func CountPartitions(ctx context.Context, pool *pgxpool.Pool, keys reservation.Keys) (partitions int, err error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	err = pool.QueryRow(ctx, sql.WorkerMostPartitions).Scan(&partitions)
	return max(partitions, keys.Partitions), err
}

package designs

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"stampede/bench/designs/redisson"
	"stampede/bench/front"
	"stampede/lock"
)

var (
	//go:embed sql/has_order.sql
	hasOrderSQL string
	//go:embed sql/take_units.sql
	takeUnitsSQL string
)

// lockTransaction is the fourth step, and the one in which many tutorials end: the reentrant lock of a
// library, with a watchdog that renews its lease, so that a slow holder does not lose it; one lock for each user
// instead of one for the sale; and inside of it a database transaction that looks whether the user has an
// order, takes a unit by UPDATE … WHERE sold < stock, and writes the order.
//
// What it gets right: users do not wait for each other's locks. The stock is where the orders are, and
// the row takes only what is there, so that nothing is oversold and nothing lost, whatever the lock does.
//
// How it fails: all that is right about it is the transaction, which would be as right without the lock
// (postgres-row). The lock saves the second click of a user, which the unique index refuses as well,
// and for that everybody pays two round trips to Redis, each with its wait for the disk, around a transaction in
// which all wait for the row of the sale. It does not even exclude: a holder that stalls loses its
// lease and writes all the same. If the process dies, its users cannot buy until their leases end.
//
// There are two of it: with stampede/lock, and with a real Redisson, in a Java process beside the front that is
// told by a pipe to lock and to unlock. A service in Java would call it instead: the pipe costs it two lines each
// way, next to the disks of Redis and Postgres.
type lockTransaction struct {
	postgresStock
	prefix string
	locks  locks
}

// locks are those of the users.
type locks interface {
	// Lock waits for a lock, which is kept up until unlock.
	Lock(ctx context.Context, key string) (unlock func() error, err error)
	Stop()
}

const (
	// lockConnections is for the hot row: more would only wait for each other inside of Postgres.
	lockConnections = 4
	// lockPatience is shorter than what the front gives an answer.
	lockPatience = 8 * time.Second
	// redissonLease is Redisson's own default, and that of stampede/lock.
	redissonLease = 30 * time.Second
	// redissonWarmUp is how many locks Java takes before it counts, so that its code is compiled, and
	// redissonTogether how many of them at a time, so that threads and connections are there. A smoke, for which
	// that would be most of its work, asks for fewer.
	redissonWarmUp, redissonTogether = 4096, 256
)

func newLockTransaction(ctx context.Context, b front.Backend) (front.Design, error) {
	rdb, err := openRedis(b.RedisURL, stockConnections)
	if err != nil {
		return nil, err
	}
	return openLockTransaction(ctx, b, ourLocks{rdb, lock.New(rdb)})
}

// ourLocks are those of stampede/lock.
type ourLocks struct {
	rdb    *redis.Client
	locker *lock.Locker
}

// Lock implements locks.
func (l ourLocks) Lock(ctx context.Context, key string) (unlock func() error, err error) {
	lease, err := l.locker.Acquire(ctx, key)
	if err != nil {
		return nil, err
	}
	return func() error { return lease.Release(context.WithoutCancel(ctx)) }, nil
}

// Stop implements locks.
func (l ourLocks) Stop() {
	_ = l.locker.Close(context.Background()) // the leases that it could not give back end by themselves
	_ = l.rdb.Close()
}

func newRedissonTransaction(ctx context.Context, b front.Backend) (front.Design, error) {
	classPath, err := redisson.Compiled()
	if err != nil {
		return nil, err
	}
	java, err := redisson.Start(classPath, b.RedisURL, redissonLease)
	if err != nil {
		return nil, err
	}
	locks, err := option(b, "warm-up", redissonWarmUp)
	if err != nil {
		return nil, err
	}
	if err := warmUp(ctx, java, b.Prefix, locks); err != nil {
		return nil, err
	}
	return openLockTransaction(ctx, b, java)
}

// redissonMissing tells what keeps Redisson from running here.
func redissonMissing() string {
	if _, err := redisson.Classes(); err != nil {
		return err.Error()
	}
	return ""
}

func warmUp(ctx context.Context, java *redisson.Redisson, prefix string, locks int) error {
	var warming errgroup.Group
	together := min(redissonTogether, locks)
	for i := range together {
		warming.Go(func() error {
			for range locks / together {
				unlock, err := java.Lock(ctx, fmt.Sprintf("%s:warm-up:%d", prefix, i))
				if err == nil {
					err = unlock()
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	return warming.Wait()
}

func openLockTransaction(ctx context.Context, b front.Backend, l locks) (front.Design, error) {
	stock, err := openPostgresStock(ctx, b, lockConnections)
	if err != nil {
		return nil, err
	}
	return &lockTransaction{postgresStock: stock, prefix: b.Prefix, locks: l}, nil
}

func (d *lockTransaction) close() {
	d.locks.Stop()
	d.postgresStock.close()
}

func (d *lockTransaction) lockOf(user string) string { return d.prefix + ":lock:" + user }

// Buy implements front.Design.
func (d *lockTransaction) Buy(ctx context.Context, o front.Order) (verdict front.Verdict, err error) {
	waiting, cancel := context.WithTimeout(ctx, lockPatience)
	defer cancel()
	unlock, err := d.locks.Lock(waiting, d.lockOf(o.User))
	if err != nil {
		return none, fmt.Errorf("lock user=%s: %w", o.User, err)
	}
	defer func() { err = errors.Join(err, unlock()) }()
	return d.sell(ctx, o)
}

// sell is the transaction, in three round trips: tutorials send its BEGIN and its COMMIT by themselves, and
// hold the row of the sale for longer.
func (d *lockTransaction) sell(ctx context.Context, o front.Order) (front.Verdict, error) {
	conn, err := d.pool.Acquire(ctx)
	if err != nil {
		return none, err
	}
	defer conn.Release()
	verdict, err := d.sellOn(ctx, conn, o)
	if err != nil || verdict != front.Confirmed {
		_, rollback := conn.Exec(context.WithoutCancel(ctx), "ROLLBACK")
		err = errors.Join(err, rollback)
	}
	if hasOrder(err) { // the lock was lost meanwhile, or was never held
		return front.AlreadyPurchased, nil
	}
	if err != nil {
		return none, fmt.Errorf("sell order=%s: %w", o.ID, err)
	}
	return verdict, nil
}

// sellOn leaves a transaction open if the order is not confirmed.
func (d *lockTransaction) sellOn(ctx context.Context, conn *pgxpool.Conn, o front.Order) (front.Verdict, error) {
	var has bool
	begin := &pgx.Batch{}
	begin.Queue("BEGIN")
	begin.Queue(hasOrderSQL, o.Sale, o.User).QueryRow(func(row pgx.Row) error { return row.Scan(&has) })
	if err := conn.SendBatch(ctx, begin).Close(); err != nil {
		return none, err
	}
	if has {
		return front.AlreadyPurchased, nil
	}
	var sequence int64
	err := conn.QueryRow(ctx, takeUnitsSQL, o.Sale, o.Quantity).Scan(&sequence)
	if errors.Is(err, pgx.ErrNoRows) {
		return front.SoldOut, nil
	}
	if err != nil {
		return none, err
	}
	commit := &pgx.Batch{}
	commit.Queue(recordOrderSQL, o.ID, o.Sale, o.User, o.Quantity, reservedAt(o.ID), sequence)
	commit.Queue("COMMIT")
	return front.Confirmed, conn.SendBatch(ctx, commit).Close()
}

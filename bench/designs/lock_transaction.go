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

// lockTransaction is the fourth step, where many tutorials end: the reentrant lock of a library, with a
// watchdog that renews its lease, so that a slow holder keeps it; one lock per user instead of one per
// sale; and under the lock a database transaction that checks whether the user has an order, takes a
// unit by UPDATE … WHERE sold < stock, and writes the order.
//
// What it gets right: users do not wait for each other's locks. The stock is in the same database as
// the orders, and the UPDATE takes only available units: nothing is oversold or lost, whatever the lock
// does.
//
// How it fails: its correctness comes from the transaction alone, which is as correct without the lock
// (postgres-row). The lock prevents only a user's second click, which the unique index refuses as well.
// For that every purchase pays two round trips to Redis, each with a wait for its disk, around a
// transaction in which all wait for the row of the sale. The lock does not even exclude reliably: a
// stalled holder loses its lease and still writes. If the process dies, its users cannot buy until
// their leases end.
//
// It has two forms: with stampede/lock, and with a real Redisson in a Java process beside the front,
// which receives its commands through a pipe. A service in Java would call it directly: the pipe costs
// it two lines in each direction, which is little beside the disks of Redis and Postgres.
type lockTransaction struct {
	postgresStock
	prefix string
	locks  userLocks
}

// userLocks are the locks of users.
type userLocks interface {
	// Lock waits for a lock, which stays held until unlock.
	Lock(ctx context.Context, key string) (unlock func() error, err error)
	Stop()
}

const (
	// lockConnections are few because of the hot row: more connections only wait for each other in
	// Postgres.
	lockConnections = 4
	// lockTimeout is shorter than the write timeout of the front.
	lockTimeout = 8 * time.Second
	// redissonLease is the default of Redisson and of stampede/lock.
	redissonLease = 30 * time.Second
	// redissonWarmUp is the number of locks that Java takes before the measurement, so that its code is
	// compiled, and redissonTogether the number at a time, so that threads and connections exist. A
	// smoke run asks for fewer, because the warm-up would take most of its time.
	redissonWarmUp, redissonTogether = 4096, 256
)

func newLockTransaction(ctx context.Context, b front.Backend) (front.Design, error) {
	rdb, err := openRedis(b.RedisURL, stockConnections)
	if err != nil {
		return nil, err
	}
	return openLockTransaction(ctx, b, ourLocks{rdb, lock.New(rdb)})
}

// ourLocks uses stampede/lock.
type ourLocks struct {
	rdb    *redis.Client
	locker *lock.Locker
}

// Lock implements userLocks.
func (l ourLocks) Lock(ctx context.Context, key string) (unlock func() error, err error) {
	lease, err := l.locker.Acquire(ctx, key)
	if err != nil {
		return nil, err
	}
	return func() error { return lease.Release(context.WithoutCancel(ctx)) }, nil
}

// Stop implements userLocks.
func (l ourLocks) Stop() {
	_ = l.locker.Close(context.Background()) // leases that could not be released expire
	_ = l.rdb.Close()
}

func newRedissonTransaction(ctx context.Context, b front.Backend) (front.Design, error) {
	classPath, err := redisson.ClassPath()
	if err != nil {
		return nil, err
	}
	java, err := redisson.Start(classPath, b.RedisURL, redissonLease)
	if err != nil {
		return nil, err
	}
	warmUpLocks, err := option(b, "warm-up", redissonWarmUp)
	if err != nil {
		return nil, err
	}
	if err := warmUp(ctx, java, b.Prefix, warmUpLocks); err != nil {
		return nil, err
	}
	return openLockTransaction(ctx, b, java)
}

// redissonMissing returns why Redisson cannot run here, or "".
func redissonMissing() string {
	if _, err := redisson.Compile(); err != nil {
		return err.Error()
	}
	return ""
}

func warmUp(ctx context.Context, java *redisson.Redisson, prefix string, count int) error {
	var warming errgroup.Group
	together := min(redissonTogether, count)
	for i := range together {
		warming.Go(func() error {
			for range count / together {
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

func openLockTransaction(ctx context.Context, b front.Backend, l userLocks) (front.Design, error) {
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

func (d *lockTransaction) lockKey(user string) string { return d.prefix + ":lock:" + user }

// Buy implements front.Design.
func (d *lockTransaction) Buy(ctx context.Context, o front.Order) (verdict front.Verdict, err error) {
	waiting, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	unlock, err := d.locks.Lock(waiting, d.lockKey(o.User))
	if err != nil {
		return none, fmt.Errorf("lock user=%s: %w", o.User, err)
	}
	defer func() { err = errors.Join(err, unlock()) }()
	return d.sell(ctx, o)
}

// sell runs the transaction in three round trips: tutorials send BEGIN and COMMIT separately, and hold
// the row of the sale for longer.
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
	if hasOrder(err) { // the lock was lost or never held
		return front.AlreadyPurchased, nil
	}
	if err != nil {
		return none, fmt.Errorf("sell order=%s: %w", o.ID, err)
	}
	return verdict, nil
}

// sellOn leaves the transaction open unless it confirms the order.
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

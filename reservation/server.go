package reservation

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/internal/clocks"
	"stampede/internal/pg"
	"stampede/internal/retry"
	"stampede/lua"
)

// ErrServerChanged is returned by MarkVerified when Redis is another server than the caller worked
// on, or has lost the caller's data.
var ErrServerChanged = errors.New("the Redis server was replaced or emptied, or its verification withdrawn, meanwhile")

// ErrUnverifiedServer: this Redis may lack accepted orders. A worker rebuilds its stock.
var ErrUnverifiedServer = fmt.Errorf(
	"%w: the Redis server is not verified", ErrUnavailable,
)

// errSaleClosed: the stock of the sale is being rebuilt.
var errSaleClosed = fmt.Errorf("%w: it is closed for a rebuild", ErrUnavailable)

// ServerState is the identity of the Redis server of a partition, and whether its stock is
// verified.
type ServerState struct {
	// RunID identifies the server's process, ReplicationID its term as a primary.
	RunID         string
	ReplicationID string
	// Known is true if the stock of the partition was verified on this server.
	Known bool
	// Recorded is true if the server has a record that it or another server was verified, or that
	// this was withdrawn. It is false if the partition was never used or Redis lost everything.
	Recorded bool
	// Now is the server's clock.
	Now time.Time
	// unverified is true until the record of the other server is withdrawn.
	unverified bool
	// epoch, shard and items are those of the sale that was asked for; epoch is empty if it is missing.
	epoch, shard, items string
}

// Servers are the Redis servers of the partitions: which server each has, whether it may be used, and the stock in it
// as a rebuild makes it. Store sells from them. It is safe for concurrent use.
type Servers struct {
	// Redis, Keys and Logger are what NewStore got. They never change.
	Redis  redis.UniversalClient
	Keys   Keys
	Logger *slog.Logger

	// fences hold, by partition, the script that was loaded last (guard.go).
	fences [MaxPartitions]atomic.Pointer[fence]
	// refused is true, by partition, if Redis is not the server recorded in Postgres (Guard).
	refused [MaxPartitions]atomic.Bool
}

// Inspect returns the server of a partition. Its errors wrap ErrUnavailable.
func (s *Servers) Inspect(ctx context.Context, partition int) (ServerState, error) {
	return s.inspect(ctx, s.Redis, partition)
}

func (s *Servers) inspect(ctx context.Context, on redis.Scripter, partition int) (ServerState, error) {
	state, err := s.ask(ctx, on, s.Keys.Server(partition))
	if err != nil {
		return ServerState{}, fmt.Errorf("%w: inspect the server of partition %d: %w", ErrUnavailable, partition, err)
	}
	return state, nil
}

// FirstUse is the token for a partition without a record of a server.
const FirstUse = "-"

const (
	// firstUseWait is how long others wait for the first user of a partition, who records its server in
	// Postgres and then in Redis.
	firstUseWait = time.Second
	firstUseLook = 20 * time.Millisecond
)

// AwaitFirstUse returns the server of a partition as soon as Redis has a record of one, or as it is
// after a second. Its errors wrap ErrUnavailable, or it returns the error of ctx.
func (s *Servers) AwaitFirstUse(ctx context.Context, partition int) (ServerState, error) {
	for until := time.Now().Add(firstUseWait); ; {
		state, err := s.Inspect(ctx, partition)
		if err != nil || state.Known || state.Recorded || !time.Now().Before(until) {
			return state, err
		}
		if !retry.Pause(firstUseLook, ctx.Done()) {
			return ServerState{}, ctx.Err()
		}
	}
}

// MarkVerified records that the stock of a partition is complete on the expected server. The token
// is the one that DistrustFor left there. It returns ErrServerChanged, and changes nothing, if Redis
// is another server by now or was emptied, or if the verification was withdrawn again.
func (s *Servers) MarkVerified(ctx context.Context, partition int, expected ServerState, token string) error {
	answer, err := lua.Verify.Run(
		ctx, s.Redis, []string{s.Keys.Server(partition)}, expected.RunID, expected.ReplicationID, token,
	).Text()
	switch {
	case err != nil:
		return fmt.Errorf("%w: verify the server of partition %d: %w", ErrUnavailable, partition, err)
	case answer != "verified":
		return fmt.Errorf("verify partition %d: %w", partition, ErrServerChanged)
	}
	return nil
}

// distrusted replaces the run id of a server that is not verified (lua/look.lua).
const distrusted = "-"

// Distrust withdraws the verification of a partition: every ingress refuses to sell from it until it is
// verified again.
func (s *Servers) Distrust(ctx context.Context, partition int) error {
	return s.DistrustFor(ctx, partition, "")
}

// DistrustFor is Distrust as the first step of the rebuild with that token. Only that rebuild can
// verify the server afterwards.
func (s *Servers) DistrustFor(ctx context.Context, partition int, token string) error {
	s.fences[partition].Store(nil)
	_, err := s.Redis.TxPipelined(ctx, func(p redis.Pipeliner) error {
		s.distrust(ctx, p, partition, token)
		return nil
	})
	if err != nil {
		return fmt.Errorf("%w: withdraw the verification of partition %d: %w", ErrUnavailable, partition, err)
	}
	return nil
}

// distrust queues the commands of the transaction. The scripts are flushed because clients with a
// loaded fence do not check again; other scripts are loaded again by their users.
func (s *Servers) distrust(ctx context.Context, p redis.Pipeliner, partition int, token string) {
	p.HSet(ctx, s.Keys.Server(partition), "run_id", distrusted, "replication_id", distrusted, "rebuild", token)
	p.ScriptFlush(ctx)
}

// ask runs lua/look.lua. The optional second key is a sale's.
func (s *Servers) ask(ctx context.Context, on redis.Scripter, keys ...string) (ServerState, error) {
	values, err := lua.Look.Run(ctx, on, keys).StringSlice()
	if err != nil {
		return ServerState{}, err
	}
	if len(values) != 7 {
		return ServerState{}, fmt.Errorf("the script returned %d values", len(values))
	}
	now, err := strconv.ParseInt(values[4], 10, 64)
	if err != nil {
		return ServerState{}, fmt.Errorf("the clock of the server: %w", err)
	}
	return ServerState{
		RunID: values[1], ReplicationID: values[2], Now: time.UnixMilli(now), epoch: values[3], shard: values[5],
		items: values[6],
		Known: values[0] == "known", Recorded: values[0] != "unrecorded", unverified: values[0] == "unverified",
	}, nil
}

// look finds a sale in a partition. It returns ErrSaleNotFound only if the server is known, because
// an unverified one may have lost it.
func (s *Servers) look(ctx context.Context, partition int, sale uuid.UUID) (address, error) {
	state, err := s.ask(ctx, s.Redis, s.Keys.Server(partition), s.Keys.Sale(partition, sale))
	switch {
	case err != nil:
		return address{}, fmt.Errorf("%w: look up sale=%s: %w", ErrUnavailable, sale, err)
	case !state.Known || s.refused[partition].Load():
		if state.unverified {
			_, _ = s.admit(ctx, partition) // for all ingresses
		}
		return address{}, ErrUnverifiedServer
	case state.epoch == "":
		return address{}, ErrSaleNotFound
	}
	epoch, err := strconv.ParseInt(state.epoch, 10, 64)
	switch {
	case err != nil:
		return address{}, fmt.Errorf("%w: look up sale=%s: its epoch: %w", ErrUnavailable, sale, err)
	case epoch == 0:
		return address{}, errSaleClosed
	}
	layout, err := readLayout(state.shard, partition)
	if err != nil {
		return address{}, fmt.Errorf("%w: look up sale=%s: %w", ErrUnavailable, sale, err)
	}
	at := address{layout: layout, epoch: epoch}
	if state.items != "" {
		at.codes = strings.Fields(state.items)
	}
	return at, nil
}

// lostOrders returns the error of a queue whose sale has a lower sequence than it has seen: Redis was
// set back and lost accepted orders. It withdraws the verification, so that their units are not sold again,
// and a worker rebuilds the stock.
func (s *Servers) lostOrders(ctx context.Context, q *queue) error {
	s.Logger.Error("Redis lost orders of a sale: nothing is sold until its stock is rebuilt",
		"sale", q.sale, "partition", q.partition, "epoch", q.address.epoch, "seen_sequence", q.target.seen.Load())
	if err := s.Distrust(ctx, q.partition); err != nil {
		return fmt.Errorf("%w: %w", ErrLostSale, err)
	}
	return ErrLostSale
}

// EachAnswering calls do for those of the partitions whose server answers, each in its own goroutine and at most
// limit of them at a time, and returns all errors. Servers are asked at the same time and take no place of the limit,
// so one that does not answer delays no other.
func (s *Servers) EachAnswering(
	ctx context.Context, partitions []int, limit int, do func(ctx context.Context, partition int) error,
) error {
	places := make(chan struct{}, limit)
	return each(len(partitions), func(i int) error {
		if err := s.answers(ctx, partitions[i]); err != nil {
			return err
		}
		select {
		case places <- struct{}{}:
			defer func() { <-places }()
			return do(ctx, partitions[i])
		case <-ctx.Done():
			return ctx.Err()
		}
	})
}

func (s *Servers) answers(ctx context.Context, partition int) error {
	limited, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	if _, err := s.Inspect(limited, partition); err != nil {
		return fmt.Errorf("partition %d: %w", partition, err)
	}
	return nil
}

// EachPartition calls do for the first partitions, at the same time, and returns all errors.
func EachPartition(partitions int, do func(partition int) error) error { return each(partitions, do) }

// each calls do with the numbers from 0 to n-1, at the same time, and returns all errors.
func each(n int, do func(i int) error) error {
	failed := make([]error, n)
	var doing sync.WaitGroup
	for i := range failed {
		doing.Go(func() { failed[i] = do(i) })
	}
	doing.Wait()
	return errors.Join(failed...)
}

func (s *Servers) refusesAny() bool {
	for partition := range s.refused {
		if s.refused[partition].Load() {
			return true
		}
	}
	return false
}

// Times returns the time by the clocks of Postgres and of the servers of these partitions. A step that nothing undoes
// is taken when all of them say that its time has come, and waits while they are too far apart: the error is then
// clocks.ErrApart. It wraps ErrUnavailable if Redis does not answer, or is that of Postgres.
func (s *Servers) Times(ctx context.Context, on pg.Querier, partitions ...int) (clocks.Times, error) {
	all := make([]clocks.Reading, 0, 1+len(partitions))
	for _, p := range partitions {
		r, err := clocks.Read(func() (time.Time, error) {
			limited, cancel := retry.ForCall(ctx)
			defer cancel()
			state, err := s.Inspect(limited, p)
			return state.Now, err
		})
		if err != nil {
			return clocks.Times{}, err
		}
		all = append(all, r)
	}
	r, err := pg.ReadClock(ctx, on)
	if err != nil {
		return clocks.Times{}, fmt.Errorf("read the clock of Postgres: %w", err)
	}
	return clocks.Agree(append(all, r)...)
}

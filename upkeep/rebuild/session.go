package rebuild

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"stampede/internal/pg"
	"stampede/internal/retry"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/sql"
)

// silenceMax is how long the session of a rebuild may be silent before Postgres ends it.
const silenceMax = 30 * time.Second

// rebuildsMax bounds the simultaneous rebuilds of a process. Each has a session of Postgres.
const rebuildsMax = 4

// lockSession is a connection to Postgres that holds the lock of a partition and makes all changes of a rebuild in it.
// So a rebuild that loses the lock cannot continue.
type lockSession struct {
	conn pg.Session
	free func() // lets another rebuild begin
}

// begin takes the lock of a partition, or returns ErrRunning. It waits while this process makes rebuildsMax rebuilds.
func (r *Rebuilder) begin(ctx context.Context, partition int) (_ *lockSession, err error) {
	select {
	case r.running <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	s := &lockSession{free: func() { <-r.running }}
	limited, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	if s.conn, err = pg.Begin(limited, r.config.Catalog.Pool, pg.PartitionLock(partition), silenceMax); err != nil {
		s.free()
		if errors.Is(err, pg.ErrLockHeld) {
			err = ErrRunning
		}
		return nil, err
	}
	return s, nil
}

func (s *lockSession) end() {
	s.conn.End()
	s.free()
}

func (s *lockSession) exec(ctx context.Context, query string, args ...any) error {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	_, err := s.conn.Exec(ctx, query, args...)
	return err
}

// ping keeps an unused session from being ended after silenceMax.
func (s *lockSession) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	return s.conn.Ping(ctx)
}

func (s *lockSession) saveServer(ctx context.Context, partition int, server reservation.ServerState) error {
	if err := s.exec(ctx, sql.RebuildSaveServer, partition, server.RunID, server.ReplicationID); err != nil {
		return fmt.Errorf("record the Redis server: %w", err)
	}
	return nil
}

// NeededGuards are the indexes that an ON CONFLICT of a rebuild names. Without them it can record neither orders nor
// the verified server, and cannot note units to offer.
var NeededGuards = []string{"offers_due_pkey", "order_events_pkey", "orders_one_live_per_user", "redis_servers_pkey"}

// requireGuards returns ErrGuardMissing if a rebuild could not finish. It is called before any sale is closed.
func (s *lockSession) requireGuards(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	_, missing, err := sql.Guards(ctx, s.conn)
	if err != nil {
		return err
	}
	var needed []error
	for _, m := range missing {
		if slices.Contains(NeededGuards, m.Name) {
			needed = append(needed, fmt.Errorf("%w: %s; restore it with %s", ledger.ErrGuardMissing, m.What, m.Mend))
		}
	}
	return errors.Join(needed...)
}

// raisedSale is a sale in its new epoch.
type raisedSale struct {
	reservation.Sale
	// sequence is at least the highest place that Postgres or Redis knows of. Of several shards Redis knows only that
	// they have given out none above it.
	sequence int64
	// retired is true if Redis gets no buyers of it.
	retired bool
}

// raiseTimeout bounds the raise of an epoch, which waits for the lock of the sale's row and counts its orders.
const raiseTimeout = time.Minute

// raiseEpoch begins the next epoch of a sale. After it, no order of an earlier epoch is confirmed. Later changes of
// operators are published after the revision that it makes.
//
// shards is how many shards the sale has from then on; 0 for as many as before.
//
// It returns errOvertaken and changes nothing if the sale has left the epoch in which it was read, before it was
// closed: another rebuild may have opened the sale, and what was sold since is not drained.
func (s *lockSession) raiseEpoch(
	ctx context.Context, sale requiredSale, reason string, shards int,
) (raisedSale, error) {
	ctx, cancel := context.WithTimeout(ctx, raiseTimeout)
	defer cancel()
	var raised raisedSale
	var known reservation.ClosedSale // the highest of all shards
	for _, c := range sale.closed {
		known.Sequence, known.Epoch = max(known.Sequence, c.Sequence), max(known.Epoch, c.Epoch)
	}
	// Some services that speak Postgres' protocol do not tell it. Then it is 0, and decision 31 does not hold there.
	var timeline int64
	_ = s.conn.QueryRow(ctx, sql.RebuildTimeline).Scan(&timeline)
	err := pg.InTransaction(ctx, s.conn, pgx.TxOptions{}, func(tx pgx.Tx) error {
		locked, err := tx.Exec(ctx, sql.CatalogLockSale, sale.id)
		if err != nil {
			return err
		} else if locked.RowsAffected() == 0 {
			return reservation.ErrSaleNotFound
		}
		rows, _ := tx.Query(ctx, sql.RebuildRaiseEpoch, // its error comes with the rows
			sale.id, known.Sequence, known.Epoch, reason, sale.epoch, shards, timeline)
		row, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[struct {
			reservation.SaleRow
			LastGiven int64
			Retired   bool
		}])
		raised = raisedSale{Sale: row.Sale(), sequence: row.LastGiven, retired: row.Retired}
		return err
	})
	if errors.Is(err, pgx.ErrNoRows) {
		err = errOvertaken
	}
	return raised, err
}

// askServers returns ErrServerUnverified if a server of the layout does not answer or is not verified. It takes no
// lock, so a sale that has to wait for a server costs no session of Postgres.
func (r *Rebuilder) askServers(ctx context.Context, layout reservation.Layout) error {
	for shard := range layout.Shards {
		state, err := r.inspect(ctx, layout.Partition(shard))
		if err != nil {
			return fmt.Errorf("%w: %w", ErrServerUnverified, err)
		}
		if state.Recorded && !state.Known {
			return fmt.Errorf("partition %d: %w", layout.Partition(shard), ErrServerUnverified)
		}
	}
	return nil
}

// requireServers returns ErrServerUnverified unless the server of each shard is the verified one. The rebuild is the
// first user of a partition that no sale was published to.
func (b *build) requireServers(ctx context.Context, layout reservation.Layout) error {
	servers, err := b.verifiedServers(ctx)
	if err != nil {
		return err
	}
	for shard := range layout.Shards {
		p := layout.Partition(shard)
		state, err := b.inspect(ctx, p)
		if err == nil && !(state.Known && state.RunID == servers[p]) {
			err = b.useFirst(ctx, p, state)
		}
		if err != nil {
			return fmt.Errorf("partition %d: %w", p, err)
		}
	}
	return nil
}

// useFirst verifies the server of a partition that was never used, which cannot have lost anything. For any other
// partition it returns ErrServerUnverified.
func (b *build) useFirst(ctx context.Context, partition int, server reservation.ServerState) error {
	if server.Recorded {
		return ErrServerUnverified
	}
	used, err := b.usedPartitions(ctx)
	if err != nil {
		return err
	} else if used[partition] {
		return ErrServerUnverified
	}
	limited, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	claimed, err := b.session.conn.Exec(limited, sql.CatalogClaimPartition, partition, server.RunID, server.ReplicationID)
	if err != nil {
		return err
	}
	limited, cancel = retry.ForCall(ctx)
	defer cancel()
	if claimed.RowsAffected() == 1 {
		return b.config.Catalog.Store.MarkVerified(limited, partition, server, reservation.FirstUse)
	}
	// Another process is its first user.
	if server, err = b.config.Catalog.Store.AwaitFirstUse(limited, partition); err == nil && !server.Known {
		err = ErrServerUnverified
	}
	return err
}

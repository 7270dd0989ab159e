package rebuild

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"stampede/internal/pg"
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
	if s.conn, err = pg.Begin(limited, r.config.Pool, pg.PartitionLock(partition), silenceMax); err != nil {
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
// the verified server.
var NeededGuards = []string{"order_events_pkey", "orders_one_live_per_user", "redis_servers_pkey"}

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

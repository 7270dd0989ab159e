package rebuild

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"stampede/fulfillment/ledger"
	"stampede/internal/pg"
	"stampede/reservation"
	"stampede/sql"
)

// rebuildSilence is for how long the session of a rebuild may be silent until Postgres ends it.
const rebuildSilence = 30 * time.Second

// Session is a connection to Postgres that holds the lock, and makes all changes there that need it:
// with the lock a rebuild loses the means to go on.
type Session struct{ Conn pg.Session }

// begin takes the lock, or returns ErrRunning.
func (r *Rebuilder) begin(ctx context.Context) (*Session, error) {
	limited, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	session, err := pg.Begin(limited, r.config.Pool, pg.RebuildLock, rebuildSilence)
	if errors.Is(err, pg.ErrLockHeld) {
		return nil, ErrRunning
	} else if err != nil {
		return nil, err
	}
	return &Session{session}, nil
}

func (s *Session) Close() { s.Conn.End() }

func (s *Session) Exec(ctx context.Context, query string, args ...any) error {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	_, err := s.Conn.Exec(ctx, query, args...)
	return err
}

// stayAwake is to be called now and then while the session has nothing else to do.
func (s *Session) stayAwake(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	return s.Conn.Ping(ctx)
}

func (s *Session) saveServer(ctx context.Context, partition int, server reservation.ServerState) error {
	if err := s.Exec(ctx, sql.RebuildSaveServer, partition, server.RunID, server.ReplicationID); err != nil {
		return fmt.Errorf("note the Redis server: %w", err)
	}
	return nil
}

// NeededGuards are what an ON CONFLICT of a rebuild names: without one of them it cannot record what it finds in the
// stream, nor which server it verifies.
var NeededGuards = []string{"order_events_pkey", "orders_one_live_per_user", "redis_servers_pkey"}

// requireGuards returns ErrGuardMissing if a rebuild could not be finished, before it closes anything.
func (s *Session) requireGuards(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	_, missing, err := sql.Guards(ctx, s.Conn)
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

// raisedSale is a sale in the epoch that was just begun.
type raisedSale struct {
	reservation.Sale
	// sequence is the highest place that was ever given out in the sale, as far as anybody knows.
	sequence int64
}

// raiseTimeout bounds the raise of an epoch. It counts the sale's orders, and waits for who has its row in hand.
const raiseTimeout = time.Minute

// RaiseEpoch begins the next epoch of a sale. When it returns, no order of an earlier one will be confirmed,
// and the definition of the sale is that of its new revision. What operators change from then on, Redis is
// told when it knows this revision.
//
// It returns errOvertaken, and has done nothing, if the sale is not in the epoch any more that it had when it was
// read, which was before it was closed: then another rebuild may have opened it, and what was sold
// since is not drained.
func (s *Session) RaiseEpoch(ctx context.Context, sale guardedSale, reason string) (raisedSale, error) {
	ctx, cancel := context.WithTimeout(ctx, raiseTimeout)
	defer cancel()
	var raised raisedSale
	err := pgx.BeginTxFunc(ctx, s.Conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		locked, err := tx.Exec(ctx, sql.CatalogLockSale, sale.id)
		if err != nil {
			return err
		} else if locked.RowsAffected() == 0 {
			return reservation.ErrSaleNotFound
		}
		rows, _ := tx.Query(ctx, sql.RebuildRaiseEpoch, // its error comes with the rows
			sale.id, sale.Closed.Sequence, sale.Closed.Epoch, reason, sale.epoch)
		row, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[struct {
			reservation.SaleRow
			LastGiven int64
		}])
		raised = raisedSale{Sale: row.Sale(), sequence: row.LastGiven}
		return err
	})
	if errors.Is(err, pgx.ErrNoRows) {
		err = errOvertaken
	}
	return raised, err
}

package ledger

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/internal/crashpoint"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

// NeedsRelease reports whether an order's reservation may still be in Redis and must be released. That is
// so if the order was rejected, even by an earlier delivery: the worker that recorded it may have crashed
// before the release. It is also so if the order had ended before this event arrived: an ingress that got
// no answer retries with the same order, and makes a second reservation if Redis has lost or released the
// first one.
func NeedsRelease(out Outcome) bool {
	return out.Status == order.StatusRejected || out.Err == nil && !out.Fresh && !out.Status.Live()
}

// ReleaseOf returns the release of the order's units.
func ReleaseOf(out Outcome) reservation.Release {
	e := &out.Event
	return reservation.Release{
		SaleID: e.SaleID, OrderID: e.OrderID, UserID: e.UserID, Quantity: e.Quantity, Lines: e.Lines,
		KeyFingerprint: e.KeyFingerprint, Status: out.Status,
	}
}

// ReleasesCountMax bounds the number of releases that the metrics count.
const ReleasesCountMax = 10_000

// ErrRefused is returned when Redis does not have the sale, cannot read what the buyer holds, or would
// have more units left than the stock. A rebuild repairs that; until then the releases are kept.
var ErrRefused = errors.New("the units were refused by Redis")

// PendingReleases returns the number of releases, counted up to ReleasesCountMax. The error is ErrRefused
// if Redis has refused one of them.
func (l *Ledger) PendingReleases(ctx context.Context) (pending int, err error) {
	ctx, cancel := context.WithTimeout(ctx, RecordTimeout)
	defer cancel()
	var id, sale *uuid.UUID
	if err := l.pool.QueryRow(ctx, sql.LedgerPendingReleases, ReleasesCountMax).Scan(&pending, &id, &sale); err != nil {
		return 0, fmt.Errorf("count releases: %w", err)
	}
	if id != nil {
		return pending, fmt.Errorf("%w of sale=%s order=%s, and maybe of others", ErrRefused, sale, id)
	}
	return pending, nil
}

// releasePartitions bounds the partitions in which a sweep releases units at a time. Each uses a connection to
// Postgres.
const releasePartitions = 2

// SweepReleases releases the units of ended orders in Redis, and returns of how many orders. Partitions are
// independent: one whose server does not answer is asked once, and delays no other.
func (l *Ledger) SweepReleases(ctx context.Context, store *reservation.Store) (released int, err error) {
	due, err := l.dueReleases(ctx)
	if err != nil {
		return 0, err
	}
	var all atomic.Int64
	err = store.EachAnswering(ctx, slices.Sorted(maps.Keys(due)), releasePartitions,
		func(ctx context.Context, partition int) error {
			n, err := SweepSales(ctx, func(ctx context.Context, except []uuid.UUID) (uuid.UUID, int, error) {
				among := slices.DeleteFunc(slices.Clone(due[partition]), func(sale uuid.UUID) bool {
					return slices.Contains(except, sale)
				})
				return l.releaseSome(ctx, store, among)
			})
			all.Add(int64(n))
			return err
		})
	return int(all.Load()), err
}

// dueReleases returns the sales of which releases are due, by partition. A sale with several shards is in the list of
// each of its partitions, so that it has a turn if any of them answers. The first one takes them all.
func (l *Ledger) dueReleases(ctx context.Context) (map[int][]uuid.UUID, error) {
	ctx, cancel := context.WithTimeout(ctx, RecordTimeout)
	defer cancel()
	rows, _ := l.pool.Query(ctx, sql.LedgerDueReleases) // its error comes with the rows
	due := map[int][]uuid.UUID{}
	var sale uuid.UUID
	var partitions, shards int
	_, err := pgx.ForEachRow(rows, []any{&sale, &partitions, &shards}, func() error {
		layout := reservation.LayoutOf(sale, partitions, shards)
		for shard := range layout.Shards {
			p := layout.Partition(shard)
			due[p] = append(due[p], sale)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list due releases: %w", err)
	}
	return due, nil
}

// releaseSome is a SweepStep among some sales. It releases the units of at most SweepMax orders of one of them in Redis
// and deletes their rows from the releases. Releases that Redis refuses are kept and retried after a while. Releases of
// an unreachable shard are retried soon, after the other releases of the sale.
//
// Rows are deleted after Redis has answered. After a crash another worker retries; lua/release.lua
// releases a unit once, because it finds the reservation gone or replaced by another order.
//
// The transaction stays open over the call to Redis on purpose: the locks on the rows are the lease of this worker, and
// end with its connection. A lease in a column needs a second write for each release, and a time after which others
// take it over. The call is bounded by retry.CallTimeout, and no buyer waits for these rows.
func (l *Ledger) releaseSome(
	ctx context.Context, store *reservation.Store, among []uuid.UUID,
) (sale uuid.UUID, released int, err error) {
	var unreached error // why no release of a sale with several shards reached Redis; their next try is noted all the same
	err = l.inTransaction(ctx, func(tx pgx.Tx) error {
		released, unreached = 0, nil
		var sharded bool
		err := tx.QueryRow(ctx, sql.LedgerReleaseSale, among).Scan(&sale, &sharded)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		} else if err != nil {
			return err
		}
		rows, _ := tx.Query(ctx, sql.LedgerTakeReleases, sale, SweepMax) // rows carry the error
		releases, err := pgx.CollectRows(rows, pgx.RowToStructByName[reservation.Release])
		if err != nil {
			return err
		}
		crashpoint.Hit(crashpoint.BeforeRelease)
		limited, cancel := context.WithTimeout(ctx, retry.CallTimeout)
		defer cancel()
		results, err := store.Release(limited, releases)
		switch {
		case err != nil && sharded: // perhaps only these are of the shard that cannot be reached
			unreached = err
			results = slices.Repeat([]reservation.ReleaseResult{reservation.ReleaseUnreached}, len(releases))
		case err != nil:
			return err
		}
		crashpoint.Hit(crashpoint.AfterRelease)
		// Not nil, which would be NULL.
		done, unknown, damaged, unreachable := []uuid.UUID{}, []uuid.UUID{}, []uuid.UUID{}, []uuid.UUID{}
		for i, r := range releases {
			switch results[i] {
			case reservation.Released, reservation.ReleaseNotHeld:
				done = append(done, r.OrderID)
			case reservation.ReleaseUnknownSale:
				unknown = append(unknown, r.OrderID)
			case reservation.ReleaseUnreached:
				unreachable = append(unreachable, r.OrderID)
			default: // damaged, or unknown to this version
				damaged = append(damaged, r.OrderID)
			}
		}
		var kept int
		if err := tx.QueryRow(ctx, sql.LedgerNoteReleases, sale, done, unknown, damaged, unreachable).Scan(&kept); err != nil {
			return err
		}
		released = len(releases) - kept
		return nil
	})
	if err == nil {
		err = unreached
	}
	if err != nil {
		return sale, 0, fmt.Errorf("release units: %w", err)
	}
	if released > 0 {
		crashpoint.Hit(crashpoint.AfterReleaseCommit)
	}
	return sale, released, nil
}

package draws

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/draw"
	"stampede/internal/pg"
	"stampede/sql"
)

// ErrNotRestored is returned for what cannot be what was published of the draw: by its terms, or because the entries in
// Postgres make another list.
var ErrNotRestored = errors.New("it is not what was published of this draw, or entries of it are missing")

// Restore takes back what was published of the frozen list of a draw, after Postgres was restored from a time before
// it. It is what a receiver of the relay or a witness kept; the entries must make the same list. The time and the round
// are those that were published then. A repeat changes nothing. The error is ErrNoDraw, ErrVoid, pg.ErrLockHeld while a
// worker freezes the list, or ErrNotRestored.
func (s *Store) Restore(ctx context.Context, goods uuid.UUID, kept *draw.Frozen, operator string) (Draw, error) {
	lock, err := pg.Begin(ctx, s.pool, pg.DrawLock(goods), silenceMax)
	if err != nil {
		return Draw{}, wrap("restore the list", goods, err)
	}
	defer lock.End()
	d, err := find(ctx, lock.Conn, goods)
	if err == nil && d.Kind != ByHash {
		err = ErrNoDraw
	}
	f := &freezing{Draw: &d, conn: lock.Conn}
	if err == nil && d.State == Freezing {
		err = f.readRest(ctx)
	}
	if err != nil {
		return d, wrap("restore the list", goods, err)
	}
	d, err = change(ctx, lock.Conn, goods, func(tx pgx.Tx, d *Draw) error {
		return f.restore(ctx, tx, d, kept, operator)
	})
	if errors.Is(err, errChanged) || errors.Is(err, ErrNotRestored) {
		_, forgotten := lock.Conn.Exec(ctx, sql.DrawsBeginAgain, goods)
		err = errors.Join(err, forgotten)
	}
	return d, wrap("restore the list", goods, err)
}

func (f *freezing) restore(ctx context.Context, tx pgx.Tx, d *Draw, kept *draw.Frozen, operator string) error {
	own := draw.Frozen{
		Version: d.Version, Goods: d.Goods,
		SaleID: kept.SaleID, EntriesSaleID: d.EntriesID, Entries: d.Entries, Root: d.Root, FrozenAt: d.FrozenAt,
		ClosesAt: d.ClosesAt, FreezeSeconds: int64(d.Freeze / time.Second), Parties: d.Parties,
	}
	if own.SaleID != uuid.Nil { // the data of an event has none
		own.SaleID = d.SaleID
	}
	switch {
	case d.State == Void:
		return ErrVoid
	case d.State == Entering:
		return fmt.Errorf("%w: the entries are not over", ErrNotRestored)
	case d.State == Freezing:
		root, err := f.final(ctx, tx, d)
		if err != nil {
			return err
		}
		own.Entries, own.Root, own.FrozenAt = f.count, root[:], kept.FrozenAt
		if own.Goods, err = d.goods(ctx, tx); err != nil {
			return err
		}
		if own.Goods != nil && kept.Goods != nil { // what was sold then may have ended meanwhile
			own.Goods.Revision, own.Goods.Sold, own.Goods.Holders = kept.Goods.Revision, kept.Goods.Sold, kept.Goods.Holders
			for i := range min(len(own.Goods.Items), len(kept.Goods.Items)) {
				own.Goods.Items[i].Sold = kept.Goods.Items[i].Sold
			}
		}
	}
	if len(d.Parties) == 0 {
		own.Rounds = draw.Rounds(d.ClosesAt, d.Freeze, own.FrozenAt)
	}
	if differs := kept.Difference(&own); differs != "" {
		return fmt.Errorf("%w: it has %s", ErrNotRestored, differs)
	}
	if d.State != Freezing {
		return nil
	}
	if len(d.Parties) == 0 && own.Rounds == nil || own.FrozenAt.Before(d.ClosesAt) {
		return fmt.Errorf("%w: a list was never frozen at that time", ErrNotRestored)
	}
	own.SaleID = uuid.Nil
	batch := new(pgx.Batch)
	batch.Queue(sql.DrawsFreeze, d.SaleID, own.Entries, []byte(own.Root), own.FrozenAt)
	d.publish(batch, &own, struct {
		draw.Frozen
		RestoredBy string `json:"restored_by"`
	}{own, operator})
	return tx.SendBatch(ctx, batch).Close()
}

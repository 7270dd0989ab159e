package draws

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"stampede/draw"
	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/reservation/order"
	"stampede/sql"
)

// rank ranks all entries by the seed, in one transaction. It needs 12 bytes of memory for each. It does nothing in
// another state. The caller excludes other calls (pg.DrawLock). Two at once harm nothing: one of them fails.
func (s *Store) rank(ctx context.Context, conn *pgx.Conn, goods uuid.UUID) error {
	err := pg.InTransaction(ctx, conn, pgx.TxOptions{}, func(tx pgx.Tx) error {
		d, err := find(ctx, tx, goods)
		if err != nil || d.State != Ranking {
			return err
		}
		ranking, err := readRanking(ctx, tx, &d)
		if err != nil {
			return err
		}
		entries, err := ranking.Sort(func(place int64) (draw.Record, error) {
			var raw []byte
			err := tx.QueryRow(ctx, sql.DrawsRecordOf, goods, place/draw.ChunkLeaves, place%draw.ChunkLeaves).Scan(&raw)
			return asRecord(raw), err
		})
		if err != nil {
			return err
		}
		return writeRanking(ctx, tx, &d, ranking, entries)
	})
	debug.FreeOSMemory() // the worker would keep as much again until it has made as much garbage
	if err != nil {
		return fmt.Errorf("rank the entries of sale=%s: %w", goods, err)
	}
	return nil
}

func asRecord(raw []byte) (r draw.Record) {
	copy(r[:], raw)
	return r
}

// errChunksMissing is returned for a frozen list of which something is missing, or the order of an entry.
var errChunksMissing = errors.New("the list of the entries is not whole")

func readRanking(ctx context.Context, tx pgx.Tx, d *Draw) (*draw.Ranking, error) {
	ranking, read := draw.NewRanking(draw.Seed(d.Seed), d.Entries), int64(0)
	for from := int64(0); read < d.Entries; from += portionChunks {
		before := read
		err := eachChunk(ctx, tx, d.SaleID, from, func(records []byte) error {
			for ; len(records) >= draw.RecordBytes; records = records[draw.RecordBytes:] {
				ranking.Add(asRecord(records[:draw.RecordBytes]))
				read++
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		if read == before {
			return nil, fmt.Errorf("%w: it has %d of %d entries", errChunksMissing, read, d.Entries)
		}
	}
	return ranking, nil
}

// eachChunk calls do with the records of portionChunks chunks, valid until do returns.
func eachChunk(ctx context.Context, on pg.Querier, goods uuid.UUID, from int64, do func(records []byte) error) error {
	rows, _ := on.Query(ctx, sql.DrawsChunks, goods, from, portionChunks) // rows carry the error
	var records pgtype.DriverBytes
	_, err := pgx.ForEachRow(rows, []any{&records}, func() error { return do(records) })
	return err
}

func writeRanking(ctx context.Context, tx pgx.Tx, d *Draw, r *draw.Ranking, entries map[byte]int64) error {
	counts := []int64{entries[0]}
	if len(d.Items) > 0 {
		counts = make([]int64, len(d.Items))
		for item := range counts {
			counts[item] = entries[order.ItemLetter(item)[0]]
		}
	}
	place := int64(0)
	ranks, places := make([]byte, 4*draw.ChunkLeaves), make([]byte, 4*draw.ChunkLeaves)
	_, err := tx.CopyFrom(ctx, pgx.Identifier{"draw_ranks"}, []string{"sale_id", "chunk", "ranks", "places"},
		pgx.CopyFromFunc(func() ([]any, error) {
			chunk := place / draw.ChunkLeaves
			n := 0
			for ; n < 4*draw.ChunkLeaves && place < d.Entries; n, place = n+4, place+1 {
				binary.BigEndian.PutUint32(ranks[n:], r.Rank(place))
				binary.BigEndian.PutUint32(places[n:], r.Place(place))
			}
			if n == 0 {
				return nil, nil
			}
			return []any{d.SaleID, chunk, ranks[:n], places[:n]}, nil
		}))
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, sql.DrawsAddRanks, d.SaleID, counts, d.epoch)
	crashpoint.Hit(crashpoint.DrawRanked)
	return err
}

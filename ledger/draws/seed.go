package draws

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"stampede/draw"
	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/reservation/order"
	"stampede/sql"
)

// Beacon gives the draw its seed: the signature of its round of drand quicknet. A repeat changes nothing. The error is
// ErrNoDraw, ErrNotFrozen, ErrVoid, ErrOtherSeed, a *WrongRoundError, or draw.ErrBeacon.
func (s *Store) Beacon(ctx context.Context, goods uuid.UUID, round int64, signature []byte) (Draw, error) {
	d, err := s.FindDraw(ctx, goods)
	if err != nil {
		return d, err
	}
	known, err := d.TakesBeacon(round, signature)
	if err != nil || known {
		return d, wrap("take the beacon", goods, err)
	}
	seed, err := draw.BeaconSeed(round, signature)
	if err != nil {
		return d, wrap("take the beacon", goods, err)
	}
	// Nobody has the signature before the time of the round. So the clock is behind, and was perhaps at the freeze.
	early := d.isEarly
	d, err = change(ctx, s.pool, goods, func(tx pgx.Tx, d *Draw) error {
		if known, err := d.TakesBeacon(round, signature); err != nil || known {
			return err
		}
		if early {
			return void(ctx, tx, d, draw.VoidEarly)
		}
		return giveSeed(ctx, tx, d, seed, signature)
	})
	if err == nil && d.State == Void {
		err = ErrVoid
	}
	return d, wrap("take the beacon", goods, err)
}

// TakesBeacon is all that Beacon looks at before it verifies a signature, which costs milliseconds. known is true if it
// is the one that has given the seed: a round has no other.
func (d *Draw) TakesBeacon(round int64, signature []byte) (known bool, err error) {
	switch {
	case len(d.Parties) > 0:
		return false, ErrOtherSeed
	case d.State == Void:
		return false, ErrVoid
	case d.FrozenAt.IsZero():
		return false, ErrNotFrozen
	case round != d.Round():
		return false, &WrongRoundError{d.Round()}
	case d.SeededAt.IsZero():
		return false, nil
	case !bytes.Equal(signature, d.Signature):
		return false, draw.ErrBeacon
	}
	return true, nil
}

func wrap(doing string, goods uuid.UUID, err error) error {
	if err != nil {
		return fmt.Errorf("%s of the draw of sale=%s: %w", doing, goods, err)
	}
	return nil
}

// Reveal gives the draw the secret of a party; the last one makes the seed. A repeat changes nothing. The error is
// ErrNoDraw, ErrNotFrozen, ErrVoid, ErrLate, ErrOtherSeed, ErrNoParty, or draw.ErrParties for a secret of another
// commitment.
func (s *Store) Reveal(ctx context.Context, goods uuid.UUID, party string, secret []byte) (Draw, error) {
	d, err := s.FindDraw(ctx, goods)
	if err != nil {
		return d, err
	}
	// Before the lock too: somebody who guesses secrets must not keep it from those who offer units.
	if known, err := d.TakesSecret(party, secret); err != nil || known {
		return d, wrap("take a secret", goods, err)
	}
	d, err = change(ctx, s.pool, goods, func(tx pgx.Tx, d *Draw) error {
		if known, err := d.TakesSecret(party, secret); err != nil || known {
			return err
		}
		d.Parties[d.party(party)].Secret = secret
		if d.isLate {
			return ErrLate
		}
		if _, err := tx.Exec(ctx, sql.DrawsReveal, goods, d.Parties); err != nil {
			return err
		}
		if slices.ContainsFunc(d.Parties, func(p draw.Party) bool { return len(p.Secret) == 0 }) {
			return nil
		}
		seed, err := draw.PartiesSeed(d.Version, d.SaleID, d.Root, d.Parties)
		if err != nil {
			return err
		}
		return giveSeed(ctx, tx, d, seed, nil)
	})
	return d, wrap("take a secret", goods, err)
}

// TakesSecret is all that Reveal looks at but the time. known is true if the party has revealed its secret before.
func (d *Draw) TakesSecret(party string, secret []byte) (known bool, err error) {
	at := d.party(party)
	switch {
	case len(d.Parties) == 0:
		return false, ErrOtherSeed
	case at < 0:
		return false, ErrNoParty
	case d.State == Void:
		return false, ErrVoid
	}
	revealed := d.Parties[at]
	revealed.Secret = secret
	if err := revealed.Verify(); err != nil {
		return false, err
	}
	if d.FrozenAt.IsZero() {
		return false, ErrNotFrozen
	}
	return len(d.Parties[at].Secret) > 0, nil
}

func (d *Draw) party(name string) int {
	return slices.IndexFunc(d.Parties, func(p draw.Party) bool { return p.Name == name })
}

func giveSeed(ctx context.Context, tx pgx.Tx, d *Draw, seed draw.Seed, signature []byte) error {
	if _, err := tx.Exec(ctx, sql.DrawsSeed, d.SaleID, seed[:], signature); err != nil {
		return err
	}
	crashpoint.Hit(crashpoint.DrawSeeded)
	_, err := tx.Exec(ctx, sql.DrawsAddEvent, d.SaleID, eventSeeded,
		draw.Seeded{Seed: seed[:], Round: d.Round(), Signature: signature, Parties: d.Parties})
	return err
}

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

package draws

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/draw"
	"stampede/internal/crashpoint"
	"stampede/sql"
)

// Beacon gives the draw its seed: the signature of its round of drand quicknet. A repeat changes nothing. The error is
// ErrNoDraw, ErrNotFrozen, ErrVoid, ErrOtherSeed, a *WrongRoundError, or draw.ErrBeacon.
func (s *Store) Beacon(ctx context.Context, goods uuid.UUID, round int64, signature []byte) (Draw, error) {
	d, err := s.FindDraw(ctx, goods)
	if err != nil {
		return d, err
	}
	var seed draw.Seed
	check := func(d *Draw) error {
		switch {
		case len(d.Parties) > 0:
			return ErrOtherSeed
		case d.State == Void:
			return ErrVoid
		case d.FrozenAt.IsZero():
			return ErrNotFrozen
		case round != d.Round():
			return &WrongRoundError{d.Round()}
		}
		return nil
	}
	if err = check(&d); err == nil && (d.SeededAt.IsZero() || !bytes.Equal(signature, d.Signature)) {
		seed, err = draw.BeaconSeed(round, signature) // a round has one signature
	}
	if err != nil || !d.SeededAt.IsZero() {
		return d, wrap("take the beacon", goods, err)
	}
	d, err = change(ctx, s.pool, goods, func(tx pgx.Tx, d *Draw) error {
		if err := check(d); err != nil || !d.SeededAt.IsZero() {
			return err
		}
		return giveSeed(ctx, tx, d, seed, signature)
	})
	return d, wrap("take the beacon", goods, err)
}

func wrap(doing string, goods uuid.UUID, err error) error {
	if err != nil {
		return fmt.Errorf("%s of the draw of sale=%s: %w", doing, goods, err)
	}
	return nil
}

// Reveal gives the draw the secret of a party; the last one makes the seed. A repeat changes nothing. The error is
// ErrNoDraw, ErrNotFrozen, ErrVoid, ErrOtherSeed, ErrNoParty, or draw.ErrParties for a secret of another commitment.
func (s *Store) Reveal(ctx context.Context, goods uuid.UUID, party string, secret []byte) (Draw, error) {
	d, err := s.FindDraw(ctx, goods)
	if err != nil {
		return d, err
	}
	// Before the lock too: somebody who guesses secrets must not keep it from those who offer units.
	if known, err := d.reveal(party, secret); err != nil || known {
		return d, wrap("take a secret", goods, err)
	}
	d, err = change(ctx, s.pool, goods, func(tx pgx.Tx, d *Draw) error {
		if known, err := d.reveal(party, secret); err != nil || known {
			return err
		}
		if d.overdue {
			return void(ctx, tx, d, reasonNoReveal)
		}
		if _, err := tx.Exec(ctx, sql.DrawsReveal, goods, d.Parties); err != nil {
			return err
		}
		if slices.ContainsFunc(d.Parties, func(p draw.Party) bool { return len(p.Secret) == 0 }) {
			return nil
		}
		seed, err := draw.PartiesSeed(d.Parties)
		if err != nil {
			return err
		}
		return giveSeed(ctx, tx, d, seed, nil)
	})
	if err == nil && d.State == Void {
		err = ErrVoid
	}
	return d, wrap("take a secret", goods, err)
}

// reveal sets the secret of a party, and returns whether it was known.
func (d *Draw) reveal(party string, secret []byte) (known bool, err error) {
	at := slices.IndexFunc(d.Parties, func(p draw.Party) bool { return p.Name == party })
	switch {
	case len(d.Parties) == 0:
		return false, ErrOtherSeed
	case at < 0:
		return false, ErrNoParty
	case d.State == Void:
		return false, ErrVoid
	case d.FrozenAt.IsZero():
		return false, ErrNotFrozen
	}
	known = len(d.Parties[at].Secret) > 0
	d.Parties[at].Secret = secret
	return known, d.Parties[at].Verify()
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

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

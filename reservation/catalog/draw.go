package catalog

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/internal/pg"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

// The kinds of a row of the table draws.
const (
	kindDraw     = "draw"
	kindWaitlist = "waitlist"
)

// The bounds of DrawTerms, which are those of package draw.
const (
	freezeMin    = 10 * time.Second
	freezeMax    = 24 * time.Hour
	partiesMax   = 16
	partyNameMax = 64 // bytes
)

// The versions of rows of the table draws: that of new draws, which is draw.Version, and that of waiting lists.
const (
	drawVersion     = 2
	waitlistVersion = 1
)

// DrawTerms are the terms of a draw of the units of a sale, the goods.
type DrawTerms struct {
	// Entries is the sale in which people enter: each order is an entry.
	Entries uuid.UUID
	// Freeze is the time from the end of the entries to the round of drand that gives the seed.
	Freeze time.Duration
	// Parties give the seed together; none if drand does.
	Parties []Party
}

// Party is one of those who give the seed of a draw.
type Party struct {
	// Name is what it is called in public.
	Name string `json:"name"`
	// Commitment is the SHA-256 of its secret, in hexadecimal.
	Commitment string `json:"commitment"`
}

// validate returns an *InvalidError for the first invalid term, and writes commitments in lower case.
func (t *DrawTerms) validate() error {
	invalid := func(field, format string, args ...any) error {
		return &order.InvalidError{Field: field, Reason: fmt.Sprintf(format, args...)}
	}
	switch {
	case t.Freeze < freezeMin || t.Freeze > freezeMax || t.Freeze%time.Second != 0:
		return invalid("freeze_seconds", "must be a whole number from %d to %d", freezeMin/time.Second, freezeMax/time.Second)
	case t.Parties != nil && len(t.Parties) == 0, len(t.Parties) > partiesMax:
		return invalid("parties", "must be 1 to %d, or left out", partiesMax)
	}
	t.Parties = slices.Clone(t.Parties)
	seen := map[string]bool{}
	for n := range t.Parties {
		p := &t.Parties[n]
		name, commitment := fmt.Sprintf("parties[%d].name", n), fmt.Sprintf("parties[%d].commitment", n)
		if err := order.ValidateText(name, p.Name, partyNameMax); err != nil {
			return err
		}
		hash, err := hex.DecodeString(p.Commitment)
		p.Commitment = hex.EncodeToString(hash)
		switch {
		case len(p.Name) > partyNameMax:
			return invalid(name, "must be at most %d bytes", partyNameMax)
		case err != nil || len(hash) != 32:
			return invalid(commitment, "must be a SHA-256 in hexadecimal, 64 digits")
		case seen["name "+p.Name]:
			return invalid(name, "is that of another party")
		case seen[p.Commitment]:
			return invalid(commitment, "is that of another party")
		}
		seen["name "+p.Name], seen[p.Commitment] = true, true
	}
	return nil
}

// storedDraw is a row of the table draws.
type storedDraw struct {
	SaleID, EntriesID uuid.UUID
	Kind              string
	FreezeSeconds     int64
	Parties           []Party
}

// CreateDraw offers the units of a sale, the goods, to those who enter another one, by rank: nobody else buys them from
// now on. A repeat with equal terms changes nothing. The error is an *InvalidError for terms that do not fit, an
// *IllegalTransitionError for goods that cannot be drawn, or wraps ErrSaleNotFound, ErrUnavailable or, if the draw is
// created, ErrNotInForce.
func (c *Catalog) CreateDraw(ctx context.Context, goods uuid.UUID, t DrawTerms) (replayed bool, err error) {
	if err := t.validate(); err != nil {
		return false, err
	}
	// Units that a buyer gets after this look are an order that no offer gets.
	counted, countErr := c.Show(ctx, goods)
	revision, err := c.change(ctx, goods, OpDraw, "",
		func(ctx context.Context, tx pgx.Tx, s reservation.Sale) (saleChange, error) {
			// No other draw of one of the two is made meanwhile.
			if err := lockSale(ctx, tx, t.Entries); errors.Is(err, pgx.ErrNoRows) {
				return saleChange{}, invalidEntries("must be the id of a sale")
			} else if err != nil {
				return saleChange{}, err
			}
			if same, err := t.isOf(ctx, tx, goods); err != nil || same {
				return saleChange{}, err
			}
			if countErr != nil {
				return saleChange{}, countErr
			}
			s.Sold += counted.Held + counted.Sold
			if err := t.allowed(ctx, tx, s, time.Now()); err != nil {
				return saleChange{}, err
			}
			seconds := int64(t.Freeze / time.Second)
			if err := t.claimCommitments(ctx, tx, goods); err != nil {
				return saleChange{}, err
			}
			if _, err := tx.Exec(ctx, sql.CatalogInsertDraw, goods, t.Entries, kindDraw, seconds, t.Parties,
				drawVersion); err != nil {
				return saleChange{}, err
			}
			data := map[string]any{
				"version": drawVersion, "stock": s.Stock, "entries_sale_id": t.Entries, "freeze_seconds": seconds,
			}
			if t.Parties != nil {
				data["parties"] = t.Parties
			}
			return saleChange{eventDrawCreated, s.State, s.Stock, data}, nil
		}, nil)
	if err != nil {
		return false, err
	}
	if err := c.publish(ctx, goods); err != nil {
		return false, fmt.Errorf("draw sale=%s: %w: %w", goods, ErrNotInForce, err)
	}
	return revision == 0, nil
}

// isOf is true if the goods have such a draw. The error is a refusal if one of the sales is in another one.
func (t *DrawTerms) isOf(ctx context.Context, tx pgx.Tx, goods uuid.UUID) (bool, error) {
	rows, _ := tx.Query(ctx, sql.CatalogFindDraws, []uuid.UUID{goods, t.Entries}) // its error comes with the rows
	known, err := pgx.CollectRows(rows, pgx.RowToStructByName[storedDraw])
	if err != nil {
		return false, err
	}
	for _, d := range known {
		switch {
		case d.SaleID == goods && d.EntriesID == t.Entries && d.Kind == kindDraw &&
			d.FreezeSeconds == int64(t.Freeze/time.Second) && slices.Equal(d.Parties, t.Parties):
			return true, nil
		case d.SaleID == goods || d.EntriesID == goods:
			_, err := (&pair{Goods: d.SaleID, Entries: d.EntriesID, Kind: d.Kind}).rule(OpDraw, goods)
			return false, err
		}
	}
	if len(known) > 0 {
		return false, invalidEntries("must not be part of another draw or of a waiting list")
	}
	return false, nil
}

// allowed returns why the goods cannot have this draw, nil if they can.
func (t *DrawTerms) allowed(ctx context.Context, tx pgx.Tx, goods reservation.Sale, now time.Time) error {
	switch {
	case t.Entries == goods.ID:
		return invalidEntries("must be another sale than the one that is drawn")
	case goods.StateAt(now) == reservation.StateEnded:
		return cannotDraw(reservation.StateEnded)
	case goods.Sold > 0:
		return cannotDraw("sold in part: units of it are held or sold")
	case goods.Shards > 1:
		return cannotDraw("in several shards")
	}
	found, err := findSale(ctx, tx, t.Entries)
	if err != nil {
		return err
	}
	entries := found[0].Sale
	price := func(i reservation.Item) bool { return i.UnitPrice > 0 }
	switch {
	case entries.ClosesAt.IsZero():
		return invalidEntries("must be a sale with closes_at")
	case entries.StateAt(now) == reservation.StateEnded:
		return invalidEntries("must be a sale that has not ended")
	case entries.PerOrderLimit != 1:
		return invalidEntries("must be a sale with per_order_limit 1")
	case entries.PaymentWindow > 0:
		return invalidEntries("must be a sale without payment_window_seconds")
	case entries.UnitPrice > 0 || slices.ContainsFunc(entries.Items, price):
		return invalidEntries("must be a sale without unit_price")
	case !slices.Equal(entries.Codes(), goods.Codes()):
		return invalidEntries("must be a sale with the items of the one that is drawn, in the same order")
	case !goods.ClosesAt.IsZero() && !goods.ClosesAt.After(entries.ClosesAt.Add(t.Freeze)):
		return invalidEntries("must close, with freeze_seconds, before the sale that is drawn")
	}
	return nil
}

// claimCommitments makes sure that no draw has used a commitment of the parties, nor will use it. The secret of one
// that was used may be public, be it that its draw was void: whoever knows all secrets before the list is frozen can
// choose the entries that win.
func (t *DrawTerms) claimCommitments(ctx context.Context, tx pgx.Tx, goods uuid.UUID) error {
	commitments := make([][]byte, 0, len(t.Parties))
	for _, p := range t.Parties {
		commitment, err := hex.DecodeString(p.Commitment)
		if err != nil {
			return err
		}
		commitments = append(commitments, commitment)
	}
	var used int
	err := tx.QueryRow(ctx, sql.CatalogClaimCommitments, goods, commitments).Scan(&used)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	} else if err != nil {
		return err
	}
	return &order.InvalidError{Field: fmt.Sprintf("parties[%d].commitment", used-1), Reason: fmt.Sprintf(
		"must be that of a new secret: another draw has used %s of %q", t.Parties[used-1].Commitment,
		t.Parties[used-1].Name)}
}

// OpenDraw has the units that a draw leaves sold to everybody once each rank had its turn. A worker does so. It may be
// repeated. The error is an *IllegalTransitionError, also for a sale that is not drawn, or wraps ErrSaleNotFound,
// ErrUnavailable or ErrNotInForce.
func (c *Catalog) OpenDraw(ctx context.Context, goods uuid.UUID) error {
	_, err := c.change(ctx, goods, OpOpen, "",
		func(ctx context.Context, tx pgx.Tx, s reservation.Sale) (saleChange, error) {
			refused := &reservation.IllegalTransitionError{Action: string(OpOpen)}
			var void, opening bool
			err := tx.QueryRow(ctx, sql.CatalogFindOpening, goods).Scan(&void, &opening)
			switch {
			case errors.Is(err, pgx.ErrNoRows):
				refused.State = "not drawn"
			case err != nil:
				return saleChange{}, err
			case opening:
				return saleChange{}, nil
			case s.StateAt(time.Now()) == reservation.StateEnded:
				refused.State = reservation.StateEnded
			case void:
				refused.State, refused.Instead = "drawn, and its draw is void", "end it, and sell its units as another sale"
			default:
				return saleChange{eventDrawOpening, s.State, s.Stock, map[string]any{}}, nil
			}
			return saleChange{}, refused
		}, nil)
	if err != nil {
		return err
	}
	if err := c.publish(ctx, goods); err != nil {
		return fmt.Errorf("open sale=%s: %w: %w", goods, ErrNotInForce, err)
	}
	return nil
}

// listName is the name of the places of a waiting list, by that of its sale.
func listName(sale string) string {
	const suffix = ": waiting list"
	name := []rune(sale)
	return string(name[:min(len(name), order.MaxNameRunes-len(suffix))]) + suffix
}

func cannotDraw(state reservation.State) error {
	return &reservation.IllegalTransitionError{Action: "draw", State: state}
}

func invalidEntries(reason string) error {
	return &order.InvalidError{Field: "entries_sale_id", Reason: reason}
}

// insertWithWaitlist creates a sale, and the one in which people wait for its units. The error is pgx.ErrNoRows if
// another sale was created with the idempotency key.
func (c *Catalog) insertWithWaitlist(ctx context.Context, sale *reservation.Sale, idempotencyKey string) error {
	entries := reservation.Sale{
		ID: uuid.Must(uuid.NewV7()), Partitions: sale.Partitions,
		Terms: reservation.Terms{
			Name:  listName(sale.Name),
			Stock: order.MaxStock, PerOrderLimit: 1, ClosesAt: sale.ClosesAt, Shards: 1,
		},
	}
	if n := int64(len(sale.Items)); n > 0 { // each has a list of its own
		entries.Stock = order.MaxStock / n * n
		for _, i := range sale.Items {
			entries.Items = append(entries.Items, reservation.Item{Code: i.Code, Name: i.Name, Stock: order.MaxStock / n})
		}
	}
	sale.EntriesID = entries.ID
	return pg.InTransaction(ctx, c.Pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, sql.CatalogInsertSale, insertArgs(ctx, *sale, idempotencyKey)...).
			Scan(&sale.Epoch, &sale.Revision, &sale.CreatedAt)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, sql.CatalogInsertSale, insertArgs(ctx, entries, "")...); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, sql.CatalogInsertDraw, sale.ID, entries.ID, kindWaitlist, 0, nil, waitlistVersion)
		if err != nil {
			return err
		}
		for _, s := range []*reservation.Sale{&entries, sale} {
			data := map[string]any{"stock": s.Stock, "sale_id": sale.ID, "entries_sale_id": entries.ID}
			err := tx.QueryRow(ctx, sql.CatalogChangeSale, s.ID, reservation.StateOpen, s.Stock, eventWaitlistCreated,
				data, nil, zeronull.Text(operatorIn(ctx))).Scan(&s.Revision)
			if err != nil {
				return err
			}
		}
		return nil
	})
}

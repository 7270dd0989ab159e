package deadletter

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/fulfillment/ledger"
	"stampede/fulfillment/stream"
	"stampede/internal/pg"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

var (
	// ErrDeadLetterNotFound is returned when no dead letter has the id.
	ErrDeadLetterNotFound = errors.New("dead letter not found")
	// ErrDeadLetterNotParked is returned for a dead letter that was replayed or discarded before.
	ErrDeadLetterNotParked = errors.New("dead letter is not parked")
	// ErrDeadLetterUnreadable is returned by Replay for a letter whose entry is not stored as Park stores one.
	ErrDeadLetterUnreadable = errors.New("dead letter cannot be read")
)

// RejectedDiscarded is the reason of an order whose event an operator discarded.
const RejectedDiscarded = "discarded"

// fieldReplayOf is a field that Replay adds to an entry: the dead letter that it is.
const fieldReplayOf = "stampede_replay_of"

// Status tells what has become of a dead letter.
type Status string

// A dead letter is parked until an operator decides; a replay that fails parks it again.
const (
	DeadLetterParked    Status = "parked"
	DeadLetterReplayed  Status = "replayed"
	DeadLetterDiscarded Status = "discarded"
)

// Letter is a stream entry that no worker could apply, kept whole, and what became of it.
type Letter struct {
	ID    int64
	Entry stream.Entry
	// Damage tells why the fields of the entry cannot be read as they are stored; Entry has none then.
	Damage string
	Reason string
	Status Status
	// Replays counts how often it was appended to its stream again, and ReplayedAs is the last of those entries.
	Replays    int
	ReplayedAs string
	// Resolution tells what an operator made of it.
	Resolution           string
	CreatedAt, UpdatedAt time.Time
}

// Store keeps entries in Postgres until an operator decides about them. It is safe for
// concurrent use.
type Store struct {
	pool   *pgxpool.Pool
	rdb    redis.UniversalClient
	ledger *ledger.Ledger
	store  *reservation.Store

	discarding sync.Mutex
}

// NewStore returns the dead letters of a database; rdb has the streams they came from. Discard
// needs two connections of the pool at a time.
func NewStore(pool *pgxpool.Pool, rdb redis.UniversalClient, store *reservation.Store) *Store {
	return &Store{pool: pool, rdb: rdb, ledger: ledger.New(pool), store: store}
}

// Park keeps an entry. It is a DeadLetterFunc: to park an entry again is no error and changes
// nothing, and an entry that Replay made goes back to the row it came from.
func (d *Store) Park(ctx context.Context, entry stream.Entry, reason error) error {
	fields, err := encodeFields(entry.Fields)
	if err != nil {
		return fmt.Errorf("park entry %s of %s: %w", entry.ID, entry.Stream, err)
	}
	var replayOf *int64
	for _, f := range entry.Fields {
		if id, err := strconv.ParseInt(f.Value, 10, 64); f.Name == fieldReplayOf && err == nil {
			replayOf = &id
		}
	}
	_, err = d.pool.Exec(ctx, sql.DeadLetterPark, entry.Stream, entry.ID, fields, Storable(reason.Error()),
		entry.Deliveries, replayOf)
	if err != nil {
		return fmt.Errorf("park entry %s of %s: %w", entry.ID, entry.Stream, ledger.OfConstraint(err))
	}
	return nil
}

// Storable is the text as Postgres can hold it: an error may quote an entry byte by byte.
func Storable(text string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
}

// List returns the newest dead letters, those with that status only unless it is empty.
func (d *Store) List(ctx context.Context, status Status, limit int) ([]Letter, error) {
	rows, err := d.pool.Query(ctx, sql.DeadLetterList, string(status), limit)
	if err != nil {
		return nil, fmt.Errorf("list dead letters: %w", err)
	}
	letters, err := pgx.CollectRows(rows, ScanLetter)
	if err != nil {
		return nil, fmt.Errorf("list dead letters: %w", err)
	}
	return letters, nil
}

// Get returns a dead letter, or ErrDeadLetterNotFound.
func (d *Store) Get(ctx context.Context, id int64) (Letter, error) {
	return readDeadLetter(ctx, d.pool, sql.DeadLetterFind, id)
}

// withLocked calls do with a letter whose row stays locked until do has returned, and commits what it did.
func (d *Store) withLocked(ctx context.Context, id int64, do func(pgx.Tx, Letter) error) error {
	return pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error {
		letter, err := readDeadLetter(ctx, tx, sql.DeadLetterLock, id)
		if err != nil {
			return err
		}
		return do(tx, letter)
	})
}

// checkParked returns ErrDeadLetterNotParked unless the letter is parked.
func (l *Letter) checkParked() error {
	if l.Status == DeadLetterParked {
		return nil
	}
	return fmt.Errorf("%w: %d is %s", ErrDeadLetterNotParked, l.ID, l.Status)
}

func readDeadLetter(ctx context.Context, from pg.Querier, query string, id int64) (Letter, error) {
	rows, err := from.Query(ctx, query, id)
	if err != nil {
		return Letter{}, fmt.Errorf("find dead letter %d: %w", id, err)
	}
	letter, err := pgx.CollectOneRow(rows, ScanLetter)
	if errors.Is(err, pgx.ErrNoRows) {
		return Letter{}, fmt.Errorf("%w: %d", ErrDeadLetterNotFound, id)
	} else if err != nil {
		return Letter{}, fmt.Errorf("find dead letter %d: %w", id, err)
	}
	return letter, nil
}

// deadLetterRow is a row of the table dead_letters.
type deadLetterRow struct {
	ID         int64
	Stream     string
	EntryID    string
	Fields     []byte
	Reason     string
	Deliveries int64
	Status     Status
	Replays    int
	Resolution string
	ReplayedAs string
	CreatedAt  time.Time
	UpdatedAt  time.Time
}

func ScanLetter(row pgx.CollectableRow) (Letter, error) {
	r, err := pgx.RowToStructByName[deadLetterRow](row)
	if err != nil {
		return Letter{}, err
	}
	l := Letter{
		ID: r.ID, Entry: stream.Entry{Stream: r.Stream, ID: r.EntryID, Deliveries: r.Deliveries}, Reason: r.Reason,
		Status:  r.Status,
		Replays: r.Replays, ReplayedAs: r.ReplayedAs, Resolution: r.Resolution, CreatedAt: r.CreatedAt,
		UpdatedAt: r.UpdatedAt,
	}
	if l.Entry.Fields, err = decodeFields(r.Fields); err != nil {
		l.Entry.Fields, l.Damage = nil, err.Error()
	}
	return l, nil
}

// Replay appends the entry to its stream again, for a worker that knows better by now, and returns
// its new id. A letter that was replayed, and is not parked again, is left as it is: appended is false
// then, and the id is the one of before. It returns ErrDeadLetterNotFound, ErrDeadLetterUnreadable, or
// ErrDeadLetterNotParked if the letter was discarded.
//
// The entry is appended before that is noted: whoever dies in between leaves a letter that may be
// replayed twice, which the ledger takes for the same order, and never one that is noted and lost.
func (d *Store) Replay(ctx context.Context, id int64) (entryID string, appended bool, err error) {
	err = d.withLocked(ctx, id, func(tx pgx.Tx, letter Letter) error {
		if letter.Status == DeadLetterReplayed {
			entryID = letter.ReplayedAs
			return nil
		}
		if err := letter.checkParked(); err != nil {
			return err
		}
		if letter.Damage != "" {
			return fmt.Errorf("%w: %s", ErrDeadLetterUnreadable, letter.Damage)
		}
		values := make([]any, 0, 2*len(letter.Entry.Fields)+2)
		for _, f := range letter.Entry.Fields {
			if f.Name != fieldReplayOf { // of a letter that this database does not know
				values = append(values, f.Name, f.Value)
			}
		}
		values = append(values, fieldReplayOf, strconv.FormatInt(id, 10))
		entryID, err = d.rdb.XAdd(ctx, &redis.XAddArgs{Stream: letter.Entry.Stream, Values: values}).Result()
		if err != nil {
			return fmt.Errorf("append to %s: %w", letter.Entry.Stream, err)
		}
		appended = true
		_, err = tx.Exec(ctx, sql.DeadLetterMarkReplayed, id, entryID)
		return err
	})
	if err != nil {
		return "", false, fmt.Errorf("replay: %w", err)
	}
	return entryID, appended, nil
}

// Discard gives a dead letter up. If its entry reserves units, the buyer was told that the order is
// accepted: it gets a truthful end, OrderRejected for the reason RejectedDiscarded, and its units go
// back to the sale; unless another delivery was applied meanwhile, which stands. That goes for a
// version that this program does not know, too, as long as it says who bought what.
//
// If it does not, or says what no order can be, nothing is done but that: an order that was
// accepted has its reservation in Redis, from which Reconcile has it recorded once the letter is
// out of the way. Errors are ErrDeadLetterNotFound, and ErrDeadLetterNotParked unless the letter is
// parked.
//
// Each step may be repeated, and the letter is marked last, so a Discard that failed may be called again.
func (d *Store) Discard(ctx context.Context, id int64, why string) error {
	// While the letter is locked on one connection, the ledger needs another: several at a time could
	// take them all, and wait for each other.
	d.discarding.Lock()
	defer d.discarding.Unlock()
	err := d.withLocked(ctx, id, func(tx pgx.Tx, letter Letter) error {
		if err := letter.checkParked(); err != nil {
			return err
		}
		became, err := d.endOrder(ctx, letter)
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, sql.DeadLetterMarkDiscarded, id, Storable(why+"; "+became))
		return err
	})
	if err != nil {
		return fmt.Errorf("discard dead letter %d: %w", id, err)
	}
	return nil
}

// endOrder gives the order of a letter its end, and says in words which.
func (d *Store) endOrder(ctx context.Context, letter Letter) (string, error) {
	const fromReservation = "if it was accepted, `stampede reconcile` has it recorded from its reservation"
	if letter.Damage != "" {
		return "the entry cannot be read, so neither can an order that it names: " + fromReservation, nil
	}
	event, err := OrderOf(letter.Entry)
	if errors.Is(err, errNoOrder) {
		return errNoOrder.Error(), nil
	} else if err != nil {
		return fmt.Sprintf("the order cannot be read (%v): %s", err, fromReservation), nil
	}
	outcomes, err := d.ledger.Refuse(ctx, []order.OrderReserved{event}, RejectedDiscarded)
	if err != nil && ledger.FaultOf(err) == ledger.BadData {
		return fmt.Sprintf("order %s cannot be recorded as the entry tells it (%v): %s", event.OrderID, err, fromReservation),
			nil
	} else if err != nil {
		return "", err
	}
	switch out := outcomes[0]; {
	case errors.Is(out.Err, ledger.ErrContradiction):
		return fmt.Sprintf("order %s was left as it is: %v", event.OrderID, out.Err), nil
	case out.Err != nil:
		return "", out.Err
	case !ledger.NeedsRelease(out):
		return fmt.Sprintf("order %s is %s", event.OrderID, out.Status), nil
	}
	results, err := d.store.Release(ctx, []reservation.Release{ledger.ReleaseOf(outcomes[0])})
	switch {
	case err != nil:
		return "", err
	case results[0] == reservation.ReleaseDamaged:
		return "", fmt.Errorf("%w: order %s of sale %s", ledger.ErrRefused, event.OrderID, event.SaleID)
	case results[0] == reservation.ReleaseUnknownSale: // nor will a rebuild count them
		return fmt.Sprintf("order %s is %s and its sale is not in Redis", event.OrderID, outcomes[0].Status), nil
	}
	return fmt.Sprintf("order %s is %s and its units are back in the sale", event.OrderID, outcomes[0].Status), nil
}

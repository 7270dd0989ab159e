// Package deadletter keeps the stream entries that no worker could apply, until an operator replays
// or discards them.
//
// Store.Park stores an entry with every byte of its fields. OrdersOf reads the reservations of an
// entry.
package deadletter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/pg"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/stream"
)

var (
	// ErrNotFound is returned when no dead letter has the id.
	ErrNotFound = errors.New("dead letter not found")
	// ErrNotParked is returned for a dead letter that was replayed or discarded.
	ErrNotParked = errors.New("dead letter is not parked")
	// ErrUnreadable is returned by Replay for a letter whose stored fields are damaged.
	ErrUnreadable = errors.New("dead letter cannot be read")
)

// RejectedDiscarded is the reason of an order whose event an operator discarded.
const RejectedDiscarded = "discarded"

// fieldReplayOf is the field that Replay adds to an entry: the id of its dead letter.
const fieldReplayOf = "stampede_replay_of"

// Status is the state of a dead letter.
type Status string

// A dead letter is parked until an operator decides. A replay that fails parks it again.
const (
	StatusParked    Status = "parked"
	StatusReplayed  Status = "replayed"
	StatusDiscarded Status = "discarded"
)

// Letter is a stream entry that no worker could apply, complete, with its status.
type Letter struct {
	ID int64
	// OrderID is the order that could not be applied, and Entry an entry with that order only. It is uuid.Nil for a
	// whole entry that cannot be read.
	OrderID uuid.UUID
	Entry   stream.Entry
	// Damage says why the stored fields of the entry cannot be read; Entry has none then.
	Damage string
	Reason string
	Status Status
	// Replays counts how often Replay appended the entry to its stream; ReplayedAs is the latest of these entries.
	Replays    int
	ReplayedAs string
	// Resolution describes the latest Replay or Discard, and Operator is who made it.
	Resolution, Operator string
	CreatedAt, UpdatedAt time.Time
}

// Store keeps entries in Postgres until an operator decides. It is safe for concurrent use.
type Store struct {
	pool   *pgxpool.Pool
	rdb    redis.UniversalClient
	ledger *ledger.Ledger
	store  *reservation.Store

	discarding sync.Mutex
}

// NewStore returns the dead letters of a database; rdb holds the streams of the entries. Discard needs two connections
// of the pool at a time.
func NewStore(pool *pgxpool.Pool, rdb redis.UniversalClient, store *reservation.Store) *Store {
	return &Store{pool: pool, rdb: rdb, ledger: ledger.New(pool), store: store}
}

// Park stores an entry, or each of the orders that stream.OrderErrors name in the reason. Parking it again changes
// nothing, and an entry that Replay made goes back to its original row.
func (s *Store) Park(ctx context.Context, entry stream.Entry, reason error) error {
	var refused stream.OrderErrors
	if !errors.As(reason, &refused) {
		return s.park(ctx, entry, uuid.Nil, reason)
	}
	for _, o := range refused {
		only, readable := onlyOrder(entry, o.OrderID)
		if !readable {
			return s.park(ctx, entry, uuid.Nil, reason)
		}
		reason := fmt.Errorf("refused after %d deliveries: %w", entry.Deliveries, o.Err)
		if err := s.park(ctx, only, o.OrderID, reason); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) park(ctx context.Context, entry stream.Entry, o uuid.UUID, reason error) error {
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
	_, err = s.pool.Exec(ctx, sql.DeadLetterPark, entry.Stream, entry.ID, fields, Storable(reason.Error()),
		entry.Deliveries, replayOf, zeronull.UUID(o))
	if err != nil {
		return fmt.Errorf("park entry %s of %s: %w", entry.ID, entry.Stream, ledger.TranslateError(err))
	}
	return nil
}

// Storable returns the text as Postgres can hold it: an error may quote an entry byte by byte.
func Storable(text string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
}

// List returns the newest dead letters, only those with that status unless it is empty.
func (s *Store) List(ctx context.Context, status Status, limit int) ([]Letter, error) {
	rows, err := s.pool.Query(ctx, sql.DeadLetterList, string(status), limit)
	if err != nil {
		return nil, fmt.Errorf("list dead letters: %w", err)
	}
	letters, err := pgx.CollectRows(rows, ScanLetter)
	if err != nil {
		return nil, fmt.Errorf("list dead letters: %w", err)
	}
	return letters, nil
}

// Get returns a dead letter, or ErrNotFound.
func (s *Store) Get(ctx context.Context, id int64) (Letter, error) {
	return readLetter(ctx, s.pool, sql.DeadLetterFind, id)
}

// withLocked calls do with a letter whose row is locked until the transaction ends; an error of do rolls it back.
func (s *Store) withLocked(ctx context.Context, id int64, do func(pgx.Tx, Letter) error) error {
	return pg.InTransaction(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		letter, err := readLetter(ctx, tx, sql.DeadLetterLock, id)
		if err != nil {
			return err
		}
		return do(tx, letter)
	})
}

// checkParked returns ErrNotParked unless the letter is parked.
func (l *Letter) checkParked() error {
	if l.Status == StatusParked {
		return nil
	}
	return fmt.Errorf("%w: %d is %s", ErrNotParked, l.ID, l.Status)
}

func readLetter(ctx context.Context, from pg.Querier, query string, id int64) (Letter, error) {
	rows, err := from.Query(ctx, query, id)
	if err != nil {
		return Letter{}, fmt.Errorf("find dead letter %d: %w", id, err)
	}
	letter, err := pgx.CollectOneRow(rows, ScanLetter)
	if errors.Is(err, pgx.ErrNoRows) {
		return Letter{}, fmt.Errorf("%w: %d", ErrNotFound, id)
	} else if err != nil {
		return Letter{}, fmt.Errorf("find dead letter %d: %w", id, err)
	}
	return letter, nil
}

// letterRow is a row of the queries sql/queries/deadletter/{find,list,lock}.sql.
type letterRow struct {
	ID         int64
	Stream     string
	EntryID    string
	OrderID    zeronull.UUID
	Fields     []byte
	Reason     string
	Deliveries int64
	Status     Status
	Replays    int
	Resolution string
	ReplayedAs string
	Operator   string
	CreatedAt  time.Time
	UpdatedAt  time.Time
}

// ScanLetter reads a dead letter from a row; damaged fields set Letter.Damage and are no error.
func ScanLetter(row pgx.CollectableRow) (Letter, error) {
	r, err := pgx.RowToStructByName[letterRow](row)
	if err != nil {
		return Letter{}, err
	}
	l := Letter{
		ID: r.ID, OrderID: uuid.UUID(r.OrderID),
		Entry:  stream.Entry{Stream: r.Stream, ID: r.EntryID, Deliveries: r.Deliveries},
		Reason: r.Reason, Status: r.Status,
		Replays: r.Replays, ReplayedAs: r.ReplayedAs, Resolution: r.Resolution, Operator: r.Operator,
		CreatedAt: r.CreatedAt, UpdatedAt: r.UpdatedAt,
	}
	if l.Entry.Fields, err = decodeFields(r.Fields); err != nil {
		l.Entry.Fields, l.Damage = nil, err.Error()
	}
	return l, nil
}

// Replay appends the entry to its stream again for an operator, and returns its new id. For a letter that was replayed
// and has not been parked again since, it returns the earlier id with appended = false. It returns ErrNotFound,
// ErrUnreadable, or ErrNotParked if the letter was discarded.
//
// The entry is appended before the letter is marked. After a crash between the two steps the letter may be replayed
// twice, which the ledger deduplicates. The other order could lose the entry.
func (s *Store) Replay(ctx context.Context, id int64, operator string) (entryID string, appended bool, err error) {
	err = s.withLocked(ctx, id, func(tx pgx.Tx, letter Letter) error {
		if letter.Status == StatusReplayed {
			entryID = letter.ReplayedAs
			return nil
		}
		if err := letter.checkParked(); err != nil {
			return err
		}
		if letter.Damage != "" {
			return fmt.Errorf("%w: %s", ErrUnreadable, letter.Damage)
		}
		values := make([]any, 0, 2*len(letter.Entry.Fields)+2)
		for _, f := range letter.Entry.Fields {
			if f.Name != fieldReplayOf { // an earlier mark, perhaps of another database
				values = append(values, f.Name, f.Value)
			}
		}
		values = append(values, fieldReplayOf, strconv.FormatInt(id, 10))
		entryID, err = s.rdb.XAdd(ctx, &redis.XAddArgs{Stream: letter.Entry.Stream, Values: values}).Result()
		if err != nil {
			return fmt.Errorf("append to %s: %w", letter.Entry.Stream, err)
		}
		appended = true
		_, err = tx.Exec(ctx, sql.DeadLetterMarkReplayed, id, entryID, zeronull.Text(operator))
		return err
	})
	if err != nil {
		return "", false, fmt.Errorf("replay: %w", err)
	}
	return entryID, appended, nil
}

// Discard resolves a dead letter for an operator without applying it. The orders of its entry that can be read are
// rejected for the reason RejectedDiscarded and their units are released, unless another delivery of the order was
// recorded. The entry may have an unknown version.
//
// Otherwise only the letter is marked. An accepted order then still has its reservation in Redis, from which
// audit.Reconcile records it. The errors are ErrNotFound, and ErrNotParked unless the letter is parked.
//
// Every step is idempotent and the letter is marked last, so Discard may be retried.
func (s *Store) Discard(ctx context.Context, id int64, why, operator string) error {
	// The letter is locked on one connection while the ledger needs another: concurrent calls could exhaust the
	// pool and deadlock.
	s.discarding.Lock()
	defer s.discarding.Unlock()
	err := s.withLocked(ctx, id, func(tx pgx.Tx, letter Letter) error {
		if err := letter.checkParked(); err != nil {
			return err
		}
		became, err := s.rejectOrders(ctx, letter)
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, sql.DeadLetterMarkDiscarded, id, Storable(why+"; "+became), zeronull.Text(operator))
		return err
	})
	if err != nil {
		return fmt.Errorf("discard dead letter %d: %w", id, err)
	}
	return nil
}

const fromReservation = "if it was accepted, `stampede reconcile` records it from its reservation"

// rejectOrders rejects the orders of a letter and describes the results.
func (s *Store) rejectOrders(ctx context.Context, letter Letter) (string, error) {
	if letter.Damage != "" {
		return "the entry cannot be read, nor an order that it may name: " + fromReservation, nil
	}
	events, err := OrdersOf(letter.Entry)
	if errors.Is(err, errNoOrder) {
		return errNoOrder.Error(), nil
	}
	var became []string
	for _, event := range events {
		result, err := s.rejectOrder(ctx, event)
		if err != nil {
			return "", err
		}
		became = append(became, result)
	}
	if err != nil {
		became = append(became, fmt.Sprintf("an order cannot be read (%v): %s", err, fromReservation))
	}
	return strings.Join(became, "; "), nil
}

// rejectOrder rejects an order and describes the result.
func (s *Store) rejectOrder(ctx context.Context, event order.OrderReserved) (string, error) {
	outcomes, err := s.ledger.Refuse(ctx, []order.OrderReserved{event}, RejectedDiscarded)
	if err != nil && ledger.FaultOf(err) == ledger.BadData {
		return fmt.Sprintf("order %s cannot be recorded from the entry (%v): %s", event.OrderID, err, fromReservation), nil
	} else if err != nil {
		return "", err
	}
	out := outcomes[0]
	switch {
	case errors.Is(out.Err, ledger.ErrContradiction):
		return fmt.Sprintf("order %s is unchanged: %v", event.OrderID, out.Err), nil
	case out.Err != nil:
		return "", out.Err
	case !ledger.NeedsRelease(out):
		return fmt.Sprintf("order %s is %s", event.OrderID, out.Status), nil
	}
	released := []reservation.Release{ledger.ReleaseOf(out)}
	results, err := s.store.Release(ctx, released)
	if err == nil {
		err = draws.New(s.pool).NoteDue(ctx, []uuid.UUID{event.SaleID})
	}
	switch {
	case err != nil:
		return "", err
	case results[0] == reservation.ReleaseDamaged:
		return "", fmt.Errorf("%w: order %s of sale %s", ledger.ErrRefused, event.OrderID, event.SaleID)
	case results[0] == reservation.ReleaseUnknownSale: // a rebuild does not count the units of a rejected order
		return fmt.Sprintf("order %s is %s and its sale is not in Redis", event.OrderID, out.Status), nil
	}
	return fmt.Sprintf("order %s is %s and its units are back in the sale", event.OrderID, out.Status), nil
}

// The fields of a dead letter are stored as JSON, [[name, value], …] in the order of the entry: readable in psql, and
// lossless. A name is a plain string, a value is {"text": …}. Either is {"base64": …} if it is not UTF-8 or has a zero
// byte, which JSON or Postgres cannot hold.

type storedValue struct {
	Text   *string `json:"text,omitempty"`
	Base64 []byte  `json:"base64,omitempty"`
}

func toStored(s string) storedValue {
	if isText(s) {
		return storedValue{Text: &s}
	}
	return storedValue{Base64: []byte(s)}
}

func (v storedValue) string() string {
	if v.Text != nil {
		return *v.Text
	}
	return string(v.Base64)
}

func isText(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }

func encodeFields(fields []stream.Field) ([]byte, error) {
	stored := make([][2]any, len(fields))
	for i, f := range fields {
		stored[i] = [2]any{f.Name, toStored(f.Value)}
		if !isText(f.Name) {
			stored[i][0] = toStored(f.Name)
		}
	}
	return json.Marshal(stored)
}

func decodeFields(data []byte) ([]stream.Field, error) {
	var stored [][2]json.RawMessage
	if err := json.Unmarshal(data, &stored); err != nil {
		return nil, fmt.Errorf("fields: %w", err)
	}
	fields := make([]stream.Field, len(stored))
	for i, pair := range stored {
		var value storedValue
		if err := json.Unmarshal(pair[1], &value); err != nil {
			return nil, fmt.Errorf("value of field %d: %w", i, err)
		}
		fields[i].Value = value.string()
		if err := json.Unmarshal(pair[0], &fields[i].Name); err == nil {
			continue
		}
		var name storedValue
		if err := json.Unmarshal(pair[0], &name); err != nil {
			return nil, fmt.Errorf("name of field %d: %w", i, err)
		}
		fields[i].Name = name.string()
	}
	return fields, nil
}

// errNoOrder is returned for an entry that names no order.
var errNoOrder = errors.New("the entry names no order")

// errIncompleteOrder is returned for an entry that names orders of which some cannot be read.
var errIncompleteOrder = errors.New("the entry names orders that cannot be read")

// OrdersOf reads the reservations of an entry. Unlike a worker, it accepts unknown versions. The error is errNoOrder
// for an entry that is no reservation; with errIncompleteOrder it returns the orders that can be read.
func OrdersOf(entry stream.Entry) ([]order.OrderReserved, error) {
	msg, err := decode(entry)
	var events []order.OrderReserved
	name := ""
	if err == nil {
		name = msg.Metadata.Get(order.MetaEvent)
		events, err = order.ReadReserved(msg)
	}
	switch {
	case err == nil:
		return events, nil
	case name == "" && !namesOrder(entry.Field(stream.FieldPayload)), name != "" && name != string(order.EventReserved):
		return nil, errNoOrder
	}
	return events, fmt.Errorf("%w: %w", errIncompleteOrder, err)
}

// decode decodes an entry as a worker does.
func decode(entry stream.Entry) (*message.Message, error) {
	values := make(map[string]any, len(entry.Fields))
	for _, f := range entry.Fields {
		values[f.Name] = f.Value
	}
	return stream.DecodeEntry(entry.ID, values, entry.Deliveries)
}

// namesOrder reports whether a line of the payload is a reservation.
func namesOrder(payload string) bool {
	for line := range strings.SplitSeq(payload, "\n") {
		if _, _, err := order.ParseReservation(line); err == nil {
			return true
		}
	}
	return false
}

// onlyOrder returns the entry with a single one of its orders, as Replay may append it. It returns false if the order
// cannot be read.
func onlyOrder(entry stream.Entry, id uuid.UUID) (stream.Entry, bool) {
	events, _ := OrdersOf(entry)
	at := slices.IndexFunc(events, func(e order.OrderReserved) bool { return e.OrderID == id })
	if at < 0 {
		return stream.Entry{}, false
	}
	only := stream.Values(events[at])
	entry.Fields = slices.Clone(entry.Fields)
	for i, f := range entry.Fields {
		if value, changed := only[f.Name].(string); changed {
			entry.Fields[i].Value = value
		}
	}
	return entry, true
}

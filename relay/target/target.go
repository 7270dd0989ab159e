// Package target holds the receivers of events: their addresses, their secrets, and up to which position each has all
// events. The table relay_targets is the truth for all processes of the relay.
package target

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/relay/feed"
	"stampede/sql"
)

// Max bounds the targets of an installation: each one that is served takes a connection to Postgres.
const Max = 32

// errorMax bounds the text of an error that is stored.
const errorMax = 500

var (
	// ErrNotFound is returned for a name that no target has.
	ErrNotFound = errors.New("there is no such target")
	// ErrExists is returned when a target with the name and another URL exists.
	ErrExists = errors.New("there is a target with this name and another URL")
	// ErrTooMany is returned by Add when there are Max targets.
	ErrTooMany = fmt.Errorf("there are %d targets already", Max)
	// ErrStale is returned when another process delivers to the target, or an operator has changed it.
	ErrStale = errors.New("another process delivers to the target, or it was changed")
)

// State is whether a target gets events.
type State string

// The states of a target.
const (
	Active State = "active"
	Paused State = "paused"
	// Disabled targets have answered that they want no more events.
	Disabled State = "disabled"
)

// Target is a receiver of events.
type Target struct {
	Name  string
	URL   string
	State State
	// All events up to and including Position are delivered.
	Position int64
	// Fence is another number after each claim of a process and each change of an operator.
	Fence  int64
	Holder string
	// Secrets sign webhooks. The newest comes first.
	Secrets      [][]byte
	AllowPrivate bool
	// Failures counts those since the last success. Before RetryAt nothing is sent.
	Failures    int
	LastError   string
	LastErrorAt zeronull.Timestamptz
	RetryAt     zeronull.Timestamptz
	DeliveredAt zeronull.Timestamptz
	CreatedAt   time.Time
}

// Standing is a target beside the newest position of all events.
type Standing struct {
	Target
	Newest int64
	// WaitingSince is the time of the first event that the target lacks; zero if it lacks none.
	WaitingSince zeronull.Timestamptz
}

// Lag is how many positions the target is behind. Some of them may belong to no event.
func (s *Standing) Lag() int64 { return max(0, s.Newest-s.Position) }

// Waiting is for how long the target has lacked an event.
func (s *Standing) Waiting(now time.Time) time.Duration {
	since := time.Time(s.WaitingSince)
	if since.IsZero() || s.Lag() == 0 {
		return 0
	}
	return max(0, now.Sub(since))
}

var nameForm = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

// CheckName returns an error for what cannot be the name of a target.
func CheckName(name string) error {
	if !nameForm.MatchString(name) {
		return fmt.Errorf("%q cannot name a target: want 1 to 63 small letters, digits and hyphens", name)
	}
	return nil
}

// Store reads and changes targets.
type Store struct{ pool *pgxpool.Pool }

// NewStore returns the Store of a database.
func NewStore(pool *pgxpool.Pool) *Store { return &Store{pool} }

// List returns all targets, by name.
func (s *Store) List(ctx context.Context) ([]Standing, error) {
	rows, err := s.pool.Query(ctx, sql.RelayListTargets)
	if err != nil {
		return nil, fmt.Errorf("list the targets: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[Standing])
	if err != nil {
		return nil, fmt.Errorf("list the targets: %w", err)
	}
	return all, nil
}

// Add adds a target that has all events up to a position.
func (s *Store) Add(
	ctx context.Context, name string, to *Address, secrets [][]byte, allowPrivate bool, position int64,
) error {
	if secrets == nil {
		secrets = [][]byte{}
	}
	tag, err := s.pool.Exec(ctx, sql.RelayAddTarget, name, to.String(), secrets, allowPrivate, position, Max)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "23505" {
		return ErrExists
	}
	if err != nil {
		return fmt.Errorf("add the target %s: %w", name, err)
	}
	if tag.RowsAffected() == 0 {
		return ErrTooMany
	}
	return nil
}

// Renew replaces the secrets of a target, and whether it may have a private address. It returns ErrNotFound if no
// target has this name and URL.
func (s *Store) Renew(ctx context.Context, name string, to *Address, secrets [][]byte, allowPrivate bool) error {
	if secrets == nil {
		secrets = [][]byte{}
	}
	return s.change(ctx, name, sql.RelayRenewTarget, to.String(), secrets, allowPrivate)
}

// SetState pauses or resumes a target. Its failures are forgotten, so that it is tried at once.
func (s *Store) SetState(ctx context.Context, name string, state State) error {
	return s.change(ctx, name, sql.RelaySetState, state)
}

// SetPosition lets a target continue after a position, which may be lower or higher than the one where it was.
func (s *Store) SetPosition(ctx context.Context, name string, position int64) (was int64, err error) {
	err = s.pool.QueryRow(ctx, sql.RelaySetPosition, name, position).Scan(&was)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, ErrNotFound
	}
	if err != nil {
		return 0, fmt.Errorf("change the target %s: %w", name, err)
	}
	return was, nil
}

// Replay says what a target does that was at one position and continues after another, which has a text.
func Replay(was, position int64, shown string) string {
	if position > was {
		return "skips the events up to position " + shown
	}
	gets := "gets the events after position " + shown
	if position < was {
		gets += " again"
	}
	return gets
}

// Remove removes a target.
func (s *Store) Remove(ctx context.Context, name string) error {
	return s.change(ctx, name, sql.RelayRemoveTarget)
}

func (s *Store) change(ctx context.Context, name, query string, args ...any) error {
	tag, err := s.pool.Exec(ctx, query, append([]any{name}, args...)...)
	if err != nil {
		return fmt.Errorf("change the target %s: %w", name, err)
	}
	if tag.RowsAffected() == 0 {
		return ErrNotFound
	}
	return nil
}

// Claim makes a process the holder of a target, which delivers to it. It returns ErrNotFound if the target is not
// active.
func Claim(ctx context.Context, conn *pgx.Conn, name, holder string) (*Target, error) {
	rows, err := conn.Query(ctx, sql.RelayClaim, name, holder)
	if err != nil {
		return nil, fmt.Errorf("claim the target %s: %w", name, err)
	}
	t, err := pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByName[Target])
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("claim the target %s: %w", name, err)
	}
	return t, nil
}

// Move records that all events up to a position are delivered, and that some of them were delivered just now. It
// returns ErrStale for a holder that was replaced.
func (t *Target) Move(ctx context.Context, conn *pgx.Conn, position int64, delivered bool) error {
	tag, err := conn.Exec(ctx, sql.RelayMove, t.Name, t.Fence, position, delivered)
	switch {
	case err != nil:
		return fmt.Errorf("move the position of the target %s: %w", t.Name, err)
	case tag.RowsAffected() == 0:
		return ErrStale
	}
	t.Position, t.Failures = position, 0
	return nil
}

// NoteFailure records why a delivery failed, after which pause the next one is tried, and up to which position all
// events are delivered. It disables the target if that is final.
func (t *Target) NoteFailure(
	ctx context.Context, conn *pgx.Conn, position int64, failure error, pause time.Duration, final bool,
) error {
	text := strings.ToValidUTF8(failure.Error(), "?")
	text = strings.ReplaceAll(text[:min(len(text), errorMax)], "\x00", "?")
	tag, err := conn.Exec(ctx, sql.RelayNoteFailure, t.Name, t.Fence, t.Failures+1, strings.ToValidUTF8(text, "?"),
		pause.Milliseconds(), final, position)
	switch {
	case err != nil:
		return fmt.Errorf("note the failure of the target %s: %w", t.Name, err)
	case tag.RowsAffected() == 0:
		return ErrStale
	}
	t.Position, t.Failures = position, t.Failures+1
	return nil
}

// Words for places in the log.
const (
	fromStart = "start"
	fromNow   = "now"
)

// settleWithin bounds the wait for transactions that write events.
const settleWithin = 10 * time.Second

// ErrPlace is returned for a place in the log that cannot be found.
var ErrPlace = errors.New("want start, now, a time such as 2026-11-23T20:00:00Z, or the id of an event")

// PositionAt returns the position after which a target continues to get all events from a place on: fromStart, fromNow,
// a time, or the event with that id and all later ones. From now on are all events that are committed after it returns.
func PositionAt(ctx context.Context, pool *pgxpool.Pool, place string) (int64, error) {
	switch at, err := time.Parse(time.RFC3339Nano, place); {
	case place == fromStart:
		return 0, nil
	case place == fromNow:
		return now(ctx, pool)
	case err == nil:
		var position *int64
		if err := pool.QueryRow(ctx, sql.RelayPositionOfTime, at).Scan(&position); err != nil {
			return 0, fmt.Errorf("find the first event from %s on: %w", place, err)
		}
		if position == nil {
			return now(ctx, pool)
		}
		return *position - 1, nil
	}
	position, err := EventPosition(ctx, pool, place)
	return position - 1, err
}

// EventPosition returns the position of the event with that id.
func EventPosition(ctx context.Context, pool *pgxpool.Pool, id string) (position int64, err error) {
	end := max(strings.LastIndexByte(id, '.'), 0)
	subject, number := id[:end], strings.TrimPrefix(id[end:], ".")
	query, owner, err1 := sql.RelayPositionOfOrder, any(nil), error(nil)
	if version, ok := strings.CutPrefix(number, "p"); ok {
		query, number = sql.RelayPositionOfPayment, version
		reference, err := url.PathUnescape(subject)
		if owner, err1 = reference, err; !utf8.ValidString(reference) || strings.ContainsRune(reference, 0) {
			err1 = ErrPlace // Postgres would refuse it
		}
	} else {
		if revision, ok := strings.CutPrefix(number, "r"); ok {
			query, number = sql.RelayPositionOfSale, revision
		}
		owner, err1 = uuid.Parse(subject)
	}
	n, err2 := strconv.ParseInt(number, 10, 32)
	if err1 != nil || err2 != nil {
		return 0, fmt.Errorf("%q is no place in the log: %w", id, ErrPlace)
	}
	err = pool.QueryRow(ctx, query, owner, n).Scan(&position)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, fmt.Errorf("there is no event %s: %w", id, ErrPlace)
	}
	if err != nil {
		return 0, fmt.Errorf("find the event %s: %w", id, err)
	}
	return position, nil
}

func now(ctx context.Context, pool *pgxpool.Pool) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, settleWithin)
	defer cancel()
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return 0, fmt.Errorf("find the newest event: %w", err)
	}
	defer conn.Release()
	return feed.Settle(ctx, conn.Conn())
}

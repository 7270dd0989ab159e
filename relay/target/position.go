package target

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/relay/feed"
	"stampede/sql"
)

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

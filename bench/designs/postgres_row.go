package designs

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/bench/front"
	"stampede/internal/connect"
)

//go:embed sql/sell_one.sql
var sellOneSQL string

// postgresStock is common to the designs that use only Postgres.
type postgresStock struct {
	idle
	pool *pgxpool.Pool
}

// openPostgresStock opens the number of connections that suits the design best.
func openPostgresStock(ctx context.Context, b front.Backend, connections int) (postgresStock, error) {
	pool, err := connect.Postgres(ctx, b.DatabaseURL, int32(connections))
	return postgresStock{pool: pool}, err
}

// Prepare implements front.Design: the row of the sale is all that is needed.
func (s postgresStock) Prepare(ctx context.Context, _ uuid.UUID, _ int64) error {
	return s.pool.Ping(ctx)
}

func (s postgresStock) close() { s.pool.Close() }

// sellVerdict converts the result word of a statement that sells to one buyer.
func sellVerdict(o front.Order, word string, err error) (front.Verdict, error) {
	if hasOrder(err) {
		return front.AlreadyPurchased, nil
	}
	if err != nil {
		return none, fmt.Errorf("sell order=%s: %w", o.ID, err)
	}
	switch word {
	case "confirmed":
		return front.Confirmed, nil
	case "already-purchased":
		return front.AlreadyPurchased, nil
	case "sold-out":
		return front.SoldOut, nil
	}
	return none, fmt.Errorf("sell order=%s: Postgres answered %q", o.ID, word)
}

// uniqueViolation is the code of Postgres for a row that a unique index refuses.
const uniqueViolation = "23505"

// hasOrder reports whether a statement failed because its user has an order in the sale.
func hasOrder(err error) bool {
	var refusal *pgconn.PgError
	return errors.As(err, &refusal) && refusal.Code == uniqueViolation &&
		strings.HasSuffix(refusal.ConstraintName, "_one_live_per_user") // of a month
}

// postgresRow does without Redis: the stock is a number in the row of the sale, and one transaction per
// purchase takes from it with UPDATE … WHERE sold < stock and writes the order.
//
// What it gets right: everything. The database takes the unit and writes the order together or not at
// all, a CHECK and a unique index protect both against errors in the program, an answer is as durable
// as possible, and there is no second system to run, to lose or to compare with. For a sale of a few
// hundred orders a second it is the design to choose.
//
// How it fails: it is slow. All buyers want the same row, and each transaction holds it until its
// COMMIT is on disk; group commit does not help transactions that wait for each other. More connections
// make it slower: they wait inside Postgres, which wakes them one by one.
//
// Tutorials send BEGIN, UPDATE, INSERT and COMMIT separately, and hold the row for four round trips.
// Here it is one prepared statement, and so one transaction in one round trip.
type postgresRow struct{ postgresStock }

// rowConnections have the next statements ready in Postgres while a COMMIT is written to disk. Of 1, 2,
// 4, 8 and 16, one is the slowest by far; 2 to 8 are alike, and from 8 on each order costs Postgres a
// fifth more.
//
// Also tried: the rows first and the counter last, which holds the row of the sale only during the
// COMMIT. It is not faster, and the order then needs another source for its sequence.
const rowConnections = 4

func newPostgresRow(ctx context.Context, b front.Backend) (front.Design, error) {
	stock, err := openPostgresStock(ctx, b, rowConnections)
	return postgresRow{stock}, err
}

// Buy implements front.Design.
func (d postgresRow) Buy(ctx context.Context, o front.Order) (front.Verdict, error) {
	var word string
	err := d.pool.QueryRow(ctx, sellOneSQL, o.ID, o.Sale, o.User, o.Quantity).Scan(&word)
	return sellVerdict(o, word, err)
}

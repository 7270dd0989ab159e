package feed_test

import (
	"context"
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/relay/feed"
	"stampede/reservation/order"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// insert writes the event of an order, and returns its position.
func insert(ctx context.Context, tx pgx.Tx, order uuid.UUID, version int) (position int64, err error) {
	err = tx.QueryRow(ctx, `INSERT INTO order_events
		(order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at)
		VALUES ($1, $2, CASE $2::int WHEN 2 THEN 'OrderConfirmed' ELSE 'OrderPaid' END, $1, 'ann', 1, now(),
			CASE $2::int WHEN 2 THEN now() END)
		RETURNING position`, order, version).Scan(&position)
	return position, err
}

func session(t *testing.T, pool *pgxpool.Pool) *pgx.Conn {
	t.Helper()
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	return conn.Conn()
}

func begin(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

func look(t *testing.T, r *feed.Reader) feed.State {
	t.Helper()
	s, err := r.Look(t.Context(), "")
	require.NoError(t, err)
	return s
}

func idsFrom(t *testing.T, r *feed.Reader, after int64) (ids []string, through int64) {
	t.Helper()
	events, through, err := r.Read(t.Context(), after, 1000)
	require.NoError(t, err)
	for _, e := range events {
		ids = append(ids, e.ID)
	}
	return ids, through
}

func TestNaiveCursorSkipsWhatReaderDoesNot(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	r := feed.NewReader(session(t, pool), "/test")
	first, second := uuid.Must(uuid.NewV7()), uuid.Must(uuid.NewV7())
	early, late := begin(t, pool), begin(t, pool)
	low, err := insert(t.Context(), early, first, 2)
	require.NoError(t, err)
	high, err := insert(t.Context(), late, second, 2)
	require.NoError(t, err)
	require.Less(t, low, high)
	require.NoError(t, late.Commit(t.Context()))

	naive := func(after int64) (seen []int64) {
		rows, err := pool.Query(t.Context(), "SELECT position FROM order_events WHERE position > $1 ORDER BY position", after)
		require.NoError(t, err)
		seen, err = pgx.CollectRows(rows, pgx.RowTo[int64])
		require.NoError(t, err)
		return seen
	}
	require.Equal(t, []int64{high}, naive(0))
	s := look(t, r)
	require.Equal(t, high, s.Newest)
	require.Zero(t, s.Settled, "the first transaction is open")
	require.EqualValues(t, early.Conn().PgConn().PID(), s.HeldBy)
	ids, through := idsFrom(t, r, 0)
	require.Empty(t, ids)
	require.Zero(t, through)

	require.NoError(t, early.Commit(t.Context()))
	require.Empty(t, naive(high), "a cursor at the highest position has skipped the first event for ever")
	require.Equal(t, high, look(t, r).Settled)
	ids, through = idsFrom(t, r, 0)
	require.Equal(t, []string{first.String() + ".2", second.String() + ".2"}, ids)
	require.Equal(t, high, through)
}

// A payment that is reported and its order, which it pays, change in one transaction: the events of both come, with one
// horizon.
func TestPaymentsAreReadWithTheirOrders(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	sale := testshop.NewPayableSale(t, pool, 10)
	id := testwork.Confirm(t, pool, sale, 1)[0]
	r := feed.NewReader(session(t, pool), "/test")
	after := look(t, r).Settled
	early := begin(t, pool)
	_, err := early.Exec(t.Context(), `INSERT INTO payment_events (reference, version, type, reason)
		VALUES (' first', 1, 'PaymentReceived', NULL), (' first', 2, 'PaymentRefundDue', 'order-not-found')`)
	require.NoError(t, err)
	// A shop may use the id of the order as the reference.
	keeper := ledger.New(pool)
	_, err = keeper.Report(t.Context(), order.Money{Reference: id.String(), OrderID: id, Amount: 5, Currency: "EUR"})
	require.NoError(t, err)
	s := look(t, r)
	require.Equal(t, after, s.Settled, "the first transaction is open")
	require.EqualValues(t, early.Conn().PgConn().PID(), s.HeldBy)
	require.NoError(t, early.Commit(t.Context()))
	_, err = keeper.Withdraw(t.Context(), id, "a mistake", "zoe")
	require.NoError(t, err)
	_, err = keeper.Refund(t.Context(), id.String(), "re_1", "ada")
	require.NoError(t, err)
	s = look(t, r)
	require.Equal(t, s.Newest, s.Settled)
	for _, limit := range []int{1, 2, 100} {
		var ids []string
		for at := after; at < s.Settled; {
			events, through, err := r.Read(t.Context(), at, limit)
			require.NoError(t, err)
			for _, e := range events {
				ids = append(ids, e.ID)
			}
			at = through
		}
		require.Equal(t, []string{
			"%20first.p2", id.String() + ".p2", id.String() + ".3", id.String() + ".4", id.String() + ".p3", id.String() + ".p4",
		}, ids, "%d at a time", limit)
	}
	events, _, err := r.Read(t.Context(), s.Settled-1, 1)
	require.NoError(t, err)
	var body struct {
		Type, Subject, PartitionKey string
		Data                        map[string]any
	}
	require.NoError(t, json.Unmarshal(events[0].Body, &body))
	delete(body.Data, "occurred_at")
	require.Equal(t, []any{"stampede.payment.refunded", id.String(), id.String(), map[string]any{
		"schema_version": 1.0, "position": float64(s.Settled), "version": 4.0, "reference": id.String(), "state": "refunded",
		"reason": "order-cancelled", "order_id": id.String(), "sale_id": sale.String(), "amount": 5.0, "currency": "EUR",
		"refund_reference": "re_1", "operator": "ada",
	}}, []any{body.Type, body.Subject, body.PartitionKey, body.Data})
}

// Each event of a payment but its report has a type for receivers, with the note and the dispute.
func TestEachStateOfPaymentsIsSent(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	r := feed.NewReader(session(t, pool), "/test")
	sale := testshop.NewPayableSale(t, pool, 10)
	ids := testwork.Confirm(t, pool, sale, 2)
	keeper := ledger.New(pool)
	after := look(t, r).Settled
	paid, _, err := keeper.History(t.Context(), ids[0])
	require.NoError(t, err)
	_, err = keeper.Report(t.Context(), order.Money{Reference: "pi_1", OrderID: ids[0]})
	require.NoError(t, err)
	other, err := keeper.Report(t.Context(), order.Money{Reference: "pi_1", OrderID: ids[1]})
	require.NoError(t, err)
	_, err = keeper.Dismiss(t.Context(), other.Reference, "a typing error", "ada")
	require.NoError(t, err)
	_, err = keeper.Disputed(t.Context(), order.Dispute{Reference: "pi_1", ID: "dp_1"})
	require.NoError(t, err)
	_, err = keeper.Pay(t.Context(), ids[0], paid.UserID, "mine")
	require.Error(t, err)
	look(t, r)
	events, _, err := r.Read(t.Context(), after, 100)
	require.NoError(t, err)
	var sent [][]any
	for _, e := range events {
		var body struct {
			Type string
			Data map[string]any
		}
		require.NoError(t, json.Unmarshal(e.Body, &body))
		if strings.HasPrefix(body.Type, "stampede.payment.") {
			sent = append(sent, []any{body.Type, body.Data["reason"], body.Data["note"], body.Data["dispute"]})
		}
	}
	require.Equal(t, [][]any{
		{"stampede.payment.settled", nil, nil, nil},
		{"stampede.payment.unclear", "other-order", nil, nil},
		{"stampede.payment.dismissed", "other-order", "a typing error", nil},
		{"stampede.payment.disputed", nil, nil, "dp_1"},
		{"stampede.payment.claimed", "already-paid", nil, nil},
	}, sent)
}

func TestRolledBackPositionsAreSettled(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	r := feed.NewReader(session(t, pool), "/test")
	require.Equal(t, feed.State{Fence: -1}, look(t, r), "no position is given out")
	tx := begin(t, pool)
	position, err := insert(t.Context(), tx, uuid.Must(uuid.NewV7()), 2)
	require.NoError(t, err)
	require.Zero(t, look(t, r).Settled)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, position, look(t, r).Settled)
	ids, through := idsFrom(t, r, 0)
	require.Empty(t, ids)
	require.Equal(t, position, through)
}

// A transaction that writes no events holds up nothing, however long it is.
func TestLongTransactionsElsewhereDoNotHoldReader(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	r := feed.NewReader(session(t, pool), "/test")
	long := begin(t, pool)
	_, err := long.Exec(t.Context(), "INSERT INTO sales (id, name, stock) VALUES (gen_random_uuid(), 'long', 1)")
	require.NoError(t, err)
	_, err = long.Exec(t.Context(), "SELECT count(*) FROM order_events")
	require.NoError(t, err)
	tx := begin(t, pool)
	position, err := insert(t.Context(), tx, uuid.Must(uuid.NewV7()), 2)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, position, look(t, r).Settled)
}

// Maintenance holds locks that are stronger than a writer's, but writes no events.
func TestMaintenanceDoesNotHoldReader(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	r := feed.NewReader(session(t, pool), "/test")
	tx := begin(t, pool)
	position, err := insert(t.Context(), tx, uuid.Must(uuid.NewV7()), 2)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	locked := begin(t, pool)
	_, err = locked.Exec(t.Context(), "LOCK TABLE order_events IN SHARE UPDATE EXCLUSIVE MODE")
	require.NoError(t, err)
	require.Equal(t, position, look(t, r).Settled)
	// A lock that conflicts with a writer's moves that one out of the fast path of its session.
	writing := begin(t, pool)
	_, err = insert(t.Context(), writing, uuid.Must(uuid.NewV7()), 2)
	require.NoError(t, err)
	require.NoError(t, locked.Rollback(t.Context()))
	require.Equal(t, position, look(t, r).Settled, "the writer still counts")
}

func TestSettleWaitsForOpenWriters(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	tx := begin(t, pool)
	position, err := insert(t.Context(), tx, uuid.Must(uuid.NewV7()), 2)
	require.NoError(t, err)
	testkit.Eventually(t, time.Minute, "the error names the writer", func() bool {
		conn := session(t, pool)
		short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err := feed.Settle(short, conn)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		return strings.Contains(err.Error(), "process "+strconv.Itoa(int(tx.Conn().PgConn().PID())))
	})

	var settling errgroup.Group
	settled := make(chan int64, 1)
	conn := session(t, pool)
	settling.Go(func() error {
		at, err := feed.Settle(context.Background(), conn)
		settled <- at
		return err
	})
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, settling.Wait())
	require.Equal(t, position, <-settled)
}

func TestEventsOfSalesAndOrdersAreOneOrder(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	exec := func(query string, args ...any) {
		t.Helper()
		_, err := pool.Exec(t.Context(), query, args...)
		require.NoError(t, err)
	}
	sale, order := uuid.Must(uuid.NewV7()), uuid.Must(uuid.NewV7())
	exec(`INSERT INTO sales (id, name, stock, payment_window_seconds, payment_grace_seconds, payments_per_second, unit_price,
		currency) VALUES ($1, 'autumn', 70, 60, 30, 25, 4900, 'EUR')`, sale)
	change := func(revision int, kind, data string) {
		exec("INSERT INTO sale_events (sale_id, revision, type, data) VALUES ($1, $2, $3, $4)", sale, revision, kind, data)
	}
	record := func(version int, kind, data string) {
		// The turn is the deadline less the window, also where it was another one before an outage.
		exec(`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at, due, pay_from, data)
			VALUES ($1, $2, $3, $4, 'ann<&>', 2, '2026-11-23 10:00:01', CASE $2::int WHEN 2 THEN timestamptz '2026-11-23 10:00:00.25' END,
			CASE $2::int WHEN 2 THEN timestamptz '2026-11-23 10:01:01' END,
			CASE $2::int WHEN 2 THEN timestamptz '2026-11-23 09:00:00' END, $5)`, order, version, kind, sale, data)
	}
	change(1, "SaleCreated", `{"stock": 50, "shards": 2}`)
	record(2, "OrderConfirmed", `{}`)
	change(2, "SalePaused", `{}`)
	record(3, "OrderPaid", `{"reference": "pi_1"}`)
	change(3, "SaleRestocked", `{"stock": 70, "units": 20}`)
	record(4, "OrderCancelled", `{"reference": "pi_1", "reason": "by phone", "operator": "bob"}`)
	change(4, "SaleResumed", `{}`)

	r := feed.NewReader(session(t, pool), "/shop")
	look(t, r)
	for _, limit := range []int{1, 2, 3, 100} {
		var got []feed.Event
		for after := int64(0); ; {
			events, through, err := r.Read(t.Context(), after, limit)
			require.NoError(t, err)
			if through == after {
				break
			}
			got, after = append(got, events...), through
		}
		var short []string
		for i, e := range got {
			require.EqualValues(t, i+1, e.Position)
			var body struct {
				ID, Source, SpecVersion, Type, Subject, PartitionKey, Sequence, DataSchema string

				Data map[string]any
			}
			require.NoError(t, json.Unmarshal(e.Body, &body))
			require.Equal(t, e.ID, body.ID)
			require.Equal(t, e.Subject, body.Subject)
			require.Equal(t, e.Subject, body.PartitionKey)
			require.Equal(t, "/shop", body.Source)
			require.Equal(t, strconv.Itoa(i+1), body.Sequence)
			for _, leave := range []string{"sale_id", "order_id", "position"} {
				delete(body.Data, leave)
			}
			if body.DataSchema == "/openapi.yaml#/components/schemas/SaleEvent" {
				delete(body.Data, "occurred_at")
			}
			data, err := json.Marshal(body.Data)
			require.NoError(t, err)
			short = append(short, body.Type+e.ID[36:]+" "+string(data))
		}
		const (
			reserved = `"quantity":2,"reserved_at":"2026-11-23T10:00:00.250Z","schema_version":1,`
			terms    = `"name":"autumn",`
			price    = `{"amount":9800,"currency":"EUR",`
			rest     = `"payment_grace_seconds":30,"payment_window_seconds":60,"payments_per_second":25,"per_order_limit":1,`
		)
		require.Equal(t, []string{
			`stampede.sale.created.r1 {"change":"created","currency":"EUR",` + terms + rest + `"revision":1,"schema_version":1,"shards":2,` +
				`"state":"open","stock":50,"unit_price":4900}`,
			`stampede.order.confirmed.2 ` + price + `"expires_at":"2026-11-23T10:01:01.000Z","kind":"order","occurred_at":"2026-11-23T10:00:01.000Z",` +
				`"pay_from":"2026-11-23T10:00:01.000Z",` + reserved + `"status":"confirmed","user_id":"ann\u003c\u0026\u003e","version":2}`,
			`stampede.sale.paused.r2 {"change":"paused","currency":"EUR",` + terms + rest + `"revision":2,"schema_version":1,"shards":2,` +
				`"state":"paused","stock":50,"unit_price":4900}`,
			`stampede.order.paid.3 ` + price + `"kind":"order","occurred_at":"2026-11-23T10:00:01.000Z","payment_reference":"pi_1",` +
				reserved + `"status":"paid","user_id":"ann\u003c\u0026\u003e","version":3}`,
			`stampede.sale.restocked.r3 {"change":"restocked","currency":"EUR",` + terms + rest + `"revision":3,"schema_version":1,"shards":2,` +
				`"state":"paused","stock":70,"unit_price":4900}`,
			`stampede.order.cancelled.4 ` + price + `"kind":"order","occurred_at":"2026-11-23T10:00:01.000Z","operator":"bob",` +
				`"payment_reference":"pi_1","quantity":2,"reason":"by phone","reserved_at":"2026-11-23T10:00:00.250Z",` +
				`"schema_version":1,"status":"cancelled","user_id":"ann\u003c\u0026\u003e","version":4}`,
			`stampede.sale.resumed.r4 {"change":"resumed","currency":"EUR",` + terms + rest + `"revision":4,"schema_version":1,"shards":2,` +
				`"state":"open","stock":70,"unit_price":4900}`,
		}, short, "%d at a time", limit)
	}
}

// Events with one position, which archives of other databases had once, are in one page: the next one begins behind it.
// A restore or a replication may set the sequence ahead: the numbers that no event has cost nothing.
func TestReaderReadsRowsOfSequenceSetAhead(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	r := feed.NewReader(session(t, pool), "/test")
	insertOne := func() (id uuid.UUID) {
		id = uuid.Must(uuid.NewV7())
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := insert(t.Context(), tx, id, 2)
			return err
		}))
		return id
	}
	before := insertOne()
	_, err := pool.Exec(t.Context(), "SELECT setval('order_events_position_seq', 1000000000)")
	require.NoError(t, err)
	after := insertOne()
	require.EqualValues(t, 1_000_000_001, look(t, r).Settled)
	ids, through := idsFrom(t, r, 0)
	require.Equal(t, []string{before.String() + ".2", after.String() + ".2"}, ids)
	require.EqualValues(t, 1_000_000_001, through)
}

func TestPageEndsWithAllEventsOfPosition(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	var want []string
	for _, position := range []int{1, 1, 2, 2} {
		id := uuid.Must(uuid.NewV7())
		_, err := pool.Exec(t.Context(), `INSERT INTO order_events
			(position, order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at)
			OVERRIDING SYSTEM VALUE VALUES ($2, $1, 2, 'OrderConfirmed', $1, 'ann', 1, now(), now())`, id, position)
		require.NoError(t, err)
		want = append(want, id.String()+".2")
	}
	_, err := pool.Exec(t.Context(), "SELECT next_position(), next_position()")
	require.NoError(t, err)
	r := feed.NewReader(session(t, pool), "/test")
	look(t, r)
	var ids []string
	for after := int64(0); len(ids) < len(want); {
		events, through, err := r.Read(t.Context(), after, 1)
		require.NoError(t, err)
		require.Greater(t, through, after)
		for _, e := range events {
			ids = append(ids, e.ID)
		}
		after = through
	}
	require.ElementsMatch(t, want, ids)
}

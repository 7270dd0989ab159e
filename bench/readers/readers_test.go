package readers

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/bench/httpload"
	"stampede/bench/page"
	"stampede/bench/rig"
	"stampede/internal/retry"
)

const (
	// connections are those of the crowd, a closed loop; payers carry the payments, an open loop.
	connections, payers = 400, 64
	paymentsPerSecond   = 50
	// expiring is the number of orders whose payment windows end during the measurement.
	expiring = 20
	// expiryTimeout bounds how late they may expire.
	expiryTimeout = time.Minute
)

// The figures: in milliseconds, answers per second, and seconds.
const (
	looks, payment50, payment99  = "reads/s", "paid, p50", "paid, p99"
	failedPayments, outage, late = "payments that failed", "outage", "expired late"
	cpuOfPostgres                = "Postgres, cores"
)

// BenchmarkReaders lets buyers pay in a sale with many paid orders, alone and while anonymous clients
// request the sale as fast as they can.
func BenchmarkReaders(b *testing.B) {
	results := rig.Compare(b,
		rig.Candidate{Name: "without readers", Turn: func(b *testing.B, _ int) rig.Values { return turn(b, 0) }},
		rig.Candidate{Name: "with readers", Turn: func(b *testing.B, _ int) rig.Values { return turn(b, connections) }},
	)
	t := page.Table{
		Title: "Payments beside a crowd of readers",
		Note: fmt.Sprintf("A sale with %s paid orders, %d payments a second in an open loop, and %d connections that "+
			"request the sale without a pause. Expired late: the latest of %d orders whose time to pay ends "+
			"meanwhile. Medians of %d rounds, with the least and the greatest.",
			rig.Count(float64(rig.Scale(b, 200_000, 2000))), paymentsPerSecond, connections, expiring, b.N),
		Head: []string{"", looks, payment50, payment99, failedPayments, "outage noted, s", late + ", s", cpuOfPostgres},
	}
	for _, name := range []string{"without readers", "with readers"} {
		row := []string{
			name, results.Of(name, looks).Format(rig.Count),
			results.Of(name, payment50).Format(rig.Millis), results.Of(name, payment99).Format(rig.Millis),
		}
		for _, figure := range []string{failedPayments, outage, late, cpuOfPostgres} {
			row = append(row, results.Of(name, figure).Format(rig.Ratio))
		}
		t.Rows = append(t.Rows, row)
	}
	rig.Put(t)
	results.Report(b, "with readers", payment99, "ms-paid-p99")
}

func turn(b *testing.B, crowd int) rig.Values {
	within := rig.Scale(b, 5*time.Second, 500*time.Millisecond)
	running := rig.Stampede{}.Start(b, 10_000_000)
	defer running.Close()
	sale := running.Sale
	fill(b, running, rig.Scale(b, 200_000, 2000))
	payable := confirmed(b, running, "payer", paymentsPerSecond*int(within/time.Second+1), 0)
	awaitHeartbeat(b, running) // may record an outage from before the start
	lost := lostTime(b, running)
	confirmed(b, running, "late", expiring, within)

	addrs := []string{running.Fronts[0].Addr}
	look := httpload.Load{Addrs: addrs, Connections: crowd, For: within, Request: func(dst []byte, _ uint64) []byte {
		return fmt.Appendf(dst, "GET /v1/sales/%s HTTP/1.1\r\nHost: localhost\r\n\r\n", sale)
	}}
	pay := httpload.Load{
		Addrs: addrs, Connections: payers, For: within, Rate: paymentsPerSecond,
		Request: func(dst []byte, n uint64) []byte {
			return fmt.Appendf(dst,
				"POST /v1/orders/%s/pay HTTP/1.1\r\nHost: localhost\r\nX-User-ID: payer-%d\r\nContent-Type: application/json\r\n"+
					"Content-Length: 21\r\n\r\n{\"reference\":\"pi_12\"}", payable[n-1], n)
		},
	}
	var looked, paid httpload.Answers
	before := running.CPU()
	together, ctx := errgroup.WithContext(b.Context())
	together.Go(func() (err error) { looked, err = look.Measure(ctx); return err })
	together.Go(func() (err error) { paid, err = pay.Measure(ctx); return err })
	require.NoError(b, together.Wait())
	values := rig.Values{
		looks: float64(looked.Wanted) / within.Seconds(), payment50: rig.InMillis(paid.Percentile(50)),
		payment99:      rig.InMillis(paid.Percentile(99)),
		failedPayments: float64(paid.Others()), cpuOfPostgres: running.CPU().Since(before)[rig.Postgres].Seconds() /
			within.Seconds(),
	}
	values[late] = lateness(b, running)
	// Includes the first heartbeat after the crowd: without it the orders would not have expired.
	values[outage] = lostTime(b, running) - lost
	if paid.Wanted == 0 || values[failedPayments] > 0 || values[outage] > 0 {
		b.Errorf("with %d reading connections: payments: %s; outage: %.1f s", crowd, paid, values[outage])
	}
	return values
}

// fill inserts so many paid orders of the sale, with the bytes in their ids by which it is found.
func fill(b *testing.B, s *rig.System, orders int) {
	b.Helper()
	ctx := b.Context()
	_, err := s.Shop.Pool.Exec(ctx, "UPDATE sales SET payment_window_seconds = 1800, sold = sold + $2 WHERE id = $1",
		s.Sale, orders)
	require.NoError(b, err)
	_, err = s.Shop.Pool.Exec(ctx,
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at,
			payment_reference)
		SELECT (left(gen_random_uuid()::text, 32) || right($1::uuid::text, 4))::uuid, $1, 'paid-' || n, 1,
			 'paid', 3, n, 1, now(), now(), 'pi' FROM generate_series(1, $2::int)
		AS n`, s.Sale, orders)
	require.NoError(b, err)
	_, err = s.Shop.Pool.Exec(ctx, "VACUUM (ANALYZE) orders")
	require.NoError(b, err)
}

// confirmed inserts unpaid orders with their events. They are due in half an hour, or spread over the given time.
func confirmed(b *testing.B, s *rig.System, user string, orders int, within time.Duration) []uuid.UUID {
	b.Helper()
	ctx := b.Context()
	_, err := s.Shop.Pool.Exec(ctx, "UPDATE sales SET sold = sold + $2 WHERE id = $1", s.Sale, orders)
	require.NoError(b, err)
	rows, err := s.Shop.Pool.Query(ctx, `WITH made AS (
			INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at,
			key_fingerprint, due)
			SELECT (left(gen_random_uuid()::text, 32) || right($1::uuid::text, 4))::uuid, $1, $2 || '-' || n, 1,
				 'confirmed', 2, n, 1, now(), now(), NULL,
				pay_clock() + CASE WHEN $4::float8 = 0 THEN interval '30 min' ELSE make_interval(secs => $4::float8 * n / $3::int)
				END
			FROM generate_series(1, $3::int) AS n RETURNING *),
		logged AS (
			INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at, data)
			SELECT id, 2, 'OrderConfirmed', sale_id, user_id, 1, now(), now(),
				jsonb_build_object('sequence', sequence, 'epoch', 1, 'due', due) FROM made)
		SELECT id FROM made ORDER BY split_part(user_id, '-', 2)::int`, s.Sale, user, orders, within.Seconds())
	require.NoError(b, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	require.NoError(b, err)
	return ids
}

// awaitHeartbeat waits until a heartbeat of the ingress is recorded.
func awaitHeartbeat(b *testing.B, s *rig.System) {
	b.Helper()
	for seen := false; !seen; retry.Pause(20*time.Millisecond, nil) {
		require.NoError(b, s.Shop.Pool.QueryRow(b.Context(),
			"SELECT now() - seen_at < interval '1 s' FROM pulse").Scan(&seen))
	}
}

// lostTime is the number of seconds by which all deadlines were postponed.
func lostTime(b *testing.B, s *rig.System) (seconds float64) {
	b.Helper()
	require.NoError(b, s.Shop.Pool.QueryRow(b.Context(), "SELECT extract(epoch FROM lost_time())::float8").Scan(&seconds))
	return seconds
}

// lateness waits until the due orders have expired, and returns how late the latest was, in seconds.
func lateness(b *testing.B, s *rig.System) (seconds float64) {
	b.Helper()
	for deadline := time.Now().Add(expiryTimeout); ; {
		var expired int
		require.NoError(b, s.Shop.Pool.QueryRow(b.Context(),
			`SELECT count(*), coalesce(max(extract(epoch FROM updated_at - due - lost_time())), 0)::float8
			FROM orders WHERE status = 'expired'`).Scan(&expired, &seconds))
		if expired == expiring {
			return seconds
		}
		if time.Now().After(deadline) {
			b.Fatalf("%d of %d orders expired within %v", expired, expiring, expiryTimeout)
		}
		retry.Pause(50*time.Millisecond, nil)
	}
}

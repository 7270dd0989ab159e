package archive_test

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/upkeep/archive"
)

// BenchmarkArchiveOfAMillionOrders measures how long a sale with a million paid orders, of two events each, takes to
// archive, to audit in its file, and to bring back; and the memory of the process. -benchtime=1x.
func BenchmarkArchiveOfAMillionOrders(b *testing.B) {
	const orders = 1_000_000
	s := testshop.NewShop(b)
	sale := s.OpenPayable(b, orders)
	for _, statement := range []string{
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at,
				payment_reference, key_fingerprint, due)
			SELECT (left(gen_random_uuid()::text, 32) || right($1::uuid::text, 4))::uuid, $1::uuid, gen_random_uuid()::text,
				1, 'paid', 3, n, 1, now(), now(), 'pi-' || n, left(md5(n::text), 16), now() FROM generate_series(1, 1000000) AS n`,
		`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at,
				sequence, epoch, due, key_fingerprint)
			SELECT id, 2, 'OrderConfirmed', sale_id, user_id, quantity, updated_at, reserved_at, sequence, epoch, due, key_fingerprint
			FROM orders WHERE sale_id = $1`,
		`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, data)
			SELECT id, 3, 'OrderPaid', sale_id, user_id, quantity, updated_at, jsonb_build_object('reference', payment_reference)
			FROM orders WHERE sale_id = $1`,
		`UPDATE sales SET sold = stock, state = 'ended', retired_at = now(), published_revision = revision,
			last_sequence = 1000000 WHERE id = $1`,
	} {
		_, err := s.Pool.Exec(b.Context(), statement, sale)
		require.NoError(b, err)
	}
	_, err := s.Pool.Exec(b.Context(), "VACUUM ANALYZE orders, order_events")
	require.NoError(b, err)
	dir := b.TempDir()
	for b.Loop() {
		done, err := archiveSale(b, s, dir, sale)
		require.NoError(b, err)
		b.ReportMetric(done.Took.Seconds(), "s/archive")
		b.ReportMetric(float64(done.Bytes)/orders, "B/order")
		began := b.Elapsed()
		report, err := archive.Audit(b.Context(), s.Pool, done.Path)
		require.NoError(b, err)
		require.Empty(b, report.Findings)
		b.ReportMetric((b.Elapsed() - began).Seconds(), "s/audit")
		restored, err := archive.Restore(b.Context(), s.Pool, done.Path)
		require.NoError(b, err)
		require.EqualValues(b, orders, restored.Orders)
		b.ReportMetric(restored.Took.Seconds(), "s/restore")
	}
	b.Logf("memory of the process: %s", peakMemory(b))
}

// peakMemory returns the most memory that the process had.
func peakMemory(b *testing.B) string {
	status, err := os.ReadFile("/proc/self/status")
	require.NoError(b, err)
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(line)
}

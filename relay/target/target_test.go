package target_test

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/relay/target"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func parse(t *testing.T, text string) *target.Address {
	t.Helper()
	a, err := target.ParseAddress(text)
	require.NoError(t, err)
	require.Equal(t, strings.TrimSuffix(text, ":"), a.String())
	return a
}

func TestParseAddress(t *testing.T) {
	t.Parallel()
	a := parse(t, "https://user:pw@shop.example:8443/hook?token=x")
	require.Equal(t, target.Webhook, a.Kind)
	require.Equal(t, "https://user:pw@shop.example:8443/hook?token=x", a.URL)
	a = parse(t, "redis-stream://user:pw@redis:6379/2?stream=shop:events&maxlen=1000")
	require.Equal(t, target.RedisStream, a.Kind)
	require.Equal(t, "redis://user:pw@redis:6379/2", a.URL)
	require.Equal(t, "shop:events", a.Stream)
	require.EqualValues(t, 1000, a.MaxLen)
	a = parse(t, "rediss-stream://redis:6379?stream=s")
	require.Equal(t, "rediss://redis:6379", a.URL)
	a = parse(t, "kafka://one:9092,two:9092/orders")
	require.Equal(t, target.Kafka, a.Kind)
	require.Equal(t, []string{"one:9092", "two:9092"}, a.Brokers)
	require.Equal(t, "orders", a.Topic)
	require.Equal(t, target.Stdout, parse(t, "stdout:").Kind)
	require.Equal(t, target.Stdout, parse(t, "stdout").Kind)

	for _, text := range []string{
		"", "shop.example", "ftp://shop.example/", "https://", "https:///hidden", "https://a b/hidden", "https://a/hidden#x",
		"https://user:hidden@host:port/", "https://a/\nhidden", "https://é/hidden", "https://a/" + strings.Repeat("x", 2000),
		"redis-stream://redis:6379/0", "redis-stream://redis:6379/0?stream=", "redis-stream://redis?stream=s&maxlen=0",
		"redis-stream://redis?stream=s&hidden=1", "redis-stream://redis?stream=s&maxlen=x", "kafka://one:9092",
		"kafka:///orders",
		"kafka://one,/orders", "kafka://user:hidden@one/orders", "kafka://one/orders/hidden", "stdout://", "http:",
	} {
		_, err := target.ParseAddress(text)
		require.ErrorIs(t, err, target.ErrURL, text)
		require.NotContains(t, err.Error(), "hidden")
	}
}

func TestRedactedURLs(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"https://user:pw@shop.example/hook?token=x":   "https://shop.example/hook?…",
		"https://shop.example":                        "https://shop.example",
		"redis-stream://:p%40w@redis:6379/0?stream=s": "redis-stream://redis:6379/0?stream=s",
		"kafka://one:9092,two:9092/orders":            "kafka://one:9092,two:9092/orders",
		"stdout":                                      "stdout",
	} {
		require.Equal(t, want, target.Redacted(text))
	}
}

func TestParseSecrets(t *testing.T) {
	t.Parallel()
	line := func(bytes int, fill byte) string {
		return "whsec_" + base64.StdEncoding.EncodeToString([]byte(strings.Repeat(string(fill), bytes)))
	}
	secrets, err := target.ParseSecrets("\n" + line(24, 'n') + "\r\n\n  " + line(64, 'o') + "\n")
	require.NoError(t, err)
	require.Len(t, secrets, 2)
	require.Equal(t, strings.Repeat("n", 24), string(secrets[0]))
	for _, text := range []string{
		"", "\n", "hidden", "whsec_hidden!", line(23, 'x'), line(65, 'x'), line(24, 'x') + "\nhidden",
		strings.Repeat(line(24, 'x')+"\n", 5), base64.StdEncoding.EncodeToString([]byte(strings.Repeat("x", 32))),
	} {
		_, err := target.ParseSecrets(text)
		require.ErrorIs(t, err, target.ErrSecret)
		require.NotContains(t, err.Error(), "hidden")
	}
}

func TestCheckName(t *testing.T) {
	t.Parallel()
	require.NoError(t, target.CheckName("shop-2"))
	for _, name := range []string{"", "Shop", "-shop", "shop.eu", strings.Repeat("x", 64), "shop\n"} {
		require.Error(t, target.CheckName(name), name)
	}
}

func TestStoreChangesTargets(t *testing.T) {
	t.Parallel()
	store := target.NewStore(testkit.Pool(t))
	shop := parse(t, "https://shop.example/hook")
	require.ErrorIs(t, store.SetState(t.Context(), "shop", target.Paused), target.ErrNotFound)
	require.ErrorIs(t, store.Renew(t.Context(), "shop", shop, nil, false), target.ErrNotFound)
	require.NoError(t, store.Add(t.Context(), "shop", shop, [][]byte{{1}}, false, 7))
	require.ErrorIs(t, store.Add(t.Context(), "shop", shop, nil, false, 7), target.ErrExists)
	other := parse(t, "https://other.example/")
	require.ErrorIs(t, store.Renew(t.Context(), "shop", other, nil, false), target.ErrNotFound)
	before, err := store.List(t.Context())
	require.NoError(t, err)
	require.NoError(t, store.Renew(t.Context(), "shop", shop, [][]byte{{2}, {1}}, true))
	all, err := store.List(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 1)
	s := all[0]
	require.Equal(t, [][]byte{{2}, {1}}, s.Secrets)
	require.True(t, s.AllowPrivate)
	require.EqualValues(t, 7, s.Position)
	require.NotEqual(t, before[0].Fence, s.Fence, "the process that delivers starts again")
	require.Zero(t, s.Lag(), "a position that is not given out yet")
	for n := range target.Max {
		err = store.Add(t.Context(), fmt.Sprintf("target-%d", n), shop, nil, false, 0)
	}
	require.ErrorIs(t, err, target.ErrTooMany)
	require.NoError(t, store.Remove(t.Context(), "shop"))
	require.ErrorIs(t, store.Remove(t.Context(), "shop"), target.ErrNotFound)
}

func TestPositionAt(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := uuid.Must(uuid.NewV7())
	order := uuid.Must(uuid.NewV7())
	copy(order[14:], sale[14:])
	at := time.Date(2026, 11, 23, 10, 0, 0, 0, time.UTC)
	for _, statement := range []string{
		"INSERT INTO sales (id, name, stock) VALUES ($1, 'autumn', 1)",
		"INSERT INTO sale_events (sale_id, revision, type, occurred_at) VALUES ($1, 1, 'SaleCreated', '2026-11-23 10:00')",
	} {
		_, err := pool.Exec(t.Context(), statement, sale)
		require.NoError(t, err)
	}
	for version := 2; version <= 3; version++ {
		_, err := pool.Exec(t.Context(), `INSERT INTO order_events
			(order_id, version, type, sale_id, user_id, quantity, occurred_at)
			VALUES ($1, $2, 'OrderPaid', $3, 'ann', 1, $4)`, order, version, sale, at.Add(time.Duration(version)*time.Minute))
		require.NoError(t, err)
	}
	for version := 1; version <= 2; version++ {
		_, err := pool.Exec(t.Context(), `INSERT INTO payment_events (reference, version, type, occurred_at)
			VALUES ('a/b.p1' || repeat('x', 280), $1,
				CASE $1::int WHEN 1 THEN 'PaymentReceived' ELSE 'PaymentRefundDue' END, '2026-11-23 11:00')`, version)
		require.NoError(t, err)
	}
	payment := "a%2Fb.p1" + strings.Repeat("x", 280)
	for place, want := range map[string]int64{
		payment + ".p2": 4, "2026-11-23T11:00:00Z": 3,
		"start": 0, "now": 5, "2026-11-23T10:00:00Z": 0, "2026-11-23T10:00:00.000001Z": 1, "2026-11-23T13:03:00+03:00": 2,
		"2030-01-01T00:00:00Z": 5, order.String() + ".2": 1, order.String() + ".3": 2, sale.String() + ".r1": 0,
	} {
		position, err := target.PositionAt(t.Context(), pool, place)
		require.NoError(t, err, place)
		require.Equal(t, want, position, place)
	}
	for _, place := range []string{
		"", ".", ".p2", payment + ".p1", payment, "%FF.p2", "%00.p2", "%.p2",
		"yesterday", "3", order.String(), order.String() + ".4", order.String() + ".x", order.String() + ".99999999999",
		sale.String() + ".r2", sale.String() + ".2", "2026-11-23",
	} {
		_, err := target.PositionAt(t.Context(), pool, place)
		require.ErrorIs(t, err, target.ErrPlace, place)
	}
}

package ingress

import (
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/reservation"
	"stampede/reservation/order"
)

// purchased purchases a unit and returns the path, id and receipt of the order.
func (s *shop) purchased(
	sale uuid.UUID, user string, headers ...reqHeader,
) (path string, id uuid.UUID, receipt string) {
	s.t.Helper()
	r := s.buy(sale, "", append(headers, as(user))...)
	answer := r.is(http.StatusAccepted)
	return r.header.Get("Location"), uuid.MustParse(answer["order_id"].(string)), answer["receipt"].(string)
}

func withReceipt(path, receipt string) string { return path + "?receipt=" + url.QueryEscape(receipt) }

// loseReservations deletes the sale's reservations from Redis.
func (s *shop) loseReservations(sale uuid.UUID) {
	s.t.Helper()
	require.NoError(s.t, s.rdb.Del(s.t.Context(), s.keys.Buyers(s.keys.Partition(sale), sale)).Err())
}

// raiseEpoch raises the epoch of the sale in Postgres, as a rebuild does.
func (s *shop) raiseEpoch(sale uuid.UUID) {
	s.t.Helper()
	_, err := s.pool.Exec(s.t.Context(), "UPDATE sales SET epoch = epoch + 1 WHERE id = $1", sale)
	require.NoError(s.t, err)
}

func TestAcceptedPurchaseHasReceipt(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	first := s.buy(sale, `{"quantity":2}`, as("ada"), withKey("k"))
	o := first.is(http.StatusAccepted)
	receipt := o["receipt"].(string)
	require.True(t, strings.HasSuffix(first.body, `,"receipt":"`+receipt+"\"}\n"), first.body)

	got, err := s.server.receipts.signer.Load().Verify(receipt)
	require.NoError(t, err)
	reservedAt, err := time.Parse(time.RFC3339, o["reserved_at"].(string))
	require.NoError(t, err)
	require.Equal(t, order.Receipt{
		OrderID: uuid.MustParse(o["order_id"].(string)), SaleID: sale, User: "ada",
		Epoch: 1, Sequence: 1, Quantity: 2, ReservedAt: reservedAt.UTC(),
	}, got)

	again := s.buy(sale, `{"quantity":2}`, as("ada"), withKey("k"))
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
	require.Equal(t, first.body, again.body)
	require.Equal(
		t, "reserved", s.get(withReceipt(first.header.Get("Location"), receipt), as("ada")).is(http.StatusOK)["status"],
	)
}

func TestInvalidReceiptsAreRejected(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	path, _, receipt := s.purchased(sale, "ada")
	_, _, othersReceipt := s.purchased(sale, "bob")
	_, _, otherReceipt := s.purchased(s.sale(reservation.Terms{Stock: 10}), "ada")
	forger, err := order.NewSigner([]byte(strings.Repeat("x", 32)))
	require.NoError(t, err)
	genuine, err := s.server.receipts.signer.Load().Verify(receipt)
	require.NoError(t, err)

	for _, bad := range []string{
		"x", receipt[:len(receipt)-1], receipt + "A", otherReceipt, string(forger.Sign(nil, genuine)),
		strings.Repeat("A", 4000),
	} {
		s.get(withReceipt(path, bad), as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
		s.get(withReceipt(path+"/events", bad), as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
	}
	for i := range receipt {
		tampered := []byte(receipt)
		tampered[i] = 'A' + (tampered[i]+1)%26
		if tampered[i] == receipt[i] {
			tampered[i]++
		}
		s.get(withReceipt(path, string(tampered)), as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
	}
	// Another buyer's receipt is not confirmed as such.
	s.get(withReceipt(path, othersReceipt), as("ada")).isProblem(http.StatusNotFound, "order-not-found")
	s.get(withReceipt(path, receipt), as("bob")).isProblem(http.StatusNotFound, "order-not-found")
	s.get(withReceipt(path, receipt)).isProblem(http.StatusUnauthorized, "unauthorized")
	s.get(path+"?receipt=", as("ada")).is(http.StatusOK)
}

// Without its receipt the order does not exist. With it the order is undecided until the sale is rebuilt
// without it.
func TestReceiptProvesOrderThatRedisLost(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	path, id, receipt := s.purchased(sale, "ada")
	s.loseReservations(sale)
	s.get(path, as("ada")).isProblem(http.StatusNotFound, "order-not-found")
	r := s.get(withReceipt(path, receipt), as("ada"))
	r.isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	require.Equal(t, "1", r.header.Get("Retry-After"))

	s.raiseEpoch(sale)
	o := s.get(withReceipt(path, receipt), as("ada")).is(http.StatusOK)
	reservedAt := o["reserved_at"]
	require.Equal(t, map[string]any{
		"order_id": id.String(), "sale_id": sale.String(), "user_id": "ada", "quantity": 1.0,
		"status": "voided", "version": 2.0, "reserved_at": reservedAt, "reason": "sale-rebuilt",
	}, o)
	require.Contains(t, string(s.get(withReceipt(path+"/events", receipt), as("ada")).body), "event: voided\nid: 2\n")

	// An order in Postgres takes precedence over its receipt.
	s.record(id, sale, "ada", order.StatusConfirmed, "")
	require.Equal(t, "confirmed", s.get(withReceipt(path, receipt), as("ada")).is(http.StatusOK)["status"])
	require.Equal(t, "confirmed", s.get(path, as("ada")).is(http.StatusOK)["status"])
}

// A third server has a secret of its own.
func TestReceiptSecretIsShared(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	other := openShopOn(t, s.on)
	stranger := openShopOn(t, s.on, func(c *Config) { c.ReceiptSecret = strings.Repeat("z", 32) })
	sale := s.sale(reservation.Terms{Stock: 10})
	path, _, receipt := s.purchased(sale, "ada", withKey("k"))
	_, _, replayed := other.purchased(sale, "ada", withKey("k"))
	require.Equal(t, receipt, replayed)
	other.get(withReceipt(path, receipt), as("ada")).is(http.StatusOK)
	stranger.get(withReceipt(path, receipt), as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
	fingerprint := func(s *shop) string {
		return regexp.MustCompile(`stampede_receipt_secret_info\{fingerprint="[0-9a-f]{8}"\} 1\n`).FindString(s.get("/metrics").body)
	}
	require.NotEmpty(t, fingerprint(s))
	require.Equal(t, fingerprint(s), fingerprint(other), "what monitoring compares")
	require.NotEqual(t, fingerprint(s), fingerprint(stranger))

	path, _, receipt = stranger.purchased(sale, "bob")
	stranger.get(withReceipt(path, receipt), as("bob")).is(http.StatusOK)
	s.get(withReceipt(path, receipt), as("bob")).isProblem(http.StatusBadRequest, "invalid-request")

	_, err := New(
		Config{Reservations: s.store, Sales: s.catalog, Orders: s.ledger, Auth: AuthHeader, ReceiptSecret: "short"},
	)
	require.ErrorContains(t, err, "STAMPEDE_RECEIPT_SECRET")
}

package ingress

import (
	"encoding/base64"
	"log/slog"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/ratelimit"
	"stampede/internal/test/testkit"
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

// ticketFor asks for a ticket and returns the path of the stream that it opens.
func (s *shop) ticketFor(path string, headers ...reqHeader) string {
	s.t.Helper()
	r := s.post(path+"/events/ticket", "", headers...)
	got := r.is(http.StatusCreated)
	require.Equal(s.t, "no-store", r.header.Get("Cache-Control"))
	require.Equal(s.t, path+"/events?ticket="+got["ticket"].(string), got["events_url"])
	expires, err := time.Parse(time.RFC3339, got["expires_at"].(string))
	require.NoError(s.t, err)
	require.WithinDuration(s.t, time.Now().Add(ticketLife), expires, 10*time.Second)
	return got["events_url"].(string)
}

func tokenFor(t *testing.T, user string) reqHeader {
	t.Helper()
	return bearing(sign(t, jwt.SigningMethodHS256, []byte(jwtSecret), "", tokenClaims(withClaim("sub", user))))
}

// What EventSource does: no header of ours, the same URL at every reconnect, and Last-Event-ID.
func TestTicketOpensStreamWithoutToken(t *testing.T) {
	t.Parallel()
	s := openShop(t, withJWT, func(c *Config) { c.BuyerPay = SwitchOn })
	s.startWorker()
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	ada := tokenFor(t, "ada")
	r := s.buy(sale, "", ada)
	path := r.header.Get("Location")
	receipt := r.is(http.StatusAccepted)["receipt"].(string)
	// The order may still be in Redis alone.
	events := s.ticketFor(path, ada)
	testkit.Eventually(t, 20*time.Second, "the order is confirmed", func() bool {
		return s.get(path, ada).is(http.StatusOK)["status"] == "confirmed"
	})
	w := s.watch(events)
	w.receivesStatus(order.StatusConfirmed, 2)
	again := s.watch(events+"&receipt="+receipt, reqHeader{"Last-Event-ID", "2"})
	s.post(path+"/pay", `{"reference":"pi_1"}`, ada).is(http.StatusOK)
	for _, stream := range []*eventReader{w, again} {
		stream.receivesStatus(order.StatusPaid, 3)
		stream.receivesEnd()
	}
	require.Equal(t, http.StatusNoContent, s.get(events, reqHeader{"Last-Event-ID", "3"}).status)
	// Another ingress needs nothing but the secret.
	other := openShopOn(t, s.on, withJWT)
	require.Contains(t, other.get(events).body, "event: paid\n")
	s.get(path+"/events").isProblem(http.StatusUnauthorized, "unauthorized")

	sales := "/v1/sales/" + sale.String()
	stream := s.watch(s.ticketFor(sales))
	e, ok := stream.next()
	require.True(t, ok)
	require.Equal(t, "sale", e.name)
}

func TestTicketOpensOnlyItsStream(t *testing.T) {
	t.Parallel()
	s := openShop(t, withJWT)
	sale := s.sale(reservation.Terms{Stock: 10})
	ada, bob := tokenFor(t, "ada"), tokenFor(t, "bob")
	path := s.buy(sale, "", ada).header.Get("Location")
	mine := s.ticketFor(path, ada)
	ticketIn := func(events string) string { return events[strings.Index(events, "=")+1:] }
	sales := "/v1/sales/" + sale.String()
	ofSale := ticketIn(s.ticketFor(sales))
	id := uuid.MustParse(strings.TrimPrefix(path, "/v1/orders/"))
	late, err := s.server.receipts.tickets.sign(ticket{kind: orderTicket, id: id, user: "ada", expires: time.Now()})
	require.NoError(t, err)
	saleAsOrder, err := s.server.receipts.tickets.sign(
		ticket{kind: orderTicket, id: sale, expires: time.Now().Add(ticketLife)})
	require.NoError(t, err)
	orderAsSale, err := s.server.receipts.tickets.sign(
		ticket{kind: saleTicket, id: id, user: "ada", expires: time.Now().Add(ticketLife)})
	require.NoError(t, err)
	receipt := s.buy(sale, "", bob).is(http.StatusAccepted)["receipt"].(string)
	raw, err := base64.RawURLEncoding.DecodeString(ticketIn(mine))
	require.NoError(t, err)
	for i := range raw {
		raw[i] ^= 1
		s.get(path+"/events?ticket="+base64.RawURLEncoding.EncodeToString(raw)).
			isProblem(http.StatusUnauthorized, "unauthorized")
		raw[i] ^= 1
	}
	for what, refused := range map[string]string{
		"another order":        "/v1/orders/" + order.NewOrderID(sale).String() + "/events?ticket=" + ticketIn(mine),
		"a sale":               sales + "/events?ticket=" + ticketIn(mine),
		"an order, of a sale":  path + "/events?ticket=" + ofSale,
		"another sale":         "/v1/sales/" + uuid.NewString() + "/events?ticket=" + ofSale,
		"the kind of an order": sales + "/events?ticket=" + saleAsOrder,
		"the kind of a sale":   path + "/events?ticket=" + orderAsSale,
		"expired":              path + "/events?ticket=" + late,
		"empty":                path + "/events?ticket=",
		"empty, of a sale":     sales + "/events?ticket=",
		"a receipt":            path + "/events?ticket=" + receipt,
		"a token":              path + "/events?ticket=" + url.QueryEscape(strings.TrimPrefix(ada.value, "Bearer ")),
		"shortened":            path + "/events?ticket=" + ticketIn(mine)[:30],
		"no base64":            path + "/events?ticket=%00%FF..",
		"long":                 path + "/events?ticket=" + strings.Repeat("A", 4000),
	} {
		r := s.get(refused)
		r.isProblem(http.StatusUnauthorized, "unauthorized")
		require.Equal(t, challengeBuyer+errorInvalid, r.header.Get("WWW-Authenticate"), what)
	}
	s.get(mine+"&ticket="+ofSale).isProblem(http.StatusBadRequest, "invalid-request")
	// A ticket is for a stream, not a token.
	s.get(path+"?ticket="+ticketIn(mine)).isProblem(http.StatusUnauthorized, "unauthorized")
	s.post(path+"/cancel?ticket="+ticketIn(mine), "").isProblem(http.StatusUnauthorized, "unauthorized")
	s.get(path, bearing(ticketIn(mine))).isProblem(http.StatusUnauthorized, "unauthorized")

	// Asking says nothing about orders of others: for each id the answer is the same, and the stream is 404.
	for _, theirs := range []string{path, "/v1/orders/" + order.NewOrderID(sale).String()} {
		s.get(s.ticketFor(theirs, bob)).isProblem(http.StatusNotFound, "order-not-found")
	}
	s.post(path+"/events/ticket", "").isProblem(http.StatusUnauthorized, "unauthorized")
	s.post("/v1/orders/x/events/ticket", "", ada).isProblem(http.StatusNotFound, "order-not-found")
	s.post("/v1/sales/x/events/ticket", "").isProblem(http.StatusNotFound, "sale-not-found")
	s.post(path+"/events/ticket", `{"for":"ever"}`, ada).isProblem(http.StatusBadRequest, "invalid-request")
	s.post(sales+"/events/ticket", `[]`).isProblem(http.StatusBadRequest, "invalid-request")
	s.post(path+"/events/ticket", "{}", ada).is(http.StatusCreated)
}

func TestTicketsHaveTheLimitsOfStreams(t *testing.T) {
	t.Parallel()
	var log syncBuffer
	s := openShop(t, func(c *Config) {
		c.UserStreams, c.Logger = 1, slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	sale := s.sale(reservation.Terms{Stock: 10})
	path, _, _ := s.purchased(sale, "ada")
	events := s.ticketFor(path, as("ada"))
	s.watch(events).receivesStatus(order.StatusReserved, 1)
	s.get(events).isProblem(http.StatusTooManyRequests, "rate-limited")
	s.get(path+"/events", as("ada")).isProblem(http.StatusTooManyRequests, "rate-limited")

	slow := openShopOn(t, s.on, func(c *Config) {
		c.UserLimit, c.Logger = Limit{Rate: ratelimit.Rate(0.001), Burst: 2}, s.server.config.Logger
	})
	slow.ticketFor(path, as("ada"))
	slow.watch(events).receivesStatus(order.StatusReserved, 1)
	slow.get(events).isProblem(http.StatusTooManyRequests, "rate-limited")
	slow.post(path+"/events/ticket", "", as("ada")).isProblem(http.StatusTooManyRequests, "rate-limited")
	slow.post(path+"/events/ticket", "", as("bob")).is(http.StatusCreated)

	// Neither a refused stream nor one that cannot be served is logged with its ticket.
	require.NoError(t, s.rdb.Close())
	s.pool.Close()
	s.get("/v1/sales/"+uuid.NewString()+"/events?ticket=x").isProblem(http.StatusUnauthorized, "unauthorized")
	require.NotContains(t, log.String(), events[strings.Index(events, "=")+1:])
}

func TestTicketsNeedTheSecret(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	path, _, _ := s.purchased(sale, "ada")
	s.server.receipts.tickets.key.Store(nil)
	s.post(path+"/events/ticket", "", as("ada")).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	s.get(path+"/events?ticket=x").isProblem(http.StatusServiceUnavailable, "sale-unavailable")

	stranger := openShopOn(t, s.on, func(c *Config) { c.ReceiptSecret = strings.Repeat("z", 32) })
	other := openShopOn(t, s.on)
	events := stranger.ticketFor(path, as("ada"))
	other.get(events).isProblem(http.StatusUnauthorized, "unauthorized")
}

// No text but a signed one opens a stream, and none makes the server panic.
func FuzzTicket(f *testing.F) {
	var signer ticketSigner
	signer.setSecret([]byte(jwtSecret))
	id := uuid.UUID{1, 2, 3}
	now := time.Unix(1_800_000_000, 0)
	valid, err := signer.sign(ticket{kind: orderTicket, id: id, user: "ada", expires: now.Add(ticketLife)})
	require.NoError(f, err)
	for _, seed := range []string{"", "A", valid, valid[1:], valid + "A", valid + "\n", strings.ToUpper(valid)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		user, err := signer.verify(text, orderTicket, id, now)
		if strings.NewReplacer("\r", "", "\n", "").Replace(text) == valid {
			require.NoError(t, err)
			require.Equal(t, "ada", user)
			return
		}
		require.Error(t, err)
		require.Empty(t, user)
	})
}

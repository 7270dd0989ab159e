package ingress

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/mod/sumdb/tlog"

	"stampede/draw"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/order"
)

// A round of drand quicknet, as drand answers it.
const (
	signature   = testshop.BeaconSignature
	randomness  = "fc1873a13f3545aeade8401532ef5519920652eee6b0d2b19ca12643b87b3587"
	drandAnswer = `{"round":657413,"randomness":"` + randomness + `","signature":"` + signature + `"}`
)

// drawn is a draw of a shop.
type drawn struct {
	*shop
	goods, entries uuid.UUID
	path           string
}

// prepareDraw makes the sales of a draw.
func (s *shop) prepareDraw() drawn {
	s.t.Helper()
	goods := s.sale(reservation.Terms{Stock: 2, PerOrderLimit: 1, PaymentWindow: time.Hour})
	entries := s.sale(reservation.Terms{Stock: 1000, PerOrderLimit: 1, ClosesAt: time.Now().Add(time.Hour)})
	return drawn{s, goods, entries, "/v1/sales/" + goods.String() + "/draw"}
}

func (d drawn) create(terms string) reply {
	d.t.Helper()
	return d.post(d.path, fmt.Sprintf(`{"entries_sale_id":"%s"%s}`, d.entries, terms), operator)
}

// enter returns the receipts of users, by their names.
func (d drawn) enter(users ...string) map[string]string {
	d.t.Helper()
	receipts := map[string]string{}
	for _, user := range users {
		receipts[user] = d.buy(d.entries, "", as(user)).is(http.StatusAccepted)["receipt"].(string)
	}
	return receipts
}

// await waits until the draw has the state, and returns it.
func (d drawn) await(state string) map[string]any {
	d.t.Helper()
	testkit.Eventually(d.t, 30*time.Second, "the draw is "+state, func() bool {
		return d.get(d.path).is(http.StatusOK)["state"] == state
	})
	return d.get(d.path).is(http.StatusOK)
}

// close ends the entries, and waits for their list.
func (d drawn) close() map[string]any {
	d.t.Helper()
	testshop.Exec(d.t, d.pool, "UPDATE sales SET closes_at = now() - interval '1 second' WHERE id = $1", d.entries)
	return d.await("frozen")
}

// moveToRound has the draw wait for the round of drandAnswer.
func (d drawn) moveToRound() {
	d.t.Helper()
	testshop.MoveDrawToRound(d.t, d.pool, d.goods)
	testkit.Eventually(d.t, 10*time.Second, "the round is known", func() bool {
		return d.get(d.path).is(http.StatusOK)["round"] == float64(testshop.BeaconRound)
	})
}

func (d drawn) proof(receipt string) reply {
	d.t.Helper()
	return d.get(d.path + "/proof?receipt=" + receipt)
}

// TestDrawByParties goes the whole way, from the entries to a paid order, and verifies it as a stranger.
func TestDrawByParties(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOperators(t))
	d := s.prepareDraw()
	secrets := map[string]string{"ann": strings.Repeat("01", 32), "the notary": strings.Repeat("02", 32)}
	var parties []string
	for _, name := range slices.Sorted(maps.Keys(secrets)) {
		secret, _ := hex.DecodeString(secrets[name])
		parties = append(parties, fmt.Sprintf(`{"name":%q,"commitment":"%X"}`, name, sha256.Sum256(secret)))
	}
	terms := `,"freeze_seconds":10,"parties":[` + strings.Join(parties, ",") + `]`
	d.get(d.path).isProblem(http.StatusNotFound, "draw-not-found")
	d.post(d.path, `{}`, bearing("token-operator")).isProblem(http.StatusForbidden, "forbidden")
	created := d.create(terms)
	require.Equal(t, "entering", created.is(http.StatusCreated)["state"])
	require.Equal(t, d.path, created.header.Get("Location"))
	require.Equal(t, created.body, d.get(d.path).body)
	require.Equal(t, created.body, d.create(terms).body)
	d.create(terms).is(http.StatusOK)
	d.create("").isProblem(http.StatusConflict, "illegal-transition")
	shown := d.get(d.path)
	require.Equal(t, http.StatusNotModified, d.get(d.path, reqHeader{"If-None-Match", shown.header.Get("Etag")}).status)
	d.buy(d.goods, "", as("zoe")).isProblem(http.StatusConflict, "offers-only")

	users := []string{"u1", "u2", "u3", "u4", "u5"}
	receipts := d.enter(users...)
	reveal := func(party string) reply {
		return d.post(d.path+"/reveal", fmt.Sprintf(`{"party":%q,"secret":%q}`, party, secrets[party]))
	}
	for _, path := range []string{"/bundle", "/leaves", "/proof?receipt=" + receipts["u1"]} {
		d.get(d.path+path).isProblem(http.StatusConflict, "draw-not-frozen")
	}
	reveal("ann").isProblem(http.StatusConflict, "draw-not-frozen")
	d.startWorker()
	frozen := d.close()
	require.EqualValues(t, 5, frozen["entries"])
	require.NotEmpty(t, frozen["reveal_by"])
	for body, detail := range map[string]string{
		`{"party":"eve","secret":"00"}`:                 "party must be the name of a party",
		`{"party":"ann","secret":"` + randomness + `"}`: "secret must be the 32 bytes",
		`{"party":"ann","secret":"xy"}`:                 "secret must be the 32 bytes",
		`{"party":"ann","secret":"00","more":1}`:        "more is not a known member",
		`{"party":"ann","party":"ann"}`:                 "party is given twice",
		`[]`:                                            "must be a JSON object",
		`{"party":"ann","secret":""}`:                   "secret must be the 32 bytes",
	} {
		p := d.post(d.path+"/reveal", body).isProblem(http.StatusBadRequest, "invalid-request")
		require.Contains(t, p["detail"], detail, body)
	}
	p := d.post(d.path+"/beacon", drandAnswer).isProblem(http.StatusBadRequest, "invalid-beacon")
	require.Contains(t, p["detail"], "that of its parties")
	require.Equal(t, "waiting", d.proof(receipts["u1"]).is(http.StatusOK)["outcome"])
	require.Equal(t, secrets["ann"], reveal("ann").is(http.StatusOK)["parties"].([]any)[0].(map[string]any)["secret"])
	reveal("ann").is(http.StatusOK)
	require.NotEmpty(t, reveal("the notary").is(http.StatusOK)["seed"])
	testkit.Eventually(t, 30*time.Second, "both units are offered", func() bool {
		return d.get(d.path).is(http.StatusOK)["offered"] == 2.0
	})

	winners := d.holdProofs(receipts)
	require.Len(t, winners, 2)
	d.holdFiles(receipts)
	for user, path := range winners {
		d.pay(path, "pi-"+user, as(user)).is(http.StatusOK)
	}
	d.buy(d.goods, "", as("zoe")).isProblem(http.StatusConflict, "offers-only")
}

// holdProofs checks the proof of each receipt. It returns the paths of the orders of the winners, by their names.
func (d drawn) holdProofs(receipts map[string]string) map[string]string {
	d.t.Helper()
	winners, ranks := map[string]string{}, map[float64]bool{}
	for user, receipt := range receipts {
		p := d.proof(receipt).is(http.StatusOK)
		var path tlog.RecordProof
		for _, hash := range p["path"].([]any) {
			path = append(path, tlog.Hash(unhex(d.t, hash)))
		}
		raw, err := base64.RawURLEncoding.DecodeString(receipt)
		require.NoError(d.t, err)
		body := sha256.Sum256(raw[:len(raw)-16])
		leaf := tlog.RecordHash(append([]byte{0}, body[:]...))
		require.Equal(d.t, hex.EncodeToString(leaf[:]), p["leaf"])
		require.NoError(d.t, tlog.CheckRecord(path, int64(p["entries"].(float64)), tlog.Hash(unhex(d.t, p["root"])),
			int64(p["place"].(float64)), leaf))
		ranks[p["rank"].(float64)] = true
		if p["outcome"] == "offered" {
			require.Less(d.t, p["rank"], 2.0)
			winners[user] = orderPath(uuid.MustParse(p["order_id"].(string)))
			require.Equal(d.t, "confirmed", d.awaitStatus(winners[user], user, order.StatusConfirmed)["status"])
		} else {
			require.Equal(d.t, "waiting", p["outcome"])
			require.NotContains(d.t, p, "order_id")
		}

		forged := bytes.Clone(raw)
		forged[len(forged)-17]++ // the user
		d.proof(base64.RawURLEncoding.EncodeToString(forged)).isProblem(http.StatusBadRequest, "invalid-request")
		// The secret that has signed it may be another one by now.
		signedAnew := bytes.Clone(raw)
		signedAnew[len(signedAnew)-1]++
		d.proof(base64.RawURLEncoding.EncodeToString(signedAnew)).is(http.StatusOK)
	}
	require.Len(d.t, ranks, len(receipts))
	other := d.buy(d.sale(reservation.Terms{Stock: 10}), "", as("u1")).is(http.StatusAccepted)["receipt"].(string)
	d.proof(other).isProblem(http.StatusNotFound, "entry-not-found")
	for _, query := range []string{"", "?receipt=", "?receipt=x", "?receipt=" + other + "&order=1", "?receipt=%00"} {
		d.get(d.path+"/proof"+query).isProblem(http.StatusBadRequest, "invalid-request")
	}
	return winners
}

func unhex(t testing.TB, text any) []byte {
	t.Helper()
	raw, err := hex.DecodeString(text.(string))
	require.NoError(t, err)
	return raw
}

// holdFiles verifies the draw from its files.
func (d drawn) holdFiles(receipts map[string]string) {
	d.t.Helper()
	bundle, err := draw.ReadBundle(strings.NewReader(d.get(d.path + "/bundle").body))
	require.NoError(d.t, err)
	leaves := d.get(d.path + "/leaves")
	require.Equal(d.t, "application/octet-stream", leaves.header.Get("Content-Type"))
	require.Equal(d.t, len(leaves.body), draw.RecordBytes*len(receipts))
	for _, receipt := range receipts {
		own, err := order.ParseReceipt(receipt)
		require.NoError(d.t, err)
		report, err := draw.Verify(d.t.Context(), bundle, strings.NewReader(leaves.body), int64(len(leaves.body)), &own)
		require.NoError(d.t, err)
		require.False(d.t, report.Has(draw.Broken) || report.Has(draw.Unknown), report)
	}
	tag := leaves.header.Get("Etag")
	require.Equal(d.t, http.StatusNotModified, d.get(d.path+"/leaves", reqHeader{"If-None-Match", tag}).status)
	d.get(d.path+"/leaves", reqHeader{"If-Match", `"x"`}).isProblem(http.StatusPreconditionFailed, "precondition-failed")
	require.Equal(d.t, "public, max-age=31536000, immutable, no-transform", leaves.header.Get("Cache-Control"))
	const from = draw.RecordBytes + 1
	part := d.get(d.path+"/leaves", reqHeader{"Range", fmt.Sprintf("bytes=%d-", from)}, reqHeader{"If-Range", tag})
	require.Equal(d.t, []any{http.StatusPartialContent, leaves.body[from:]}, []any{part.status, part.body})
	whole := d.get(d.path+"/leaves", reqHeader{"Range", "bytes=1-"}, reqHeader{"If-Range", `"another"`})
	require.Equal(d.t, []any{http.StatusOK, leaves.body}, []any{whole.status, whole.body})
	beyond := d.get(d.path+"/leaves", reqHeader{"Range", fmt.Sprintf("bytes=%d-", len(leaves.body))})
	require.Equal(d.t, http.StatusRequestedRangeNotSatisfiable, beyond.status)
	for _, path := range []string{"", "/bundle", "/leaves"} {
		testkit.Eventually(d.t, 30*time.Second, d.path+path+" is the same for GET and HEAD", func() bool {
			get, head := d.get(d.path+path), d.ask(http.MethodHead, d.path+path, nil)
			return head.status == http.StatusOK && head.body == "" && sameHeaders(get, head)
		})
	}
}

func TestBeaconSeedsDraw(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	d := s.prepareDraw()
	d.create("").is(http.StatusCreated)
	beacon := func(body string) reply { return d.post(d.path+"/beacon", body) }
	beacon(drandAnswer).isProblem(http.StatusConflict, "draw-not-frozen")
	left := d.buy(d.entries, "", as("u2"))
	d.startWorker()
	testkit.Eventually(t, 20*time.Second, "u2 leaves", func() bool {
		return d.cancel(left.header.Get("Location"), as("u2")).status == http.StatusOK
	})
	var again reply
	testkit.Eventually(t, 20*time.Second, "u2 enters again", func() bool {
		again = d.buy(d.entries, "", as("u2"))
		return again.status == http.StatusAccepted
	})
	receipts := d.enter("u1")
	receipts["u2"] = again.is(http.StatusAccepted)["receipt"].(string)
	testshop.Exec(t, s.pool, "UPDATE orders SET updated_at = updated_at - interval '1 minute' WHERE status = 'cancelled'")
	require.EqualValues(t, 2, d.close()["entries"])
	d.cancel(again.header.Get("Location"), as("u2")).isProblem(http.StatusConflict, "illegal-transition")
	p := beacon(drandAnswer).isProblem(http.StatusBadRequest, "invalid-beacon")
	require.Regexp(t, `^the seed of the draw is that of round \d+, of 20\S+Z\.$`, p["detail"])
	d.moveToRound()
	for body, slug := range map[string]string{
		`{}`:                                "invalid-beacon",
		`{"round":657413}`:                  "invalid-beacon",
		`{"round":657413,"signature":"xy"}`: "invalid-beacon",
		strings.Replace(drandAnswer, "b7", "97", 1):                                    "invalid-beacon",
		strings.Replace(drandAnswer, signature, "c0"+strings.Repeat("00", 47), 1):      "invalid-beacon",
		strings.Replace(drandAnswer, "657413", "657414", 1):                            "invalid-beacon",
		strings.Replace(drandAnswer, "657413", "-1", 1):                                "invalid-beacon",
		strings.Replace(drandAnswer, "657413", "99999999999999999999", 1):              "invalid-request",
		strings.Replace(drandAnswer, "657413", `"657413"`, 1):                          "invalid-request",
		strings.Replace(drandAnswer, `"randomness"`, `"previous_signature":"","b"`, 1): "invalid-request",
	} {
		beacon(body).isProblem(http.StatusBadRequest, slug)
	}
	large := strings.Replace(drandAnswer, randomness, strings.Repeat("0", 1<<20), 1)
	beacon(large).isProblem(http.StatusRequestEntityTooLarge, "body-too-large")
	p = d.post(d.path+"/reveal", `{"party":"ann","secret":"00"}`).isProblem(http.StatusBadRequest, "invalid-request")
	require.Contains(t, p["detail"], "that of a round of drand")
	require.NotContains(t, d.get(d.path).is(http.StatusOK), "seed")
	require.Equal(t, randomness, beacon(drandAnswer).is(http.StatusOK)["seed"])
	require.Equal(t, randomness, d.get(d.path).is(http.StatusOK)["seed"], "this server shows it immediately")
	require.Equal(t, randomness, beacon(drandAnswer).is(http.StatusOK)["seed"], "a repeat")
	require.EqualValues(t, 1, d.await("over")["last_rank"])
	require.Len(t, d.holdProofs(receipts), 2)
	d.holdFiles(receipts)

	d.buy(d.goods, "", as("late")).isProblem(http.StatusConflict, "offers-only")
	for range 2 {
		require.Equal(t, true, d.post(d.path+"/open", "", operator).is(http.StatusOK)["opening"])
	}
	d.await("open")
	testkit.Eventually(t, 20*time.Second, "the units are for everybody", func() bool {
		return strings.Contains(d.buy(d.goods, "", as("late")).body, "sold-out")
	})

	testshop.Exec(t, s.pool, "UPDATE draws SET voided_at = now(), void_reason = 'late' WHERE sale_id = $1", d.goods)
	require.Equal(t, "late", d.await("void")["void_reason"])
	beacon(drandAnswer).isProblem(http.StatusConflict, "draw-void")
}

func TestDrawIsRefused(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	d := s.prepareDraw()
	for body, detail := range map[string]string{
		`{}`:                      "entries_sale_id must be the id of a sale",
		`{"entries_sale_id":"x"}`: "entries_sale_id must be the id of a sale",
		`{"entries_sale_id":"` + uuid.NewString() + `"}`:                      "entries_sale_id must be the id of a sale",
		`{"entries_sale_id":"ID","freeze_seconds":9}`:                         "freeze_seconds must be a whole number",
		`{"entries_sale_id":"ID","freeze_seconds":9223372036854775807}`:       "freeze_seconds must be",
		`{"entries_sale_id":"ID","parties":[]}`:                               "parties must be 1 to 16",
		`{"entries_sale_id":"ID","parties":[{"name":"a","commitment":"00"}]}`: "parties[0].commitment must be a SHA-256",
		`{"entries_sale_id":"ID","parties":[{"name":"a","secret":"00"}]}`:     "parties[0].secret is not a known member",
		`{"entries_sale_id":"ID","rounds":1}`:                                 "rounds is not a known member",
		fmt.Sprintf(`{"entries_sale_id":"%s"}`, d.goods):                      "must be another sale",
	} {
		body = strings.ReplaceAll(body, "ID", d.entries.String())
		p := d.post(d.path, body, operator).isProblem(http.StatusBadRequest, "invalid-request")
		require.Contains(t, p["detail"], detail, body)
	}
	d.post(d.path, `{}`).isProblem(http.StatusUnauthorized, "unauthorized")
	d.post("/v1/sales/x/draw", `{}`, operator).isProblem(http.StatusNotFound, "sale-not-found")
	none := "/v1/sales/" + uuid.NewString() + "/draw"
	d.post(none, fmt.Sprintf(`{"entries_sale_id":"%s"}`, d.entries), operator).
		isProblem(http.StatusNotFound, "sale-not-found")
	receipt := d.enter("u1")["u1"]
	for _, path := range []string{none, d.path, "/v1/sales/x/draw"} {
		for _, rest := range []string{"", "/bundle", "/leaves", "/proof?receipt=" + receipt} {
			d.get(path+rest).isProblem(http.StatusNotFound, "draw-not-found")
		}
		d.post(path+"/beacon", drandAnswer).isProblem(http.StatusNotFound, "draw-not-found")
		d.post(path+"/reveal", `{"party":"a","secret":"00"}`).isProblem(http.StatusNotFound, "draw-not-found")
		d.post(path+"/open", "", operator).isProblem(http.StatusNotFound, "draw-not-found")
	}
	d.post(d.path+"/open", "").isProblem(http.StatusUnauthorized, "unauthorized")
	waited, err := s.catalog.Create(t.Context(), reservation.Terms{
		Name: "x", Stock: 1, PerOrderLimit: 1, PaymentWindow: time.Hour, Waitlist: true,
	})
	require.NoError(t, err)
	list := "/v1/sales/" + waited.ID.String() + "/draw"
	d.get(list).isProblem(http.StatusNotFound, "draw-not-found")
	d.post(list+"/beacon", drandAnswer).isProblem(http.StatusNotFound, "draw-not-found")

	sold := s.sale(reservation.Terms{Stock: 1})
	s.buy(sold, "", as("u1")).is(http.StatusAccepted)
	p := d.post("/v1/sales/"+sold.String()+"/draw", fmt.Sprintf(`{"entries_sale_id":"%s"}`, d.entries), operator).
		isProblem(http.StatusConflict, "illegal-transition")
	require.Contains(t, p["detail"], "units of it are held or sold")
}

// Whoever floods a draw with wrong signatures keeps no party from revealing its secret, and no one from another address
// from bringing the right one.
func TestWrongSignaturesHoldNoLine(t *testing.T) {
	t.Parallel()
	s := openShop(t, behindProxy, func(c *Config) { c.AddressStreams = 4 })
	d, other := s.prepareDraw(), s.prepareDraw()
	d.create("").is(http.StatusCreated)
	secret := bytes.Repeat([]byte{1}, 32)
	other.create(fmt.Sprintf(`,"freeze_seconds":10,"parties":[{"name":"ann","commitment":"%x"}]`, sha256.Sum256(secret))).
		is(http.StatusCreated)
	d.enter("u1")
	other.enter("u1")
	d.startWorker()
	d.close()
	other.close()
	d.moveToRound()
	stranger := fromAddress("192.0.2.1")
	wrong := func(n int) string {
		return fmt.Sprintf(`{"round":%d,"signature":"%s%08x"}`, testshop.BeaconRound, signature[:88], n)
	}
	require.Equal(t, http.StatusBadRequest, d.post(d.path+"/beacon", wrong(0), stranger).status)
	require.Equal(t, http.StatusBadRequest, d.post(d.path+"/beacon", wrong(0), stranger).status, "it is remembered")
	turns := s.server.draws.verifier.line.turns
	for range cap(turns) { // a flood holds them
		testkit.Eventually(t, testshop.Soon, "a turn is free", func() bool {
			select {
			case turns <- struct{}{}:
				return true
			default:
				return false
			}
		})
	}
	waiting := make(chan reply, 5)
	for n := range cap(waiting) {
		go func() { waiting <- d.post(d.path+"/beacon", wrong(n+1), stranger) }()
	}
	p := (<-waiting).isProblem(http.StatusTooManyRequests, "rate-limited")
	require.Contains(t, p["detail"], "in line")
	other.post(other.path+"/reveal", fmt.Sprintf(`{"party":"ann","secret":"%x"}`, secret)).is(http.StatusOK)
	for range cap(turns) {
		<-turns
	}
	for range cap(waiting) - 1 {
		require.Contains(t, []int{http.StatusBadRequest, http.StatusServiceUnavailable}, (<-waiting).status)
	}
	d.post(d.path+"/beacon", drandAnswer).is(http.StatusOK)
	d.post(d.path+"/beacon", wrong(99), stranger).isProblem(http.StatusBadRequest, "invalid-beacon")
}

// A crowd that asks for proofs keeps nobody from a sale, and no one from giving the seed.
func TestProofsWaitInLine(t *testing.T) {
	t.Parallel()
	s := openShop(t, func(c *Config) { c.MaxInFlight = 8 }) // one slot for all who look at sales
	d := s.prepareDraw()
	d.create("").is(http.StatusCreated)
	receipts := d.enter("u1", "u2", "u3")
	d.startWorker()
	d.close()
	d.moveToRound()
	lock, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = lock.Rollback(context.Background()) }()
	_, err = lock.Exec(t.Context(), "LOCK TABLE draw_chunks")
	require.NoError(t, err)
	// A receipt that anybody can make up takes the turn of none that was signed.
	proofs, strange := make(chan reply, len(receipts)), make(chan reply, 2)
	for range cap(strange) {
		raw, err := base64.RawURLEncoding.DecodeString(receipts["u1"])
		require.NoError(t, err)
		raw[len(raw)-1]++ // of the signature
		go func() { strange <- d.proof(base64.RawURLEncoding.EncodeToString(raw)) }()
	}
	d.awaitReaders(lineTurns)
	for _, receipt := range receipts {
		go func() { proofs <- d.proof(receipt) }()
	}
	d.awaitReaders(2 * lineTurns)
	s.get("/v1/sales/" + d.goods.String()).is(http.StatusOK)
	d.post(d.path+"/beacon", drandAnswer).is(http.StatusOK)
	require.NoError(t, lock.Rollback(t.Context()))
	for range receipts {
		(<-proofs).is(http.StatusOK)
	}
	for range cap(strange) {
		(<-strange).is(http.StatusOK)
	}
}

// awaitReaders waits until so many calls wait for a lock of the lists.
func (d drawn) awaitReaders(n int) {
	d.t.Helper()
	testkit.Eventually(d.t, 10*time.Second, "proofs are read", func() bool {
		var reading int
		err := d.pool.QueryRow(d.t.Context(), `SELECT count(*) FROM pg_locks
			WHERE NOT granted AND relation = 'draw_chunks'::regclass`).Scan(&reading)
		return err == nil && reading == n
	})
}

// A refused change, which anybody can make, does not have all draws read again.
func TestRefusedBeaconKeepsAnswers(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	d := s.prepareDraw()
	d.create("").is(http.StatusCreated)
	testkit.Eventually(t, 20*time.Second, "the answer is that of before", func() bool {
		before := d.get(d.path)
		testshop.Exec(t, s.pool, "UPDATE draws SET freeze_seconds = freeze_seconds + 1 WHERE sale_id = $1", d.goods)
		d.post(d.path+"/beacon", drandAnswer).isProblem(http.StatusConflict, "draw-not-frozen")
		return d.get(d.path).body == before.body
	})
}

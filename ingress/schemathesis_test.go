//go:build schemathesis

package ingress

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/labstack/echo/v4"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/reservation"
)

// streamTime is how long a stream stays open: schemathesis reads an answer to its end.
const streamTime = 200 * time.Millisecond

// signedByStripe sends an event as Stripe's own library signs it.
func (s *shop) signedByStripe(secret, body string) reply {
	s.t.Helper()
	const sign = `import stripe, sys, time
now, secret, body = int(time.time()), *sys.argv[1:]
print(f"t={now},v1=" + stripe.WebhookSignature._compute_signature(f"{now}.{body}", secret), end="")`
	header, err := exec.CommandContext(s.t.Context(), "../bin/schemathesis/bin/python", "-c", sign, secret, body).Output()
	require.NoError(s.t, err)
	return s.stripe(body, string(header))
}

// TestSchemathesis has schemathesis make requests from openapi.yaml, valid and invalid ones, and follow its links, on a
// server with a worker, sales and orders. Its settings are in testdata/schemathesis.toml. Each answer is held against
// the document by the test itself as well.
func TestSchemathesis(t *testing.T) {
	program, err := filepath.Abs("../bin/schemathesis/bin/st")
	require.NoError(t, err)
	_, stripe := withStripe(t, stripeSecret)
	pay := func(c *Config) { c.BuyerPay = SwitchOn }
	s := openShop(t, withJWT, stripe, pay) // in the other mode every user id is a credential
	s.server.router.echo.Pre(func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			if !strings.HasSuffix(c.Request().URL.Path, "/events") {
				return next(c)
			}
			ctx, cancel := context.WithTimeout(c.Request().Context(), streamTime)
			defer cancel()
			c.SetRequest(c.Request().WithContext(ctx))
			return next(c)
		}
	})
	s.startWorker()
	token := sign(t, jwt.SigningMethodHS256, []byte(jwtSecret), "", tokenClaims())
	buyer := bearing(token)
	order := func(window time.Duration) string {
		sale := s.sale(reservation.Terms{Stock: 1_000_000, PerOrderLimit: 1_000_000, PaymentWindow: window})
		return s.buy(sale, "", buyer, prefer("wait=30")).is(http.StatusCreated)["order_id"].(string)
	}
	final, open, cancelled := order(0), order(time.Hour), order(time.Hour)
	due := newReference()
	s.post(paymentsPath, fmt.Sprintf(`{"reference":%q}`, due), operator).is(http.StatusOK)
	unclear := s.signedByStripe(stripeSecret, paidIntent(newReference(), "4900", "eur", metadataOf("cart 7"))).
		is(http.StatusOK)["reference"].(string)
	s.signedByStripe(stripeSecret, `{"type":"charge.succeeded","emoji":"🎟"}`).is(http.StatusOK)
	for body, outcome := range map[string]string{
		paidIntent(newReference(), "500000", "isk", metadataOf("cart 7")):                    `"amount":5000,`,
		paidIntent(newReference(), "4900.0", "eur", metadataOf("cart 7")):                    `"amount":4900,`,
		paidIntent(newReference(), "4900", "eur", `"metadata":{"order_id":7}`):               `"unreadable":"order_id 7"`,
		paidIntent(newReference(), "4900", "eur", `"name":"\ud83c",`+metadataOf("cart 7")):   `"amount":4900,`,
		strings.Replace(paidIntent("pi_x", "1", "eur", metadataOf("x")), "true", "false", 1): "test mode",
		`{"object":"v2.core.event","type":"v1.payment_intent.succeeded"}`:                    "thin event",
	} {
		answer := s.signedByStripe(stripeSecret, body)
		answer.is(http.StatusOK)
		require.Contains(t, answer.body, outcome)
	}
	disputed := newReference()
	s.signedByStripe(stripeSecret, paidIntent(disputed, "4900", "eur", metadataOf("cart 7"))).is(http.StatusOK)
	answer := s.signedByStripe(stripeSecret, stripeDispute("created", disputed, "needs_response"))
	require.Equal(t, "disputed", answer.is(http.StatusOK)["state"])
	answer = s.signedByStripe(stripeSecret, refundedCharge(strconv.Quote(disputed), "4900", `"metadata":{}`))
	require.Equal(t, "refunded", answer.is(http.StatusOK)["state"])
	s.signedByStripe("whsec_another-secret", "{}").isProblem(http.StatusBadRequest, "invalid-request")
	drawn, byParties := s.prepareDraw(), s.prepareDraw()
	drawn.create("").is(http.StatusCreated)
	receipt := s.buy(drawn.entries, "", buyer).is(http.StatusAccepted)["receipt"].(string)
	drawn.close()
	drawn.moveToRound()
	drawn.post(drawn.path+"/beacon", drandAnswer).is(http.StatusOK)
	drawn.proof(receipt).is(http.StatusOK)
	secret := make([]byte, sha256.Size)
	byParties.create(fmt.Sprintf(`,"parties":[{"name":"ann","commitment":"%x"}]`, sha256.Sum256(secret))).
		is(http.StatusCreated)
	byParties.close()
	byParties.post(byParties.path+"/reveal", fmt.Sprintf(`{"party":"ann","secret":"%x"}`, secret)).is(http.StatusOK)
	waited := s.sale(reservation.Terms{Stock: 1, PerOrderLimit: 1, PaymentWindow: time.Hour, Waitlist: true})
	holder := tokenClaims()
	holder["sub"] = "holder"
	s.buy(waited, "", bearing(sign(t, jwt.SigningMethodHS256, []byte(jwtSecret), "", holder))).is(http.StatusAccepted)
	settings, err := os.ReadFile("testdata/schemathesis.toml")
	require.NoError(t, err)
	folder := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(folder, "schemathesis.toml"), []byte(os.Expand(string(settings),
		func(name string) string {
			return map[string]string{
				"BUYER_TOKEN": token, "OPERATOR_TOKEN": adminToken,
				"FINAL_ORDER": final, "OPEN_ORDER": open, "CANCELLED_ORDER": cancelled, "REFUND_DUE": due, "UNCLEAR": unclear,
				"DRAWN_SALE": drawn.goods.String(), "PARTIES_SALE": byParties.goods.String(), "WAITED_SALE": waited.String(),
			}[name]
		})), 0o600))
	run := exec.CommandContext(t.Context(), program, "run", s.url+"/openapi.yaml")
	run.Dir = folder // it writes there, too
	output, err := run.CombinedOutput()
	require.NoError(t, err, "%s", output)
	t.Logf("%s", output)
	// It must have come to where something happens.
	metrics := s.get("/metrics").body
	for _, r := range s.server.router.echo.Routes() {
		if r.Method != http.MethodHead {
			none := `stampede_http_requests_total{route="` + r.Method + " " + r.Path + `",status="2xx"} 0` + "\n"
			assert.False(t, strings.Contains(metrics, none), "no success: %s %s", r.Method, r.Path)
		}
	}
}

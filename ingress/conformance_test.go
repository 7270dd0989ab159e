package ingress

import (
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/ratelimit"
	"stampede/internal/test/testkit"
	"stampede/reservation"
)

// RFC 9457, section 3.1: type, title, status and detail; section 3.1.1: the type is a reference to a page; section 3:
// the media type; section 3.2: extension members.
func TestProblemsFollowRFC9457(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	r := s.buy(sale, `{"quantity":3}`, as("ada"))
	p := r.isProblem(http.StatusUnprocessableEntity, "quantity-over-limit")
	require.EqualValues(t, 2, p["limit"])
	// A relative type is resolved with the URL of the request (section 3.1.1, RFC 3986, section 5).
	base, err := url.Parse(ordersPath(sale))
	require.NoError(t, err)
	page, err := base.Parse(p["type"].(string))
	require.NoError(t, err)
	explained := s.get(page.Path)
	require.Equal(t, http.StatusOK, explained.status)
	require.Equal(t, "text/html; charset=utf-8", explained.header.Get("Content-Type"))
	require.Contains(t, explained.body, "The quantity is over the limit")
	inJSON := s.get(page.Path, reqHeader{"Accept", "application/problem+json, application/json;q=0.9"}).is(http.StatusOK)
	require.Equal(t, []any{p["type"], p["title"], p["status"]}, []any{inJSON["type"], inJSON["title"], inJSON["status"]})
	s.get("/problems/nonsense").isProblem(http.StatusNotFound, "not-found")
}

// RFC 7240, section 2: names are case-insensitive, values may be quoted, parameters follow a semicolon, several headers
// are one list, of a preference that is sent twice the first counts, and unknown ones are ignored. Section 3:
// Preference-Applied. Section 4.3: wait.
func TestPreferFollowsRFC7240(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.startWorker()
	sale := s.sale(reservation.Terms{Stock: 100})
	for i, test := range []struct {
		prefer  []string
		applied string
	}{
		{[]string{`foo="a, wait=3"; bar; wait=4, wait=10`}, "wait=10"}, // TestPreferredWait has more
		{[]string{"respond-async", "wait=10"}, "wait=10"},
		{[]string{"wait=soon"}, ""},
		{[]string{""}, ""},
	} {
		headers := []reqHeader{as("buyer-" + strconv.Itoa(i))}
		for _, value := range test.prefer {
			headers = append(headers, reqHeader{"Prefer", value})
		}
		r := s.buy(sale, "", headers...)
		require.Equal(t, test.applied, r.header.Get("Preference-Applied"), test.prefer)
		if test.applied == "" {
			r.is(http.StatusAccepted)
		} else {
			r.is(http.StatusCreated)
		}
	}
}

// RFC 9110, sections 10.2.1 and 15.5.6: Allow with 405, and with OPTIONS (section 9.3.7), which is safe and needs no
// credentials. Section 9.1: methods are case-sensitive.
func TestMethodsFollowRFC9110(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 1})
	before := s.stock(sale)
	// TestUnknownRoutesAndMethods has more.
	for _, method := range []string{http.MethodTrace, "QUERY", "post", "PROPFIND"} {
		r := s.ask(method, ordersPath(sale), nil)
		r.isProblem(http.StatusMethodNotAllowed, "method-not-allowed")
		require.Equal(t, "OPTIONS, POST", r.header.Get("Allow"))
	}
	require.Equal(t, before, s.stock(sale))
}

// RFC 9110, section 9.3.2: HEAD is answered with the headers of GET, without a body.
func TestHeadFollowsRFC9110(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 1})
	path, _ := s.confirm(s.sale(reservation.Terms{Stock: 1}), "ada")
	for _, path := range []string{
		"/livez", "/readyz", "/v1/sales", "/v1/sales/" + sale.String(), "/v1/orders", path, "/docs", "/openapi.yaml",
		"/openapi.json", "/problems", "/problems/sold-out", "/problems/x", "/v1/sales/x", "/v1/sales?limit=0",
	} {
		testkit.Eventually(t, 30*time.Second, path+" is the same for GET and HEAD", func() bool {
			get, head := s.get(path, as("ada")), s.ask(http.MethodHead, path, nil, as("ada"))
			require.Empty(t, head.body)
			require.Equal(t, get.status, head.status)
			return len(get.body) == 0 || sameHeaders(get, head)
		})
	}
}

// sameHeaders compares all headers but Date: a second may begin between the two.
func sameHeaders(get, head reply) bool {
	get.header.Del("Date")
	head.header.Del("Date")
	for name := range get.header {
		if get.header.Get(name) != head.header.Get(name) {
			return false
		}
	}
	return len(get.header) == len(head.header) && head.header.Get("Content-Length") == strconv.Itoa(len(get.body))
}

// RFC 9110, section 10.2.2: Location with 201 (section 15.3.2) and 202 leads to what was made. Section 10.2.3:
// Retry-After with 429 (RFC 6585, section 4) and 503 is a number of seconds.
func TestLocationAndRetryAfterFollowRFC9110(t *testing.T) {
	t.Parallel()
	s := openShop(t, func(c *Config) { c.UserLimit = Limit{Rate: ratelimit.Rate(0.001), Burst: 2} })
	created := s.post("/v1/sales", `{"name":"a sale","stock":5}`, operator)
	id := created.is(http.StatusCreated)["id"]
	require.Equal(t, id, s.get(created.header.Get("Location")).is(http.StatusOK)["id"])
	sale := uuid.MustParse(id.(string))
	accepted := s.buy(sale, "", as("ada"))
	require.Equal(t,
		accepted.is(http.StatusAccepted)["order_id"],
		s.get(accepted.header.Get("Location"), as("ada")).is(http.StatusOK)["order_id"])

	s.buy(sale, "", as("ada"))
	limited := s.buy(sale, "", as("ada"))
	limited.isProblem(http.StatusTooManyRequests, "rate-limited")
	seconds, err := strconv.Atoi(limited.header.Get("Retry-After"))
	require.NoError(t, err)
	require.Positive(t, seconds)
	s.server.stopping.Store(true)
	stopping := s.get("/readyz")
	stopping.isProblem(http.StatusServiceUnavailable, "not-ready")
	require.Equal(t, "1", stopping.header.Get("Retry-After"))
	s.server.stopping.Store(false)
}

// RFC 9110, section 13.1: If-None-Match compares weakly and takes lists and "*", If-Match compares strongly. Section
// 13.2.2: If-Match comes first, and If-None-Match puts If-Modified-Since out of force. Section 15.4.5: 304 has the
// headers of the 200. Section 13.2.1: requests that change something ignore If-None-Match.
func TestConditionalRequestsFollowRFC9110(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 1})
	for _, path := range []string{"/v1/sales/" + sale.String(), "/openapi.yaml", "/docs", "/problems/sold-out"} {
		full := s.get(path)
		tag := full.header.Get("ETag")
		require.NotEmpty(t, tag)
		ifNone := func(values ...string) (headers []reqHeader) {
			for _, value := range values {
				headers = append(headers, reqHeader{"If-None-Match", value})
			}
			return headers
		}
		for _, headers := range [][]reqHeader{
			ifNone(tag), ifNone("W/" + tag), ifNone("*"), ifNone(`"a", ` + tag), ifNone(`"a,b"`, tag),
			ifNone(`"a" ,` + tag + `, "b"`),
			append(ifNone(tag), reqHeader{"If-Modified-Since", "Sat, 01 Jan 2000 00:00:00 GMT"}),
			append(ifNone(tag), reqHeader{"If-Match", "*"}), append(ifNone(tag), reqHeader{"If-Match", `"a", ` + tag}),
		} {
			r := s.get(path, headers...)
			require.Equal(t, http.StatusNotModified, r.status, headers)
			require.Empty(t, r.body)
			for _, name := range []string{"ETag", "Cache-Control", "Vary", "Content-Security-Policy"} {
				require.Equal(t, full.header.Get(name), r.header.Get(name), name)
			}
		}
		for _, headers := range [][]reqHeader{
			ifNone(`"another"`), ifNone(""), ifNone(strings.Trim(tag, `"`)),
			{{"If-Match", tag}},
			{{"If-Modified-Since", time.Now().UTC().Format(http.TimeFormat)}},
			append(ifNone(`"another"`), reqHeader{"If-Modified-Since", time.Now().UTC().Format(http.TimeFormat)}),
		} {
			require.Equal(t, http.StatusOK, s.get(path, headers...).status, headers)
		}
		for _, headers := range [][]reqHeader{
			{{"If-Match", `"another"`}}, {{"If-Match", "W/" + tag}}, append(ifNone(tag), reqHeader{"If-Match", `"another"`}),
		} {
			s.get(path, headers...).isProblem(http.StatusPreconditionFailed, "precondition-failed")
		}
	}
	s.post("/v1/sales/"+sale.String()+"/pause", "", operator, reqHeader{"If-None-Match", "*"}).is(http.StatusOK)
}

// RFC 6750, section 3: a challenge with each 401, without an error code if there were no credentials; section 3.1:
// invalid_request (400), invalid_token (401) and insufficient_scope (403). RFC 9110, section 11.1: the name of the
// scheme is case-insensitive; section 15.5.2: there is always a challenge.
func TestCredentialsFollowRFC6750(t *testing.T) {
	t.Parallel()
	buyers := openShop(t, withJWT)
	off := openShopOn(t, buyers.on, func(c *Config) { c.AdminToken = "" })
	sale := buyers.sale(reservation.Terms{Stock: 1}).String()
	token := bearing("x")
	for name, test := range map[string]struct {
		answer    reply
		status    int
		slug      string
		challenge string
	}{
		"no token": {buyers.get("/v1/orders"), 401, "unauthorized", `Bearer realm="stampede"`},
		"other scheme": {
			buyers.get("/v1/orders", reqHeader{"Authorization", "Basic eA=="}), 401, "unauthorized", `Bearer realm="stampede"`,
		},
		"bad token": {
			buyers.get("/v1/orders", token), 401, "unauthorized", `Bearer realm="stampede", error="invalid_token"`,
		},
		"scheme alone": {
			buyers.get("/v1/orders", reqHeader{"Authorization", "Bearer"}), 400, "invalid-request",
			`Bearer realm="stampede", error="invalid_request"`,
		},
		"two tokens": {
			buyers.get("/v1/orders", token, token), 400, "invalid-request", `Bearer realm="stampede", error="invalid_request"`,
		},
		"list of tokens": {
			buyers.get("/v1/orders", bearing("x, Bearer y")), 400, "invalid-request",
			`Bearer realm="stampede", error="invalid_request"`,
		},
		"no operator": {buyers.post("/v1/sales/"+sale+"/end", ""), 401, "unauthorized", `Bearer realm="stampede-admin"`},
		"bad operator's token": {
			buyers.post("/v1/sales/"+sale+"/end", "", token), 401, "unauthorized",
			`Bearer realm="stampede-admin", error="invalid_token"`,
		},
		"two operators": {
			buyers.post("/v1/sales/"+sale+"/end", "", operator, operator), 400, "invalid-request",
			`Bearer realm="stampede-admin", error="invalid_request"`,
		},
		"no operators": {
			off.post("/v1/sales/"+sale+"/end", "", operator), 403, "forbidden",
			`Bearer realm="stampede-admin", error="insufficient_scope"`,
		},
		"no user header": {off.get("/v1/orders"), 401, "unauthorized", `Header realm="stampede", name="X-User-Id"`},
	} {
		test.answer.isProblem(test.status, test.slug)
		require.Equal(t, test.challenge, test.answer.header.Get("WWW-Authenticate"), name)
	}
	valid := sign(t, jwt.SigningMethodHS256, []byte(jwtSecret), "", tokenClaims())
	buyers.get("/v1/orders", reqHeader{"Authorization", "bEARER " + valid}).is(http.StatusOK)
	buyers.get("/v1/orders", reqHeader{"Authorization", "Bearer   " + valid}).is(http.StatusOK)
}

// The Idempotency-Key draft (draft-ietf-httpapi-idempotency-key-header, section 2.1) makes the key a string of
// structured fields (RFC 9651, section 3.3.3). Quoted and bare keys are the same; other structured fields are refused.
func TestIdempotencyKeysFollowDraft(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 100})
	for _, test := range []struct{ first, same string }{
		{"abc", `"abc"`},
		{`"abc"`, "abc"},
		{`"a\"b\\c"`, `"a\"b\\c"`},
		{`"a;b,c"`, `"a;b,c"`},
		{"8e03978e-40d5-43e8-bc93-6894a57f9324", `"8e03978e-40d5-43e8-bc93-6894a57f9324"`},
		{"123", `"123"`},
	} {
		user := as(uuid.NewString())
		first := s.buy(sale, "", user, withKey(test.first))
		again := s.buy(sale, "", user, withKey(test.same))
		require.Equal(t, first.is(http.StatusAccepted), again.is(http.StatusAccepted), test.first)
		require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
	}
	before := s.stock(sale)
	for _, key := range []string{
		`"`, `""`, `"abc`, `abc"`, `a"b`, `"a"b"`, `"a\b"`, `"abc\"`, `"a b"`, `"abc";p=1`, `"abc", "def"`,
		"abc,def", "abc;p", ":YWJj:", "?1", "@1659578233", `%"abc"`, "(a)", `"` + strings.Repeat("k", 256) + `"`, `a\b`,
	} {
		s.buy(sale, "", as("eve"), withKey(key)).isProblem(http.StatusBadRequest, "invalid-request")
	}
	require.Equal(t, before, s.stock(sale))
	create := func(key string) reply {
		return s.post("/v1/sales", `{"name":"once","stock":1}`, operator, withKey(key))
	}
	require.Equal(t, create("one").is(http.StatusCreated)["id"], create(`"one"`).is(http.StatusCreated)["id"])
}

// RFC 9562, section 4: ids are written in lower case with hyphens and read in any case; section 5.7: version 7, which
// begins with the time. Other forms of a UUID (sections 4 and appendix) are not ids here.
func TestIDsFollowRFC9562(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	began := time.Now().Add(-time.Minute).UnixMilli()
	sale := s.post("/v1/sales", `{"name":"a sale","stock":5}`, operator).is(http.StatusCreated)["id"].(string)
	placed := s.post("/v1/sales/"+sale+"/orders", "", as("ada")).is(http.StatusAccepted)["order_id"].(string)
	for _, text := range []string{sale, placed} {
		id := uuid.MustParse(text)
		require.Equal(t, id.String(), text)
		require.EqualValues(t, 7, id.Version())
		require.Equal(t, uuid.RFC4122, id.Variant())
		millis := int64(id[0])<<40 | int64(id[1])<<32 | int64(id[2])<<24 | int64(id[3])<<16 | int64(id[4])<<8 | int64(id[5])
		require.Greater(t, millis, began)
	}
	s.get("/v1/sales/" + strings.ToUpper(sale)).is(http.StatusOK)
	s.get("/v1/orders/"+strings.ToUpper(placed), as("ada")).is(http.StatusOK)
	s.post("/v1/sales/"+strings.ToUpper(sale)+"/orders", "", as("bob")).is(http.StatusAccepted)
	for _, form := range []string{
		strings.ReplaceAll(sale, "-", ""), "%7B" + sale + "%7D", "{" + sale + "}", "urn:uuid:" + sale, sale[:35], sale + "0",
		"x", sale + "%00", "%0d%0a", "..%2f" + sale, sale[:35] + "%7d", strings.Repeat("a", 10<<10),
		uuid.Nil.String(), uuid.Max.String(), uuid.NewString(),
	} {
		s.post("/v1/sales/"+form+"/pause", "", operator).isProblem(http.StatusNotFound, "sale-not-found")
		s.get("/v1/sales/"+form).isProblem(http.StatusNotFound, "sale-not-found")
		s.post("/v1/sales/"+form+"/orders", "", as("eve")).isProblem(http.StatusNotFound, "sale-not-found")
		s.get("/v1/orders/"+form, as("ada")).isProblem(http.StatusNotFound, "order-not-found")
	}
}

// HTML standard, section 9.2: events have a name, an id and data; retry sets the time after which a client reconnects;
// Last-Event-ID resumes; 204 ends reconnecting. An id that is not one of ours resumes nothing.
func TestStreamsFollowHTMLStandard(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	path, id := s.confirm(s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour}), "ada")
	_, err := s.ledger.Pay(t.Context(), id, "ada", "pi_1")
	require.NoError(t, err)
	whole := s.get(path+"/events", as("ada"))
	require.Equal(t, "text/event-stream", whole.header.Get("Content-Type"))
	require.True(t, strings.HasPrefix(whole.body, "retry: 2000\n\nevent: paid\nid: 3\ndata: {"), whole.body)
	require.True(t, strings.HasSuffix(whole.body, "}\n\n"))
	for last, resumed := range map[string]bool{
		"3": true, "2": false, "0": false, "-1": false, "x": false, "": false, "3 ": true, "4": false,
		"999999999999999999999": false, "0x3": false,
	} {
		r := s.get(path+"/events", as("ada"), reqHeader{"Last-Event-ID", last})
		if resumed {
			require.Equal(t, http.StatusNoContent, r.status, "%q", last)
			require.Empty(t, r.body)
		} else {
			require.Equal(t, whole.body, r.body, "%q", last)
		}
	}
}

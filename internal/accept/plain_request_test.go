package accept

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/tracing"
)

const (
	plainSale = "01910b0e-7d70-7cc0-8000-00000000abcd"

	sampledParent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
)

// plainHead is the text of a plain purchase's head, after changes: "Name: value" replaces the line of that name or is a
// new one, "-Name" removes it.
func plainHead(changes ...string) string {
	lines := []string{
		"Host: shop.example:8080", "User-Agent: buyer/1.0", "Content-Length: 14", "Content-Type: application/json",
		"X-User-ID: ada", "Accept-Encoding: gzip",
	}
	for _, change := range changes {
		name, _, _ := strings.Cut(strings.TrimPrefix(change, "-"), ":")
		kept := lines[:0:0]
		for _, line := range lines {
			if !strings.HasPrefix(line, name+":") {
				kept = append(kept, line)
			}
		}
		if lines = kept; !strings.HasPrefix(change, "-") {
			lines = append(lines, change)
		}
	}
	return "POST /v1/sales/" + plainSale + "/orders HTTP/1.1\r\n" + strings.Join(lines, "\r\n") + "\r\n\r\n"
}

const plainJSON = `{"quantity":1}`

// Purchases by what is special in them: those that are plain, and others, most of which are attacks.
var (
	plainRequests = map[string]string{
		"typical":               plainHead() + plainJSON,
		"lower-case names":      lowerNames(plainHead()) + plainJSON,
		"empty body":            plainHead("Content-Length: 0"),
		"no media type":         plainHead("-Content-Type") + plainJSON,
		"another media type":    plainHead("Content-Type: text/plain") + plainJSON,
		"no buyer":              plainHead("-X-User-ID") + plainJSON,
		"key":                   plainHead("Idempotency-Key: k-1") + plainJSON,
		"quoted key":            plainHead(`Idempotency-Key: "k-1"`) + plainJSON,
		"keep-alive":            plainHead("Connection: keep-alive") + plainJSON,
		"Keep-Alive":            plainHead("Connection: Keep-Alive") + plainJSON,
		"forwarded":             plainHead("X-Forwarded-For: 203.0.113.9, 10.0.0.1") + plainJSON,
		"browser":               plainHead("Cookie: a=b; c=d", "Origin: https://shop", "Sec-Fetch-Mode: cors") + plainJSON,
		"Chromium":              chromiumHead("https://shop.example") + plainJSON,
		"another origin":        chromiumHead("https://evil.example") + plainJSON,
		"no origin":             chromiumHead("null") + plainJSON,
		"address as host":       plainHead("Host: [2001:db8::1]:80") + plainJSON,
		"broken JSON":           plainHead() + `{"quantity":1]`,
		"invalid sale":          strings.Replace(plainHead(), plainSale, strings.Repeat("-", 36), 1) + plainJSON,
		"noise twice":           plainHead("Accept: a", "Via: 1.1 b") + plainJSON,
		"invalid buyer":         plainHead("X-User-ID: a b") + plainJSON,
		"two in a row":          plainHead() + plainJSON + plainHead("X-User-ID: bob") + plainJSON,
		"line ends in between":  plainHead() + plainJSON + "\r\n" + plainHead("X-User-ID: bob") + plainJSON,
		"largest":               plainHead("Content-Length: 3500") + plainJSON + strings.Repeat(" ", 3486),
		"body like a request":   plainHead("Content-Length: 5") + "GET /" + plainHead() + plainJSON,
		"no length in the body": plainHead("Content-Length: 0") + plainJSON,
		"sampled trace":         plainHead("traceparent: "+sampledParent) + plainJSON,
		"trace of more flags":   plainHead("traceparent: "+sampledParent[:54]+"b", "tracestate: a=b") + plainJSON,
		"unsampled trace":       plainHead("traceparent: "+sampledParent[:54]+"a") + plainJSON,
		"trace of no sense":     plainHead("traceparent: "+strings.Repeat("1", 200)) + plainJSON,
	}
	otherRequests = map[string]string{
		"nothing":                    "",
		"a byte":                     "P",
		"half a line":                plainHead()[:40],
		"half a head":                plainHead()[:120],
		"half a body":                plainHead() + plainJSON[:5],
		"no body":                    plainHead(),
		"GET":                        "GET /livez HTTP/1.1\r\nHost: shop\r\n\r\n",
		"OPTIONS":                    strings.Replace(plainHead(), "POST", "OPTIONS", 1) + plainJSON,
		"lower-case method":          strings.Replace(plainHead(), "POST", "post", 1) + plainJSON,
		"HTTP/1.0":                   strings.Replace(plainHead(), "HTTP/1.1", "HTTP/1.0", 1) + plainJSON,
		"HTTP/1.0 and keep-alive":    strings.Replace(plainHead("Connection: keep-alive"), "P/1.1", "P/1.0", 1) + plainJSON,
		"HTTP/1.2":                   strings.Replace(plainHead(), "HTTP/1.1", "HTTP/1.2", 1) + plainJSON,
		"HTTP/2.0":                   strings.Replace(plainHead(), "HTTP/1.1", "HTTP/2.0", 1) + plainJSON,
		"HTTP/2 preface":             "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
		"HTTP/0.9":                   "POST /v1/sales/" + plainSale + "/orders\r\n\r\n",
		"absolute form":              strings.Replace(plainHead(), "/v1", "http://shop/v1", 1) + plainJSON,
		"authority form":             "CONNECT shop:80 HTTP/1.1\r\nHost: shop\r\n\r\n",
		"query":                      strings.Replace(plainHead(), "/orders", "/orders?a=b", 1) + plainJSON,
		"fragment":                   strings.Replace(plainHead(), "/orders", "/orders#a", 1) + plainJSON,
		"trailing slash":             strings.Replace(plainHead(), "/orders", "/orders/", 1) + plainJSON,
		"double slash":               strings.Replace(plainHead(), "/sales", "//sales", 1) + plainJSON,
		"dots":                       strings.Replace(plainHead(), "/sales", "/x/../sales", 1) + plainJSON,
		"percent-encoded path":       strings.Replace(plainHead(), "/sales", "/%73ales", 1) + plainJSON,
		"percent-encoded sale":       strings.Replace(plainHead(), "/0191", "/%301", 1) + plainJSON,
		"upper-case sale":            strings.Replace(plainHead(), plainSale, strings.ToUpper(plainSale), 1) + plainJSON,
		"another route":              strings.Replace(plainHead(), "/orders", "/pause", 1) + plainJSON,
		"two spaces in the line":     strings.Replace(plainHead(), "POST ", "POST  ", 1) + plainJSON,
		"tab in the line":            strings.Replace(plainHead(), "POST ", "POST\t", 1) + plainJSON,
		"space behind the line":      strings.Replace(plainHead(), "HTTP/1.1", "HTTP/1.1 ", 1) + plainJSON,
		"line ends in front":         "\r\n" + plainHead() + plainJSON,
		"five line ends in between":  plainHead() + plainJSON + "\r\n\r\n\n" + plainHead() + plainJSON,
		"only line ends behind":      plainHead() + plainJSON + "\r\n",
		"bare LF":                    strings.ReplaceAll(plainHead(), "\r\n", "\n") + plainJSON,
		"a bare LF in the head":      strings.Replace(plainHead(), "\r\nContent-Type", "\nContent-Type", 1) + plainJSON,
		"bare LF at the end":         strings.Replace(plainHead(), "\r\n\r\n", "\r\n\n", 1) + plainJSON,
		"bare CR":                    strings.Replace(plainHead(), "\r\nContent-Type", "\rContent-Type", 1) + plainJSON,
		"CR CR LF":                   strings.Replace(plainHead(), "ada\r\n", "ada\r\r\n", 1) + plainJSON,
		"obs-fold":                   plainHead("X-User-ID: ada\r\n bob") + plainJSON,
		"obs-fold of the length":     plainHead("Content-Length:\r\n 14") + plainJSON,
		"space in front of a header": plainHead(" X-User-ID: bob") + plainJSON,
		"first line folded":          strings.Replace(plainHead(), "\r\nHost", "\r\n Host", 1) + plainJSON,
		"space before the colon":     plainHead("Content-Length : 14") + plainJSON,
		"tab before the colon":       plainHead("Content-Length\t: 14") + plainJSON,
		"no colon":                   plainHead("Nonsense") + plainJSON,
		"empty name":                 plainHead(": x") + plainJSON,
		"no space behind a colon":    plainHead("Content-Length:14") + plainJSON,
		"two spaces behind a colon":  plainHead("X-User-ID:  ada") + plainJSON,
		"tab behind a colon":         plainHead("X-User-ID:\tada") + plainJSON,
		"space behind a value":       plainHead("X-User-ID: ada ") + plainJSON,
		"empty value":                plainHead("X-User-ID: ") + plainJSON,
		"NUL in a value":             plainHead("X-User-ID: a\x00b") + plainJSON,
		"NUL in a name":              plainHead("X-User\x00-ID: ada") + plainJSON,
		"tab in a value":             plainHead("X-User-ID: a\tb") + plainJSON,
		"DEL in a value":             plainHead("User-Agent: a\x7f") + plainJSON,
		"UTF-8 in a value":           plainHead("User-Agent: bär") + plainJSON,
		"unknown header":             plainHead("X-Unknown: 1") + plainJSON,
		"long name":                  plainHead(strings.Repeat("X", 40)+": 1") + plainJSON,
		"CL and TE":                  plainHead("Transfer-Encoding: chunked") + "0\r\n\r\n",
		"TE": plainHead("-Content-Length", "Transfer-Encoding: chunked") +
			"e\r\n" + plainJSON + "\r\n0\r\n\r\n",
		"TE identity":            plainHead("Transfer-Encoding: identity") + plainJSON,
		"TE chunked in capitals": plainHead("Transfer-Encoding: Chunked") + "0\r\n\r\n",
		"TE twice":               plainHead("Transfer-Encoding: chunked, chunked") + "0\r\n\r\n",
		"TE with a vertical tab": plainHead("Transfer-Encoding: \x0bchunked") + "0\r\n\r\n",
		"TE by an underscore":    plainHead("Transfer_Encoding: chunked") + "0\r\n\r\n",
		"TE and a space":         plainHead("Transfer-Encoding : chunked") + "0\r\n\r\n",
		"chunk extension": plainHead("-Content-Length", "Transfer-Encoding: chunked") +
			"e;a=\"\n\"\r\n" + plainJSON + "\r\n0\r\n\r\n",
		"chunk size too large": plainHead("-Content-Length", "Transfer-Encoding: chunked") +
			"1000000000000000e\r\n" + plainJSON + "\r\n0\r\n\r\n",
		"chunks and a trailer": plainHead("-Content-Length", "Transfer-Encoding: chunked", "Trailer: X-User-ID") +
			"0\r\nX-User-ID: bob\r\n\r\n",
		"length twice":            plainHead("Content-Length: 14\r\nContent-Length: 14") + plainJSON,
		"two lengths":             plainHead("Content-Length: 14\r\nContent-Length: 0") + plainJSON,
		"two lengths in a line":   plainHead("Content-Length: 14, 14") + plainJSON,
		"no length":               plainHead("-Content-Length") + plainJSON,
		"+5":                      plainHead("Content-Length: +14") + plainJSON,
		"-1":                      plainHead("Content-Length: -1") + plainJSON,
		"leading zero":            plainHead("Content-Length: 014") + plainJSON,
		"two zeros":               plainHead("Content-Length: 00"),
		"hexadecimal":             plainHead("Content-Length: 0xe") + plainJSON,
		"underscore in a length":  plainHead("Content-Length: 1_4") + plainJSON,
		"quoted length":           plainHead(`Content-Length: "14"`) + plainJSON,
		"length over the limit":   plainHead("Content-Length: 4097") + strings.Repeat(" ", 4097),
		"length over everything":  plainHead("Content-Length: 99999999999999999999") + plainJSON,
		"body beyond the buffer":  plainHead("Content-Length: 4096") + plainJSON + strings.Repeat(" ", 4082),
		"Expect":                  plainHead("Expect: 100-continue") + plainJSON,
		"Expect of others":        plainHead("Expect: tea") + plainJSON,
		"no host":                 plainHead("-Host") + plainJSON,
		"two hosts":               plainHead("Host: a\r\nHost: b") + plainJSON,
		"the same host twice":     plainHead("Host: a\r\nHost: a") + plainJSON,
		"host with a path":        plainHead("Host: shop/evil") + plainJSON,
		"host with a user":        plainHead("Host: a@shop") + plainJSON,
		"host with spaces":        plainHead("Host: a b") + plainJSON,
		"host with a comma":       plainHead("Host: a,b") + plainJSON,
		"Connection: close":       plainHead("Connection: close") + plainJSON,
		"Connection: Upgrade":     plainHead("Connection: Upgrade", "Upgrade: h2c") + plainJSON,
		"Connection: TE":          plainHead("Connection: keep-alive, close") + plainJSON,
		"Connection names length": plainHead("Connection: Content-Length") + plainJSON,
		"Connection twice":        plainHead("Connection: keep-alive\r\nConnection: close") + plainJSON,
		"Prefer":                  plainHead("Prefer: wait=0") + plainJSON,
		"Content-Encoding":        plainHead("Content-Encoding: gzip") + plainJSON,
		"two buyers":              plainHead("X-User-ID: ada\r\nX-User-ID: bob") + plainJSON,
		"two keys":                plainHead("Idempotency-Key: a\r\nIdempotency-Key: b") + plainJSON,
		"two origins":             plainHead("Origin: https://shop\r\nOrigin: https://evil") + plainJSON,
		"empty origin":            plainHead("Origin: ") + plainJSON,
		"preflight":               preflightHead("POST"),
		"preflight of a DELETE":   preflightHead("DELETE"),
		"two media types":         plainHead("Content-Type: application/json\r\nContent-Type: text/plain") + plainJSON,
		"two paths of proxies":    plainHead("X-Forwarded-For: a\r\nX-Forwarded-For: b") + plainJSON,
		"two traces":              plainHead("Traceparent: a\r\nTraceparent: b") + plainJSON,
		"huge head":               plainHead("Cookie: "+strings.Repeat("a", 5000)) + plainJSON,
		"head over the limit":     plainHead("Cookie: "+strings.Repeat("a", 16<<10)) + plainJSON,
		"TLS":                     "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + strings.Repeat("\x00", 100),
		"proxy protocol":          "PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n" + plainHead() + plainJSON,
	}
)

// chromiumHead is the head of a purchase by fetch in Chromium 156, from a page of this origin.
func chromiumHead(origin string) string {
	return strings.ReplaceAll("POST /v1/sales/"+plainSale+`/orders HTTP/1.1
Host: api.example
Connection: keep-alive
Content-Length: 14
sec-ch-ua-platform: "Linux"
X-User-ID: ada
Idempotency-Key: k
sec-ch-ua: "Not:A-Brand";v="8", "Chromium";v="156"
Content-Type: application/json
sec-ch-ua-mobile: ?0
User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/156.0.0.0 Safari/537.36
Accept: */*
Origin: `+origin+`
Sec-Fetch-Site: same-site
Sec-Fetch-Mode: cors
Sec-Fetch-Dest: empty
Referer: https://shop.example/
Accept-Encoding: gzip, deflate, br, zstd
Accept-Language: en-US,en;q=0.9

`, "\n", "\r\n")
}

// preflightHead asks for the permission to send a purchase with this method.
func preflightHead(method string) string {
	return "OPTIONS /v1/sales/" + plainSale + "/orders HTTP/1.1\r\nHost: api.example\r\n" +
		"Origin: https://shop.example\r\nAccess-Control-Request-Method: " + method + "\r\nAccess-Control-Request-Headers: content-type\r\n\r\n"
}

// lowerNames writes the names of a head as HTTP/2 gateways do.
func lowerNames(head string) string {
	lines := strings.SplitAfter(head, "\r\n")
	for i, line := range lines[1:] {
		if name, value, ok := strings.Cut(line, ":"); ok {
			lines[i+1] = strings.ToLower(name) + ":" + value
		}
	}
	return strings.Join(lines, "")
}

func newPlainReader(t *testing.T, buyer string) *plainRequest {
	t.Helper()
	allowed := plainAllowList(buyer, true)
	require.NotNil(t, allowed)
	return newPlainRequest(t.Context(), allowed, buyer, "192.0.2.1:4000")
}

func TestPlainPurchasesAreRecognized(t *testing.T) {
	t.Parallel()
	for name, text := range plainRequests {
		require.Positive(t, newPlainReader(t, "X-User-ID").read([]byte(text)), name)
	}
	for name, text := range otherRequests {
		text, _ = strings.CutPrefix(text, plainHead()+plainJSON) // what follows the first is the matter
		text = text[:min(len(text), plainRequestMax)]            // the buffer of a connection
		require.Zero(t, newPlainReader(t, "X-User-ID").read([]byte(text)), name)
	}
}

// What the reader takes net/http takes as well: as many bytes, of which it makes the same request.
func TestPlainPurchasesAreReadAsByNetHTTP(t *testing.T) {
	t.Parallel()
	for name, text := range plainRequests {
		t.Run(name, func(t *testing.T) { readsAsNetHTTP(t, []byte(text)) })
	}
}

func readsAsNetHTTP(t *testing.T, text []byte) {
	t.Helper()
	ours := newPlainReader(t, "X-User-ID")
	length := ours.read(text)
	if length == 0 {
		return
	}
	in := bufio.NewReader(bytes.NewReader(text))
	theirs, err := http.ReadRequest(in)
	require.NoError(t, err)
	body, err := io.ReadAll(theirs.Body)
	require.NoError(t, err)
	left, err := io.ReadAll(in)
	require.NoError(t, err)
	require.Equal(t, len(text)-len(left), length)
	ourBody, err := io.ReadAll(ours.Body)
	require.NoError(t, err)
	require.Equal(t, body, ourBody)
	require.Equal(t, []any{theirs.Method, theirs.RequestURI, theirs.URL.Path, theirs.Proto, theirs.ContentLength},
		[]any{ours.Method, ours.RequestURI, ours.URL.Path, ours.Proto, ours.ContentLength})
	require.Equal(t, "/v1/sales/"+ours.sale+"/orders", theirs.URL.Path)
	require.False(t, theirs.Close)
	require.Empty(t, theirs.TransferEncoding)
	for _, name := range []string{
		"X-User-Id", "Content-Type", "Content-Encoding", "X-Forwarded-For", "Idempotency-Key", "Origin", "Prefer",
		"Expect",
	} {
		require.Equal(t, theirs.Header[name], ours.Header[name], name)
	}
	// One without the sampled flag has no meaning for the purchase.
	ourTrace, theirTrace := ours.Header["Traceparent"], theirs.Header["Traceparent"]
	if len(theirTrace) != 1 || tracing.Sampled(theirTrace[0]) || ourTrace != nil {
		require.Equal(t, theirTrace, ourTrace)
	}
}

// The next request does not change what the last one's handler has kept.
func TestPlainRequestsShareNoMemory(t *testing.T) {
	t.Parallel()
	r := newPlainReader(t, "X-User-ID")
	buffer := []byte(plainHead("Idempotency-Key: first") + plainJSON)
	require.Positive(t, r.read(buffer))
	user, key, media := r.Header["X-User-Id"][0], r.Header["Idempotency-Key"][0], r.Header["Content-Type"][0]
	sale := r.sale
	copy(buffer, bytes.Repeat([]byte{'x'}, len(buffer)))
	require.Equal(t, []string{"ada", "first", "application/json", plainSale}, []string{user, key, media, sale})
	require.Positive(t, r.read([]byte(plainHead("-X-User-ID", "-Content-Type", "Content-Length: 0"))))
	require.Empty(t, r.Header)
	require.Equal(t, http.NoBody, r.Body)
}

func TestPlainAllowListNeedsOrdinaryBuyerHeader(t *testing.T) {
	t.Parallel()
	for _, buyer := range []string{
		"X-User-ID", "x-forwarded-user", "X-Forwarded-Proto", "Remote-User", "Authorization", "Cookie",
	} {
		require.NotNil(t, plainAllowList(buyer, false), buyer)
	}
	for _, buyer := range []string{
		"Host", "Content-Length", "Transfer-Encoding", "Connection", "Expect", "Prefer", "Content-Type", "Content-Encoding",
		"X-Forwarded-For", "Idempotency-Key", "Origin", "Upgrade", "Trailer", "Pragma", "X-User(ID", "X-User:ID", "X-",
		"User",
		"X-" + strings.Repeat("a", plainNameMax),
	} {
		require.Nil(t, plainAllowList(buyer, false), buyer)
	}
	// With another header for the buyer, this one is not allowed any more.
	require.Zero(t, newPlainReader(t, "X-Buyer").read([]byte(plainHead()+plainJSON)))
	text := plainHead("-X-User-ID", "Authorization: Bearer a.b.c") + plainJSON
	r := newPlainReader(t, "Authorization")
	require.Equal(t, len(text), r.read([]byte(text)))
	require.Equal(t, []string{"Bearer a.b.c"}, r.Header["Authorization"])
	r = newPlainReader(t, "X-User-ID")
	require.Equal(t, len(text), r.read([]byte(text)))
	require.Empty(t, r.Header["Authorization"])
}

func BenchmarkPlainRequest(b *testing.B) {
	for name, text := range map[string]string{
		"client": plainHead() + plainJSON, "browser": chromiumHead("https://shop.example") + plainJSON,
	} {
		text := []byte(text)
		b.Run(name+"/reader", func(b *testing.B) {
			r := newPlainRequest(b.Context(), plainAllowList("X-User-ID", false), "X-User-ID", "")
			b.ReportAllocs()
			for b.Loop() {
				if r.read(text) == 0 {
					b.Fatal("not plain")
				}
			}
		})
		b.Run(name+"/net-http", func(b *testing.B) {
			b.ReportAllocs()
			from := bytes.NewReader(nil)
			in := bufio.NewReader(from)
			for b.Loop() {
				from.Reset(text)
				in.Reset(from)
				if _, err := http.ReadRequest(in); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// A plain purchase is read without an allocation, also if it has a traceparent that is not sampled.
func TestPlainReaderAllocatesNothing(t *testing.T) {
	for name, traced := range map[string]bool{"traces off": false, "traces on": true} {
		for _, parent := range []string{sampledParent[:53] + "00", sampledParent} {
			if traced && parent == sampledParent {
				continue // its header is needed
			}
			text := []byte(plainHead("Traceparent: "+parent) + plainJSON)
			r := newPlainRequest(t.Context(), plainAllowList("X-User-ID", traced), "X-User-ID", "")
			require.Zero(t, testing.AllocsPerRun(100, func() {
				if r.read(text) == 0 {
					panic("not plain")
				}
			}), "%s %s", name, parent)
			require.Nil(t, r.Header["Traceparent"])
		}
	}
}

package accept

import (
	"bytes"
	"context"
	"net/http"
	"net/url"
	"strings"
)

const (
	// plainRequestMax bounds a plain purchase, head and body. Most have a few hundred bytes.
	plainRequestMax = 4 << 10

	plainLineStart = "POST /v1/sales/"
	plainLineEnd   = "/orders HTTP/1.1\r\n"
	saleIDLength   = 36
	plainNameMax   = 32
)

// plainHeader says what a reader does with a header that is allowed in a plain purchase.
type plainHeader int8

const (
	plainIgnored    plainHeader = iota // neither net/http nor the purchase looks at it
	plainHost                          // required by HTTP
	plainLength                        // Content-Length
	plainConnection                    // keep-alive, and nothing else
	plainMedia                         // Content-Type
	plainForwarded                     // X-Forwarded-For
	plainKey                           // Idempotency-Key
	plainOrigin                        // Origin
	plainTrace                         // traceparent, if requests are traced
	plainBuyer                         // names the buyer, or proves who it is
	plainHeaders                       // the number of kinds
)

// plainMeanings are the headers whose values matter. Each may be sent once.
var plainMeanings = map[string]plainHeader{
	"host": plainHost, "content-length": plainLength, "connection": plainConnection, "content-type": plainMedia,
	"x-forwarded-for": plainForwarded, "idempotency-key": plainKey, "origin": plainOrigin,
}

// plainNoise lists what browsers, clients, proxies and tracers add and nothing here reads.
var plainNoise = []string{
	"accept", "accept-encoding", "accept-language", "authorization", "baggage", "cache-control", "cookie", "dnt",
	"forwarded", "from", "priority", "referer", "sec-ch-ua", "sec-ch-ua-mobile", "sec-ch-ua-platform", "sec-fetch-dest",
	"sec-fetch-mode", "sec-fetch-site", "sec-gpc", "traceparent", "tracestate", "user-agent", "via", "x-forwarded-host",
	"x-forwarded-port", "x-forwarded-proto", "x-real-ip", "x-request-id",
}

// plainAllowList returns the headers that a plain purchase may have, by their names in lower case. It is nil if the
// header that names the buyer is not like others: then there are no plain purchases.
func plainAllowList(buyer string, traced bool) map[string]plainHeader {
	allowed := make(map[string]plainHeader)
	for _, name := range plainNoise {
		allowed[name] = plainIgnored
	}
	for name, meaning := range plainMeanings {
		allowed[name] = meaning
	}
	if traced {
		allowed["traceparent"] = plainTrace
	}
	name := strings.ToLower(buyer)
	// A name that is not allowed otherwise may have a meaning for net/http or the purchase, as "Expect" and "Prefer"
	// have. Those of extensions have none.
	meaning, known := allowed[name]
	if meaning != plainIgnored || !known && !isExtension(name) {
		return nil
	}
	allowed[name] = plainBuyer
	return allowed
}

// isExtension reports whether a name in lower case begins like those that gateways make up, and has no character
// that net/http refuses in a name.
func isExtension(name string) bool {
	rest, ok := strings.CutPrefix(name, "x-")
	if !ok {
		rest, ok = strings.CutPrefix(name, "remote-")
	}
	for i := range len(rest) {
		c := rest[i]
		ok = ok && (c == '-' || c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z')
	}
	return ok && rest != "" && len(name) <= plainNameMax
}

// plainRequest is the plain purchase that a connection has read last. The handler gets it as an http.Request, which is
// the same one for all purchases of the connection, and holds nothing that refers to the connection's buffer.
type plainRequest struct {
	*http.Request
	allowed map[string]plainHeader
	// buyerName is the canonical name of the header plainBuyer.
	buyerName string
	sale      string
	// values has the value of each header, as http.Header wants it, or "" if the request has no such header.
	values [plainHeaders][1]string
	body   plainBody
}

func newPlainRequest(ctx context.Context, allowed map[string]plainHeader, buyer, remoteAddr string) *plainRequest {
	r := &http.Request{
		Method: http.MethodPost, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		URL: new(url.URL), Header: make(http.Header), RemoteAddr: remoteAddr,
	}
	return &plainRequest{
		Request: r.WithContext(ctx), allowed: allowed, buyerName: http.CanonicalHeaderKey(buyer),
	}
}

// plainBody is the body of a plain purchase.
type plainBody struct{ bytes.Reader }

func (*plainBody) Close() error { return nil }

// read takes the plain purchase with which b begins, and returns its length: head and body. It returns 0 if b begins
// with anything else, or does not have all of it. The request is valid until the next read, its body as long as b.
//
// net/http would read the same (FuzzPlainReader). This is a strict subset of HTTP: each line ends in CRLF, each colon
// has one space behind it, and values are visible ASCII, with spaces only inside.
func (r *plainRequest) read(b []byte) int {
	sale, rest, ok := cutPlainLine(b)
	if !ok {
		return 0
	}
	var values [plainHeaders][]byte
	for {
		end := bytes.IndexByte(rest, '\n')
		if end < 1 || rest[end-1] != '\r' {
			return 0
		}
		line := rest[:end-1]
		rest = rest[end+1:]
		if len(line) == 0 {
			break
		}
		header, value, ok := r.cutHeader(line)
		if !ok || values[header] != nil {
			return 0
		}
		if header != plainIgnored {
			values[header] = value
		}
	}
	length, ok := plainBodyLength(values[plainLength])
	if !ok || length > len(rest) || !isPlainHost(values[plainHost]) || !isKeepAlive(values[plainConnection]) {
		return 0
	}
	r.set(sale, &values, rest[:length])
	return len(b) - len(rest) + length
}

// cutPlainLine cuts the request line off b.
func cutPlainLine(b []byte) (sale, rest []byte, ok bool) {
	rest, ok = bytes.CutPrefix(b, []byte(plainLineStart))
	if !ok || len(rest) < saleIDLength {
		return nil, nil, false
	}
	sale = rest[:saleIDLength]
	for _, c := range sale {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') && c != '-' {
			return nil, nil, false
		}
	}
	rest, ok = bytes.CutPrefix(rest[saleIDLength:], []byte(plainLineEnd))
	return sale, rest, ok
}

// cutHeader reads a line of the head.
func (r *plainRequest) cutHeader(line []byte) (header plainHeader, value []byte, ok bool) {
	colon := bytes.IndexByte(line, ':')
	if colon < 0 || colon > plainNameMax || colon+2 >= len(line) || line[colon+1] != ' ' {
		return 0, nil, false
	}
	name, value := line[:colon], line[colon+2:]
	if value[0] == ' ' || value[len(value)-1] == ' ' {
		return 0, nil, false
	}
	for _, c := range value {
		if c < ' ' || c > '~' {
			return 0, nil, false
		}
	}
	var lower [plainNameMax]byte
	for i, c := range name {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		lower[i] = c
	}
	header, ok = r.allowed[string(lower[:len(name)])]
	return header, value, ok
}

// plainBodyLength reads a Content-Length in the one way to write it.
func plainBodyLength(digits []byte) (length int, ok bool) {
	if len(digits) == 0 || len(digits) > 4 || digits[0] == '0' && len(digits) > 1 {
		return 0, false
	}
	for _, c := range digits {
		if c < '0' || c > '9' {
			return 0, false
		}
		length = length*10 + int(c-'0')
	}
	return length, length <= MaxBodyBytes
}

// isPlainHost accepts names and addresses, with and without a port.
func isPlainHost(host []byte) bool {
	for _, c := range host {
		if (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') &&
			c != '.' && c != '-' && c != ':' && c != '_' && c != '[' && c != ']' {
			return false
		}
	}
	return len(host) > 0
}

// isKeepAlive accepts no value, or the one that changes nothing in HTTP/1.1.
func isKeepAlive(connection []byte) bool {
	return connection == nil || string(connection) == "keep-alive" || string(connection) == "Keep-Alive"
}

// set makes the http.Request. Its strings are copies: the user of an order is remembered for long.
func (r *plainRequest) set(sale []byte, values *[plainHeaders][]byte, body []byte) {
	if r.sale != string(sale) {
		r.sale = string(sale)
		r.URL.Path = "/v1/sales/" + r.sale + "/orders"
		r.RequestURI = r.URL.Path
	}
	r.setHeader("Content-Type", plainMedia, values)
	r.setHeader("X-Forwarded-For", plainForwarded, values)
	r.setHeader("Idempotency-Key", plainKey, values)
	r.setHeader("Origin", plainOrigin, values)
	if values[plainTrace] != nil && !mayBeSampled(values[plainTrace]) {
		values[plainTrace] = nil // a proxy may add one to every request
	}
	r.setHeader("Traceparent", plainTrace, values)
	r.setHeader(r.buyerName, plainBuyer, values)
	r.ContentLength, r.Body = int64(len(body)), http.NoBody
	if len(body) > 0 {
		r.body.Reset(body)
		r.Body = &r.body
	}
}

// mayBeSampled reports whether the lowest bit of the flags of a traceparent is set.
func mayBeSampled(traceparent []byte) bool {
	const flags = 54
	if len(traceparent) <= flags {
		return false
	}
	c := traceparent[flags]
	return c <= '9' && c&1 == 1 || c >= 'a' && c&1 == 0
}

func (r *plainRequest) setHeader(name string, header plainHeader, values *[plainHeaders][]byte) {
	old, value := &r.values[header][0], values[header]
	if *old == string(value) {
		return
	}
	*old = string(value)
	if value == nil {
		delete(r.Header, name)
	} else {
		r.Header[name] = r.values[header][:]
	}
}

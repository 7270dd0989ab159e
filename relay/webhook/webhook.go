// Package webhook sends events by HTTP: one POST for each, signed as Standard Webhooks wants
// (https://www.standardwebhooks.com), to public addresses only unless others are allowed.
package webhook

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	"stampede/relay/feed"
)

const (
	// timeout bounds a request and its answer.
	timeout = 15 * time.Second
	// retryAfterMax bounds what a receiver may ask for.
	retryAfterMax = 24 * time.Hour
	// inFlight is how many requests of a target are sent at the same time.
	inFlight = 64

	dialTimeout = 5 * time.Second
	idleTimeout = time.Minute
	// answerMax is how much of an answer is read, so that its connection can be used again, and answerShown how much of it
	// an error shows.
	answerMax, answerShown = 4 << 10, 200
	headersMax             = 16 << 10
)

// Refusal is the answer of a receiver that did not take an event.
type Refusal struct {
	Status int
	// RetryAfter is the pause that the receiver wants before any other event; 0 if it does not say.
	RetryAfter time.Duration
	// Answer is the begin of its text.
	Answer string
}

// Error names the status and the text.
func (r *Refusal) Error() string {
	text := fmt.Sprintf("the receiver answered %d %s", r.Status, http.StatusText(r.Status))
	if r.Answer != "" {
		text += ": " + strconv.QuoteToASCII(r.Answer)
	}
	return text
}

// Final reports whether the receiver wants no more events.
func (r *Refusal) Final() bool { return r.Status == http.StatusGone }

// Sender sends events to one URL. It is safe for concurrent use.
type Sender struct {
	url     string
	secrets [][]byte
	client  *http.Client
	agent   string
}

// Config is what a Sender needs.
type Config struct {
	URL string
	// Secrets sign each event, the newest first.
	Secrets [][]byte
	// AllowPrivate allows addresses that are not of the public internet.
	AllowPrivate bool
	// TLS is for receivers with certificates of other authorities than those of the system; nil for those.
	TLS *tls.Config
	// Agent is the User-Agent.
	Agent string
}

// New returns a Sender. It opens no connection.
func New(config Config) *Sender {
	dialer := &net.Dialer{Timeout: dialTimeout}
	if !config.AllowPrivate {
		dialer.ControlContext = onlyPublic
	}
	return &Sender{
		url: config.URL, secrets: config.Secrets, agent: config.Agent,
		client: &http.Client{
			Timeout: timeout,
			// A redirection could lead anywhere, and would not repeat a POST.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
			Transport: &http.Transport{
				// No proxy: it would hide the address that is dialed.
				DialContext: dialer.DialContext, TLSClientConfig: config.TLS, TLSHandshakeTimeout: dialTimeout,
				ForceAttemptHTTP2: true, MaxConnsPerHost: inFlight, MaxIdleConnsPerHost: inFlight, IdleConnTimeout: idleTimeout,
				MaxResponseHeaderBytes: headersMax, DisableCompression: true,
			},
		},
	}
}

// InFlight is how many calls of Send the receiver gets at the same time.
func (s *Sender) InFlight() int { return inFlight }

// Send sends an event and returns nil when the receiver has taken it. The error of a receiver that answered is a
// *Refusal. Errors do not hold the URL.
func (s *Sender) Send(ctx context.Context, e *feed.Event) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, bytes.NewReader(e.Body))
	if err != nil {
		return errors.New("the URL cannot be requested")
	}
	at := time.Now()
	request.Header = http.Header{
		"Content-Type":      {feed.ContentType},
		"User-Agent":        {s.agent},
		"Webhook-Id":        {e.ID},
		"Webhook-Timestamp": {strconv.FormatInt(at.Unix(), 10)},
		"Webhook-Signature": {sign(s.secrets, e.ID, at, e.Body)},
	}
	if e.TraceParent != "" {
		request.Header["Traceparent"] = []string{e.TraceParent}
	}
	answer, err := s.client.Do(request)
	if err != nil {
		var outer *url.Error
		if errors.As(err, &outer) {
			err = outer.Err // the outer one repeats the URL
		}
		return fmt.Errorf("send the event: %w", err)
	}
	defer func() { _ = answer.Body.Close() }()
	text, _ := io.ReadAll(io.LimitReader(answer.Body, answerMax)) // what matters is the status
	if answer.StatusCode >= 200 && answer.StatusCode <= 299 {
		return nil
	}
	return &Refusal{
		Status: answer.StatusCode, RetryAfter: retryAfter(answer, at),
		Answer: strings.TrimSpace(string(text[:min(len(text), answerShown)])),
	}
}

// Close closes the idle connections.
func (s *Sender) Close() error {
	s.client.CloseIdleConnections()
	return nil
}

// retryAfter reads the header of 429 and 503, in seconds or as a date.
func retryAfter(answer *http.Response, now time.Time) time.Duration {
	if answer.StatusCode != http.StatusTooManyRequests && answer.StatusCode != http.StatusServiceUnavailable {
		return 0
	}
	text := answer.Header.Get("Retry-After")
	var pause time.Duration
	if seconds, err := strconv.ParseInt(text, 10, 32); err == nil {
		pause = time.Duration(seconds) * time.Second
	} else if at, err := http.ParseTime(text); err == nil {
		pause = at.Sub(now)
	}
	return min(max(0, pause), retryAfterMax)
}

// sign returns the signatures of an event that is sent at that time, one for each secret, separated by spaces.
func sign(secrets [][]byte, id string, at time.Time, body []byte) string {
	signatures := make([]string, 0, len(secrets))
	for _, secret := range secrets {
		mac := hmac.New(sha256.New, secret)
		_, _ = fmt.Fprintf(mac, "%s.%d.", id, at.Unix()) // a hash returns no error
		_, _ = mac.Write(body)
		signatures = append(signatures, "v1,"+base64.StdEncoding.EncodeToString(mac.Sum(nil)))
	}
	return strings.Join(signatures, " ")
}

// ErrPrivate is returned for a receiver whose address is not of the public internet.
var ErrPrivate = errors.New("the address of the receiver is not public, which this target does not allow (--allow-private)")

// special are the blocks that the methods of netip.Addr do not know and that are no addresses of the public internet,
// or that lead to an IPv4 address which they hide (IANA's special-purpose registries).
var special = func() (blocks []netip.Prefix) {
	for _, text := range []string{
		"0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15",
		"198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4", "168.63.129.16/32",
		"::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23",
		"2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16", "fec0::/10",
	} {
		blocks = append(blocks, netip.MustParsePrefix(text))
	}
	return blocks
}()

// isPublic reports whether an address belongs to the public internet.
func isPublic(ip netip.Addr) bool {
	ip = ip.Unmap().WithZone("")
	if !ip.IsGlobalUnicast() || ip.IsPrivate() {
		return false // also loopback, link-local with the metadata of clouds, multicast and unspecified ones
	}
	for _, block := range special {
		if block.Contains(ip) {
			return false
		}
	}
	return true
}

// onlyPublic refuses a connection before it is made. It sees the address that a name was resolved to, so that a name
// which resolves differently the next time does not help.
func onlyPublic(_ context.Context, _, address string, _ syscall.RawConn) error {
	to, err := netip.ParseAddrPort(address)
	if err != nil || !isPublic(to.Addr()) {
		return fmt.Errorf("dial %s: %w", address, ErrPrivate)
	}
	return nil
}

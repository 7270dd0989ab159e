// Package keyset has the public keys with which an identity provider signs tokens: a JSON Web Key Set (RFC 7517).
// Keys are those of a set that may verify a token. A Source fetches the set of a URL and keeps it fresh.
package keyset

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/big"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/retry"
	"stampede/internal/telemetry"
)

const (
	bytesMax = 1 << 20
	// keysMax bounds the keys with which one token is tried. Providers publish a few.
	keysMax = 100
	// RSA keys below rsaBitsMin must not be used (RFC 7518, section 3.3). Larger ones than rsaBitsMax take too long.
	rsaBitsMin, rsaBitsMax = 2048, 8192
	// nameMax bounds what is shown of a key's kid.
	nameMax = 64
)

var (
	rsaMethods = []string{"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}
	okpMethods = []string{"EdDSA"}
	curves     = map[string]struct {
		elliptic.Curve
		methods []string
	}{
		"P-256": {elliptic.P256(), []string{"ES256"}},
		"P-384": {elliptic.P384(), []string{"ES384"}},
		"P-521": {elliptic.P521(), []string{"ES512"}},
	}
)

// Methods returns the signature methods that the keys of a set can verify. All of them need only a public key. HMAC is
// not among them: it would take a public key for a secret.
func Methods() []string {
	return slices.Concat(rsaMethods, curves["P-256"].methods, curves["P-384"].methods, curves["P-521"].methods, okpMethods)
}

var errNoneUsable = errors.New("none of its keys can be used")

// Keys are the keys of a set that can be used.
type Keys struct {
	keys []key
	// Ignored says of each other key which one it is, and why it cannot be used.
	Ignored []string
}

// key is a public key.
type key struct {
	id      string // its kid; "" if it has none
	methods []string
	public  crypto.PublicKey
}

// Len is the number of keys that can be used.
func (k *Keys) Len() int { return len(k.keys) }

// Find returns the keys that may verify a token with this kid, "" if it has none, and this method. A kid may name a key
// of each type, and several of one type.
func (k *Keys) Find(id, method string) (found []crypto.PublicKey) {
	for _, one := range k.keys {
		if (id == "" || id == one.id) && slices.Contains(one.methods, method) {
			found = append(found, one.public)
		}
	}
	return found
}

// parse reads a set. Each key is read by itself, and ignored if it cannot be used (RFC 7517, section 5). If none can be
// used, that is an error, and the result says why.
func parse(text []byte) (*Keys, error) {
	var set struct {
		Keys []jsontext.Value `json:"keys"`
	}
	text = bytes.TrimPrefix(text, []byte("\ufeff"))
	anyText := jsontext.AllowInvalidUTF8(true)
	if err := json.Unmarshal(text, &set, anyText, jsontext.AllowDuplicateNames(true)); err != nil {
		return nil, fmt.Errorf("the answer is no key set: %w", err)
	}
	keys := new(Keys)
	for i, one := range set.Keys {
		var m members
		read, err := key{}, json.Unmarshal(one, &m, anyText)
		switch {
		case len(keys.keys) == keysMax:
			err = fmt.Errorf("only the first %d are used", keysMax)
		case err != nil:
			err = errors.New("it is no JSON object of a key, or has a member twice or of another type")
		default:
			read, err = m.key()
		}
		if err == nil {
			keys.keys = append(keys.keys, read)
			continue
		}
		name := fmt.Sprintf("key %d", i+1)
		if m.ID != "" {
			name += fmt.Sprintf(" (kid %q)", m.ID[:min(len(m.ID), nameMax)])
		}
		keys.Ignored = append(keys.Ignored, name+": "+err.Error())
	}
	switch {
	case len(set.Keys) == 0:
		return nil, errors.New("the answer has no keys")
	case len(keys.keys) == 0:
		return keys, errNoneUsable
	}
	return keys, nil
}

// members are those of a key that are read. Certificates are not: the other members are as trustworthy as they are, as
// all came from the provider.
type members struct {
	Type       string   `json:"kty"`
	ID         string   `json:"kid"`
	Use        string   `json:"use"`
	Operations []string `json:"key_ops"`
	Method     string   `json:"alg"`
	Curve      string   `json:"crv"`
	X          string   `json:"x"`
	Y          string   `json:"y"`
	N          string   `json:"n"`
	E          string   `json:"e"`
	// Private is there if the set gives away what signs.
	Private jsontext.Value `json:"d"`
}

// key returns the key, or why it cannot verify tokens.
func (m *members) key() (k key, err error) {
	switch {
	case m.Use != "" && m.Use != "sig":
		return k, fmt.Errorf("its use is %q, not sig", m.Use)
	case m.Operations != nil && !slices.Contains(m.Operations, "verify"):
		return k, errors.New("its key_ops do not have verify")
	case m.Private != nil && m.Private.Kind() != 'n':
		return k, errors.New("its private part is published, so that anybody can sign with it")
	}
	k.id = m.ID
	switch m.Type {
	case "RSA":
		k.methods = rsaMethods
		k.public, err = m.rsa()
	case "EC":
		k.methods = curves[m.Curve].methods
		k.public, err = m.ec()
	case "OKP":
		k.methods = okpMethods
		k.public, err = m.ed25519()
	default:
		err = fmt.Errorf("its kty is %q, not RSA, EC or OKP", m.Type)
	}
	if err == nil && m.Method != "" {
		if !slices.Contains(k.methods, m.Method) {
			return k, fmt.Errorf("its alg is %q, not %s", m.Method, strings.Join(k.methods, ", "))
		}
		k.methods = []string{m.Method}
	}
	return k, err
}

func (m *members) rsa() (*rsa.PublicKey, error) {
	n, err := number("n", m.N)
	if err != nil {
		return nil, err
	}
	e, err := number("e", m.E)
	if err != nil {
		return nil, err
	}
	switch bits := n.BitLen(); {
	case bits < rsaBitsMin || bits > rsaBitsMax:
		return nil, fmt.Errorf("its n has %d bits, want %d to %d", bits, rsaBitsMin, rsaBitsMax)
	case n.Bit(0) == 0:
		return nil, errors.New("its n is even")
	case e.Cmp(big.NewInt(3)) < 0 || e.Cmp(big.NewInt(math.MaxInt32)) > 0 || e.Bit(0) == 0:
		return nil, errors.New("its e is not an odd number from 3 to 2147483647")
	}
	return &rsa.PublicKey{N: n, E: int(e.Int64())}, nil
}

func (m *members) ec() (*ecdsa.PublicKey, error) {
	curve, known := curves[m.Curve]
	if !known {
		return nil, fmt.Errorf("its crv is %q, not P-256, P-384 or P-521", m.Curve)
	}
	length := (curve.Params().BitSize + 7) / 8
	point := []byte{4} // uncompressed
	for _, one := range [...]struct{ name, text string }{{"x", m.X}, {"y", m.Y}} {
		coordinate, err := number(one.name, one.text)
		if err != nil {
			return nil, err
		}
		if coordinate.BitLen() > 8*length {
			return nil, fmt.Errorf("its %s is too large for its crv", one.name)
		}
		point = append(point, coordinate.FillBytes(make([]byte, length))...)
	}
	public, err := ecdsa.ParseUncompressedPublicKey(curve.Curve, point)
	if err != nil {
		return nil, errors.New("its x and y are no point of its crv")
	}
	return public, nil
}

func (m *members) ed25519() (ed25519.PublicKey, error) {
	if m.Curve != "Ed25519" {
		return nil, fmt.Errorf("its crv is %q, not Ed25519", m.Curve)
	}
	x, err := decode("x", m.X)
	if err == nil && len(x) != ed25519.PublicKeySize {
		err = fmt.Errorf("its x has %d bytes, want %d", len(x), ed25519.PublicKeySize)
	}
	return x, err
}

func number(name, text string) (*big.Int, error) {
	bytes, err := decode(name, text)
	return new(big.Int).SetBytes(bytes), err
}

// decode reads base64url. Some providers pad it.
func decode(name, text string) ([]byte, error) {
	if text == "" {
		return nil, errors.New("it has no " + name)
	}
	decoded, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(text, "="))
	if err != nil {
		return nil, fmt.Errorf("its %s is no base64url", name)
	}
	return decoded, nil
}

const (
	fetchTimeout = 3 * time.Second
	refresh      = 15 * time.Minute
	// With old keys the provider is asked again retryKnown after a failure, because they may be revoked.
	retryKnown = time.Minute
	// Without keys nobody can buy: the pause grows from retryFirst to retryLongest.
	retryFirst, retryLongest = time.Second, 5 * time.Second
	// renewInterval is the pause between fetches for tokens that no key verifies, which any client can invent.
	renewInterval = 10 * time.Second
	// renewWait bounds how long a request waits for such a fetch, and waitingMax how many do.
	renewWait  = 2 * time.Second
	waitingMax = 256
	// linesMax bounds the log lines about ignored keys of one fetch.
	linesMax = 20
)

// errBusy means that too many requests wait for the provider's answer to wait for it, too.
var errBusy = errors.New("too many requests wait for the key set")

// Fetch gets the set of a URL, as Parse does.
func Fetch(ctx context.Context, url string) (*Keys, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = answer.Body.Close() }()
	var keys *Keys
	text, err := io.ReadAll(io.LimitReader(answer.Body, bytesMax+1))
	switch {
	case answer.StatusCode != http.StatusOK:
		err = errors.New(answer.Status)
	case len(text) > bytesMax:
		err = fmt.Errorf("the answer has more than %d bytes", bytesMax)
	case err == nil:
		keys, err = parse(text)
	}
	if err != nil {
		return keys, fmt.Errorf("GET %s: %w", request.URL.Redacted(), err)
	}
	return keys, nil
}

// Source has the keys of a URL. It is safe for concurrent use.
type Source struct {
	url    string
	log    *slog.Logger
	known  atomic.Pointer[Keys]
	wanted chan struct{} // wakes Run

	counts  *prometheus.GaugeVec
	current prometheus.Gauge

	mu sync.Mutex
	// renewed is when a fetch was wanted last because of a token. renewing is closed when the next fetch ends; nil if
	// none is wanted.
	renewed  time.Time
	renewing chan struct{}
	waiting  int

	// Of the goroutine that fetches.
	outage  retry.Outage
	failed  int // times in a row
	ignored []string
}

// New fetches the keys once. If that fails, there are none until Run has fetched them. Without a URL the source is nil,
// and only its metrics exist.
func New(ctx context.Context, url string, log *slog.Logger, registerer prometheus.Registerer) (*Source, error) {
	s := &Source{
		url: url, log: log, wanted: make(chan struct{}, 1), outage: retry.Outage{Log: log, Doing: "fetch the key set"},
		counts: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "stampede_key_set_keys",
			Help: "Keys of the set at STAMPEDE_JWKS_URL that verify tokens of buyers (usable), and those that cannot be used " +
				"(ignored).",
		}, []string{"state"}),
		current: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "stampede_key_set_current",
			Help: "1 if the latest try to fetch the set at STAMPEDE_JWKS_URL gave keys, or there is no such URL, else 0.",
		}),
	}
	for _, collector := range []prometheus.Collector{s.counts, s.current} {
		if err := registerer.Register(collector); err != nil {
			return nil, fmt.Errorf("key set: %w", err)
		}
	}
	s.count("usable", 0)
	s.count("ignored", 0)
	if url == "" {
		s.current.Set(1)
		return nil, nil
	}
	s.fetch(ctx)
	return s, nil
}

func (s *Source) count(state string, n int) { s.counts.WithLabelValues(state).Set(float64(n)) }

// Known returns the latest keys, or nil if there were none yet.
func (s *Source) Known() *Keys { return s.known.Load() }

// Run keeps the keys fresh until ctx is done. A failure keeps those that are known.
func (s *Source) Run(ctx context.Context) {
	for {
		pause := time.NewTimer(s.pause())
		select {
		case <-pause.C:
		case <-s.wanted:
			pause.Stop()
		case <-ctx.Done():
			pause.Stop()
			return
		}
		s.mu.Lock()
		renewing := s.renewing
		s.mu.Unlock()
		s.fetch(ctx)
		if renewing != nil { // one that was wanted since then comes next
			s.mu.Lock()
			s.renewing = nil
			s.mu.Unlock()
			close(renewing)
		}
	}
}

// pause is the pause before the next fetch.
func (s *Source) pause() time.Duration {
	switch {
	case s.failed == 0:
		return retry.Delay(1, refresh, refresh)
	case s.known.Load() == nil:
		return retry.Delay(s.failed, retryFirst, retryLongest)
	}
	return retry.Delay(1, retryKnown, retryKnown)
}

func (s *Source) fetch(ctx context.Context) {
	keys, err := Fetch(ctx, s.url)
	if ctx.Err() != nil {
		return
	}
	s.outage.Note(err)
	s.current.Set(telemetry.OneIf(err == nil))
	if keys != nil {
		s.noteIgnored(ctx, keys.Ignored)
	}
	if err != nil {
		s.failed++
		return
	}
	s.failed = 0
	s.known.Store(keys)
	s.count("usable", keys.Len())
}

// noteIgnored logs those keys that the last set did not have.
func (s *Source) noteIgnored(ctx context.Context, ignored []string) {
	s.count("ignored", len(ignored))
	lines := 0
	for _, one := range ignored {
		if lines < linesMax && !slices.Contains(s.ignored, one) {
			s.log.WarnContext(ctx, "a key of the key set cannot be used and is ignored", "reason", one)
			lines++
		}
	}
	s.ignored = ignored
}

// Renew has the provider asked again, because no known key verifies a token, and waits for its answer. If it was asked
// for another token a moment ago, nothing happens.
func (s *Source) Renew(ctx context.Context) error {
	answered, err := s.want()
	if answered == nil {
		return err
	}
	limit := time.NewTimer(renewWait)
	defer limit.Stop()
	select {
	case <-answered:
	case <-limit.C:
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting--
	return nil
}

// want returns what is closed when the provider has answered, or nil if the caller is not to wait.
func (s *Source) want() (answered <-chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.renewing == nil {
		if time.Since(s.renewed) < renewInterval {
			return nil, nil
		}
		s.renewed, s.renewing = time.Now(), make(chan struct{})
		select {
		case s.wanted <- struct{}{}:
		default:
		}
	}
	if s.waiting == waitingMax {
		return nil, errBusy
	}
	s.waiting++
	return s.renewing, nil
}

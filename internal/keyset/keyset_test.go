package keyset

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"math/big"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type object map[string]any

// with returns the object with other members. A member nil is left out.
func (o object) with(members object) object {
	changed := maps.Clone(o)
	for name, value := range members {
		if changed[name] = value; value == nil {
			delete(changed, name)
		}
	}
	return changed
}

func text(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

var provider = sync.OnceValue(func() (p struct {
	rsa     *rsa.PrivateKey
	ec      *ecdsa.PrivateKey
	ed25519 ed25519.PublicKey
},
) {
	var errs [3]error
	p.rsa, errs[0] = rsa.GenerateKey(rand.Reader, 2048)
	p.ec, errs[1] = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	p.ed25519, _, errs[2] = ed25519.GenerateKey(rand.Reader)
	for _, err := range errs {
		if err != nil {
			panic(err)
		}
	}
	return p
})

func rsaKey() object {
	return object{"kty": "RSA", "kid": "a", "n": text(provider().rsa.N.Bytes()), "e": "AQAB"}
}

func ecKey() object {
	point, err := provider().ec.PublicKey.Bytes()
	if err != nil {
		panic(err)
	}
	return object{"kty": "EC", "kid": "a", "crv": "P-256", "x": text(point[1:33]), "y": text(point[33:])}
}

func okpKey() object {
	return object{"kty": "OKP", "kid": "a", "crv": "Ed25519", "x": text(provider().ed25519)}
}

func setOf(t *testing.T, keys ...any) []byte {
	t.Helper()
	set, err := json.Marshal(object{"keys": keys})
	require.NoError(t, err)
	return set
}

func TestUnusableKeysAreIgnoredOneByOne(t *testing.T) {
	t.Parallel()
	small, err := rsa.GenerateKey(rand.Reader, 1024)
	require.NoError(t, err)
	good, other := rsaKey().with(object{"kid": "good"}), func(members object) object { return rsaKey().with(members) }
	n := provider().rsa.N
	for name, test := range map[string]struct {
		key any
		why string
	}{
		"use tls":             {other(object{"use": "tls"}), `its use is "tls"`},
		"use enc":             {other(object{"use": "enc", "alg": "RSA-OAEP"}), `its use is "enc"`},
		"use in capitals":     {other(object{"use": "SIG"}), `its use is "SIG"`},
		"use of two":          {other(object{"use": []string{"sig"}}), "of another type"},
		"key_ops to encrypt":  {other(object{"key_ops": []string{"encrypt"}}), "key_ops"},
		"key_ops of nothing":  {other(object{"key_ops": []string{}}), "key_ops"},
		"key_ops as text":     {other(object{"key_ops": "verify"}), "of another type"},
		"key_ops of numbers":  {other(object{"key_ops": []int{1}}), "of another type"},
		"kid is a number":     {other(object{"kid": 1}), "of another type"},
		"kid is a list":       {other(object{"kid": []string{"a"}}), "of another type"},
		"kid is an object":    {other(object{"kid": object{}}), "of another type"},
		"no kty":              {other(object{"kty": nil}), `its kty is ""`},
		"kty is a number":     {other(object{"kty": 1}), "of another type"},
		"kty in small":        {other(object{"kty": "rsa"}), `its kty is "rsa"`},
		"kty of tomorrow":     {other(object{"kty": "AKP", "alg": "ML-DSA-44"}), `its kty is "AKP"`},
		"a secret":            {object{"kty": "oct", "kid": "a", "k": text(make([]byte, 64))}, `its kty is "oct"`},
		"KTY in capitals":     {other(object{"kty": nil, "KTY": "RSA"}), `its kty is ""`},
		"no n":                {other(object{"n": nil}), "it has no n"},
		"n is empty":          {other(object{"n": ""}), "it has no n"},
		"n is a number":       {other(object{"n": 1}), "of another type"},
		"n is null":           {json.RawMessage(`{"kty":"RSA","n":null,"e":"AQAB"}`), "it has no n"},
		"n is no base64url":   {other(object{"n": "***"}), "its n is no base64url"},
		"n is plain base64":   {other(object{"n": "+/" + text(n.Bytes())}), "its n is no base64url"},
		"n is zero":           {other(object{"n": "AA"}), "its n has 0 bits"},
		"n is small":          {other(object{"n": text(small.N.Bytes())}), "its n has 1024 bits"},
		"n is huge":           {other(object{"n": text(make([]byte, 1)) + strings.Repeat("_", 12000)}), "want 2048 to 8192"},
		"n is even":           {other(object{"n": text(new(big.Int).Lsh(n, 1).Bytes())}), "its n is even"},
		"no e":                {other(object{"e": nil}), "it has no e"},
		"e is a number":       {other(object{"e": 65537}), "of another type"},
		"e is 1":              {other(object{"e": "AQ"}), "its e is not"},
		"e is even":           {other(object{"e": "Ag"}), "its e is not"},
		"e is huge":           {other(object{"e": strings.Repeat("_", 40)}), "its e is not"},
		"alg to encrypt":      {other(object{"alg": "RSA-OAEP-256"}), `its alg is "RSA-OAEP-256"`},
		"alg of a secret":     {other(object{"alg": "HS256"}), `its alg is "HS256"`},
		"alg none":            {other(object{"alg": "none"}), `its alg is "none"`},
		"alg of another type": {other(object{"alg": "ES256"}), `its alg is "ES256"`},
		"alg is a number":     {other(object{"alg": 256}), "of another type"},
		"private part":        {other(object{"d": "AQAB"}), "private part"},
		"private part of EC":  {ecKey().with(object{"d": "AQAB"}), "private part"},
		"crv of bitcoin":      {ecKey().with(object{"crv": "secp256k1"}), `its crv is "secp256k1"`},
		"crv of another key":  {ecKey().with(object{"crv": "P-384"}), "no point"},
		"no crv":              {ecKey().with(object{"crv": nil}), `its crv is ""`},
		"no x":                {ecKey().with(object{"x": nil}), "it has no x"},
		"no y":                {ecKey().with(object{"y": nil}), "it has no y"},
		"x is too large":      {ecKey().with(object{"x": text([]byte(strings.Repeat("x", 33)))}), "its x is too large"},
		"no point":            {ecKey().with(object{"y": "AQ"}), "no point"},
		"the point at zero":   {ecKey().with(object{"x": "AA", "y": "AA"}), "no point"},
		"alg of another crv":  {ecKey().with(object{"alg": "ES384"}), `its alg is "ES384"`},
		"crv of X25519":       {okpKey().with(object{"crv": "X25519"}), `its crv is "X25519"`},
		"crv of Ed448":        {okpKey().with(object{"crv": "Ed448"}), `its crv is "Ed448"`},
		"x is short":          {okpKey().with(object{"x": "AQAB"}), "its x has 3 bytes"},
		"a member twice": {
			json.RawMessage(`{"kty":"RSA","kid":"a","kid":"b","n":"` + text(n.Bytes()) + `","e":"AQAB"}`), "twice",
		},
		"no object": {[]string{"a"}, "no JSON object"},
		"a text":    {"a", "no JSON object"},
		"a number":  {1, "no JSON object"},
		"null":      {nil, `its kty is ""`},
		"nothing":   {object{}, `its kty is ""`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			keys, err := parse(setOf(t, test.key, good, test.key))
			require.NoError(t, err)
			require.Equal(t, 1, keys.Len())
			require.Len(t, keys.Find("good", "RS256"), 1)
			require.Len(t, keys.Ignored, 2)
			require.Contains(t, keys.Ignored[0], test.why)
			require.Contains(t, keys.Ignored[1], "key 3")

			keys, err = parse(setOf(t, test.key))
			require.ErrorIs(t, err, errNoneUsable)
			require.Contains(t, keys.Ignored[0], test.why)
		})
	}
}

// What else providers publish does not keep a key from being used.
func TestOddKeysAreUsed(t *testing.T) {
	t.Parallel()
	n := provider().rsa.N.Bytes()
	for name, key := range map[string]object{
		"use sig":              rsaKey().with(object{"use": "sig"}),
		"use null":             rsaKey().with(object{"use": json.RawMessage("null")}),
		"key_ops":              rsaKey().with(object{"key_ops": []string{"sign", "verify", "dance"}}),
		"no certificate":       rsaKey().with(object{"x5c": []string{"AAAA"}}),
		"certificate as text":  rsaKey().with(object{"x5c": "AAAA"}),
		"no certificates":      rsaKey().with(object{"x5c": []string{}}),
		"odd thumbprint":       rsaKey().with(object{"x5t": 1, "x5t#S256": "x", "x5u": "ftp://x"}),
		"own members":          rsaKey().with(object{"nbf": 1, "issuer": "https://x", "ext": true}),
		"no private part":      rsaKey().with(object{"d": json.RawMessage("null")}),
		"padded":               rsaKey().with(object{"n": base64.URLEncoding.EncodeToString(n)}),
		"a byte zero in front": rsaKey().with(object{"n": text(append([]byte{0}, n...))}),
		"e of 3":               rsaKey().with(object{"e": "Aw"}),
		"half a surrogate":     rsaKey().with(object{"name": json.RawMessage(`"\ud83d"`)}),
	} {
		keys, err := parse(setOf(t, key))
		require.NoError(t, err, name)
		require.Empty(t, keys.Ignored, name)
		require.Len(t, keys.Find("a", "RS256"), 1, name)
	}
	keys, err := parse(append([]byte("\ufeff"), setOf(t, rsaKey())...))
	require.NoError(t, err)
	require.Equal(t, 1, keys.Len())
}

func TestKeysAreFoundByKidAndType(t *testing.T) {
	t.Parallel()
	second, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	named := rsaKey().with(object{"kid": "b", "alg": "PS256"})
	unnamed := okpKey().with(object{"kid": nil})
	keys, err := parse(setOf(t, rsaKey(), ecKey(), rsaKey().with(object{"n": text(second.N.Bytes())}), named, unnamed))
	require.NoError(t, err)
	for _, test := range []struct {
		id, method string
		want       []crypto.PublicKey
	}{
		{"a", "RS256", []crypto.PublicKey{&provider().rsa.PublicKey, &second.PublicKey}},
		{"a", "PS512", []crypto.PublicKey{&provider().rsa.PublicKey, &second.PublicKey}},
		{"a", "ES256", []crypto.PublicKey{&provider().ec.PublicKey}},
		{"a", "ES384", nil},
		{"a", "EdDSA", nil},
		{"a", "HS256", nil},
		{"b", "RS256", nil},
		{"b", "PS256", []crypto.PublicKey{&provider().rsa.PublicKey}},
		{"c", "RS256", nil},
		{"", "RS256", []crypto.PublicKey{&provider().rsa.PublicKey, &second.PublicKey}},
		{"", "EdDSA", []crypto.PublicKey{provider().ed25519}},
	} {
		require.Equal(t, test.want, keys.Find(test.id, test.method), "%s %s", test.id, test.method)
	}
}

func TestSetsAreBounded(t *testing.T) {
	t.Parallel()
	many := make([]any, keysMax+1)
	for i := range many {
		many[i] = ecKey().with(object{"kid": fmt.Sprint(i)})
	}
	keys, err := parse(setOf(t, many...))
	require.NoError(t, err)
	require.Equal(t, keysMax, keys.Len())
	require.Equal(t, []string{`key 101 (kid "100"): only the first 100 are used`}, keys.Ignored)
	for _, other := range []string{
		"", "<html>", "[]", "{}", `{"keys":null}`, `{"keys":[]}`, `{"keys":{}}`, `{"Keys":[{}]}`, `{"keys":[{]}`,
	} {
		_, err := parse([]byte(other))
		require.Error(t, err, other)
	}
}

// published is a provider, and the source of its keys.
type published struct {
	*Source
	t       *testing.T
	answer  atomic.Pointer[func(http.ResponseWriter)]
	asked   atomic.Int64
	log     bytes.Buffer
	metrics *prometheus.Registry
}

func publish(t *testing.T, answer func(http.ResponseWriter)) *published {
	t.Helper()
	p := &published{t: t, metrics: prometheus.NewRegistry()}
	p.answer.Store(&answer)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		p.asked.Add(1)
		(*p.answer.Load())(w)
	}))
	t.Cleanup(server.Close)
	var err error
	p.Source, err = New(t.Context(), server.URL, slog.New(slog.NewTextHandler(&p.log, nil)), p.metrics)
	require.NoError(t, err)
	return p
}

// runs has the keys kept fresh until the returned function is called.
func (p *published) runs() (stop func()) {
	ctx, cancel := context.WithCancel(p.t.Context())
	var running sync.WaitGroup
	running.Go(func() { p.Run(ctx) })
	stop = func() {
		cancel()
		running.Wait()
	}
	p.t.Cleanup(stop)
	return stop
}

func (p *published) fetches(answer func(http.ResponseWriter)) {
	p.answer.Store(&answer)
	p.fetch(p.t.Context())
}

func (p *published) shows(usable, ignored, current float64) {
	p.t.Helper()
	require.Equal(p.t, []float64{usable, ignored, current}, []float64{
		testutil.ToFloat64(p.counts.WithLabelValues("usable")), testutil.ToFloat64(p.counts.WithLabelValues("ignored")),
		testutil.ToFloat64(p.current),
	})
}

func sends(text []byte) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) { _, _ = w.Write(text) }
}

func fails(w http.ResponseWriter) { w.WriteHeader(http.StatusBadGateway) }

func TestKeysOutliveFailures(t *testing.T) {
	t.Parallel()
	p := publish(t, fails)
	require.Nil(t, p.Known())
	p.shows(0, 0, 0)
	require.Contains(t, p.log.String(), "502 Bad Gateway")
	p.fetches(sends(setOf(t, rsaKey(), ecKey().with(object{"use": "tls"}))))
	p.shows(1, 1, 1)
	known := p.Known()
	for name, answer := range map[string]func(http.ResponseWriter){
		"an error":      fails,
		"a page":        sends([]byte("<html>maintenance</html>")),
		"no keys":       sends([]byte(`{"keys":[]}`)),
		"no usable key": sends(setOf(t, rsaKey().with(object{"use": "tls"}))),
		"a huge set":    sends([]byte(`{"keys":[],"x":"` + strings.Repeat("x", bytesMax) + `"}`)),
		"another status with keys": func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusNonAuthoritativeInfo)
			_, _ = w.Write(setOf(t, ecKey()))
		},
	} {
		p.fetches(answer)
		require.Same(t, known, p.Known(), name)
		p.shows(1, 1, 0)
	}
	require.Greater(t, p.pause(), retryLongest, "it is not asked as often as without keys")
	require.LessOrEqual(t, p.pause(), retryKnown)
	p.fetches(sends(setOf(t, rsaKey(), ecKey())))
	p.shows(2, 0, 1)
	require.Greater(t, p.pause(), retryKnown)
	require.Contains(t, p.log.String(), "can fetch the key set again")
}

func TestIgnoredKeysAreLoggedOnce(t *testing.T) {
	t.Parallel()
	odd := rsaKey().with(object{"kid": "odd", "use": "tls"})
	p := publish(t, sends(setOf(t, rsaKey(), odd)))
	require.Contains(t, p.log.String(), `key 2 (kid \"odd\"): its use is \"tls\"`)
	lines := func() int { return strings.Count(p.log.String(), "is ignored") }
	require.Equal(t, 1, lines())
	p.fetches(fails)
	p.fetches(sends(setOf(t, rsaKey(), odd)))
	require.Equal(t, 1, lines())
	p.fetches(sends(setOf(t, rsaKey(), odd, odd.with(object{"kid": "more"}))))
	require.Equal(t, 2, lines())
	many := []any{rsaKey()}
	for range 10 * linesMax {
		many = append(many, odd.with(object{"kid": strings.Repeat("k", 1000)}))
	}
	p.fetches(sends(setOf(t, many...)))
	require.Equal(t, 2+linesMax, lines())
	require.Less(t, p.log.Len(), 100*200)
	p.shows(1, 10*linesMax, 1)
}

func TestProviderIsAskedUntilItHasKeys(t *testing.T) {
	t.Parallel()
	p := publish(t, fails)
	for p.failed = 1; p.failed < 20; p.failed++ {
		require.LessOrEqual(t, p.pause(), retryLongest)
		require.GreaterOrEqual(t, p.pause(), retryFirst/2)
	}
	p.failed = 1
	p.runs()
	testkit.Eventually(t, 30*time.Second, "the provider is asked again", func() bool { return p.asked.Load() > 2 })
	answer := sends(setOf(t, rsaKey()))
	p.answer.Store(&answer)
	testkit.Eventually(t, 30*time.Second, "the key is known", func() bool { return p.Known() != nil })
}

// However many tokens no key verifies, the provider is asked once for all of them.
func TestTokensHaveProviderAskedOnce(t *testing.T) {
	t.Parallel()
	p := publish(t, sends(setOf(t, rsaKey())))
	p.runs()
	held, began := make(chan struct{}), make(chan struct{}, 2)
	answer := func(w http.ResponseWriter) {
		began <- struct{}{}
		<-held
		sends(setOf(t, ecKey()))(w)
	}
	p.answer.Store(&answer)
	var asking sync.WaitGroup
	asking.Go(func() { require.NoError(t, p.Renew(t.Context())) })
	<-began
	for range waitingMax - 1 {
		asking.Go(func() { require.NoError(t, p.Renew(t.Context())) })
	}
	testkit.Eventually(t, 30*time.Second, "all wait", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.waiting == waitingMax
	})
	require.ErrorIs(t, p.Renew(t.Context()), errBusy)
	close(held)
	asking.Wait()
	require.Len(t, p.Known().Find("a", "ES256"), 1)
	require.NoError(t, p.Renew(t.Context()), "asked a moment ago")
	require.EqualValues(t, 2, p.asked.Load())

	p.mu.Lock()
	require.Zero(t, p.waiting)
	p.renewed = p.renewed.Add(-renewInterval)
	p.mu.Unlock()
	next := sends(setOf(t, okpKey()))
	p.answer.Store(&next)
	require.NoError(t, p.Renew(t.Context()))
	require.Len(t, p.Known().Find("a", "EdDSA"), 1)
	require.EqualValues(t, 3, p.asked.Load())
}

// A provider that hangs holds a request no longer than renewWait.
func TestProviderThatHangsHoldsNobodyForLong(t *testing.T) {
	t.Parallel()
	p := publish(t, sends(setOf(t, rsaKey())))
	began := time.Now()
	require.NoError(t, p.Renew(t.Context())) // nothing runs
	require.Less(t, time.Since(began), 10*renewWait)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, p.Renew(gone))
}

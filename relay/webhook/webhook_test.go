package webhook_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	verifier "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"stampede/relay/feed"
	"stampede/relay/webhook"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	older = bytes.Repeat([]byte{7}, 24)
	newer = bytes.Repeat([]byte{9}, 64)
	event = feed.Event{ID: "01a208e6-68d5-787b-8e9c-eee0a87a8356.2", Body: []byte(`{"data":{"user_id":"ann"}}`)}
)

// receive starts a receiver over TLS, and returns a sender to it.
func receive(t *testing.T, answer http.HandlerFunc, change func(*webhook.Config)) *webhook.Sender {
	t.Helper()
	server := httptest.NewTLSServer(answer)
	t.Cleanup(server.Close)
	roots := x509.NewCertPool()
	roots.AddCert(server.Certificate())
	config := webhook.Config{
		URL: server.URL + "/hook?token=hidden", Secrets: [][]byte{newer, older}, AllowPrivate: true,
		TLS: &tls.Config{RootCAs: roots}, Agent: "stampede/test",
	}
	if change != nil {
		change(&config)
	}
	s := webhook.New(config)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func TestSendSignsForEachSecret(t *testing.T) {
	t.Parallel()
	type request struct {
		header http.Header
		body   []byte
	}
	got := make(chan request, 1)
	s := receive(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got <- request{r.Header, body}
		w.WriteHeader(http.StatusNoContent)
	}, nil)
	require.NoError(t, s.Send(t.Context(), &event))
	r := <-got
	require.Equal(t, event.Body, r.body)
	require.Equal(t, event.ID, r.header.Get("webhook-id"))
	require.Equal(t, "application/cloudevents+json", r.header.Get("Content-Type"))
	require.Equal(t, "stampede/test", r.header.Get("User-Agent"))
	for _, secret := range [][]byte{older, newer} {
		w, err := verifier.NewWebhook("whsec_" + base64.StdEncoding.EncodeToString(secret))
		require.NoError(t, err)
		require.NoError(t, w.Verify(r.body, r.header))
		require.Error(t, w.Verify(append(r.body, ' '), r.header), "another body")
	}
	other, err := verifier.NewWebhook("whsec_" + base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{8}, 24)))
	require.NoError(t, err)
	require.Error(t, other.Verify(r.body, r.header), "another secret")
}

func refusal(status int, retryAfter time.Duration) webhook.Refusal {
	return webhook.Refusal{Status: status, RetryAfter: retryAfter}
}

func TestAnswersThatAreRefusals(t *testing.T) {
	t.Parallel()
	soon := time.Now().Add(time.Hour).UTC().Format(http.TimeFormat)
	for name, test := range map[string]struct {
		status int
		header [2]string
		want   webhook.Refusal
	}{
		"gone":                {status: 410, want: webhook.Refusal{Status: 410}},
		"busy":                {429, [2]string{"Retry-After", "17"}, refusal(429, 17*time.Second)},
		"unavailable":         {503, [2]string{"Retry-After", soon}, refusal(503, time.Hour)},
		"a year":              {503, [2]string{"Retry-After", "31536000"}, refusal(503, 24*time.Hour)},
		"past":                {429, [2]string{"Retry-After", "-5"}, webhook.Refusal{Status: 429}},
		"nonsense":            {429, [2]string{"Retry-After", "soon"}, webhook.Refusal{Status: 429}},
		"another status":      {500, [2]string{"Retry-After", "17"}, webhook.Refusal{Status: 500}},
		"redirection":         {307, [2]string{"Location", "/other"}, webhook.Refusal{Status: 307}},
		"permanently moved":   {301, [2]string{"Location", "/other"}, webhook.Refusal{Status: 301}},
		"unauthorized":        {401, [2]string{}, webhook.Refusal{Status: 401}},
		"nothing was changed": {304, [2]string{}, webhook.Refusal{Status: 304}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			calls := 0
			s := receive(t, func(w http.ResponseWriter, r *http.Request) {
				calls++
				if r.URL.Path == "/other" {
					return
				}
				if test.header[0] != "" {
					w.Header().Set(test.header[0], test.header[1])
				}
				w.WriteHeader(test.status)
			}, nil)
			err := s.Send(t.Context(), &event)
			var refusal *webhook.Refusal
			require.ErrorAs(t, err, &refusal)
			require.Equal(t, 1, calls)
			require.Equal(t, test.want.Status, refusal.Status)
			require.InDelta(t, test.want.RetryAfter, refusal.RetryAfter, float64(2*time.Second))
			require.Equal(t, test.status == 410, refusal.Final())
		})
	}
}

func TestSendReadsLittleOfAnswer(t *testing.T) {
	t.Parallel()
	s := receive(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusTeapot)
		for range 1000 {
			if _, err := w.Write(bytes.Repeat([]byte("\x1b[31mred "), 1000)); err != nil {
				return
			}
		}
	}, nil)
	err := s.Send(t.Context(), &event)
	require.ErrorContains(t, err, `418 I'm a teapot: "\x1b[31mred`)
	require.Less(t, len(err.Error()), 1000)
}

func TestErrorsDoNotShowURL(t *testing.T) {
	t.Parallel()
	s := receive(t, nil, func(c *webhook.Config) { c.URL = "https://user:hidden@127.0.0.1:1/hidden?token=hidden" })
	err := s.Send(t.Context(), &event)
	require.ErrorContains(t, err, "connection refused")
	require.NotContains(t, err.Error(), "hidden")
	s = receive(t, nil, func(c *webhook.Config) { c.TLS = nil })
	err = s.Send(t.Context(), &event)
	require.ErrorContains(t, err, "certificate")
	require.NotContains(t, err.Error(), "hidden")
}

func TestSendEndsWithContext(t *testing.T) {
	t.Parallel()
	stopped := make(chan struct{})
	s := receive(t, func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
		case <-stopped:
		}
	}, nil)
	t.Cleanup(func() { close(stopped) })
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, s.Send(ctx, &event), context.DeadlineExceeded)
}

// The receiver listens on each of these addresses as far as this machine has them, and none of them is connected.
func TestSendRefusesPrivateAddresses(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", ":0") //nolint:gosec // all addresses are what this is about
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	accepted := make(chan net.Addr, 1)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			accepted <- conn.RemoteAddr()
			_ = conn.Close()
		}
	}()
	_, port, err := net.SplitHostPort(listener.Addr().String())
	require.NoError(t, err)
	for _, host := range []string{
		"127.0.0.1", "localhost", "127.1.2.3", "[::1]", "0.0.0.0", "[::]", "[::ffff:127.0.0.1]", "[::127.0.0.1]",
		"10.0.0.1", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "[fd00:ec2::254]", "[fe80::1]",
		"[64:ff9b::7f00:1]", "[64:ff9b:1::a00:1]", "[2002:7f00:1::]", "224.0.0.1", "[ff02::1]", "255.255.255.255",
		"2130706433", "0177.0.0.1", "0x7f.1", "127.1",
	} {
		s := receive(t, nil, func(c *webhook.Config) {
			c.URL, c.AllowPrivate = "https://"+net.JoinHostPort(strings.Trim(host, "[]"), port)+"/", false
		})
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		err := s.Send(ctx, &event)
		cancel()
		var unknown *net.DNSError
		if !errors.As(err, &unknown) { // forms that are no addresses to Go are names that nobody has
			require.ErrorIs(t, err, webhook.ErrPrivate, host)
		}
	}
	require.Empty(t, accepted)
}

func TestIsPublic(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		"8.8.8.8": true, "1.1.1.1": true, "2606:4700:4700::1111": true, "::ffff:8.8.8.8": true, "172.32.0.1": true,
		"100.63.255.255": true, "100.128.0.0": true,
		"172.31.255.255": false, "100.127.255.255": false, "198.19.0.1": false, "192.0.0.8": false, "203.0.113.9": false,
		"::ffff:10.0.0.1": false, "::ffff:0:10.0.0.1": false, "64:ff9b::8.8.8.8": false, "2001:0:1::": false,
		"2001:db8::1": false, "fc00::1": false, "fec0::1": false, "fe80::1%eth0": false, "168.63.129.16": false,
		"240.0.0.1": false, "::": false, "::ffff:100.64.0.1": false,
	} {
		require.Equal(t, want, webhook.IsPublic(netip.MustParseAddr(text)), text)
	}
}

// A proxy of the environment would be dialed in place of the receiver.
func TestSendIgnoresProxyOfEnvironment(t *testing.T) {
	t.Setenv("HTTPS_PROXY", "http://127.0.0.1:1")
	t.Setenv("HTTP_PROXY", "http://127.0.0.1:1")
	s := receive(t, nil, func(c *webhook.Config) { c.URL, c.AllowPrivate = "https://192.0.2.1/", false })
	require.ErrorContains(t, s.Send(t.Context(), &event), "dial 192.0.2.1:443")
}

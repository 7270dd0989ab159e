package forwarded_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/forwarded"
)

func TestClientBehindProxies(t *testing.T) {
	t.Parallel()
	var trusted forwarded.Proxies
	require.NoError(t, trusted.UnmarshalText(
		[]byte("10.0.0.0/8, 2001:db8:ffff::/48,::ffff:172.16.0.0/108, 192.0.2.7, fe80::/10,")))
	for name, test := range map[string]struct {
		peer string
		hops []string
		want string
	}{
		"no proxy":                          {"198.51.100.1:4000", nil, "198.51.100.1"},
		"a peer that is no proxy":           {"198.51.100.1:4000", []string{"203.0.113.9"}, "198.51.100.1"},
		"a proxy that says nothing":         {"10.0.0.1:4000", nil, "10.0.0.1"},
		"a proxy":                           {"10.0.0.1:4000", []string{"203.0.113.9"}, "203.0.113.9"},
		"what the client claims":            {"10.0.0.1:4000", []string{"8.8.8.8, 203.0.113.9"}, "203.0.113.9"},
		"a client that claims to be inside": {"10.0.0.1:4000", []string{"10.9.9.9, 203.0.113.9"}, "203.0.113.9"},
		"two proxies":                       {"10.0.0.1:4000", []string{"8.8.8.8,203.0.113.9 ,\t10.0.0.2"}, "203.0.113.9"},
		"two headers": {
			"10.0.0.1:4000", []string{"8.8.8.8", "203.0.113.9, 10.0.0.2", "10.0.0.3"}, "203.0.113.9",
		},
		"all of them trusted":   {"10.0.0.1:4000", []string{"10.0.0.3, 10.0.0.2"}, "10.0.0.3"},
		"with a port":           {"10.0.0.1:4000", []string{"203.0.113.9:1234"}, "203.0.113.9"},
		"version 6 with a port": {"10.0.0.1:4000", []string{"[2001:db8::1]:1234"}, "2001:db8::1"},
		"not an address":        {"10.0.0.1:4000", []string{"203.0.113.9, unknown, 10.0.0.2"}, "10.0.0.2"},
		"an empty header":       {"10.0.0.1:4000", []string{""}, "10.0.0.1"},
		"a proxy by version 6":  {"[2001:db8:ffff::5]:4000", []string{"203.0.113.9"}, "203.0.113.9"},
		"mapped to version 6":   {"[::ffff:10.0.0.1]:4000", []string{"::ffff:203.0.113.9"}, "203.0.113.9"},
		"a mapped prefix":       {"172.31.0.1:4000", []string{"203.0.113.9"}, "203.0.113.9"},
		"one address":           {"192.0.2.7:4000", []string{"203.0.113.9"}, "203.0.113.9"},
		"the address beside it": {"192.0.2.8:4000", []string{"203.0.113.9"}, "192.0.2.8"},
		"with a zone":           {"[fe80::1%eth0]:4000", nil, "fe80::1"},
		"a proxy with a zone":   {"[fe80::1%eth0]:4000", []string{"203.0.113.9"}, "203.0.113.9"},
		"a hop with a zone":     {"10.0.0.1:4000", []string{"2001:db8::1%eth0"}, "2001:db8::1"},
		"in brackets":           {"10.0.0.1:4000", []string{"[2001:db8::1]"}, "2001:db8::1"},
		"a broken bracket":      {"10.0.0.1:4000", []string{"2001:db8::1]"}, "10.0.0.1"},
		"no port":               {"10.0.0.1:4000", []string{"203.0.113.9:"}, "10.0.0.1"},
		"a claim with a port":   {"10.0.0.1:4000", []string{"8.8.8.8:1, 203.0.113.9:2"}, "203.0.113.9"},
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.RemoteAddr = test.peer
		r.Header["X-Forwarded-For"] = test.hops
		require.Equal(t, test.want, trusted.Client(r).String(), name)
		if test.hops != nil {
			r.RemoteAddr = "198.51.100.1:4000"
			require.Equal(t, "198.51.100.1", forwarded.Proxies(nil).Client(r).String(), name)
		}
	}
	for _, wrong := range []string{"ten", "10.0.0.0/33", "10.0.0.0/8;10.1.0.0/16"} {
		require.ErrorContains(t, new(forwarded.Proxies).UnmarshalText([]byte(wrong)), "is neither an address nor a prefix")
	}
}

func TestKeyIsAddressOrNetwork(t *testing.T) {
	t.Parallel()
	for peer, want := range map[string]string{
		"192.0.2.1:5": "192.0.2.1", "[::ffff:192.0.2.1]:5": "192.0.2.1", "[2001:db8:1:2:3::4]:5": "2001:db8:1:2::/64",
		"@": "::/64",
	} {
		require.Equal(t, want, forwarded.Proxies(nil).Key(&http.Request{RemoteAddr: peer}).String(), peer)
	}
}

// Package forwarded finds the addresses of clients behind proxies. A client can write anything into X-Forwarded-For, so
// only what a trusted proxy has added to it counts.
package forwarded

import (
	"fmt"
	"net/http"
	"net/netip"
	"strings"
)

// Proxies are the proxies that are trusted.
type Proxies []netip.Prefix

// Client returns the client's address: the peer, or behind a trusted proxy the rightmost hop that is not trusted. It is
// the zero Addr if the peer has none.
func (p Proxies) Client(r *http.Request) netip.Addr {
	client := peer(r)
	headers := r.Header["X-Forwarded-For"]
	for i := len(headers) - 1; i >= 0; i-- {
		for rest, more := headers[i], true; more; {
			if !p.trusts(client) {
				return client
			}
			comma := strings.LastIndexByte(rest, ',')
			hop, ok := parseHop(rest[comma+1:])
			if !ok {
				return client // the trusted proxy does not know its client's address
			}
			client, more = hop, comma >= 0
			rest = rest[:max(comma, 0)]
		}
	}
	return client
}

// Sent reports whether the request comes from a trusted proxy, whose other headers may be believed then.
func (p Proxies) Sent(r *http.Request) bool { return p.trusts(peer(r)) }

// Secure is true for a request over TLS, which a trusted proxy says of its own side.
func (p Proxies) Secure(r *http.Request) bool {
	return r.TLS != nil || p.Sent(r) && r.Header.Get("X-Forwarded-Proto") == "https"
}

func (p Proxies) trusts(addr netip.Addr) bool {
	for _, prefix := range p {
		if prefix.Contains(addr) {
			return true
		}
	}
	return false
}

// Key is what limits count by: an IPv4 address, or an IPv6 /64, which a customer has at least.
type Key [16]byte

// Key returns the Key of the client.
func (p Proxies) Key(r *http.Request) Key {
	addr := p.Client(r)
	key := Key(addr.As16())
	if addr.Is6() {
		clear(key[8:])
	}
	return key
}

// String is the address, or the prefix of an IPv6 network.
func (k Key) String() string {
	addr := netip.AddrFrom16(k).Unmap()
	if addr.Is6() {
		return netip.PrefixFrom(addr, 64).String()
	}
	return addr.String()
}

func peer(r *http.Request) netip.Addr {
	addr, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	return canonical(addr.Addr())
}

// parseHop reads an entry of X-Forwarded-For; some proxies add the port, or brackets only.
func parseHop(text string) (netip.Addr, bool) {
	text = strings.Trim(text, " \t")
	if addr, err := netip.ParseAddr(text); err == nil {
		return canonical(addr), true
	}
	if strings.HasSuffix(text, "]") {
		text += ":0"
	}
	if hop, err := netip.ParseAddrPort(text); err == nil {
		return canonical(hop.Addr()), true
	}
	return netip.Addr{}, false
}

// canonical makes all forms of an address equal: an IPv4 address may be written as ::ffff:192.0.2.1.
func canonical(addr netip.Addr) netip.Addr { return addr.Unmap().WithZone("") }

// UnmarshalText reads prefixes ("10.0.0.0/8") and addresses, separated by commas.
func (p *Proxies) UnmarshalText(text []byte) error {
	var all Proxies
	for entry := range strings.SplitSeq(string(text), ",") {
		if entry = strings.TrimSpace(entry); entry == "" {
			continue
		}
		prefix, err := netip.ParsePrefix(entry)
		if addr, addrErr := netip.ParseAddr(entry); addrErr == nil {
			prefix, err = netip.PrefixFrom(addr, addr.BitLen()), nil
		}
		if err != nil {
			return fmt.Errorf("%q is neither an address nor a prefix like 10.0.0.0/8", entry)
		}
		if addr := prefix.Addr(); addr.Is4In6() && prefix.Bits() >= 96 {
			prefix = netip.PrefixFrom(addr.Unmap(), prefix.Bits()-96)
		}
		all = append(all, prefix.Masked())
	}
	*p = all
	return nil
}

package ingress

import (
	"fmt"
	"net/http"
	"net/netip"
	"strings"
)

// addresses finds out where requests come from. X-Forwarded-For is whatever its sender wrote, so only what a trusted proxy
// has added to it is believed.
type addresses struct{ trusted []netip.Prefix }

// of is the address of the client: of the peer, or, if that is a trusted proxy, of the rightmost hop that is not. It is
// the zero Addr if the peer has none.
func (a addresses) of(r *http.Request) netip.Addr {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	client := canonical(peer.Addr())
	headers := r.Header["X-Forwarded-For"]
	for i := len(headers) - 1; i >= 0; i-- {
		for rest, more := headers[i], true; more; {
			if !a.trusts(client) {
				return client
			}
			comma := strings.LastIndexByte(rest, ',')
			hop, ok := parseHop(rest[comma+1:])
			if !ok {
				return client // a trusted proxy says that it does not know more
			}
			client, more = hop, comma >= 0
			rest = rest[:max(comma, 0)]
		}
	}
	return client
}

func (a addresses) trusts(addr netip.Addr) bool {
	for _, p := range a.trusted {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

// client is what bounds go by: an IPv4 address, or the /64 of an IPv6 address, which is what one customer has at least.
type clientKey [16]byte

func (a addresses) keyOf(r *http.Request) clientKey {
	addr := a.of(r)
	c := clientKey(addr.As16())
	if addr.Is6() {
		clear(c[8:])
	}
	return c
}

// parseHop reads an entry of X-Forwarded-For; some proxies add the port.
func parseHop(text string) (netip.Addr, bool) {
	text = trimOWS(text)
	if addr, err := netip.ParseAddr(text); err == nil {
		return canonical(addr), true
	}
	if hop, err := netip.ParseAddrPort(text); err == nil {
		return canonical(hop.Addr()), true
	}
	return netip.Addr{}, false
}

// plain makes an address the same however it came: an IPv4 address may come as ::ffff:192.0.2.1.
func canonical(addr netip.Addr) netip.Addr { return addr.Unmap().WithZone("") }

// ParseTrustedProxies reads prefixes ("10.0.0.0/8") and addresses, with commas between them.
func ParseTrustedProxies(text string) (trusted []netip.Prefix, err error) {
	for entry := range strings.SplitSeq(text, ",") {
		if entry = strings.TrimSpace(entry); entry == "" {
			continue
		}
		prefix, err := netip.ParsePrefix(entry)
		if addr, err2 := netip.ParseAddr(entry); err2 == nil {
			prefix, err = netip.PrefixFrom(addr, addr.BitLen()), nil
		}
		if err != nil {
			return nil, fmt.Errorf("%q is no address and no prefix like 10.0.0.0/8", entry)
		}
		if addr := prefix.Addr(); addr.Is4In6() && prefix.Bits() >= 96 {
			prefix = netip.PrefixFrom(addr.Unmap(), prefix.Bits()-96)
		}
		trusted = append(trusted, prefix.Masked())
	}
	return trusted, nil
}

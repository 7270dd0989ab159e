package ingress

import (
	"fmt"
	"net/http"
	"net/netip"
	"strings"
)

// clientAddresses finds the addresses of clients. A client can write anything into X-Forwarded-For, so only what a
// trusted proxy has added to it counts.
type clientAddresses struct{ trusted []netip.Prefix }

// of returns the client's address: the peer's or, behind a trusted proxy, that of the rightmost hop that is not
// trusted. It is the zero Addr if the peer has none.
func (a clientAddresses) of(r *http.Request) netip.Addr {
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
				return client // the trusted proxy does not know its client's address
			}
			client, more = hop, comma >= 0
			rest = rest[:max(comma, 0)]
		}
	}
	return client
}

func (a clientAddresses) trusts(addr netip.Addr) bool {
	for _, p := range a.trusted {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

// clientKey is what limits count by: an IPv4 address, or an IPv6 /64, which a customer has at least.
type clientKey [16]byte

func (a clientAddresses) keyOf(r *http.Request) clientKey {
	addr := a.of(r)
	key := clientKey(addr.As16())
	if addr.Is6() {
		clear(key[8:])
	}
	return key
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

// canonical makes all forms of an address equal: an IPv4 address may be written as ::ffff:192.0.2.1.
func canonical(addr netip.Addr) netip.Addr { return addr.Unmap().WithZone("") }

// ParseTrustedProxies reads prefixes ("10.0.0.0/8") and addresses, separated by commas.
func ParseTrustedProxies(text string) (trusted []netip.Prefix, err error) {
	for entry := range strings.SplitSeq(text, ",") {
		if entry = strings.TrimSpace(entry); entry == "" {
			continue
		}
		prefix, err := netip.ParsePrefix(entry)
		if addr, addrErr := netip.ParseAddr(entry); addrErr == nil {
			prefix, err = netip.PrefixFrom(addr, addr.BitLen()), nil
		}
		if err != nil {
			return nil, fmt.Errorf("%q is neither an address nor a prefix like 10.0.0.0/8", entry)
		}
		if addr := prefix.Addr(); addr.Is4In6() && prefix.Bits() >= 96 {
			prefix = netip.PrefixFrom(addr.Unmap(), prefix.Bits()-96)
		}
		trusted = append(trusted, prefix.Masked())
	}
	return trusted, nil
}

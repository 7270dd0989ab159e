package webhook

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
)

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

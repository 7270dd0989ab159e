package main

import (
	"cmp"
	"fmt"
	"net/netip"

	"stampede/ingress"
	"stampede/internal/ratelimit"
)

// clientFlags bound what each client may take of an ingress.
type clientFlags struct {
	UserRate       ratelimit.Rate `default:"5/s" placeholder:"N/s" help:"How often a user may buy, and as often again pay, cancel and look at orders; more is answered 429; 0: as often as they like (${default})."`
	UserBurst      int            `default:"20" placeholder:"N" help:"How often of that at once (${default})."`
	AddressRate    ratelimit.Rate `default:"0" placeholder:"N/s" help:"The same for a client address, before anybody is authenticated; as often again for all other calls. Offices and mobile networks share addresses; 0: as often as they like (${default})."`
	AddressBurst   int            `default:"200" placeholder:"N" help:"How often of that at once (${default})."`
	UserStreams    int            `default:"16" placeholder:"N" help:"Streams of orders that a user may have open at once; 0: all (${default})."`
	AddressStreams int            `default:"1000" placeholder:"N" help:"Streams of orders, and as many of sales, that a client address may have open at once, at most a quarter of all; 0: all (${default})."`
	TrustedProxies proxies        `placeholder:"PREFIXES" help:"Proxies whose X-Forwarded-For is believed, as 10.0.0.0/8,192.0.2.1. Without it the address of the connection is the client's."`
}

func (f clientFlags) Validate() error {
	return cmp.Or(
		wantBurst("--user-burst", f.UserBurst),
		wantBurst("--address-burst", f.AddressBurst),
		wantAtLeast("--user-streams", f.UserStreams, 0),
		wantAtLeast("--address-streams", f.AddressStreams, 0),
	)
}

func wantBurst(flag string, n int) error {
	return want(n >= 1 && n <= ratelimit.MaxBurst, flag, n, fmt.Sprintf("1 to %d", ratelimit.MaxBurst))
}

func (f clientFlags) bound(config *ingress.Config) {
	config.UserLimit = ingress.Limit{Rate: f.UserRate, Burst: f.UserBurst}
	config.AddressLimit = ingress.Limit{Rate: f.AddressRate, Burst: f.AddressBurst}
	config.UserStreams, config.AddressStreams = f.UserStreams, f.AddressStreams
	config.TrustedProxies = f.TrustedProxies
}

// proxies are the value of a flag.
type proxies []netip.Prefix

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *proxies) UnmarshalText(text []byte) (err error) {
	*p, err = ingress.ParseTrustedProxies(string(text))
	return err
}

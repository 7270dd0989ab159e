package main

import (
	"cmp"
	"fmt"

	"stampede/ingress"
	"stampede/internal/forwarded"
	"stampede/internal/ratelimit"
)

// clientFlags limit what each client may use of an ingress.
type clientFlags struct {
	UserRate       ratelimit.Rate    `default:"5/s" placeholder:"N/s" help:"Purchases that a user may make, and as many requests that pay, cancel or read orders; more get 429; 0: no limit (${default})."`
	UserBurst      int               `default:"20" placeholder:"N" help:"How many of these may come in one burst (${default})."`
	AddressRate    ratelimit.Rate    `default:"0" placeholder:"N/s" help:"The same limits for a client address, checked before authentication, and as many for all other calls together. Offices and mobile networks share addresses; 0: no limit (${default})."`
	AddressBurst   int               `default:"200" placeholder:"N" help:"How many of these may come in one burst (${default})."`
	UserStreams    int               `default:"16" placeholder:"N" help:"Streams of orders that a user may have open at the same time; 0: no limit (${default})."`
	AddressStreams int               `default:"1000" placeholder:"N" help:"Streams of orders, and as many of sales, that a client address may have open at the same time, at most a quarter of all streams; 0: no limit (${default})."`
	TrustedProxies forwarded.Proxies `placeholder:"PREFIXES" help:"Proxies whose X-Forwarded-For is trusted, such as 10.0.0.0/8,192.0.2.1. Without it the client address is that of the connection."`
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
	return checkFlag(n >= 1 && n <= ratelimit.MaxBurst, flag, n, fmt.Sprintf("1 to %d", ratelimit.MaxBurst))
}

func (f clientFlags) bound(config *ingress.Config) {
	config.UserLimit = ingress.Limit{Rate: f.UserRate, Burst: f.UserBurst}
	config.AddressLimit = ingress.Limit{Rate: f.AddressRate, Burst: f.AddressBurst}
	config.UserStreams, config.AddressStreams = f.UserStreams, f.AddressStreams
	config.TrustedProxies = f.TrustedProxies
}

// browserFlags open an ingress to the pages of other origins.
type browserFlags struct {
	CORSOrigins origins `name:"cors-origins" env:"STAMPEDE_CORS_ORIGINS" placeholder:"ORIGINS" help:"Origins whose pages may make buyers' calls, such as https://shop.example,http://localhost:3000; * allows all (default: none)."`
}

// tokenFlags say how the tokens of buyers are verified.
type tokenFlags struct {
	JWTSecret   string `name:"jwt-secret" env:"STAMPEDE_JWT_SECRET" placeholder:"SECRET" help:"Secret of the buyers' HS256 tokens, at least 32 bytes."`
	JWKSURL     string `name:"jwks-url" env:"STAMPEDE_JWKS_URL" placeholder:"URL" help:"Key set for the buyers' tokens, instead of a secret."`
	JWTIssuer   string `name:"jwt-issuer" env:"STAMPEDE_JWT_ISSUER" placeholder:"ISS" help:"Issuer that tokens must name (default: any)."`
	JWTAudience string `name:"jwt-audience" env:"STAMPEDE_JWT_AUDIENCE" placeholder:"AUD" help:"Audience that tokens must name (default: any)."`
}

func (f tokenFlags) verifyBy(config *ingress.Config) {
	config.JWTSecret, config.JWKSURL = f.JWTSecret, f.JWKSURL
	config.JWTIssuer, config.JWTAudience = f.JWTIssuer, f.JWTAudience
}

// origins are the value of a flag.
type origins []string

// UnmarshalText implements encoding.TextUnmarshaler.
func (o *origins) UnmarshalText(text []byte) (err error) {
	*o, err = ingress.ParseOrigins(string(text))
	return err
}

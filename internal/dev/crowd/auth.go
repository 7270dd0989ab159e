package crowd

import (
	"net/http"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// Auth signs requests as a buyer. Implementations are safe for concurrent use.
type Auth interface {
	sign(h http.Header, user string) error
}

// HeaderAuth is the name of the header that names the buyer, for an ingress with STAMPEDE_AUTH=header.
type HeaderAuth string

// sign implements Auth.
func (name HeaderAuth) sign(h http.Header, user string) error {
	h.Set(string(name), user)
	return nil
}

// JWTAuth creates an HS256 token per request, signed with the secret of the ingress.
type JWTAuth struct {
	Secret   []byte
	Issuer   string // no claim if empty
	Audience string // no claim if empty
}

// sign implements Auth.
func (a JWTAuth) sign(h http.Header, user string) error {
	now := time.Now()
	claims := jwt.RegisteredClaims{
		Subject:   user,
		Issuer:    a.Issuer,
		IssuedAt:  jwt.NewNumericDate(now),
		ExpiresAt: jwt.NewNumericDate(now.Add(time.Minute)),
	}
	if a.Audience != "" {
		claims.Audience = jwt.ClaimStrings{a.Audience}
	}
	token, err := jwt.NewWithClaims(jwt.SigningMethodHS256, claims).SignedString(a.Secret)
	if err != nil {
		return err
	}
	h.Set("Authorization", "Bearer "+token)
	return nil
}

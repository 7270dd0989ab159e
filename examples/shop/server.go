package main

import (
	"embed"
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

const (
	// tokenLife is short: the page asks for another token when one is about to expire.
	tokenLife = 5 * time.Minute
	bodyMax   = 4 << 10
)

//go:embed page
var pageFiles embed.FS

// shopConfig is what a shop needs.
type shopConfig struct {
	// API is the URL of an ingress, for browsers and for the shop itself.
	API string
	// Sale is the sale that the page shows.
	Sale string
	// Secret signs the tokens of buyers; it is the ingress's STAMPEDE_JWT_SECRET.
	Secret string
	// Cashier is the token of an operator with the role cashier.
	Cashier string
	// Origin is the URL of the shop.
	Origin string
}

// shop is the shop's server.
type shop struct {
	config   shopConfig
	provider *provider
}

func newShop(config shopConfig) (*shop, error) {
	switch {
	case config.Sale == "":
		return nil, errors.New("which sale? Give -sale, or run everything with -dev")
	case config.Secret == "":
		return nil, errors.New("SHOP_JWT_SECRET is not set: it is the STAMPEDE_JWT_SECRET of the ingress")
	case config.Cashier == "":
		return nil, errors.New("SHOP_CASHIER_TOKEN is not set: it is that of an operator with the role cashier")
	}
	return &shop{config: config, provider: newProvider(config.Origin + "/webhooks/payments")}, nil
}

func (s *shop) close() { s.provider.close() }

func (s *shop) handler() http.Handler {
	page, err := fs.Sub(pageFiles, "page")
	if err != nil {
		panic(err) // the folder is embedded
	}
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(page))
	mux.HandleFunc("GET /config", s.showConfig)
	mux.HandleFunc("POST /login", s.login)
	mux.HandleFunc("GET /orders/{order}/payments", s.authenticated(s.listPayments))
	mux.HandleFunc("POST /orders/{order}/payments", s.authenticated(s.startPayment))
	mux.HandleFunc("POST /webhooks/payments", s.receiveWebhook)
	mux.HandleFunc("GET /provider/payments/{payment}", s.provider.show)
	mux.HandleFunc("POST /provider/payments/{payment}", s.provider.capture)
	// The page runs only our own script and style, and talks only to us and to the API.
	policy := "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self' " +
		s.config.API + "; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		r.Body = http.MaxBytesReader(w, r.Body, bodyMax)
		mux.ServeHTTP(w, r)
	})
}

func (s *shop) showConfig(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]string{"api": s.config.API, "sale": s.config.Sale})
}

var userName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,31}$`)

// login signs a token for anybody. A real shop checks who it is.
func (s *shop) login(w http.ResponseWriter, r *http.Request) {
	var who struct {
		Name string `json:"name"`
	}
	if json.NewDecoder(r.Body).Decode(&who) != nil || !userName.MatchString(who.Name) {
		http.Error(w, "a name has 1 to 32 small letters, digits, dots and hyphens", http.StatusBadRequest)
		return
	}
	token, err := s.token(who.Name)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{"token": token, "expires_in": int(tokenLife.Seconds())})
}

// token signs what an ingress believes (STAMPEDE_AUTH=jwt).
func (s *shop) token(user string) (string, error) {
	claims := jwt.RegisteredClaims{Subject: user, ExpiresAt: jwt.NewNumericDate(time.Now().Add(tokenLife))}
	return jwt.NewWithClaims(jwt.SigningMethodHS256, claims).SignedString([]byte(s.config.Secret))
}

// authenticated wraps a handler for buyers.
func (s *shop) authenticated(h func(w http.ResponseWriter, r *http.Request, user string)) http.HandlerFunc {
	parser := jwt.NewParser(jwt.WithValidMethods([]string{"HS256"}), jwt.WithExpirationRequired())
	return func(w http.ResponseWriter, r *http.Request) {
		token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		var claims jwt.RegisteredClaims
		_, err := parser.ParseWithClaims(token, &claims, func(*jwt.Token) (any, error) {
			return []byte(s.config.Secret), nil
		})
		if err != nil {
			http.Error(w, "sign in", http.StatusUnauthorized)
			return
		}
		h(w, r, claims.Subject)
	}
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // fails if the client has left
}

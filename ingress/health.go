package ingress

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/labstack/echo/v4"
	"golang.org/x/sync/singleflight"

	"stampede/internal/pg"
	"stampede/reservation"
	"stampede/reservation/problems"
)

// pingTimeout bounds a ping. It is below the few seconds after which health checks time out.
const pingTimeout = 500 * time.Millisecond

// health answers the probes of those who operate the server.
type health struct {
	*core
	pings singleflight.Group
}

// serverStates are the states of both servers, as /readyz shows them: up, down or read-only.
type serverStates struct {
	Status   string `json:"status"`
	Redis    string `json:"redis"`
	Postgres string `json:"postgres"`
}

// live serves GET /livez: the process runs.
func (s *health) live(c echo.Context) error {
	return writeJSON(c, http.StatusOK, struct {
		Status string `json:"status"`
	}{"alive"})
}

// ready serves GET /readyz: the server takes requests, Redis takes the writes of a purchase, the secret for receipts
// was read, and a key for the tokens of buyers is known. Postgres is reported, but not required: a sale goes on without
// it. Neither is the provider of the keys, once they are known.
func (s *health) ready(c echo.Context) error {
	states, err := s.readiness()
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, states)
}

// readiness returns the states of both servers, and a problem if this one takes no requests. It asks none if this one
// is stopping.
func (s *health) readiness() (serverStates, error) {
	if s.stopping.Load() {
		return serverStates{}, &problem{Kind: problems.NotReady, detail: "This server is stopping.", retryAfter: retrySoon}
	}
	states := serverStates{Status: "ready"}
	var pinging sync.WaitGroup
	pinging.Go(func() { states.Postgres, _ = s.ping("postgres", s.config.Postgres.Ping) })
	redisState, err := s.ping("redis", s.config.Reservations.Writable)
	pinging.Wait()
	states.Redis = redisState
	detail := ""
	switch code := reservation.RefusalCode(err); {
	case err == nil && s.receipts.signer.Load() != nil && s.hasKeys():
		return states, nil
	case err == nil && !s.hasKeys():
		detail = "No key for the tokens of buyers is known: STAMPEDE_JWKS_URL does not answer, or with no usable key."
	case err == nil:
		detail = "The secret for receipts was not read from Postgres yet, and STAMPEDE_RECEIPT_SECRET is not set."
	case code != "":
		detail = "Redis refuses writes: " + code + "."
	default:
		detail = "Redis does not answer."
	}
	return states, &problem{
		Kind: problems.NotReady, retryAfter: retrySoon, redis: states.Redis, postgres: states.Postgres, detail: detail,
	}
}

// hasKeys is false if no token of a buyer can be verified.
func (s *health) hasKeys() bool { return s.keys == nil || s.keys.Known() != nil }

// look is readiness for the metrics.
func (s *health) look(context.Context) (notReady string, dependencies map[string]bool) {
	states, err := s.readiness()
	var why *problem
	if errors.As(err, &why) {
		notReady = strings.TrimSuffix(why.detail, ".")
	}
	if states.Redis == "" { // nothing was asked, because the server is stopping
		return notReady, nil
	}
	return notReady, map[string]bool{
		"redis": states.Redis == "up", "postgres": states.Postgres == "up", "receipt-secret": s.receipts.signer.Load() != nil,
	}
}

// ping asks a server once for all concurrent calls, because the route needs no authentication.
func (s *health) ping(name string, ask func(context.Context) error) (state string, err error) {
	_, err, _ = s.pings.Do(name, func() (any, error) {
		ctx, cancel := context.WithTimeout(s.background.ctx, pingTimeout)
		defer cancel()
		return nil, ask(ctx)
	})
	switch {
	case errors.Is(err, pg.ErrReadOnly):
		return "read-only", err
	case err != nil:
		return "down", err
	}
	return "up", nil
}

package ingress

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/labstack/echo/v4"

	"stampede/internal/pg"
	"stampede/reservation"
)

// pingTimeout bounds a ping. It is below the few seconds after which health checks time out.
const pingTimeout = 500 * time.Millisecond

const (
	stateUp       = "up"
	stateDown     = "down"
	stateReadOnly = "read-only"
)

var aliveBody = []byte(`{"status":"alive"}` + "\n")

// live serves GET /livez: the process runs.
func (s *Server) live(c echo.Context) error {
	c.Response().Header()["Content-Type"] = jsonContent
	write(c, http.StatusOK, aliveBody)
	return nil
}

// ready serves GET /readyz: the server takes requests, Redis takes the writes of a purchase, and the secret for
// receipts was read. Postgres is reported, but not required: a sale goes on without it.
func (s *Server) ready(c echo.Context) error {
	redisState, postgresState, err := s.readiness()
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, struct {
		Status   string `json:"status"`
		Redis    string `json:"redis"`
		Postgres string `json:"postgres"`
	}{"ready", redisState, postgresState})
}

// Ready returns nil if GET /readyz answers 200.
func (s *Server) Ready(context.Context) error {
	_, _, err := s.readiness()
	return err
}

// readiness returns the states of both servers, and a problem if this one takes no requests.
func (s *Server) readiness() (redisState, postgresState string, err error) {
	if s.stopping.Load() {
		return "", "", &problem{kind: kindNotReady, detail: "This server is stopping.", retryAfter: retrySoon}
	}
	var pinging sync.WaitGroup
	pinging.Go(func() { postgresState, _ = s.ping("postgres", s.config.Postgres.Ping) })
	redisState, err = s.ping("redis", s.config.Reservations.Writable)
	pinging.Wait()
	if err != nil {
		detail := "Redis does not answer."
		if code := reservation.RefusalCode(err); code != "" {
			detail = "Redis refuses writes: " + code + "."
		}
		return redisState, postgresState, &problem{
			kind: kindNotReady, retryAfter: retrySoon, redis: redisState, postgres: postgresState, detail: detail,
		}
	}
	if s.signer.Load() == nil {
		return redisState, postgresState, &problem{
			kind: kindNotReady, retryAfter: retrySoon, redis: redisState, postgres: postgresState,
			detail: "The secret for receipts was not read from Postgres yet, and STAMPEDE_RECEIPT_SECRET is not set.",
		}
	}
	return redisState, postgresState, nil
}

// ping asks a server once for all concurrent calls, because the route needs no authentication.
func (s *Server) ping(name string, ask func(context.Context) error) (state string, err error) {
	_, err, _ = s.pings.Do(name, func() (any, error) {
		ctx, cancel := context.WithTimeout(s.background.ctx, pingTimeout)
		defer cancel()
		return nil, ask(ctx)
	})
	switch {
	case errors.Is(err, pg.ErrReadOnly):
		return stateReadOnly, err
	case err != nil:
		return stateDown, err
	}
	return stateUp, nil
}

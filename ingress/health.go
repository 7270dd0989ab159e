package ingress

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/labstack/echo/v4"

	"stampede/internal/pg"
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

// ready serves GET /readyz: the server takes requests, Redis answers a PING, and the secret for receipts was read.
// Whether Redis accepts writes is not checked. Postgres is reported, but not required: a sale goes on without it.
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
	pinging.Go(func() { postgresState = s.ping("postgres", s.config.Postgres) })
	redisState = s.ping("redis", s.config.Reservations)
	pinging.Wait()
	if redisState == stateDown {
		return redisState, postgresState, &problem{
			kind: kindNotReady, retryAfter: retrySoon, redis: redisState, postgres: postgresState,
			detail: "Redis does not answer.",
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

// ping pings a server once for all concurrent calls, because the route needs no authentication.
func (s *Server) ping(name string, p Pinger) string {
	answer, _, _ := s.pings.Do(name, func() (any, error) {
		ctx, cancel := context.WithTimeout(s.background.ctx, pingTimeout)
		defer cancel()
		switch err := p.Ping(ctx); {
		case errors.Is(err, pg.ErrReadOnly):
			return stateReadOnly, nil
		case err != nil:
			return stateDown, nil
		}
		return stateUp, nil
	})
	return answer.(string)
}

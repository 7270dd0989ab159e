package ingress

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/labstack/echo/v4"
)

// pingTimeout is how quickly a server must answer to count as up. It leaves room below the few
// seconds that health checks wait.
const pingTimeout = 500 * time.Millisecond

const (
	up   = "up"
	down = "down"
)

var aliveBody = []byte(`{"status":"alive"}` + "\n")

// live serves GET /livez: the process runs.
func (s *Server) live(c echo.Context) error {
	c.Response().Header()["Content-Type"] = jsonContent
	write(c, http.StatusOK, aliveBody)
	return nil
}

// ready serves GET /readyz: this server takes requests, Redis answers a PING, without which no
// purchase can be decided, and the secret for receipts is known. Whether Redis takes writes is not tried.
// Postgres is only told of: once the secret was read, a sale goes on without it.
func (s *Server) ready(c echo.Context) error {
	if s.stopping.Load() {
		return &problem{kind: kindNotReady, detail: "This server is stopping.", retryAfter: retrySoon}
	}
	var (
		postgres string
		asked    sync.WaitGroup
	)
	asked.Go(func() { postgres = s.ping("postgres", s.config.Postgres) })
	redis := s.ping("redis", s.config.Reservations)
	asked.Wait()
	if redis == down {
		return &problem{kind: kindNotReady, detail: "Redis does not answer.", retryAfter: retrySoon, redis: redis, postgres: postgres}
	}
	if s.signer.Load() == nil {
		return &problem{
			kind: kindNotReady, retryAfter: retrySoon, redis: redis, postgres: postgres,
			detail: "The secret for receipts could not be read from Postgres yet, and STAMPEDE_RECEIPT_SECRET is not set.",
		}
	}
	return writeJSON(c, http.StatusOK, struct {
		Status   string `json:"status"`
		Redis    string `json:"redis"`
		Postgres string `json:"postgres"`
	}{"ready", redis, postgres})
}

// ping asks a server once for all who want to know at the same time: the route needs no authentication.
func (s *Server) ping(name string, p Pinger) string {
	answer, _, _ := s.pings.Do(name, func() (any, error) {
		ctx, cancel := context.WithTimeout(s.background.ctx, pingTimeout)
		defer cancel()
		if p.Ping(ctx) != nil {
			return down, nil
		}
		return up, nil
	})
	return answer.(string)
}

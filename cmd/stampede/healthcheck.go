package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"
)

type healthcheckCmd struct {
	look
	outputFlag
	URL     string        `name:"url" env:"STAMPEDE_HEALTHCHECK_URL" default:"http://127.0.0.1:8080/readyz" placeholder:"URL" help:"URL to request (${default}); for a worker, /readyz at its metrics address."`
	Timeout time.Duration `env:"STAMPEDE_HEALTHCHECK_TIMEOUT" default:"3s" placeholder:"DURATION" help:"How long to wait for the answer (${default})."`
}

// errNotReady ends a command that got the answer of a process that is not ready.
var errNotReady = errors.New("not healthy")

// health is the result of healthcheck as JSON.
type health struct {
	URL   string `json:"url"`
	Ready bool   `json:"ready"`
	// Status is the status of the answer, 0 without one.
	Status int `json:"status"`
}

// Run prints nothing as text if all is well, because it runs every few seconds in a container.
func (c *healthcheckCmd) Run(ctx context.Context, s *streams) error {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL, nil)
	if err != nil {
		return &usageError{err}
	}
	found := health{URL: c.URL}
	resp, asked := http.DefaultClient.Do(req)
	if asked == nil {
		_ = resp.Body.Close()
		found.Ready, found.Status = resp.StatusCode == http.StatusOK, resp.StatusCode
	}
	if err := c.print(s.out, found, ""); err != nil {
		return err
	}
	switch {
	case asked != nil:
		return fmt.Errorf("not healthy: %w", asked)
	case !found.Ready:
		return fmt.Errorf("%w: %s answers %s", errNotReady, c.URL, resp.Status)
	}
	return nil
}

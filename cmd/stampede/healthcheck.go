package main

import (
	"context"
	"fmt"
	"net/http"
	"time"
)

type healthcheckCmd struct {
	URL     string        `name:"url" env:"STAMPEDE_HEALTHCHECK_URL" default:"http://127.0.0.1:8080/readyz" placeholder:"URL" help:"URL to request (${default}); for a worker, /readyz at its metrics address."`
	Timeout time.Duration `env:"STAMPEDE_HEALTHCHECK_TIMEOUT" default:"3s" placeholder:"DURATION" help:"How long to wait for the answer (${default})."`
}

func (c *healthcheckCmd) Run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL, nil)
	if err != nil {
		return &usageError{err}
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("not healthy: %w", err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("not healthy: %s answers %s", c.URL, resp.Status)
	}
	return nil
}

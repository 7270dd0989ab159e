package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/google/uuid"
	"github.com/mattn/go-isatty"
	"golang.org/x/sync/errgroup"

	"stampede/internal/connect"
	"stampede/internal/crowd"
	"stampede/internal/figure"
)

type loadCmd struct {
	keysFlags
	URLs         []string      `name:"url" env:"STAMPEDE_LOAD_URL" default:"http://127.0.0.1:8080" placeholder:"URL" help:"Ingresses, separated by commas; buyers go round them (${default})."`
	Sale         uuid.UUID     `env:"STAMPEDE_LOAD_SALE" placeholder:"ID" help:"Sale to buy from. Without it one is created, for which the admin token is needed."`
	Stock        int64         `env:"STAMPEDE_LOAD_STOCK" default:"10000" placeholder:"UNITS" help:"Units of the sale that is created (${default})."`
	AdminToken   string        `env:"STAMPEDE_ADMIN_TOKEN" placeholder:"TOKEN" help:"Bearer token with which to create the sale."`
	Buyers       int           `env:"STAMPEDE_LOAD_BUYERS" default:"50000" placeholder:"N" help:"How many buyers come (${default})."`
	Over         time.Duration `env:"STAMPEDE_LOAD_OVER" default:"10s" placeholder:"DURATION" help:"Time over which they come, evenly (${default})."`
	Rate         float64       `env:"STAMPEDE_LOAD_RATE" placeholder:"PER SECOND" help:"Buyers a second, instead of --over."`
	Quantity     int64         `env:"STAMPEDE_LOAD_QUANTITY" default:"1" placeholder:"UNITS" help:"Units that each buyer asks for (${default})."`
	DoubleClicks float64       `env:"STAMPEDE_LOAD_DOUBLE_CLICKS" default:"0.05" placeholder:"SHARE" help:"Share of buyers who click twice at once, 0 to 1 (${default})."`
	Connections  int           `env:"STAMPEDE_LOAD_CONNECTIONS" default:"256" placeholder:"N" help:"Connections to each ingress (${default})."`
	Patience     time.Duration `env:"STAMPEDE_LOAD_PATIENCE" default:"30s" placeholder:"DURATION" help:"How long a buyer goes on with the same key while the outcome is unknown, and how long arrivals in Postgres are waited for (${default})."`
	AuthHeader   string        `env:"STAMPEDE_AUTH_HEADER" default:"X-User-ID" placeholder:"NAME" help:"Header in which buyers are named, unless a secret is given (${default})."`
	JWTSecret    string        `name:"jwt-secret" env:"STAMPEDE_JWT_SECRET" placeholder:"SECRET" help:"Secret from which buyers' HS256 tokens are minted."`
	JWTIssuer    string        `name:"jwt-issuer" env:"STAMPEDE_JWT_ISSUER" placeholder:"ISS" help:"Issuer that the tokens name."`
	JWTAudience  string        `name:"jwt-audience" env:"STAMPEDE_JWT_AUDIENCE" placeholder:"AUD" help:"Audience that the tokens name."`
	DatabaseURL  string        `name:"database-url" env:"DATABASE_URL" placeholder:"URL" help:"Postgres behind the ingress: with it the orders are checked there, else by asking the ingress for each."`
	RedisURL     string        `name:"redis-url" env:"REDIS_URL" placeholder:"URL" help:"Redis behind the ingress: with it and Postgres the sale is audited as well."`
}

func (c *loadCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	collectLess()
	auth := c.auth()
	sale := c.Sale
	if sale == uuid.Nil {
		if c.AdminToken == "" {
			return usagef("give --sale, or --admin-token with which to create one")
		}
		var err error
		if sale, err = crowd.CreateSale(ctx, c.URLs[0], c.AdminToken, "load test", c.Stock, c.Quantity); err != nil {
			return err
		}
		_, _ = fmt.Fprintf(s.err, "created sale %s of %s units\n", sale, figure.Count(c.Stock))
	}
	over := c.Over
	if c.Rate > 0 {
		over = time.Duration(float64(c.Buyers) / c.Rate * float64(time.Second))
	}
	buyers, err := crowd.New(crowd.Config{
		URLs: c.URLs, Sale: sale, Buyers: c.Buyers, Over: over, Quantity: c.Quantity, DoubleClicks: c.DoubleClicks,
		Connections: c.Connections, Patience: c.Patience, Auth: auth,
	})
	if err != nil {
		return &usageError{err}
	}
	books, closeBooks, err := c.openBooks(ctx, sale, auth)
	if err != nil {
		return err
	}
	defer closeBooks()

	report, err := send(ctx, s.err, buyers, books, c.Patience)
	if err != nil {
		return err
	}
	if err := report.WriteText(s.out); err != nil {
		return err
	}
	// A crowd that was stopped by a signal is still held against the books.
	compareCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*c.Patience)
	defer cancel()
	comparison, err := books.Compare(compareCtx, buyers.Ledger())
	if err != nil {
		return err
	}
	judged := c.judge(s.out, report, comparison)
	if c.DatabaseURL == "" || c.RedisURL == "" {
		return judged
	}
	return errors.Join(judged, c.audit(compareCtx, s.out, sale, logger))
}

// audit holds all of the sale against the promises, whoever bought from it.
func (c *loadCmd) audit(ctx context.Context, w io.Writer, sale uuid.UUID, logger *slog.Logger) error {
	b, err := openBackend(ctx, connect.Control, c.RedisURL, c.DatabaseURL, c.keysFlags, 2, logger)
	if err != nil {
		return err
	}
	defer b.Close()
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return audit(ctx, w, b, c.keysFlags, sale, c.Patience, false)
}

func (c *loadCmd) auth() crowd.Auth {
	if c.JWTSecret != "" {
		return crowd.JWTAuth{Secret: []byte(c.JWTSecret), Issuer: c.JWTIssuer, Audience: c.JWTAudience}
	}
	return crowd.HeaderAuth(c.AuthHeader)
}

func (c *loadCmd) openBooks(ctx context.Context, sale uuid.UUID, auth crowd.Auth) (crowd.Books, func(), error) {
	if c.DatabaseURL == "" {
		books, err := crowd.OpenAPIBooks(ctx, c.URLs[0], sale, auth)
		return books, func() {}, err
	}
	pool, err := connect.Postgres(ctx, c.DatabaseURL, 2)
	if err != nil {
		return nil, nil, err
	}
	books, err := crowd.OpenPostgresBooks(ctx, pool, sale)
	if err != nil {
		pool.Close()
		return nil, nil, err
	}
	return books, pool.Close, nil
}

// send runs the crowd with its progress on w, and watches the orders arrive in the books.
func send(ctx context.Context, w io.Writer, buyers *crowd.Crowd, books crowd.Books, patience time.Duration) (crowd.Report, error) {
	var durable crowd.Durable
	var together errgroup.Group
	together.Go(func() error { buyers.Run(ctx); return nil })
	together.Go(func() error { buyers.ShowProgress(ctx, w, isTerminal(w)); return nil })
	together.Go(func() (err error) {
		durable, err = buyers.WatchDurable(context.WithoutCancel(ctx), books, patience)
		return err
	})
	err := together.Wait()
	report := buyers.Report()
	switch {
	case errors.Is(err, crowd.ErrPaymentWindow):
		return report, nil // the report does without
	case err != nil:
		return report, err
	}
	report.Durable = &durable
	return report, nil
}

// judge prints whether ledger and books agree, and what the crowd must not have met.
func (c *loadCmd) judge(w io.Writer, report crowd.Report, comparison crowd.Comparison) error {
	where := "Postgres"
	if c.DatabaseURL == "" {
		where = "the ingress's answers"
	}
	_, err := fmt.Fprintf(w, "\nchecked against %s, order by order: %s\n", where, comparison)
	for _, example := range comparison.Examples {
		_, _ = fmt.Fprintln(w, "  "+example)
	}
	switch {
	case err != nil:
		return err
	case !comparison.Holds():
		return errBroken
	case len(report.Failures) > 0:
		return errors.New("some clicks ended without a proper answer")
	}
	return nil
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}

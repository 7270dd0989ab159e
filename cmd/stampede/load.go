package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/mattn/go-isatty"
	"golang.org/x/sync/errgroup"

	"stampede/internal/connect"
	"stampede/internal/crowd"
	"stampede/internal/figure"
)

type loadCmd struct {
	keysFlags
	URLs         []string       `name:"url" env:"STAMPEDE_LOAD_URL" default:"http://127.0.0.1:8080" placeholder:"URL" help:"Ingresses, separated by commas; buyers go round them (${default})."`
	Sale         uuid.UUID      `env:"STAMPEDE_LOAD_SALE" placeholder:"ID" help:"Sale to buy from. Without it one is created, for which the admin token is needed."`
	Stock        int64          `env:"STAMPEDE_LOAD_STOCK" default:"10000" placeholder:"UNITS" help:"Units of the sale that is created (${default})."`
	AdminToken   string         `env:"STAMPEDE_ADMIN_TOKEN" placeholder:"TOKEN" help:"Bearer token with which to create the sale."`
	Buyers       int            `env:"STAMPEDE_LOAD_BUYERS" default:"50000" placeholder:"N" help:"How many buyers come (${default})."`
	Over         *time.Duration `env:"STAMPEDE_LOAD_OVER" placeholder:"DURATION" help:"Time over which they come, evenly (10s)."`
	Rate         *float64       `env:"STAMPEDE_LOAD_RATE" placeholder:"PER SECOND" help:"Buyers a second, instead of --over."`
	Quantity     int64          `env:"STAMPEDE_LOAD_QUANTITY" default:"1" placeholder:"UNITS" help:"Units that each buyer asks for (${default})."`
	DoubleClicks float64        `env:"STAMPEDE_LOAD_DOUBLE_CLICKS" default:"0.05" placeholder:"SHARE" help:"Share of buyers who click twice at once, 0 to 1 (${default})."`
	Connections  int            `env:"STAMPEDE_LOAD_CONNECTIONS" default:"256" placeholder:"N" help:"Connections to each ingress (${default})."`
	Patience     time.Duration  `env:"STAMPEDE_LOAD_PATIENCE" default:"30s" placeholder:"DURATION" help:"How long a buyer goes on with the same key while the outcome is unknown, and how long arrivals in Postgres are waited for (${default})."`
	AuthHeader   string         `env:"STAMPEDE_AUTH_HEADER" default:"X-User-ID" placeholder:"NAME" help:"Header in which buyers are named, unless a secret is given (${default})."`
	JWTSecret    string         `name:"jwt-secret" env:"STAMPEDE_JWT_SECRET" placeholder:"SECRET" help:"Secret from which buyers' HS256 tokens are minted."`
	JWTIssuer    string         `name:"jwt-issuer" env:"STAMPEDE_JWT_ISSUER" placeholder:"ISS" help:"Issuer that the tokens name."`
	JWTAudience  string         `name:"jwt-audience" env:"STAMPEDE_JWT_AUDIENCE" placeholder:"AUD" help:"Audience that the tokens name."`
	DatabaseURL  string         `name:"database-url" env:"DATABASE_URL" placeholder:"URL" help:"Postgres behind the ingress: with it the orders are checked there, else by asking the ingress for each."`
	RedisURL     string         `name:"redis-url" env:"REDIS_URL" placeholder:"URL" help:"Redis behind the ingress: with it and Postgres the sale is audited as well."`
}

// Validate is called by kong, so that nothing is created for a crowd that cannot come.
func (c *loadCmd) Validate() error {
	return cmp.Or(
		c.keysFlags.Validate(),
		wantAtLeast("--stock", c.Stock, 1),
		want(c.Buyers >= 1 && c.Buyers <= crowd.MaxBuyers, "--buyers", c.Buyers, fmt.Sprintf("1 to %d", crowd.MaxBuyers)),
		c.validatePace(),
		wantAtLeast("--quantity", c.Quantity, 1),
		wantShare("--double-clicks", c.DoubleClicks),
		wantAtLeast("--connections", c.Connections, 1),
		wantAtLeast("--patience", c.Patience, time.Millisecond),
		wantHeader("--auth-header", c.AuthHeader),
		c.validateServers(),
	)
}

func (c *loadCmd) validatePace() error {
	const slowest = 0.01 // so that the time of any crowd is one that Go can express
	switch {
	case c.Over != nil && c.Rate != nil:
		return usagef("give --over or --rate, not both")
	case c.Over != nil:
		return wantAtLeast("--over", *c.Over, 0)
	case c.Rate != nil:
		return wantAtLeast("--rate", *c.Rate, slowest)
	}
	return nil
}

// over is the time over which the buyers come.
func (c *loadCmd) over() time.Duration {
	switch {
	case c.Over != nil:
		return *c.Over
	case c.Rate != nil:
		return time.Duration(float64(c.Buyers) / *c.Rate * float64(time.Second))
	}
	return 10 * time.Second
}

func (c *loadCmd) validateServers() error {
	switch {
	case c.Sale == uuid.Nil && c.AdminToken == "":
		return usagef("give --sale, or --admin-token (STAMPEDE_ADMIN_TOKEN) with which to create one")
	case c.RedisURL != "" && c.DatabaseURL == "":
		return usagef("--redis-url (REDIS_URL) is for the audit, which needs --database-url (DATABASE_URL) as well")
	}
	return nil
}

func (c *loadCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	collectLess()
	config := crowd.Config{
		URLs: c.URLs, Sale: c.Sale, Buyers: c.Buyers, Over: c.over(), Quantity: c.Quantity, DoubleClicks: c.DoubleClicks,
		Connections: c.Connections, Patience: c.Patience, Auth: c.auth(),
	}
	if err := config.Validate(); err != nil {
		return &usageError{err}
	}
	behind, err := c.openBehind(ctx, logger)
	if err != nil {
		return err
	}
	defer behind.close()
	if config.Sale == uuid.Nil {
		if config.Sale, err = crowd.CreateSale(ctx, c.URLs[0], c.AdminToken, "load test", c.Stock, c.Quantity); err != nil {
			return err
		}
		_, _ = fmt.Fprintf(s.err, "created sale %s of %s units\n", config.Sale, figure.Count(c.Stock))
	}
	buyers, err := crowd.New(config)
	if err != nil {
		return err
	}
	books, err := c.openBooks(ctx, behind.pool, config.Sale, config.Auth)
	if err != nil {
		return err
	}
	report, err := send(ctx, s.err, buyers, books, c.Patience)
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintln(s.err) // between the progress and the report
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
	if behind.backend == nil {
		return judged
	}
	// The audit holds all of the sale against the promises, whoever bought from it.
	if _, err := fmt.Fprintln(s.out); err != nil {
		return errors.Join(judged, err)
	}
	return alsoAudited(judged, runAudit(compareCtx, s.out, behind.backend, c.keysFlags, config.Sale, c.Patience, false))
}

// alsoAudited adds what an audit said. The status is that of what was judged before, unless that
// was good: an audit that could not look makes it no better.
func alsoAudited(judged, audited error) error {
	if judged == nil || audited == nil {
		return cmp.Or(judged, audited)
	}
	return fmt.Errorf("%w; the audit: %v", judged, audited) //nolint:errorlint // its status does not count
}

// behind is what is known of the servers behind the ingress.
type behind struct {
	pool    *pgxpool.Pool // nil without Postgres
	backend *backend      // nil without both
	close   func()
}

// openBehind comes before the crowd, so that a URL that is wrong is found before a sale is created.
func (c *loadCmd) openBehind(ctx context.Context, logger *slog.Logger) (behind, error) {
	const postgresConns = 2
	switch {
	case c.DatabaseURL == "":
		return behind{close: func() {}}, nil
	case c.RedisURL == "":
		pool, err := connect.Postgres(ctx, c.DatabaseURL, postgresConns)
		if err != nil {
			return behind{}, err
		}
		return behind{pool: pool, close: pool.Close}, nil
	}
	b, err := openBackend(ctx, connect.Control, c.RedisURL, c.DatabaseURL, c.keysFlags, postgresConns, logger)
	if err != nil {
		return behind{}, err
	}
	return behind{pool: b.pool, backend: b, close: b.Close}, nil
}

func (c *loadCmd) auth() crowd.Auth {
	if c.JWTSecret != "" {
		return crowd.JWTAuth{Secret: []byte(c.JWTSecret), Issuer: c.JWTIssuer, Audience: c.JWTAudience}
	}
	return crowd.HeaderAuth(c.AuthHeader)
}

func (c *loadCmd) openBooks(
	ctx context.Context, pool *pgxpool.Pool, sale uuid.UUID, auth crowd.Auth,
) (crowd.Books, error) {
	api, err := crowd.OpenAPIBooks(ctx, c.URLs[0], sale, auth)
	if err != nil || pool == nil {
		return api, err
	}
	books, err := crowd.OpenPostgresBooks(ctx, pool, sale)
	if err != nil {
		return nil, err
	}
	books.AskToo(api)
	return books, nil
}

// send runs the crowd with its progress on w, and watches the orders arrive in the books.
func send(
	ctx context.Context, w io.Writer, buyers *crowd.Crowd, books crowd.Books, patience time.Duration,
) (crowd.Report, error) {
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

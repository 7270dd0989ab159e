package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/mattn/go-isatty"
	"golang.org/x/sync/errgroup"

	"stampede/internal/connect"
	"stampede/internal/dev/loadgen"
	"stampede/internal/format"
	"stampede/reservation"
)

type loadCmd struct {
	keysFlags
	outputFlag
	URLs         []string       `name:"url" env:"STAMPEDE_LOAD_URL" default:"http://127.0.0.1:8080" placeholder:"URL" help:"Ingresses, separated by commas; buyers use them in turn (${default})."`
	Sale         uuid.UUID      `env:"STAMPEDE_LOAD_SALE" placeholder:"ID" help:"Sale to buy from. Without it a sale is created, which needs the admin token."`
	Stock        int64          `env:"STAMPEDE_LOAD_STOCK" default:"10000" placeholder:"UNITS" help:"Units of the created sale (${default})."`
	Items        []saleItem     `env:"STAMPEDE_LOAD_ITEMS" placeholder:"CODE:STOCK" help:"Items of the created sale with their units, in place of --stock, or those of --sale in its order; buyers take --quantity units of them in turn."`
	Shards       int            `env:"STAMPEDE_LOAD_SHARDS" default:"1" placeholder:"N" help:"Shards of the created sale (${default})."`
	AdminToken   string         `env:"STAMPEDE_ADMIN_TOKEN" placeholder:"TOKEN" help:"Bearer token for creating the sale."`
	Buyers       int            `env:"STAMPEDE_LOAD_BUYERS" default:"50000" placeholder:"N" help:"Number of buyers (${default})."`
	Over         *time.Duration `env:"STAMPEDE_LOAD_OVER" placeholder:"DURATION" help:"Time over which the buyers arrive, evenly spread (10s)."`
	Rate         *float64       `env:"STAMPEDE_LOAD_RATE" placeholder:"PER SECOND" help:"Buyers per second, instead of --over."`
	Arrive       string         `env:"STAMPEDE_LOAD_ARRIVE" placeholder:"flash:TIME|FILE" help:"How the buyers arrive, instead of evenly: flash:2s, half of them in 2 s, half of the others in the next 2 s and so on; or as in a file with a second and a number of buyers in each line."`
	Want         []loadgen.Want `env:"STAMPEDE_LOAD_WANT" placeholder:"NAME=LIMIT" help:"What the load must not exceed, else the exit status is 1: p99=250ms of accepted orders, refused-p99=100ms, durable=10s (from the first click until the last order is in Postgres), failed=0.1% of the clicks; also p50 and max. The exit status is 3 if that could not be measured, also because the load itself was too busy."`
	Quantity     int64          `env:"STAMPEDE_LOAD_QUANTITY" default:"1" placeholder:"UNITS" help:"Units per purchase (${default})."`
	DoubleClicks float64        `env:"STAMPEDE_LOAD_DOUBLE_CLICKS" default:"0.05" placeholder:"SHARE" help:"Share of buyers who click twice at the same time, 0 to 1 (${default})."`
	Connections  int            `env:"STAMPEDE_LOAD_CONNECTIONS" default:"256" placeholder:"N" help:"Connections to each ingress (${default})."`
	Patience     time.Duration  `env:"STAMPEDE_LOAD_PATIENCE" default:"30s" placeholder:"DURATION" help:"How long a buyer retries with the same key while the outcome is unknown, and how long to wait for orders to arrive in Postgres (${default})."`
	AuthHeader   string         `env:"STAMPEDE_AUTH_HEADER" default:"${auth_header}" placeholder:"NAME" help:"Header that names the buyer, unless a JWT secret is given (${default})."`
	JWTSecret    string         `name:"jwt-secret" env:"STAMPEDE_JWT_SECRET" placeholder:"SECRET" help:"Secret that signs the buyers' HS256 tokens."`
	JWTIssuer    string         `name:"jwt-issuer" env:"STAMPEDE_JWT_ISSUER" placeholder:"ISS" help:"Issuer in the tokens."`
	JWTAudience  string         `name:"jwt-audience" env:"STAMPEDE_JWT_AUDIENCE" placeholder:"AUD" help:"Audience in the tokens."`
	DatabaseURL  string         `name:"database-url" env:"DATABASE_URL" placeholder:"URL" help:"Postgres behind the ingress. With it orders are verified there, else by one request per order."`
	RedisURL     string         `name:"redis-url" env:"REDIS_URL" placeholder:"URL" help:"Redis behind the ingress. With it and Postgres the sale is audited as well."`

	arrivals loadgen.Arrivals
}

// Validate is called by kong, before a sale is created.
func (c *loadCmd) Validate() error {
	return cmp.Or(
		c.keysFlags.Validate(),
		wantAtLeast("--stock", c.Stock, 1),
		wantAtLeast("--shards", c.Shards, 1),
		checkFlag(c.Buyers >= 1 && c.Buyers <= loadgen.MaxBuyers, "--buyers", c.Buyers,
			fmt.Sprintf("1 to %d", loadgen.MaxBuyers)),
		c.readArrivals(),
		wantAtLeast("--quantity", c.Quantity, 1),
		wantShare("--double-clicks", c.DoubleClicks),
		wantAtLeast("--connections", c.Connections, 1),
		wantAtLeast("--patience", c.Patience, time.Millisecond),
		wantHeader("--auth-header", c.AuthHeader),
		c.validateServers(),
	)
}

// readArrivals sets when the buyers arrive.
func (c *loadCmd) readArrivals() error {
	const slowest = 0.01 // keeps the duration of any crowd within time.Duration
	given := 0
	for _, is := range []bool{c.Over != nil, c.Rate != nil, c.Arrive != ""} {
		if is {
			given++
		}
	}
	switch half, isFlash := strings.CutPrefix(c.Arrive, "flash:"); {
	case given > 1:
		return usagef("give one of --over, --rate and --arrive")
	case c.Over != nil:
		c.arrivals = loadgen.Evenly(*c.Over)
		return wantAtLeast("--over", *c.Over, 0)
	case c.Rate != nil:
		c.arrivals = loadgen.Evenly(float64(c.Buyers) / max(*c.Rate, slowest) * float64(time.Second))
		return wantAtLeast("--rate", *c.Rate, slowest)
	case isFlash:
		within, err := time.ParseDuration(half)
		if err != nil || within <= 0 || within > time.Hour {
			return usagef("--arrive=%s: want a time up to an hour, as in flash:2s", c.Arrive)
		}
		c.arrivals = loadgen.Flash(within)
	case c.Arrive != "":
		file, err := os.Open(c.Arrive)
		if err != nil {
			return usagef("--arrive: want flash:TIME or a file: %v", err)
		}
		defer func() { _ = file.Close() }()
		recorded, err := loadgen.ReadRecorded(file)
		if err != nil {
			return usagef("--arrive=%s: %v", c.Arrive, err)
		}
		c.arrivals = recorded
	default:
		c.arrivals = loadgen.Evenly(10 * time.Second)
	}
	return nil
}

func (c *loadCmd) validateServers() error {
	switch {
	case c.Sale == uuid.Nil && c.AdminToken == "":
		return usagef("give --sale, or --admin-token (STAMPEDE_ADMIN_TOKEN) to create one")
	case c.RedisURL != "" && c.DatabaseURL == "":
		return usagef("--redis-url (REDIS_URL) is for the audit, which needs --database-url (DATABASE_URL) as well")
	}
	return nil
}

func (c *loadCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	raiseGOGC()
	terms := reservation.Terms{Name: "load test", Stock: c.Stock, PerOrderLimit: c.Quantity, Shards: c.Shards}
	if len(c.Items) > 0 {
		terms.Items, terms.Stock = itemTerms(c.Items)
	}
	config := loadgen.Config{
		URLs: c.URLs, Sale: c.Sale, Buyers: c.Buyers, Arrivals: c.arrivals, Quantity: c.Quantity, Items: terms.Codes(),
		DoubleClicks: c.DoubleClicks, Connections: c.Connections, Patience: c.Patience, Auth: c.auth(),
	}
	if err := config.Validate(); err != nil {
		return &usageError{err}
	}
	servers, err := c.openServers(ctx, logger)
	if err != nil {
		return err
	}
	defer servers.close()
	if config.Sale == uuid.Nil {
		if config.Sale, err = loadgen.CreateSale(ctx, c.URLs[0], c.AdminToken, terms); err != nil {
			return err
		}
		_, _ = fmt.Fprintf(s.err, "created sale %s of %s units\n", config.Sale, format.Count(terms.Stock))
	}
	buyers, err := loadgen.New(config)
	if err != nil {
		return err
	}
	verifier, err := c.openVerifier(ctx, servers.pool, config.Sale, config.Auth)
	if err != nil {
		return err
	}
	report, err := send(ctx, s.err, buyers, verifier, c.Patience)
	if err != nil {
		return err
	}
	result := loadResult{Sale: config.Sale, Crowd: report}
	if !c.json() {
		_, _ = fmt.Fprintln(s.err) // between the progress and the report
		if err := report.WriteText(s.out); err != nil {
			return err
		}
	}
	// A crowd that was stopped by a signal is still verified.
	verifyCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*c.Patience)
	defer cancel()
	comparison, err := verifier.Compare(verifyCtx, buyers.Ledger())
	if err != nil {
		return err
	}
	result.Checked, result.Wants = comparison, report.Judge(c.Want)
	out := s.out
	if c.json() {
		out = io.Discard
	}
	judged := c.judge(out, result)
	if servers.backend == nil {
		return c.finish(s, result, judged)
	}
	// The audit checks all orders of the sale, not only those of this crowd.
	var auditJSON bytes.Buffer
	if c.json() {
		out = &auditJSON
	} else if _, err := fmt.Fprintln(s.out); err != nil {
		return errors.Join(judged, err)
	}
	audited, auditErr := lookAtPromises(verifyCtx, servers.backend, config.Sale, c.Patience)
	if auditErr == nil {
		auditErr = c.printVerdict(out, audited)
	}
	result.Audit = auditJSON.Bytes()
	return c.finish(s, result, alsoAudited(judged, auditErr))
}

// loadResult is the result of load as JSON.
type loadResult struct {
	Sale  uuid.UUID      `json:"sale_id"`
	Crowd loadgen.Report `json:"crowd"`
	// Checked compares the answers with the orders.
	Checked loadgen.Comparison `json:"checked"`
	// Wants compare the figures with those that were wanted.
	Wants []loadgen.Judgement `json:"wants,omitempty"`
	// Audit is what stampede audit prints, absent without Redis and Postgres.
	Audit json.RawMessage `json:"audit,omitempty"`
}

// finish prints the result if it is wanted as JSON, and returns err.
func (c *loadCmd) finish(s *streams, result loadResult, err error) error {
	if !c.json() {
		return err
	}
	return errors.Join(err, writeJSON(s.out, result))
}

// alsoAudited adds the error of an audit to that of the verification. If both failed, the exit status is that of the
// verification: an unfinished audit must not hide it.
func alsoAudited(judged, audited error) error {
	if judged == nil || audited == nil {
		return cmp.Or(judged, audited)
	}
	return fmt.Errorf("%w; the audit: %v", judged, audited) //nolint:errorlint // must not change the exit status
}

// loadServers are the servers behind the ingress, as far as they are given.
type loadServers struct {
	pool    *pgxpool.Pool // nil without Postgres
	backend *backend      // nil without both
	close   func()
}

// openServers runs before the crowd, so that a wrong URL is found before a sale is created.
func (c *loadCmd) openServers(ctx context.Context, logger *slog.Logger) (loadServers, error) {
	const postgresConns = 2
	switch {
	case c.DatabaseURL == "":
		return loadServers{close: func() {}}, nil
	case c.RedisURL == "":
		pool, err := connect.Postgres(ctx, c.DatabaseURL, postgresConns)
		if err != nil {
			return loadServers{}, err
		}
		return loadServers{pool: pool, close: pool.Close}, nil
	}
	stores := storesFlags{redisFlag{c.RedisURL}, databaseFlag{c.DatabaseURL}, c.keysFlags}
	b, err := stores.open(ctx, postgresConns, logger)
	if err != nil {
		return loadServers{}, err
	}
	return loadServers{pool: b.pool, backend: b, close: b.Close}, nil
}

func (c *loadCmd) auth() loadgen.Auth {
	if c.JWTSecret != "" {
		return loadgen.JWTAuth{Secret: []byte(c.JWTSecret), Issuer: c.JWTIssuer, Audience: c.JWTAudience}
	}
	return loadgen.HeaderAuth(c.AuthHeader)
}

func (c *loadCmd) openVerifier(
	ctx context.Context, pool *pgxpool.Pool, sale uuid.UUID, auth loadgen.Auth,
) (loadgen.Verifier, error) {
	api, err := loadgen.NewAPIVerifier(ctx, c.URLs[0], sale, auth)
	if err != nil || pool == nil {
		return api, err
	}
	verifier, err := loadgen.NewPostgresVerifier(ctx, pool, sale)
	if err != nil {
		return nil, err
	}
	verifier.UseAPI(api)
	return verifier, nil
}

// send runs the crowd with its progress on w, and watches the orders arrive in Postgres.
func send(
	ctx context.Context, w io.Writer, buyers *loadgen.Crowd, verifier loadgen.Verifier, patience time.Duration,
) (loadgen.Report, error) {
	var durable loadgen.Durable
	var running errgroup.Group
	running.Go(func() error { buyers.Run(ctx); return nil })
	running.Go(func() error { buyers.ShowProgress(ctx, w, isTerminal(w)); return nil })
	running.Go(func() (err error) {
		durable, err = buyers.WatchDurable(context.WithoutCancel(ctx), verifier, patience)
		return err
	})
	err := running.Wait()
	report := buyers.Report()
	switch {
	case errors.Is(err, loadgen.ErrPaymentWindow):
		return report, nil // the report omits it
	case err != nil:
		return report, err
	}
	report.Durable = &durable
	return report, nil
}

// judge prints the comparisons. It returns errBroken if one does not hold, and another error if clicks failed.
func (c *loadCmd) judge(w io.Writer, r loadResult) error {
	where := "Postgres"
	if c.DatabaseURL == "" {
		where = "the answers of the ingress"
	}
	_, err := fmt.Fprintf(w, "\nchecked against %s, order by order: %s\n", where, r.Checked)
	for _, example := range r.Checked.Examples {
		_, _ = fmt.Fprintln(w, "  "+example)
	}
	missed, unmeasured, mayFail := false, false, false
	for _, j := range r.Wants {
		mark := "✓"
		switch {
		case !j.Measured:
			mark, unmeasured = "?", true
		case !j.Met:
			mark, missed = "✗", true
		}
		mayFail = mayFail || j.Want == loadgen.WantFailed
		_, _ = fmt.Fprintf(w, "%s %s\n", mark, j.Text)
	}
	switch {
	case err != nil:
		return err
	case !r.Checked.Holds(), missed:
		return errBroken
	case len(r.Crowd.Failures) > 0 && !mayFail:
		return errors.New("some clicks ended without a valid answer")
	case unmeasured:
		return errUnchecked
	}
	return nil
}

// isTerminal takes a reader or a writer.
func isTerminal(stream any) bool {
	f, ok := stream.(interface{ Fd() uintptr })
	return ok && isatty.IsTerminal(f.Fd())
}

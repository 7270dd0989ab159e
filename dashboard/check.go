package dashboard

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/google/uuid"

	"stampede/reservation/catalog"
	"stampede/sql"
	"stampede/upkeep/audit"
	"stampede/upkeep/rebuild"
)

// checkKind is what a check does.
type checkKind string

const (
	checkAudit checkKind = "audit"
	checkDry   checkKind = "dry run"
	checkApply checkKind = "reconcile"
)

const (
	// checkTimeout ends a check that takes too long, auditWait is how long an audit waits for rest.
	checkTimeout = 15 * time.Minute
	auditWait    = 10 * time.Second
	// dryRunKept is how long a dry run may be applied: the installation goes on.
	dryRunKept = 15 * time.Minute
	// findingsMax bounds the differences that a page shows.
	findingsMax = 300
)

// checks runs one audit or reconcile at a time, and keeps the latest of each kind.
type checks struct {
	running sync.WaitGroup

	mu     sync.Mutex
	now    *check // the running one
	latest map[checkKind]*check
	// token is that of the latest dry run; it is used once.
	token string
}

// check is one run. It does not change once it has ended.
type check struct {
	ID, Operator string
	Kind         checkKind
	Sale         uuid.UUID
	Began, Ended time.Time
	Problem      string
	Hint         string
	Report       *audit.Report
	Reconciled   *audit.ReconcileReport
	Findings     []audit.Finding
	// More is how many differences are not in Findings.
	More int
}

// wait waits for the running check, after the last one has begun.
func (c *checks) wait() {
	c.mu.Lock()
	running := &c.running // checks that began before are counted
	c.mu.Unlock()
	running.Wait()
}

// state changes when a page of checks has something new to show.
func (c *checks) state() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.now != nil {
		return "running " + c.now.ID
	}
	newest := ""
	var at time.Time
	for _, one := range c.latest {
		if one.Ended.After(at) {
			newest, at = one.ID, one.Ended
		}
	}
	return "ended " + newest
}

// checksPage is the body of the page of audits.
type checksPage struct {
	Running             *check
	Audit, Dry, Applied *check
	Token               string
	Sale                string
}

// checkPages are the page of audits, and the actions that run them. They run in the background until stopping is done.
type checkPages struct {
	*site
	checks   *checks
	stopping context.Context
}

func (d checkPages) show(_ context.Context, r *http.Request) (page, error) {
	c := d.checks
	c.mu.Lock()
	p := checksPage{
		Running: c.now, Audit: c.latest[checkAudit], Dry: c.latest[checkDry], Applied: c.latest[checkApply], Token: c.token,
		Sale: r.URL.Query().Get("sale"),
	}
	c.mu.Unlock()
	if p.Dry != nil && time.Since(p.Dry.Ended) > dryRunKept {
		p.Token = ""
	}
	return page{template: "audit", title: "Audit", body: p}, nil
}

func (d checkPages) audit(ctx context.Context, c *check) error {
	report, err := audit.Run(ctx, audit.Config{
		Pool: d.Pool, Redis: d.Redis, Keys: d.Keys, Wait: auditWait, Sale: c.Sale,
	})
	if err == nil {
		c.Report = &report
	}
	return err
}

// reconcile repairs differences, or only shows them in a dry run.
func (d checkPages) reconcile(ctx context.Context, c *check) error {
	rebuilder, err := rebuild.New(rebuild.Config{
		Pool: d.Pool, Redis: d.Redis, Keys: d.Keys, Store: d.Store, Logger: d.Logger,
	})
	if err != nil {
		return err
	}
	report, err := audit.Reconcile(ctx, audit.ReconcileConfig{
		Pool: d.Pool, Redis: d.Redis, Keys: d.Keys, Store: d.Store, Catalog: d.Catalog, Rebuilder: rebuilder,
		Sale: c.Sale, DryRun: c.Kind == checkDry, Logger: d.Logger,
		Explain: func(f audit.Finding) error {
			if len(c.Findings) < findingsMax {
				c.Findings = append(c.Findings, f)
			} else {
				c.More++
			}
			return nil
		},
	})
	if err == nil {
		c.Reconciled = &report
	}
	return err
}

// start returns the handler of a form that begins a check, unless one is running. It goes on when the page is closed.
// The form of a reconcile has the token of the dry run that it applies, which is used up.
func (d checkPages) start(kind checkKind, run func(context.Context, *check) error) sessionHandler {
	return d.act(actTimeout, func(_ context.Context, r *http.Request, operator string) (action, error) {
		c := &check{ID: rand.Text()[:8], Kind: kind, Operator: operator, Began: time.Now()}
		return action{string(kind), []any{"check", c.ID}, "/audit", func() (string, error) {
			if text := r.PostForm.Get("sale"); text != "" {
				sale, err := uuid.Parse(text)
				if err != nil {
					return "", &refusal{
						"That is not the id of a sale.", "Nothing was done. It is at the top of the page of each sale.",
					}
				}
				c.Sale = sale
			}
			if err := d.checks.begin(c, r.PostForm.Get("token"), d.stopping); err != nil {
				return "", err
			}
			go d.run(c, run)
			return "The " + string(kind) + " has begun.", nil
		}}, nil
	})
}

// begin makes the check the running one.
func (c *checks) begin(next *check, token string, stopping context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch dry := c.latest[checkDry]; {
	case stopping.Err() != nil:
		return &refusal{"The dashboard is stopping.", "Nothing was done."}
	case c.now != nil:
		return &refusal{
			"The " + string(c.now.Kind) + " of " + c.now.Operator + " is running.", "Nothing was done. Wait for its end.",
		}
	case next.Kind != checkApply:
	case dry == nil || c.token == "" || subtle.ConstantTimeCompare([]byte(token), []byte(c.token)) != 1:
		return &refusal{
			"Reconcile applies a dry run that was read, and this is not the latest one.",
			"Nothing was done. Begin with a dry run, and read it.",
		}
	case time.Since(dry.Ended) > dryRunKept:
		return &refusal{"The dry run is older than " + lasting(dryRunKept) + ".", "Nothing was done. Repeat it, and read it."}
	default:
		next.Sale = dry.Sale
	}
	c.now, c.token = next, ""
	c.running.Add(1)
	return nil
}

func (d checkPages) run(c *check, do func(context.Context, *check) error) {
	defer d.checks.running.Done()
	ctx, cancel := context.WithTimeout(catalog.WithOperator(d.stopping, c.Operator), checkTimeout)
	defer cancel()
	err := sql.Check(ctx, d.Pool)
	if err == nil {
		err = do(ctx, c)
	}
	log := d.Logger.With("operator", c.Operator, "action", string(c.Kind), "check", c.ID)
	if err != nil {
		c.Problem, c.Hint, _ = explain(err)
		if errors.Is(err, context.Canceled) {
			c.Problem, c.Hint = "It was interrupted, because the dashboard stopped.", "Run it again."
		}
		log.Warn("a check failed", "error", err)
	} else {
		log.Info("a check has ended")
	}
	d.record(ctx, c)
	d.checks.mu.Lock()
	defer d.checks.mu.Unlock()
	c.Ended = time.Now()
	d.checks.now, d.checks.latest[c.Kind] = nil, c
	if c.Kind == checkDry && err == nil && len(c.Findings) > 0 {
		d.checks.token = rand.Text()
	}
}

// record keeps the verdict of an audit of all sales.
func (d checkPages) record(ctx context.Context, c *check) {
	if c.Report == nil || c.Sale != uuid.Nil {
		return
	}
	if err := audit.Record(ctx, d.Pool, *c.Report, c.Operator); err != nil {
		d.Logger.Warn("the verdict of an audit could not be recorded", "check", c.ID, "error", err)
		c.Problem, c.Hint = "The verdict could not be recorded.", "It is shown here only. Run the audit again when Postgres answers."
	}
}

// Bad reports whether the check found something.
func (c *check) Bad() bool {
	return c.Problem != "" || c.Report != nil && c.Report.Broken() || c.Reconciled != nil && c.Reconciled.Remaining > 0
}

// Took is how long it ran.
func (c *check) Took() time.Duration { return c.Ended.Sub(c.Began) }

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

	"stampede/dashboard/session"
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
	now    *check
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
	running := &c.running // whoever began before has been counted
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

func (d *Dashboard) showChecks(w http.ResponseWriter, r *http.Request, s *session.Session) {
	c := &d.checks
	c.mu.Lock()
	page := checksPage{
		Running: c.now, Audit: c.latest[checkAudit], Dry: c.latest[checkDry], Applied: c.latest[checkApply], Token: c.token,
		Sale: r.URL.Query().Get("sale"),
	}
	c.mu.Unlock()
	if page.Dry != nil && time.Since(page.Dry.Ended) > dryRunKept {
		page.Token = ""
	}
	d.render(w, r, s, http.StatusOK, "audit", "Audit", page)
}

func (d *Dashboard) runAudit(w http.ResponseWriter, r *http.Request, s *session.Session) {
	d.startCheck(w, r, s, checkAudit, func(ctx context.Context, c *check) error {
		report, err := audit.Run(ctx, audit.Config{
			Pool: d.Pool, Redis: d.Redis, Keys: d.Keys, Wait: auditWait, Sale: c.Sale,
		})
		if err != nil {
			return err
		}
		c.Report = &report
		return nil
	})
}

func (d *Dashboard) runDryRun(w http.ResponseWriter, r *http.Request, s *session.Session) {
	d.startCheck(w, r, s, checkDry, func(ctx context.Context, c *check) error {
		return d.reconcile(ctx, c, true)
	})
}

// runReconcile applies what a dry run has shown: its form has the token of that, which is used up.
func (d *Dashboard) runReconcile(w http.ResponseWriter, r *http.Request, s *session.Session) {
	d.startCheck(w, r, s, checkApply, func(ctx context.Context, c *check) error {
		return d.reconcile(ctx, c, false)
	})
}

func (d *Dashboard) reconcile(ctx context.Context, c *check, dry bool) error {
	rebuilder, err := rebuild.New(rebuild.Config{
		Pool: d.Pool, Redis: d.Redis, Keys: d.Keys, Store: d.Store, Logger: d.Logger,
	})
	if err != nil {
		return err
	}
	report, err := audit.Reconcile(ctx, audit.ReconcileConfig{
		Pool: d.Pool, Redis: d.Redis, Keys: d.Keys, Store: d.Store, Catalog: d.Catalog, Rebuilder: rebuilder,
		Sale: c.Sale, DryRun: dry, Logger: d.Logger,
		Explain: func(f audit.Finding) error {
			if len(c.Findings) < findingsMax {
				c.Findings = append(c.Findings, f)
			} else {
				c.More++
			}
			return nil
		},
	})
	if err != nil {
		return err
	}
	c.Reconciled = &report
	return nil
}

// startCheck begins a check, unless one is running. It goes on when the page is closed.
func (d *Dashboard) startCheck(
	w http.ResponseWriter, r *http.Request, s *session.Session, kind checkKind, do func(context.Context, *check) error,
) {
	if !d.readForm(w, r, s) {
		return
	}
	c := &check{ID: rand.Text()[:8], Kind: kind, Operator: s.Person().Name, Began: time.Now()}
	d.act(w, r, s, string(kind), "/audit", []any{"check", c.ID}, func() (string, error) {
		if text := r.PostForm.Get("sale"); text != "" {
			sale, err := uuid.Parse(text)
			if err != nil {
				return "", &refusal{"That is not the id of a sale.", "Nothing was done. It is at the top of the page of each sale."}
			}
			c.Sale = sale
		}
		if err := d.checks.begin(c, r.PostForm.Get("token"), d.stopping); err != nil {
			return "", err
		}
		go d.runCheck(c, do)
		return "The " + string(kind) + " has begun. This page shows its result when it has ended.", nil
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

func (d *Dashboard) runCheck(c *check, do func(context.Context, *check) error) {
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
	d.recordAudit(ctx, c)
	d.checks.mu.Lock()
	defer d.checks.mu.Unlock()
	c.Ended = time.Now()
	d.checks.now, d.checks.latest[c.Kind] = nil, c
	if c.Kind == checkDry && err == nil && len(c.Findings) > 0 {
		d.checks.token = rand.Text()
	}
}

// recordAudit keeps the verdict of an audit of all sales.
func (d *Dashboard) recordAudit(ctx context.Context, c *check) {
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

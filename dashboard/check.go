package dashboard

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"stampede/internal/format"
	"stampede/ledger/deadletter"
	"stampede/relay/target"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
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
		Catalog: d.Catalog, Wait: auditWait, Sale: c.Sale,
	})
	if err == nil {
		c.Report = &report
	}
	return err
}

// reconcile repairs differences, or only shows them in a dry run.
func (d checkPages) reconcile(ctx context.Context, c *check) error {
	rebuilder, err := rebuild.New(rebuild.Config{Catalog: d.Catalog, Logger: d.Logger})
	if err != nil {
		return err
	}
	report, err := audit.Reconcile(ctx, audit.ReconcileConfig{
		Catalog: d.Catalog, Rebuilder: rebuilder,
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
	err := sql.Check(ctx, d.Catalog.Pool)
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
	if err := audit.Record(ctx, d.Catalog.Pool, *c.Report, c.Operator); err != nil {
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

// lettersPage is the body of the list of dead letters.
type lettersPage struct {
	Status   string
	Statuses []string
	Rows     []deadletter.Letter
	Max      int
	Parked   bool
}

// letterStatuses are those that can be listed, the first by default.
var letterStatuses = []string{"parked", "replayed", "discarded", "all"}

// letterPages are the pages of dead letters, and the actions on them.
type letterPages struct {
	*site
	letters *deadletter.Store
}

func (d letterPages) list(ctx context.Context, r *http.Request) (page, error) {
	p := lettersPage{Status: r.URL.Query().Get("status"), Statuses: letterStatuses, Max: bulkMax}
	if !slices.Contains(letterStatuses, p.Status) {
		p.Status = letterStatuses[0]
	}
	p.Parked = p.Status == letterStatuses[0]
	status := deadletter.Status(p.Status)
	if p.Status == "all" {
		status = ""
	}
	var err error
	p.Rows, err = d.letters.List(ctx, status, bulkMax)
	return page{template: "letters", title: "Dead letters", body: p}, err
}

// letterPage is the body of the page of a dead letter.
type letterPage struct {
	deadletter.Letter
	Orders []order.OrderReserved
	Parked bool
}

func (d letterPages) show(ctx context.Context, r *http.Request) (page, error) {
	id, err := strconv.ParseInt(r.PathValue("letter"), 10, 64)
	if err != nil {
		return page{}, deadletter.ErrNotFound
	}
	l, err := d.letters.Get(ctx, id)
	p := letterPage{Letter: l, Parked: l.Status == deadletter.StatusParked}
	if err == nil && l.Damage == "" {
		p.Orders, _ = deadletter.OrdersOf(l.Entry) // of one that names no order, none
	}
	return page{template: "letter", title: fmt.Sprintf("Dead letter %d", id), body: p}, err
}

// resolve replays or discards letters. Each is an action of its own: one that fails does not stop the others.
func (d letterPages) resolve(ctx context.Context, r *http.Request, operator string) (action, error) {
	form := r.PostForm
	to := "/letters"
	if id, err := strconv.ParseInt(form.Get("back"), 10, 64); err == nil {
		to += "/" + strconv.FormatInt(id, 10)
	}
	what := form.Get("do")
	return action{what + " letters", []any{"letters", strings.Join(form["id"], ",")}, to, func() (string, error) {
		ids, err := letterIDs(form["id"])
		if err != nil {
			return "", err
		}
		switch reason := field(form, "reason"); {
		case what == "replay":
			return each(ids, lettersSaid("is in its stream again", "are in their streams again"), func(id int64) error {
				_, appended, err := d.letters.Replay(ctx, id, operator)
				if err == nil && !appended {
					return &refusal{"it was replayed before, and is not parked again.", ""}
				}
				return err
			})
		case what != "discard":
			return "", errForm
		case reason == "":
			return "", &refusal{"Say why they are discarded.", "Nothing was done. The reason is stored with each."}
		default:
			if err := order.ValidateReason(reason); err != nil {
				return "", err
			}
			return each(ids, lettersSaid("is discarded", "are discarded"), func(id int64) error {
				return d.letters.Discard(ctx, id, reason, operator)
			})
		}
	}}, nil
}

func letterIDs(texts []string) (ids []int64, err error) {
	for _, text := range texts {
		id, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return nil, errForm
		}
		ids = append(ids, id)
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	switch {
	case len(ids) == 0:
		return nil, &refusal{"No dead letter is selected.", "Nothing was done. Select some, up to " + count(bulkMax) + "."}
	case len(ids) > bulkMax:
		return nil, &refusal{
			"Too many dead letters are selected.", "Nothing was done. Select at most " + count(bulkMax) + ".",
		}
	}
	return ids, nil
}

// lettersSaid says what became of a number of letters.
func lettersSaid(one, more string) func(n int) string {
	return func(n int) string {
		if n == 1 {
			return "One dead letter " + one + "."
		}
		return count(n) + " dead letters " + more + "."
	}
}

// targetsPage is the body of the list of the relay's targets, and of the page of one.
type targetsPage struct {
	Rows []targetRow
	Path string // of the page, from which an open one asks for its rows again
}

// targetRow is a target as pages show it: its URL without secrets.
type targetRow struct {
	target.Standing
	Kind, Address string
	Behind        int64
	Waits         time.Duration
	// Last and Failed are the times of the last delivery and of the last error.
	Last, Failed, Retry time.Time
}

func newTargetRow(t target.Standing, now time.Time) targetRow {
	kind := unknown
	if to, err := target.ParseAddress(t.URL); err == nil {
		kind = string(to.Kind)
	}
	return targetRow{
		t, kind, format.Printable(target.Redacted(t.URL)), t.Lag(), t.Waiting(now),
		time.Time(t.DeliveredAt), time.Time(t.LastErrorAt), time.Time(t.RetryAt),
	}
}

// targetPages are the pages of the relay's targets, and the actions on them.
type targetPages struct {
	*site
	targets *target.Store
}

// list shows all targets, or the one of the path.
func (d targetPages) list(ctx context.Context, r *http.Request) (page, error) {
	all, err := d.targets.List(ctx)
	p, title, name := targetsPage{Path: r.URL.Path}, "Targets", r.PathValue("target")
	if name != "" {
		title = "Target " + name
		all = slices.DeleteFunc(all, func(t target.Standing) bool { return t.Name != name })
		if err == nil && len(all) == 0 {
			err = target.ErrNotFound
		}
	}
	for _, t := range all {
		p.Rows = append(p.Rows, newTargetRow(t, time.Now()))
	}
	if err == nil && r.URL.Query().Has("rows") {
		return page{part: "targetrows", body: p}, nil
	}
	if name != "" {
		return page{template: "target", title: title, body: p}, err
	}
	return page{template: "targets", title: title, body: p}, err
}

// change returns the handler of a form that changes a target.
func (d targetPages) change(
	name string, do func(ctx context.Context, form url.Values, name string) (string, error),
) sessionHandler {
	return d.act(bulkTimeout, func(ctx context.Context, r *http.Request, _ string) (action, error) {
		one := r.PathValue("target")
		return action{name, []any{"target", one}, "/targets/" + url.PathEscape(one), func() (string, error) {
			return do(ctx, r.PostForm, one)
		}}, nil
	})
}

func (d targetPages) pause(ctx context.Context, _ url.Values, name string) (string, error) {
	return "The target is paused: it gets no events until it is resumed, and misses none.",
		d.targets.SetState(ctx, name, target.Paused)
}

func (d targetPages) resume(ctx context.Context, _ url.Values, name string) (string, error) {
	return "The target gets events.", d.targets.SetState(ctx, name, target.Active)
}

// replay moves the position of a target, as stampede relay replay does.
func (d targetPages) replay(ctx context.Context, form url.Values, name string) (string, error) {
	if field(form, "name") != name {
		return "", &refusal{"That is not the name of this target.", "Nothing was done. Type it as it stands on the page."}
	}
	place, find := field(form, "place"), target.PositionAt
	if form.Get("how") == "after" {
		find = target.EventPosition
	}
	position, err := find(ctx, d.Catalog.Pool, place)
	if form.Get("how") == "after" && errors.Is(err, target.ErrPlace) {
		return "", &refusal{
			"There is no such event.", "Nothing was done. Write the id of an event. Start, now and a time go with \"from\".",
		}
	}
	if err != nil {
		return "", err
	}
	was, err := d.targets.SetPosition(ctx, name, position)
	return "The target " + target.Replay(was, position, count(position)) + ".", err
}

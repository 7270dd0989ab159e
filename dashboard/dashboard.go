// Package dashboard serves the pages of operators: what an installation does while it sells, and the actions of its
// operators. It reads what dashboard/fleet collects, and acts through the same packages as the commands.
//
// A request passes the gate (web.go: headers, origin, session, role), and then a handler of its part: sale.go,
// draw.go, order.go, payment.go, check.go or the end of web.go. The handler returns the body of a page, or
// an action, and the site (site.go) renders the template of the page, or runs the action. What changes while a page is
// open is rendered once for all browsers in board.go, and sent by dashboard/live. What happened is kept in journal.go.
package dashboard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"

	"stampede/dashboard/fleet"
	"stampede/dashboard/live"
	"stampede/dashboard/session"
	"stampede/internal/accept"
	"stampede/internal/forwarded"
	"stampede/internal/operators"
	"stampede/internal/telemetry"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/relay/target"
	"stampede/reservation/catalog"
)

// Fleet is what is known of the installation.
type Fleet interface {
	Snapshot() *fleet.Snapshot
	Next(ctx context.Context, after uint64) (*fleet.Snapshot, error)
	History() []fleet.Point
}

// Config says what a Dashboard shows, and to whom. All but TrustedProxies is required.
type Config struct {
	Fleet     Fleet
	Catalog   *catalog.Catalog
	Operators *operators.Registry
	// TrustedProxies are the proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted.
	TrustedProxies forwarded.Proxies
	Metrics        *prometheus.Registry
	Logger         *slog.Logger
}

// The limits of a server for people. An open page has its own limit of time: that of each write (dashboard/live).
const (
	readHeaderTimeout = 5 * time.Second
	readTimeout       = 10 * time.Second
	writeTimeout      = bulkTimeout + 15*time.Second // the longest action, and the answer
	idleTimeout       = 60 * time.Second
	stopTimeout       = 5 * time.Second
	maxHeaderBytes    = 16 << 10
	maxFormBytes      = 64 << 10
)

// Dashboard joins the parts to one server. Each part has its own pages.
type Dashboard struct {
	*site
	hub     *live.Hub
	checks  *checks
	handler http.Handler
	// watchReady runs as long as Serve.
	watchReady func(context.Context)

	// stopping ends with Run: streams and checks end with it.
	stopping context.Context
	stop     context.CancelFunc
}

// New returns a Dashboard. Run makes it live; its Handler answers before that, too.
func New(config Config) (*Dashboard, error) {
	d := &Dashboard{
		site:   &site{Config: config, journal: &journal{}},
		checks: &checks{latest: make(map[checkKind]*check)},
	}
	d.stopping, d.stop = context.WithCancel(context.Background())
	var err error
	if d.metrics, err = newMetrics(config.Metrics); err != nil {
		return nil, err
	}
	d.watchReady, err = telemetry.WatchReady(config.Metrics, "dashboard", func(context.Context) (string, map[string]bool) {
		s := d.Fleet.Snapshot()
		return "", map[string]bool{"redis": s.Redis.Reachable, "postgres": s.Postgres.Reachable}
	})
	if err != nil {
		return nil, err
	}
	if d.assets, err = readAssets(); err != nil {
		return nil, err
	}
	if d.templates, err = readTemplates(config.Catalog.Store.Keys); err != nil {
		return nil, err
	}
	books, err := readBooks()
	if err != nil {
		return nil, err
	}
	d.boards = &boards{parts: d.parts, checks: d.checks.state, journal: d.journal}
	d.hub = live.New(live.Config{
		Next: func(ctx context.Context, after uint64) (*live.Board, error) {
			s, err := d.Fleet.Next(ctx, after)
			if err != nil {
				return nil, err
			}
			return d.boards.render(s), nil
		},
		Watching: func(n int) { d.metrics.watchers.Set(float64(n)) },
	})
	gate := newGate(d.site)
	d.handler = gate.protect(d.routes(gate, books))
	return d, nil
}

// routes are all pages and actions. What an operator does there decides which role it takes.
func (d *Dashboard) routes(gate *gate, books books) http.Handler {
	mux := http.NewServeMux()
	// Pages can be served, and a server that does not answer is what they show: a proxy must not hide them then.
	telemetry.Probe(mux, func(context.Context) error { return nil })
	mux.Handle("GET /metrics", d.metrics.scrape)
	mux.Handle("GET /assets/{file}", d.assets)
	mux.HandleFunc("GET /favicon.ico", func(w http.ResponseWriter, r *http.Request) { // of answers without a page
		http.Redirect(w, r, d.assets["icon.svg"].url, http.StatusFound)
	})
	mux.HandleFunc("GET /login", gate.showLogin)
	mux.HandleFunc("POST /login", gate.login)

	feed := feed{d.site, d.hub, d.stopping}
	sales := salePages{d.site}
	orders := orderPages{d.site, ledger.New(d.Catalog.Pool)}
	letters := letterPages{d.site, deadletter.NewStore(d.Catalog.Pool, d.Catalog.Store.Redis, d.Catalog.Store)}
	targets := targetPages{d.site, target.NewStore(d.Catalog.Pool)}
	drawn := newDrawPages(d.site)
	checks := checkPages{d.site, d.checks, d.stopping}
	for pattern, route := range map[string]struct {
		action operators.Action
		h      sessionHandler
	}{
		"POST /logout":                  {operators.Look, gate.logout},
		"GET /{$}":                      {operators.Look, d.look(d.overview)},
		"GET /find":                     {operators.Look, d.look(orders.search)},
		"POST /troubles":                {operators.NoteTrouble, d.act(actTimeout, d.acknowledged)},
		"GET /live":                     {operators.Look, feed.follow},
		"GET /history":                  {operators.Look, feed.history},
		"GET /minutes":                  {operators.Look, feed.minutes},
		"GET /timeline":                 {operators.Look, feed.timeline},
		"GET /targets":                  {operators.Look, d.look(targets.list)},
		"GET /targets/{target}":         {operators.Look, d.look(targets.list)},
		"POST /targets/{target}/pause":  {operators.SteerTarget, targets.change("pause", targets.pause)},
		"POST /targets/{target}/resume": {operators.SteerTarget, targets.change("resume", targets.resume)},
		"POST /targets/{target}/replay": {operators.SteerTarget, targets.change("replay", targets.replay)},
		"GET /sales":                    {operators.Look, d.look(sales.list)},
		"POST /sales":                   {operators.CreateSale, d.act(actTimeout, sales.create)},
		"GET /sales/{sale}":             {operators.Look, d.look(sales.show)},
		"GET /sales/{sale}/draw":        {operators.Look, d.look(drawn.show)},
		"POST /sales/{sale}/pause":      {operators.ChangeSale, sales.change("pause", sales.pause)},
		"POST /sales/{sale}/resume":     {operators.ChangeSale, sales.change("resume", sales.resume)},
		"POST /sales/{sale}/restock":    {operators.ChangeSale, sales.change("restock", sales.restock)},
		"POST /sales/{sale}/end":        {operators.EndSale, sales.change("end", sales.end)},
		"GET /orders":                   {operators.Look, d.look(orders.list)},
		"GET /orders/{order}":           {operators.Look, d.look(orders.show)},
		"POST /orders/{order}/cancel":   {operators.CancelOrder, d.act(actTimeout, orders.cancel)},
		"GET /refunds":                  {operators.Look, d.look(orders.refunds)},
		"GET /refunds.csv":              {operators.Look, orders.refundsFile},
		"POST /refunds":                 {operators.SettlePayment, d.act(bulkTimeout, orders.refund)},
		"POST /refunds/dismissed":       {operators.SettlePayment, d.act(bulkTimeout, orders.dismiss)},
		"GET /letters":                  {operators.Look, d.look(letters.list)},
		"POST /letters":                 {operators.ResolveLetters, d.act(bulkTimeout, letters.resolve)},
		"GET /letters/{letter}":         {operators.Look, d.look(letters.show)},
		"GET /audit":                    {operators.Look, d.look(checks.show)},
		"POST /audit/run":               {operators.RunAudit, checks.start(checkAudit, checks.audit)},
		"POST /audit/dry-run":           {operators.RunAudit, checks.start(checkDry, checks.reconcile)},
		"POST /audit/apply":             {operators.RunAudit, checks.start(checkApply, checks.reconcile)},
		"GET /docs/{page}":              {operators.Look, d.look(books.show)},
		"/": {operators.Look, func(w http.ResponseWriter, r *http.Request, s *session.Session) {
			d.render(w, r, s, problemPage(http.StatusNotFound, "There is no such page.", ""))
		}},
	} {
		mux.HandleFunc(pattern, gate.withSession(route.action, route.h))
	}
	return mux
}

func (d *Dashboard) overview(context.Context, *http.Request) (page, error) {
	return page{template: "overview", title: "Overview", body: newTable(d.Fleet.History(), allScope)}, nil
}

// ServeHTTP implements http.Handler.
func (d *Dashboard) ServeHTTP(w http.ResponseWriter, r *http.Request) { d.handler.ServeHTTP(w, r) }

// Run sends changes to open pages until ctx is done; then it ends their streams and waits for running checks.
func (d *Dashboard) Run(ctx context.Context) error {
	running, ctx := errgroup.WithContext(ctx)
	running.Go(func() error { return d.hub.Run(ctx) })
	running.Go(func() error { return d.journal.follow(ctx, d.Fleet) })
	err := running.Wait()
	d.stop()
	d.checks.wait()
	return err
}

// Serve runs the dashboard on a listener until ctx is done, and then finishes running requests.
func (d *Dashboard) Serve(ctx context.Context, listener net.Listener) error {
	server := d.server()
	running, ctx := errgroup.WithContext(ctx)
	running.Go(func() error { d.watchReady(ctx); return nil })
	running.Go(func() error { return d.Run(ctx) })
	running.Go(func() error {
		if err := server.Serve(accept.New(listener, 0)); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("dashboard: %w", err)
		}
		return nil
	})
	running.Go(func() error {
		<-ctx.Done()
		d.stop() // the streams end, for which Shutdown would wait
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		if server.Shutdown(grace) != nil {
			_ = server.Close() // the grace period is over
		}
		return nil
	})
	return running.Wait()
}

func (d *Dashboard) server() *http.Server {
	return &http.Server{
		Handler: d, ReadHeaderTimeout: readHeaderTimeout, ReadTimeout: readTimeout, WriteTimeout: writeTimeout,
		IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes, ConnContext: accept.ConnContext,
		ErrorLog: slog.NewLogLogger(d.Logger.Handler(), slog.LevelDebug),
	}
}

// metrics are the metrics of the dashboard itself.
type metrics struct {
	watchers prometheus.Gauge
	logins   *prometheus.CounterVec
	actions  *prometheus.CounterVec
	scrape   http.Handler
}

func newMetrics(registry *prometheus.Registry) (*metrics, error) {
	m := &metrics{
		watchers: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "stampede_dashboard_watchers", Help: "Open pages that follow the installation.",
		}),
		logins: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "stampede_dashboard_logins_total",
			Help: "Logins by outcome: ok, refused for a wrong token, or limited because there were too many.",
		}, []string{"outcome"}),
		actions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "stampede_dashboard_actions_total",
			Help: "Actions of operators by outcome: ok, failed, or denied because the role is too low.",
		}, []string{"outcome"}),
		scrape: promhttp.HandlerFor(registry, promhttp.HandlerOpts{Registry: registry}),
	}
	for _, outcome := range []string{loginOK, loginRefused, loginLimited} {
		m.logins.WithLabelValues(outcome)
	}
	for _, outcome := range []string{actionOK, actionFailed, actionDenied} {
		m.actions.WithLabelValues(outcome)
	}
	for _, c := range []prometheus.Collector{m.watchers, m.logins, m.actions} {
		if err := registry.Register(c); err != nil {
			return nil, fmt.Errorf("dashboard: %w", err)
		}
	}
	return m, nil
}

// The values of labels.
const (
	loginOK, loginRefused, loginLimited  = "ok", "refused", "limited"
	actionOK, actionFailed, actionDenied = "ok", "failed", "denied"
)

// Package dashboard is the operators' desk: pages that show an installation while it sells, and the actions of its
// operators. It reads what dashboard/fleet collects, and acts through the same packages as the commands.
//
// A request passes web.go (headers, origin, session, role), then the handler of its page (page.go, sale.go, order.go,
// letter.go, check.go, book.go), which renders a template of the folder pages. What changes while a page is
// open is made once for all browsers in board.go, and sent by dashboard/live.
package dashboard

import (
	"context"
	"errors"
	"fmt"
	"html/template"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"stampede/dashboard/fleet"
	"stampede/dashboard/live"
	"stampede/dashboard/session"
	"stampede/internal/accept"
	"stampede/internal/forwarded"
	"stampede/internal/operators"
	"stampede/internal/ratelimit"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation"
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
	Pool      *pgxpool.Pool
	Redis     redis.UniversalClient
	Keys      reservation.Keys
	Store     *reservation.Store
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

// Logins: of one address, and of all together.
const (
	loginRate, loginBurst = 10.0 / 60, 10
	loginsRate            = 10
	loginsBurst           = 50
)

// Dashboard is the operators' desk.
type Dashboard struct {
	Config
	sessions *session.Sessions
	hub      *live.Hub
	ledger   *ledger.Ledger
	letters  *deadletter.Store
	pages    map[string]*template.Template
	parts    *template.Template // of fragments
	assets   map[string]asset
	books    map[string]book
	handler  http.Handler
	metrics  *metrics
	checks   checks
	logins   *rate.Limiter
	byAddr   *ratelimit.Limiter

	// stopping ends with Run: streams and checks end with it.
	stopping context.Context
	stop     context.CancelFunc

	rendered struct {
		sync.Mutex
		board *live.Board
	}
}

// New returns a Dashboard. Run makes it live; its Handler answers before that, too.
func New(config Config) (*Dashboard, error) {
	d := &Dashboard{
		Config: config, sessions: session.New(config.Operators),
		ledger:  ledger.New(config.Pool),
		letters: deadletter.NewStore(config.Pool, config.Redis, config.Store),
		logins:  rate.NewLimiter(loginsRate, loginsBurst),
		byAddr:  ratelimit.New(loginRate, loginBurst),
	}
	d.stopping, d.stop = context.WithCancel(context.Background())
	d.checks.latest = make(map[checkKind]*check)
	var err error
	if d.metrics, err = newMetrics(config.Metrics); err != nil {
		return nil, err
	}
	if d.assets, err = readAssets(); err != nil {
		return nil, err
	}
	if d.books, err = readBooks(); err != nil {
		return nil, err
	}
	if d.pages, d.parts, err = d.readPages(); err != nil {
		return nil, err
	}
	d.hub = live.New(live.Config{
		Next: func(ctx context.Context, after uint64) (*live.Board, error) {
			s, err := d.Fleet.Next(ctx, after)
			if err != nil {
				return nil, err
			}
			return d.boardOf(s), nil
		},
		Watching: func(n int) { d.metrics.watchers.Set(float64(n)) },
	})
	d.handler = d.protect(d.routes())
	return d, nil
}

// ServeHTTP implements http.Handler.
func (d *Dashboard) ServeHTTP(w http.ResponseWriter, r *http.Request) { d.handler.ServeHTTP(w, r) }

// Run sends changes to open pages until ctx is done; then it ends their streams and waits for running checks.
func (d *Dashboard) Run(ctx context.Context) error {
	err := d.hub.Run(ctx)
	d.stop()
	d.checks.wait()
	return err
}

// Serve runs the dashboard on a listener until ctx is done, and then finishes running requests.
func (d *Dashboard) Serve(ctx context.Context, listener net.Listener) error {
	server := d.server()
	together, ctx := errgroup.WithContext(ctx)
	together.Go(func() error { return d.Run(ctx) })
	together.Go(func() error {
		if err := server.Serve(accept.New(listener, 0)); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("dashboard: %w", err)
		}
		return nil
	})
	together.Go(func() error {
		<-ctx.Done()
		d.stop() // the streams end, for which Shutdown would wait
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		if server.Shutdown(grace) != nil {
			_ = server.Close() // the grace period is over
		}
		return nil
	})
	return together.Wait()
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

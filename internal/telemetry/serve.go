package telemetry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"stampede/internal/retry"
)

// Limits of a server for a scraper and a few probes.
const (
	readyTimeout    = 2 * time.Second
	shutdownTimeout = 2 * time.Second
	maxHeaderBytes  = 8 << 10
)

// Option adds to what Serve answers.
type Option func(*http.ServeMux)

// Serve answers /metrics, /livez and /readyz on addr until ctx is done, and then finishes running
// requests. It returns nil after such a stop, and immediately an error if it cannot listen.
func Serve(
	ctx context.Context, addr string, registry *prometheus.Registry, ready func(context.Context) error, options ...Option,
) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	slog.InfoContext(ctx, "metrics are served", "addr", listener.Addr().String())
	return serve(ctx, listener, newHandler(registry, ready, options...))
}

func serve(ctx context.Context, listener net.Listener, handler http.Handler) error {
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 2 * time.Second,
		ReadTimeout:       5 * time.Second,
		WriteTimeout:      10 * time.Second,
		IdleTimeout:       60 * time.Second,
		MaxHeaderBytes:    maxHeaderBytes,
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	select {
	case err := <-ended:
		return fmt.Errorf("metrics: %w", err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if err := server.Shutdown(grace); err != nil {
		_ = server.Close() // the grace period is over
	}
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("metrics: %w", err)
	}
	return nil
}

// newHandler answers /metrics from the registry, and the probes.
func newHandler(
	registry *prometheus.Registry, ready func(context.Context) error, options ...Option,
) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{Registry: registry}))
	Probe(mux, ready)
	for _, option := range options {
		option(mux)
	}
	return mux
}

// Probe answers /livez always, and /readyz with the result of ready, within readyTimeout: if that fails, the answer is
// 503 with the error, which is for the operators' network.
func Probe(mux *http.ServeMux, ready func(context.Context) error) {
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { writeText(w, http.StatusOK, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), readyTimeout)
		defer cancel()
		if err := ready(ctx); err != nil {
			writeText(w, http.StatusServiceUnavailable, "not ready: "+err.Error())
			return
		}
		writeText(w, http.StatusOK, "ok")
	})
}

func writeText(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text+"\n")
}

// readyInterval is the pause between two looks at whether a process is ready. A scrape asks no server.
const readyInterval = time.Second

// WatchReady registers the metrics of whether a process, such as ingress, is ready, and of what it depends on.
//
// run looks until its context is done; before its first look the series are absent. look returns why the process is not
// ready, "" if it is; a dependency that it leaves out keeps its value.
func WatchReady(
	reg prometheus.Registerer, process string,
	look func(context.Context) (notReady string, dependencies map[string]bool),
) (run func(context.Context), err error) {
	ready, err := RegisterOnce(reg, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "stampede_ready", Help: "1 if this process is ready, as /readyz says; else 0, and why not.",
	}, []string{"process", "reason"}))
	if err != nil {
		return nil, err
	}
	up, err := RegisterOnce(reg, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "stampede_dependency_up",
		Help: "1 if this process can use the dependency, and a server takes its writes, else 0. " +
			"An ingress is ready without postgres.",
	}, []string{"dependency"}))
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) {
		shown := ""
		for {
			limited, cancel := context.WithTimeout(ctx, readyTimeout)
			notReady, dependencies := look(limited)
			cancel()
			if ctx.Err() == nil {
				ready.WithLabelValues(process, notReady).Set(OneIf(notReady == ""))
				if notReady != shown { // only now, so that no scrape finds nothing
					ready.DeleteLabelValues(process, shown)
					shown = notReady
				}
				for name, isUp := range dependencies {
					up.WithLabelValues(name).Set(OneIf(isUp))
				}
			}
			if !retry.Pause(readyInterval, ctx.Done()) {
				return
			}
		}
	}, nil
}

// Profiles adds the profiles of the Go runtime below /debug/pprof/, for go tool pprof. The command line is left out: it
// may hold secrets.
func Profiles(mux *http.ServeMux) {
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("POST /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
}

// Package ingress is where buyers and operators come in, over HTTP.
//
// It is the first step in the way of an order: it finds out who asks, checks what they ask for, sheds
// the load that it cannot carry, hands purchases to reservation, and puts the answer into HTTP. A
// purchase never touches Postgres; only the operators' calls and what buyers do with their orders
// afterwards do: look at them (status.go, history.go), pay and cancel (change.go).
//
// Buyers may also wait: for the end of a purchase (wait.go), or for every change of an order or a sale (order_events.go,
// sale_events.go). Workers tell what they have done (outcomes.go), and a hub looks it up for all who wait (hub.go).
//
// Every route is served by the same few lines (route.go), every error becomes an answer in one place
// (problem.go), and the purchase (purchase.go) is written for speed, because a crowd calls it: no
// reflection, no middleware, no line in the log, pooled buffers, connections that need little of the runtime (conn.go).
package ingress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/labstack/echo/v4"
	"golang.org/x/sync/singleflight"

	"stampede/internal/accept"
	"stampede/reservation"
)

// What a connection may take. A purchase is a few hundred bytes each way.
const (
	readHeaderTimeout = 2 * time.Second
	readTimeout       = 5 * time.Second
	// writeTimeout begins with the end of the head, so it covers a body that comes as slowly as it may
	// and the longest work after it. An answer that is later is thrown away.
	writeTimeout   = 12 * time.Second
	idleTimeout    = 60 * time.Second
	maxHeaderBytes = 8 << 10
	maxBodyBytes   = 4 << 10

	// goodbye is how long requests that outlived the drain get to answer that they were cancelled.
	cancelGrace = time.Second
)

// Server is the HTTP server. Make it with New; it is safe for concurrent use.
type Server struct {
	config  Config
	log     *slog.Logger
	echo    *echo.Echo
	auth    authenticator
	admin   adminGate
	metrics *metrics
	limits  *clientLimits

	// Every request under /v1 takes a place in room, a purchase when it has been read.
	inFlight inFlightSlots
	// Who waits, or watches, takes no place in room while nothing is being done for them.
	waitSlots, orderStreamSlots, saleStreamSlots slots

	postgres breaker
	pings    singleflight.Group
	versions *orderVersions
	outages  outageLog
	// oddOutcomes keeps nonsense in the stream of outcomes from filling the log.
	badOutcomes cooldown
	addr        atomic.Pointer[string]
	// connections is nil until Run listens.
	connections atomic.Pointer[accept.Listener]
	stopping    atomic.Bool

	// signer is nil until the secret for receipts was read once; no purchase is accepted before.
	signer  atomic.Pointer[reservation.Signer]
	waiters *orderWaiters
	// sales, newestSales and olderSales answer all who look at sales (sales.go).
	saleFeed, firstPageFeed, laterPagesFeed *feed

	// background is what New started.
	background *background
	// ending is closed when those who wait or watch are to be let go.
	waitsEnd     chan struct{}
	waitsEndOnce sync.Once
}

// New makes a server that is ready to serve through Handler or Run. With a JWKS URL it fetches the
// keys; when they cannot be fetched the server starts without them and goes on trying. Whoever does
// not call Run calls Close.
func New(config Config) (*Server, error) {
	config.setDefaults()
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("ingress: %w", err)
	}
	s := &Server{
		config: config, log: config.Logger, admin: newAdminGate(config.AdminToken),
		inFlight:         newInFlightSlots(config.MaxInFlight),
		waitSlots:        slots{limit: int64(config.MaxWaiting)},
		orderStreamSlots: slots{limit: int64(config.MaxStreams)},
		saleStreamSlots:  slots{limit: int64(config.MaxStreams)},
		versions:         newOrderVersions(),
		background:       newBackground(),
		waitsEnd:         make(chan struct{}),
	}
	s.postgres.probe, s.postgres.background, s.postgres.log = config.Postgres.Ping, s.background, s.log
	if err := s.init(); err != nil {
		s.Close()
		return nil, fmt.Errorf("ingress: %w", err)
	}
	return s, nil
}

func (s *Server) init() (err error) {
	if s.auth, err = newAuthenticator(s.background.ctx, s.config); err != nil {
		return err
	}
	s.metrics, err = newMetrics(s.config.Metrics, gaugeSources{
		&s.inFlight, &s.waitSlots, &s.orderStreamSlots, &s.saleStreamSlots, s.connections.Load, s.config.MaxConnections,
	})
	if err != nil {
		return err
	}
	if s.limits, err = newClientLimits(s.config, s.config.Metrics); err != nil {
		return err
	}
	if err := s.initSigner(); err != nil {
		return err
	}
	s.waiters = newOrderWaiters(s.findForWaiters, s.metrics.outcomeLookups)
	s.background.start(s.waiters.run)
	if s.config.Outcomes != nil {
		s.background.start(s.followOutcomes)
	}
	s.startFeeds()
	if s.config.Listener != nil {
		s.setAddr(s.config.Listener)
	}
	s.routes()
	return nil
}

// Handler serves all routes.
func (s *Server) Handler() http.Handler { return s.echo }

// Addr is where the server listens, host:port; empty until it does.
func (s *Server) Addr() string {
	if addr := s.addr.Load(); addr != nil {
		return *addr
	}
	return ""
}

// Close ends what New started, and lets go of those who wait or watch. A server that was closed must not be used any more.
func (s *Server) Close() {
	s.endWaits()
	s.background.stop()
}

// letGo ends the streams, and answers those who wait for the end of their order that it is reserved.
func (s *Server) endWaits() { s.waitsEndOnce.Do(func() { close(s.waitsEnd) }) }

// Run listens and serves until ctx ends; then it stops taking requests, finishes those that it has
// taken, within Config.DrainTimeout, and returns nil. Run is for calling once.
func (s *Server) Run(ctx context.Context) error {
	defer s.Close()
	listener := s.config.Listener
	if listener == nil {
		var err error
		if listener, err = accept.Listen(ctx, s.config.Addr); err != nil {
			return fmt.Errorf("ingress: %w", err)
		}
		s.setAddr(listener)
	}
	// The requests do not end with ctx: what was accepted is finished.
	base, abandon := context.WithCancel(context.WithoutCancel(ctx))
	defer abandon()
	server := &http.Server{
		Handler:           s.echo,
		BaseContext:       func(net.Listener) context.Context { return base },
		ConnContext:       withConn,
		ConnState:         connState,
		ReadHeaderTimeout: readHeaderTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
	connections := accept.New(listener, s.config.MaxConnections)
	s.connections.Store(connections)
	served := make(chan error, 1)
	go func() {
		defer close(served)
		served <- server.Serve(connListener{connections})
	}()
	err := errors.Join(s.serve(ctx, served), s.drain(base, abandon, connections))
	_ = server.Close() // of connections that outlived the drain
	for range served { // net.ErrClosed, unless serve had its error before
	}
	return err
}

// serve returns when it is time to drain, or with the error of a listener that fails before.
func (s *Server) serve(ctx context.Context, served <-chan error) error {
	select {
	case err := <-served:
		return fmt.Errorf("ingress: serve %s: %w", s.Addr(), err)
	case <-ctx.Done():
	}
	s.stopping.Store(true)
	select {
	case err := <-served:
		return fmt.Errorf("ingress: serve %s: %w", s.Addr(), err)
	case <-time.After(s.config.StopDelay):
		return nil
	}
}

// drain lets the accepted requests finish, those included that clients have sent and the server has not read yet. Those
// that take longer than DrainTimeout are cancelled, and get a moment to answer so before their connections are closed.
// Who waits or watches is not waited for.
func (s *Server) drain(base context.Context, abandon context.CancelFunc, connections *accept.Listener) error {
	s.endWaits()
	ctx, cancel := context.WithTimeout(base, s.config.DrainTimeout)
	defer cancel()
	err := connections.Drain(ctx)
	if err == nil {
		return nil
	}
	unfinished := s.inFlight.taken()
	abandon()
	last, cancelLast := context.WithTimeout(context.WithoutCancel(base), cancelGrace)
	defer cancelLast()
	_ = connections.Drain(last) // its end is the same as that of the goodbye
	return fmt.Errorf("ingress: %d requests were not finished after %s: %w", unfinished, s.config.DrainTimeout, err)
}

func (s *Server) setAddr(l net.Listener) {
	addr := l.Addr().String()
	s.addr.Store(&addr)
}

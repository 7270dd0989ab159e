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
	"stampede/internal/operators"
	"stampede/reservation/order"
)

// Limits of a connection. A purchase is a few hundred bytes each way.
const (
	readHeaderTimeout = 2 * time.Second
	readTimeout       = 5 * time.Second
	// writeTimeout starts at the end of the request's head. It covers the slowest body (readTimeout) and
	// the longest work after it: net/http discards a later answer.
	writeTimeout   = 12 * time.Second
	idleTimeout    = 60 * time.Second
	maxHeaderBytes = 8 << 10
	maxBodyBytes   = 4 << 10

	// cancelGrace is how long cancelled requests may take to answer when a drain has timed out.
	cancelGrace = time.Second
)

// Server is the HTTP server. Make it with New; it is safe for concurrent use.
type Server struct {
	config Config
	log    *slog.Logger
	echo   *echo.Echo
	// servePurchase is the route of purchases. It answers its errors.
	servePurchase echo.HandlerFunc

	auth    authenticator
	admin   operatorsGate
	cors    *cors // nil if no origin is allowed
	metrics *metrics
	limits  *clientLimits

	// Every request under /v1 takes a slot of inFlight; a purchase, a payment and a cancellation take it
	// after their body was read.
	inFlight inFlightSlots
	// A request that only waits holds one of these instead.
	waitSlots, orderStreamSlots, saleStreamSlots slots

	// signer is nil until the secret for receipts was read. Without it no purchase is accepted.
	signer   atomic.Pointer[order.Signer]
	tickets  ticketSigner // with the same secret
	postgres breaker
	versions *orderVersions
	waiters  *orderWaiters
	// The feeds answer all requests for sales.
	saleFeed, firstPageFeed, laterPagesFeed *feed

	outages outageLog
	// badOutcomes bounds the log lines about outcomes that cannot be decoded.
	badOutcomes cooldown
	pings       singleflight.Group

	addr atomic.Pointer[string]
	// connections is nil until Run listens.
	connections atomic.Pointer[accept.Listener]
	stopping    atomic.Bool
	background  *background
	// waitsEnd is closed to end waiting purchases and streams.
	waitsEnd     chan struct{}
	waitsEndOnce sync.Once
}

// New returns a server that is ready to serve through Handler or Run. With a JWKS URL it fetches the
// keys; if that fails, the server starts without keys and retries. Call Close if Run is not called.
func New(config Config) (*Server, error) {
	config.setDefaults()
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("ingress: %w", err)
	}
	s := &Server{
		config: config, log: config.Logger, cors: newCORS(config),
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
	known, err := operators.New(operators.Config{
		File: s.config.OperatorsFile, AdminToken: s.config.AdminToken, Logger: s.log, Registerer: s.config.Metrics,
	})
	if err != nil {
		return err
	}
	s.admin = operatorsGate{known}
	s.background.start(known.Run)
	if s.limits, err = newClientLimits(s.config, s.config.Metrics); err != nil {
		return err
	}
	if err := s.initSigner(); err != nil {
		return err
	}
	s.waiters = newOrderWaiters(s.findForWaiters, s.metrics.outcomeLookups)
	s.background.start(s.waiters.run)
	s.background.start(func(ctx context.Context) { s.metrics.sales.followNewest(ctx, s.config.Sales.Newest, s.log) })
	if s.config.Outcomes != nil {
		s.background.start(s.followOutcomes)
	}
	s.startFeeds()
	if s.config.Listener != nil {
		s.setAddr(s.config.Listener)
	}
	return s.routes()
}

// Handler serves all routes.
func (s *Server) Handler() http.Handler { return s.echo }

// listenAddr is where the server listens, host:port; empty until it does.
func (s *Server) listenAddr() string {
	if addr := s.addr.Load(); addr != nil {
		return *addr
	}
	return ""
}

func (s *Server) setAddr(l net.Listener) {
	addr := l.Addr().String()
	s.addr.Store(&addr)
}

// Run listens and serves until ctx is done. Then it takes no more requests, finishes the accepted ones
// within Config.DrainTimeout, closes the server, and returns nil. Call it once.
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
	// Requests do not end with ctx: those that were accepted are finished.
	base, cancelRequests := context.WithCancel(context.WithoutCancel(ctx))
	defer cancelRequests()
	server := &http.Server{
		Handler:           s.echo,
		BaseContext:       func(net.Listener) context.Context { return base },
		ConnContext:       accept.ConnContext,
		ConnState:         accept.ConnState,
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
		s.accept(base, server, connections, served)
	}()
	err := errors.Join(s.serve(ctx, served), s.drain(base, cancelRequests, connections))
	_ = server.Close()
	for range served { // net.ErrClosed, unless serve has taken the error
	}
	connections.CloseAll() // those that outlived the drain
	return err
}

// accept accepts connections and serves requests until the listener fails, whose error it sends to served, and the
// server is closed.
func (s *Server) accept(
	base context.Context, server *http.Server, connections *accept.Listener, served chan<- error,
) {
	if s.config.PlainReader {
		if front := s.newPlainFront(base, connections.Addr()); front != nil {
			var behind sync.WaitGroup
			behind.Go(func() { _ = server.Serve(front) }) // ends when the server is closed
			defer behind.Wait()
			served <- front.Run(connections)
			return
		}
	}
	served <- server.Serve(connections)
}

// serve returns nil when it is time to drain, and the error of a listener that fails before.
func (s *Server) serve(ctx context.Context, served <-chan error) error {
	select {
	case err := <-served:
		return fmt.Errorf("ingress: serve %s: %w", s.listenAddr(), err)
	case <-ctx.Done():
	}
	s.stopping.Store(true)
	select {
	case err := <-served:
		return fmt.Errorf("ingress: serve %s: %w", s.listenAddr(), err)
	case <-time.After(s.config.StopDelay):
		return nil
	}
}

// drain finishes the accepted requests, also those that clients have sent and the server has not read
// yet. After DrainTimeout it cancels the rest and gives them cancelGrace to answer. Waiting purchases and
// streams end immediately.
func (s *Server) drain(base context.Context, cancelRequests context.CancelFunc, connections *accept.Listener) error {
	s.endWaits()
	ctx, cancel := context.WithTimeout(base, s.config.DrainTimeout)
	defer cancel()
	err := connections.Drain(ctx)
	if err == nil {
		return nil
	}
	unfinished := s.inFlight.taken()
	cancelRequests()
	grace, cancelGraceTimer := context.WithTimeout(context.WithoutCancel(base), cancelGrace)
	defer cancelGraceTimer()
	_ = connections.Drain(grace) // Run closes what is left after it
	return fmt.Errorf("ingress: %d requests were not finished after %s: %w", unfinished, s.config.DrainTimeout, err)
}

// Close ends waiting purchases and streams, and stops what New started. The server cannot be used again.
func (s *Server) Close() {
	s.endWaits()
	s.background.stop()
}

// endWaits has waiting purchases answered as reserved, and ends the streams.
func (s *Server) endWaits() { s.waitsEndOnce.Do(func() { close(s.waitsEnd) }) }

// background runs goroutines beside the requests. They end with ctx.
type background struct {
	ctx    context.Context
	cancel context.CancelFunc

	// mu keeps start from adding a goroutine while stop waits.
	mu      sync.Mutex
	running sync.WaitGroup
}

func newBackground() *background {
	ctx, cancel := context.WithCancel(context.Background())
	return &background{ctx: ctx, cancel: cancel}
}

// start runs f, unless stop was called before.
func (b *background) start(f func(context.Context)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ctx.Err() == nil {
		b.running.Go(func() { f(b.ctx) })
	}
}

// stop ends the goroutines and waits for them.
func (b *background) stop() {
	b.mu.Lock()
	b.cancel()
	b.mu.Unlock()
	b.running.Wait()
}

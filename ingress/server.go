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

	"stampede/internal/accept"
	"stampede/internal/keyset"
	"stampede/internal/operators"
	"stampede/internal/telemetry"
)

// cancelGrace is how long cancelled requests may take to answer when a drain has timed out.
const cancelGrace = time.Second

// Server is the HTTP server. Make it with New; it is safe for concurrent use.
type Server struct {
	*core
	router *router
	health *health
	sales  *saleService
	draws  *drawService

	addr atomic.Pointer[string]
	// connections is nil until Run listens.
	connections  atomic.Pointer[accept.Listener]
	waitsEndOnce sync.Once
}

// core is what calls of all kinds share.
type core struct {
	config  Config
	log     *slog.Logger
	auth    authenticator
	keys    *keyset.Source // nil unless the tokens of buyers are verified by a key set
	metrics *metrics
	limits  *clientLimits

	// Every request under /v1 takes a slot of inFlight, except those that wait in a line. Where a call needs a proof of
	// who makes it, it takes the slot afterwards; a purchase, a payment and a cancellation after their body was read.
	inFlight inFlightSlots
	// A purchase that only waits holds one of waitSlots instead.
	waitSlots slots

	receipts *receipts
	orders   *orderStore
	prices   *prices
	waiters  *orderWaiters

	background *background
	stopping   atomic.Bool
	// waitsEnd is closed to end waiting purchases and streams.
	waitsEnd chan struct{}
}

// New returns a server that is ready to serve through Handler or Run. With a JWKS URL it fetches the
// keys; if that fails, the server starts without keys and retries. Call Close if Run is not called.
func New(config Config) (*Server, error) {
	config.setDefaults()
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("ingress: %w", err)
	}
	s := &Server{core: &core{
		config: config, log: config.Logger,
		inFlight:   newInFlightSlots(config.MaxInFlight),
		waitSlots:  slots{limit: int64(config.MaxWaiting)},
		background: newBackground(),
		waitsEnd:   make(chan struct{}),
	}}
	if err := s.init(); err != nil {
		s.Close()
		return nil, fmt.Errorf("ingress: %w", err)
	}
	return s, nil
}

func (s *Server) init() (err error) {
	c, background := s.core, s.background
	if c.auth, c.keys, err = newAuthenticator(background.ctx, c.config); err != nil {
		return err
	}
	if c.keys != nil {
		background.start(c.keys.Run)
	}
	if c.limits, err = newClientLimits(c.config, c.config.Metrics); err != nil {
		return err
	}
	c.metrics, err = newMetrics(c.config.Metrics, gaugeSources{
		&c.inFlight, &c.waitSlots, &c.limits.orderStreams.all, &c.limits.saleStreams.all, s.connections.Load,
		c.config.MaxConnections,
	})
	if err != nil {
		return err
	}
	known, err := operators.New(operators.Config{
		File: c.config.OperatorsFile, AdminToken: c.config.AdminToken, Logger: c.log, Registerer: c.config.Metrics,
	})
	if err != nil {
		return err
	}
	background.start(known.Run)
	c.receipts = &receipts{info: c.metrics.receiptSecret}
	if err := c.receipts.start(c.config, background); err != nil {
		return err
	}
	c.prices = &prices{}
	c.orders = newOrderStore(c.config, c.prices, background)
	c.waiters = newOrderWaiters(c.orders.findAwaited, c.metrics.outcomeLookups)
	background.start(c.waiters.run)
	if c.config.Outcomes != nil {
		background.start((&outcomeReader{core: c}).run)
	}
	if c.config.Listener != nil {
		s.setAddr(c.config.Listener)
	}
	s.health, s.sales = &health{core: c}, newSaleService(c)
	s.draws = newDrawService(c, s.sales)
	s.router = newRouter(c, operatorsGate{known})
	background.start(func(ctx context.Context) { c.metrics.sales.run(ctx, s.sales.followed, c.log) })
	watch, err := telemetry.WatchReady(c.config.Metrics, "ingress", s.health.look)
	if err != nil {
		return err
	}
	background.start(watch)
	site, err := documents()
	if err != nil {
		return err
	}
	for _, r := range s.table(site) {
		s.router.add(r)
	}
	return nil
}

// Handler serves all routes.
func (s *Server) Handler() http.Handler { return s.router.echo }

// Ready returns nil if GET /readyz answers 200.
func (s *Server) Ready(context.Context) error {
	_, err := s.health.readiness()
	return err
}

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
	connections := accept.New(listener, s.config.MaxConnections)
	connections.Refusal = refusal
	s.connections.Store(connections)
	server := accept.NewServer(s.router.echo, s.log)
	served := accept.Serve(base, server, connections, s.plainReader())
	err := errors.Join(s.serve(ctx, served), s.drain(base, cancelRequests, connections))
	_ = server.Close()
	for range served { // net.ErrClosed, unless serve has taken the error
	}
	connections.CloseAll() // those that outlived the drain
	return err
}

// plainReader has plain purchases answered by the handler of their route.
func (s *Server) plainReader() *accept.PlainConfig {
	if !s.config.PlainReader {
		return nil
	}
	buyer := s.config.AuthHeader
	if s.config.Auth == AuthJWT {
		buyer = "Authorization"
	}
	return &accept.PlainConfig{
		Buyer: buyer, Handler: s.router.plainHandler, Traced: s.config.Tracer != nil, Logger: s.log,
	}
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

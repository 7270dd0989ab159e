package accept

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

// Limits of a connection. A purchase is a few hundred bytes each way.
const (
	readHeaderTimeout = 2 * time.Second
	ReadTimeout       = 5 * time.Second
	// MaxHeadBytes is the length of a head, the request line included, that is read for certain: a token may have very
	// many groups. net/http reads up to a buffer more.
	MaxHeadBytes = 32 << 10
	// WriteTimeout starts at the end of the request's head. It covers the slowest body (ReadTimeout) and the longest
	// work after it: net/http discards a later answer.
	WriteTimeout = 12 * time.Second
	idleTimeout  = 60 * time.Second
	// MaxBodyBytes bounds the body of a request. The handler enforces it; a plain purchase has no longer one.
	MaxBodyBytes = 4 << 10
)

// UserHeader names the buyer of a request if a gateway has authenticated it, unless another header is configured.
const UserHeader = "X-User-ID"

// NewServer returns an http.Server with the limits of a connection.
func NewServer(handler http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           handler,
		ConnContext:       ConnContext,
		ConnState:         connState,
		ReadHeaderTimeout: readHeaderTimeout,
		ReadTimeout:       ReadTimeout,
		WriteTimeout:      WriteTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    MaxHeadBytes,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}

// Serve has the server serve the connections, whose requests have the context ctx. With plain, purchases are read in
// front of the server, unless none can be plain because the buyer's header has another meaning. The channel receives
// the error with which the listener ends, and is closed when the server is: to stop, first call Drain of the listener,
// which finishes the requests, and then close the server.
func Serve(ctx context.Context, server *http.Server, connections *Listener, plain *PlainConfig) <-chan error {
	server.BaseContext = func(net.Listener) context.Context { return ctx }
	var front *plainFront
	if plain != nil {
		front = newPlainFront(ctx, connections.Addr(), *plain)
	}
	served := make(chan error, 1)
	go func() {
		defer close(served)
		if front == nil {
			served <- server.Serve(connections)
			return
		}
		var behind sync.WaitGroup
		behind.Go(func() {
			_ = server.Serve(front) // ends when the server is closed
			_ = connections.Close()
		})
		defer behind.Wait()
		served <- front.run(connections)
	}()
	return served
}

// EventStream sets the head of an answer of server-sent events, which nothing on its way may hold back: nginx would
// buffer them, and gateways that compress (Express, Traefik, Caddy) keep the first kilobyte.
func EventStream(head http.Header) {
	head.Set("Content-Type", "text/event-stream")
	head.Set("Cache-Control", "no-store, no-transform")
	head.Set("X-Accel-Buffering", "no")
}

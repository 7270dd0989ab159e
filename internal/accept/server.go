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

// Conn is what a Listener accepts, if it is a TCP connection.
type Conn interface {
	net.Conn
	// Changed receives the connection's state in the server.
	Changed(state http.ConnState)
	// Arrived returns when the newest bytes that were read arrived at this machine, also if they waited for the
	// connection to be accepted; zero if that is unknown. The client has left if it is known to have closed the
	// connection by then, or its own side of it.
	Arrived() (at time.Time, left bool)
	// HasLeft asks the kernel whether the client has left.
	HasLeft() bool
}

// LateAfter is the age at which a request to change something is not carried out any more. Its client may have given
// up, and have been answered by another process since.
const LateAfter = 2 * time.Second

// Arrival is when a request came, and whether its client still waited when it had been read. The zero value is of a
// request whose connection is not known.
type Arrival struct {
	// Read is when the request had been read.
	Read time.Time
	// At is when its last bytes arrived at this machine, and Read if that is not Known. It may be the time of later
	// bytes of the same client.
	At    time.Time
	Known bool
	Left  bool
	// Conn is nil if it is not known.
	Conn Conn
}

// arrivalOn returns the arrival of a request that has been read from a connection right now.
func arrivalOn(c Conn) Arrival {
	a := Arrival{Read: time.Now(), Conn: c}
	a.At = a.Read
	if c == nil {
		return a
	}
	at, left := c.Arrived()
	a.Left = left
	if a.Known = !at.IsZero(); a.Known {
		// At has a monotonic clock from here on. The other one may have been set back.
		a.At = a.Read.Add(-max(0, a.Read.Sub(at)))
	}
	return a
}

// IsLate reports whether the request is not to be carried out any more.
func (a Arrival) IsLate() bool { return a.Left || time.Since(a.At) > LateAfter }

type connKey struct{}

// ConnContext is for http.Server.ConnContext, so that Arrived finds the connection of a request.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	if c, ok := c.(Conn); ok {
		return context.WithValue(ctx, connKey{}, c)
	}
	return ctx
}

// Arrived returns the arrival of what has been read of a request until now. A plain purchase has been read whole, and
// has the clock that was read for it.
func Arrived(w http.ResponseWriter, r *http.Request) Arrival {
	if a, ok := w.(*plainAnswer); ok {
		return a.arrival
	}
	c, _ := r.Context().Value(connKey{}).(Conn)
	return arrivalOn(c)
}

package ingress

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"stampede/internal/accept"
)

// acceptRetryPause is the pause before connections are accepted again when files were short.
const acceptRetryPause = 50 * time.Millisecond

// PlainConfig configures a PlainFront.
type PlainConfig struct {
	// Buyer is the header that names the buyer, or proves who it is.
	Buyer string
	// Handler is called once for each connection, with the writer and the request of all its purchases. What it
	// returns answers one of them, in the sale of its path, and must not keep the request's body.
	Handler func(w http.ResponseWriter, r *http.Request) func(sale string)
	// Traced is set if the handler reads the header traceparent.
	Traced bool
	Logger *slog.Logger
}

// PlainFront answers plain purchases in front of an http.Server, for which it is the listener: it accepts connections,
// and those on which anything else arrives go to that server. The server's ConnState must be accept.ConnState.
type PlainFront struct {
	config PlainConfig
	ctx    context.Context // of requests
	addr   net.Addr
	// allowed has the headers that a plain purchase may have.
	allowed map[string]plainHeader

	handed    chan net.Conn
	closed    chan struct{}
	closeOnce sync.Once
}

// NewPlainFront returns nil if no request can be a plain purchase, because the buyer's header has another meaning. The
// context is that of the requests.
func NewPlainFront(ctx context.Context, addr net.Addr, config PlainConfig) *PlainFront {
	allowed := plainAllowList(config.Buyer, config.Traced)
	if allowed == nil {
		return nil
	}
	return &PlainFront{
		config: config, ctx: ctx, addr: addr, allowed: allowed,
		handed: make(chan net.Conn), closed: make(chan struct{}),
	}
}

// Run accepts connections until the listener fails, which is when it is closed. The accepted ones are served on.
func (f *PlainFront) Run(connections *accept.Listener) error {
	for {
		conn, err := connections.Accept()
		switch {
		case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
			f.config.Logger.Warn("cannot accept a connection now", "error", err)
			select {
			case <-time.After(acceptRetryPause):
			case <-f.closed:
			}
		case err != nil:
			return err
		default:
			go f.serve(conn)
		}
	}
}

func (f *PlainFront) serve(conn net.Conn) {
	if conn, ok := conn.(accept.Conn); ok {
		newPlainConn(f, conn).serve()
		return
	}
	if !f.give(conn) {
		_ = conn.Close()
	}
}

// handOver gives a connection to the http.Server, which reads the unread bytes first. It is false if that server is
// closed.
func (f *PlainFront) handOver(conn accept.Conn, unread []byte) bool {
	// The server sets deadlines of its own.
	_ = conn.SetDeadline(time.Time{})
	return f.give(&handedConn{conn, unread})
}

func (f *PlainFront) give(conn net.Conn) bool {
	select {
	case f.handed <- conn:
		return true
	case <-f.closed:
		return false
	}
}

// Accept implements net.Listener: it returns the connections that were handed over.
func (f *PlainFront) Accept() (net.Conn, error) {
	select {
	case conn := <-f.handed:
		return conn, nil
	case <-f.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (f *PlainFront) Close() error {
	f.closeOnce.Do(func() { close(f.closed) })
	return nil
}

// Addr implements net.Listener.
func (f *PlainFront) Addr() net.Addr { return f.addr }

// handedConn is a connection whose first bytes were read before it was handed over.
type handedConn struct {
	accept.Conn
	unread []byte
}

// Read implements net.Conn. http.Server has one read at a time.
func (c *handedConn) Read(p []byte) (int, error) {
	if len(c.unread) == 0 {
		return c.Conn.Read(p)
	}
	n := copy(p, c.unread)
	if c.unread = c.unread[n:]; len(c.unread) == 0 {
		c.unread = nil // the buffer is not needed any more
	}
	return n, nil
}

// CloseWrite is called by http.Server when it closes the connection of a client that still sends.
func (c *handedConn) CloseWrite() error {
	if tcp, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return tcp.CloseWrite()
	}
	return nil
}

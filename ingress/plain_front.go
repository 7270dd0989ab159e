package ingress

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"stampede/internal/accept"
)

// acceptRetryPause is the pause before connections are accepted again when files were short.
const acceptRetryPause = 50 * time.Millisecond

// plainFront answers plain purchases in front of an http.Server, for which it is the listener: it accepts connections,
// and those on which anything else arrives go to that server.
type plainFront struct {
	server *Server
	ctx    context.Context // of requests
	addr   net.Addr
	// buyer is the header that names the buyer, and allowed has all that a plain purchase may have.
	buyer   string
	allowed map[string]plainHeader

	handed    chan net.Conn
	closed    chan struct{}
	closeOnce sync.Once
}

// newPlainFront returns nil if no request can be a plain purchase.
func newPlainFront(ctx context.Context, s *Server, addr net.Addr) *plainFront {
	buyer := s.config.AuthHeader
	if s.config.Auth == AuthJWT {
		buyer = "Authorization"
	}
	allowed := plainAllowList(buyer)
	if allowed == nil {
		return nil
	}
	return &plainFront{
		server: s, ctx: ctx, addr: addr, buyer: buyer, allowed: allowed,
		handed: make(chan net.Conn), closed: make(chan struct{}),
	}
}

// run accepts connections until the listener fails, which is when it is closed. The accepted ones are served on.
func (f *plainFront) run(connections *accept.Listener) error {
	for {
		conn, err := connections.Accept()
		switch {
		case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
			f.server.log.Warn("cannot accept a connection now", "error", err)
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

func (f *plainFront) serve(conn net.Conn) {
	if conn, ok := conn.(statefulConn); ok {
		newPlainConn(f, conn).serve()
		return
	}
	if !f.give(conn) {
		_ = conn.Close()
	}
}

// handOver gives a connection to the http.Server, which reads the unread bytes first. It is false if that server is
// closed.
func (f *plainFront) handOver(conn statefulConn, unread []byte) bool {
	// The server sets deadlines of its own.
	_ = conn.SetDeadline(time.Time{})
	return f.give(&handedConn{conn, unread})
}

func (f *plainFront) give(conn net.Conn) bool {
	select {
	case f.handed <- conn:
		return true
	case <-f.closed:
		return false
	}
}

// Accept implements net.Listener: it returns the connections that were handed over.
func (f *plainFront) Accept() (net.Conn, error) {
	select {
	case conn := <-f.handed:
		return conn, nil
	case <-f.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (f *plainFront) Close() error {
	f.closeOnce.Do(func() { close(f.closed) })
	return nil
}

// Addr implements net.Listener.
func (f *plainFront) Addr() net.Addr { return f.addr }

// handedConn is a connection whose first bytes were read before it was handed over.
type handedConn struct {
	statefulConn
	unread []byte
}

// Read implements net.Conn. http.Server has one read at a time.
func (c *handedConn) Read(p []byte) (int, error) {
	if len(c.unread) == 0 {
		return c.statefulConn.Read(p)
	}
	n := copy(p, c.unread)
	if c.unread = c.unread[n:]; len(c.unread) == 0 {
		c.unread = nil // the buffer is not needed any more
	}
	return n, nil
}

// CloseWrite is called by http.Server when it closes the connection of a client that still sends.
func (c *handedConn) CloseWrite() error {
	if tcp, ok := c.statefulConn.(interface{ CloseWrite() error }); ok {
		return tcp.CloseWrite()
	}
	return nil
}

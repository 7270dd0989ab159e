package ingress

// Why connections are wrapped: http.Server sets about seven deadlines on the socket for each request. Nearly
// all of them are replaced before they are due, and each moves a timer of the runtime under a lock. Once
// http.Server has a whole request it also starts a background read, to notice a client that leaves: a system
// call that finds nothing, a wait in the poller, and two more deadlines to end it. A purchase is answered
// before it would matter that its buyer has left.
//
// An httpConn records every deadline and sets few of them on the socket, and a handler can skip the background
// read. Together that saves 4.0 to 4.6 of 68 µs of CPU time for an accepted purchase and 0.7 to 1.3 of 39 µs for
// one that is sold out; ingress, Redis client and buyers count together (BenchmarkConnection, two cores of AMD
// EPYC, Go 1.26). A sold-out purchase saves the deadlines only, because its background read hardly begins. An
// accepted one needs both changes: a background read is ended by a deadline that has to reach the socket.

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"stampede/internal/accept"
)

// connListener wraps the TCP connections that it accepts in an httpConn. Others stay as they are: a TLS
// connection, for example, cannot go on after a timeout.
type connListener struct{ net.Listener }

func (l connListener) Accept() (net.Conn, error) {
	accepted, err := l.Listener.Accept()
	if tcp, ok := accepted.(*accept.Conn); ok {
		return newConn(tcp), nil
	}
	return accepted, err
}

// connState is for http.Server.ConnState.
func connState(c net.Conn, state http.ConnState) {
	if c, ok := c.(*httpConn); ok {
		if tcp, ok := c.tcpConn.(*accept.Conn); ok {
			tcp.Changed(state)
		}
	}
}

// tcpConn is what an httpConn needs of a TCP connection. It hides ReadFrom, which would bypass the deadlines of
// an httpConn.
type tcpConn interface {
	net.Conn
	CloseWrite() error // http.Server calls it when it closes the connection of a client that still sends
}

// httpConn is a TCP connection of an http.Server. Like every net.Conn it is safe for concurrent use.
type httpConn struct {
	tcpConn
	read, write deadline
	// skipRead has the next read of one byte without a deadline return nothing. It is guarded by read.mu.
	skipRead bool
}

func newConn(tcp tcpConn) *httpConn {
	return &httpConn{tcpConn: tcp, read: deadline{set: tcp.SetReadDeadline}, write: deadline{set: tcp.SetWriteDeadline}}
}

func (c *httpConn) Read(p []byte) (n int, err error) {
	if len(p) == 1 && c.takeSkip() {
		return 0, nil
	}
	if err := c.read.begin(); err != nil {
		return 0, err
	}
	defer c.read.end()
	for {
		n, err = c.tcpConn.Read(p)
		if !c.read.wasExtended(err) {
			return n, err
		}
	}
}

func (c *httpConn) Write(p []byte) (n int, err error) {
	if err := c.write.begin(); err != nil {
		return 0, err
	}
	defer c.write.end()
	for {
		var more int
		more, err = c.tcpConn.Write(p[n:])
		n += more
		if !c.write.wasExtended(err) {
			return n, err
		}
	}
}

func (c *httpConn) SetReadDeadline(t time.Time) error {
	c.read.mu.Lock()
	defer c.read.mu.Unlock()
	if !t.IsZero() {
		c.skipRead = false // the request is over
	}
	return c.read.want(t)
}

func (c *httpConn) SetWriteDeadline(t time.Time) error {
	c.write.mu.Lock()
	defer c.write.mu.Unlock()
	return c.write.want(t)
}

func (c *httpConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

type connKey struct{}

// withConn is for http.Server.ConnContext.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// skipBackgroundRead is for a handler that will answer soon: the request's context need not end when the
// client leaves. Call it before the body is read. A request without a body is in its background read from
// the start; for that one the call has no effect.
//
// The background read is recognized by its length of one byte and by having no deadline: the timeouts of
// Server.Run give every other read one. It is answered immediately with no bytes and no error, which ends
// it; what the client sends meanwhile is read as the next request. Any other reader that was taken for
// it would only read once more.
func skipBackgroundRead(r *http.Request) {
	if c, ok := r.Context().Value(connKey{}).(*httpConn); ok {
		c.read.mu.Lock()
		c.skipRead = true
		c.read.mu.Unlock()
	}
}

func (c *httpConn) takeSkip() bool {
	c.read.mu.Lock()
	defer c.read.mu.Unlock()
	if !c.skipRead || !c.read.wanted.IsZero() {
		return false
	}
	c.skipRead = false
	return true
}

// deadline is the deadline of reads or of writes. It is applied to the socket only for a call that would
// otherwise outlive it: one that begins, or one in progress.
type deadline struct {
	set func(time.Time) error // sets the socket's deadline

	mu sync.Mutex
	// wanted is the deadline that calls must keep, applied is the socket's; zero is none.
	// Invariant: during calls applied is not later than wanted. A call that ends too early goes on.
	wanted, applied time.Time
	calls           int
}

// want is called with mu held.
func (d *deadline) want(t time.Time) error {
	d.wanted = t
	if d.calls > 0 && isEarlier(t, d.applied) {
		return d.apply()
	}
	return nil
}

func (d *deadline) apply() error {
	d.applied = d.wanted
	return d.set(d.applied)
}

// begin starts a call, which ends with end.
func (d *deadline) begin() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if isEarlier(d.wanted, d.applied) {
		if hasPassed(d.wanted) {
			return os.ErrDeadlineExceeded
		}
		_ = d.apply() // fails if the connection is closed, and so does the call
	}
	d.calls++
	return nil
}

func (d *deadline) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls--
}

// wasExtended reports whether a call that ended with err goes on: it has met a deadline that is not wanted
// any more.
func (d *deadline) wasExtended(err error) bool {
	if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return !hasPassed(d.wanted) && d.apply() == nil
}

func isEarlier(t, than time.Time) bool { return !t.IsZero() && (than.IsZero() || t.Before(than)) }

func hasPassed(t time.Time) bool { return !t.IsZero() && !t.After(time.Now()) }

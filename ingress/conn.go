package ingress

// Why connections are wrapped: http.Server sets about seven deadlines on the socket for a request, nearly all of which are
// replaced before they are due, and each of them moves a timer of the runtime under a lock. And once it has a request in
// full it reads on in a goroutine, so as to notice a client that leaves: a system call that finds nothing, a wait in the
// poller, and two more deadlines to end it. A purchase is answered before it would matter that its buyer has left.
//
// A conn keeps every deadline for http.Server, and tells the socket of few of them; a handler may have a request left
// unwatched. Together that is 4.0 to 4.6 of 68 µs of CPU time for a purchase that is accepted, and 0.7 to 1.3 of 39 µs for one that is told
// "sold out", for ingress, Redis client and buyers together (BenchmarkConnection, two cores of AMD EPYC, Go 1.26). The
// latter is the deadlines alone, because nothing is waited for and the watch hardly begins. For the former the two belong
// together: a watch is ended by a deadline that cannot be put off.

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

// connListener makes a conn of every TCP connection that it accepts. Others stay as they are: one of TLS, for example,
// cannot go on after a time-out.
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
	if c, ok := c.(*conn); ok {
		if tcp, ok := c.tcpConn.(*accept.Conn); ok {
			tcp.Changed(state)
		}
	}
}

// tcpConn is what a conn needs of a TCP connection. The ReadFrom, which knows nothing of deadlines that were put off, is
// left out, so that nobody finds it.
type tcpConn interface {
	net.Conn
	CloseWrite() error // http.Server looks for it when it hangs up on a client who is still sending
}

// conn is a TCP connection under an http.Server. It is safe for concurrent use, as a net.Conn has to be.
type conn struct {
	tcpConn
	read, write deadline
	// unwatched makes the next read of one byte without a deadline find nothing. It is guarded by read.mu.
	skipRead bool
}

func newConn(tcp tcpConn) *conn {
	return &conn{tcpConn: tcp, read: deadline{set: tcp.SetReadDeadline}, write: deadline{set: tcp.SetWriteDeadline}}
}

func (c *conn) Read(p []byte) (n int, err error) {
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

// Write goes on behind what was written before a deadline that is none any more.
func (c *conn) Write(p []byte) (n int, err error) {
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

func (c *conn) SetReadDeadline(t time.Time) error {
	c.read.mu.Lock()
	defer c.read.mu.Unlock()
	if !t.IsZero() {
		c.skipRead = false // the request is over
	}
	return c.read.want(t)
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	c.write.mu.Lock()
	defer c.write.mu.Unlock()
	return c.write.want(t)
}

func (c *conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

type connKey struct{}

// withConn is for http.Server.ConnContext.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// leaveUnwatched is for a handler that will answer soon: the context of its request need not end when the client leaves.
// It has to be called before the body is read. When http.Server watches already, as it does from the start where there is no
// body, it is too late, and the watch goes on.
//
// The read by which http.Server watches is known by having no deadline, from which all its other reads are told apart by
// the time-outs of Server.Run, and by its length. It is answered that nothing was there, at once and without an error: that
// ends the watch, nobody waits for anything, and what the client sends meanwhile is read as the next request later. A
// reader that is not the watch, if it ever was taken for it, would have to read once more.
func skipBackgroundRead(r *http.Request) {
	if c, ok := r.Context().Value(connKey{}).(*conn); ok {
		c.read.mu.Lock()
		c.skipRead = true
		c.read.mu.Unlock()
	}
}

func (c *conn) takeSkip() bool {
	c.read.mu.Lock()
	defer c.read.mu.Unlock()
	if !c.skipRead || !c.read.wanted.IsZero() {
		return false
	}
	c.skipRead = false
	return true
}

// deadline is the deadline of the Reads or that of the Writes. The socket hears of it when a call would otherwise outlive
// it: one that begins, or one that is under way.
type deadline struct {
	set func(time.Time) error // sets that of the socket

	mu sync.Mutex
	// wanted is what calls are to keep, and known what the socket knows; zero is no deadline.
	// Invariant: while there are calls, known is not later than wanted. Calls that end too early go on.
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

// enter begins a call, which leave ends.
func (d *deadline) begin() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if isEarlier(d.wanted, d.applied) {
		if hasPassed(d.wanted) {
			return os.ErrDeadlineExceeded
		}
		_ = d.apply() // a connection that is closed tells so in the call as well
	}
	d.calls++
	return nil
}

func (d *deadline) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls--
}

// wasPutOff tells whether a call that ended with err is to go on, because the deadline that ended it is not the wanted one.
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

// Package accept takes TCP connections for an http.Server: no more at once than there are files for, and at the end
// without losing a request.
//
// When all places are taken, the connections that have been idle for longest are closed to make room; while none is idle,
// new ones wait in the kernel. And http.Server.Shutdown drops every request whose head it reads after it was called, so
// Drain stands in its place: it stops taking connections, and closes each one that was taken when nothing is under way
// on it and nothing has come in.
package accept

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// lull is for how long no connection may have come until the last one has. It is longer than a handshake that
	// is under way takes.
	lull = 200 * time.Millisecond
	// lullMax bounds that where new handshakes cannot be held off.
	lullMax = time.Second
	// drainEvery is how often a Drain looks which connections it can close.
	drainEvery = 5 * time.Millisecond
	// evictShare: where there is no room, one part in so many of all connections is closed if as many are idle, so that
	// to find the oldest costs little for each.
	evictShare = 32
)

// Listener is a net.Listener of Conns. It is safe for concurrent use; Accept is for one goroutine.
type Listener struct {
	inner net.Listener
	max   int

	// accepted is how many connections there have been: a clock that stands still while none comes.
	accepted atomic.Int64
	// evicted is how many idle ones were closed to make room.
	evicted atomic.Int64
	// wanting is true while Accept waits for room, and woken ends that wait.
	wanting atomic.Bool
	woken   chan struct{}

	draining atomic.Bool
	// stopped is closed when no more connections are taken.
	stopped  chan struct{}
	stopOnce sync.Once

	mu sync.Mutex
	// open has every connection that was accepted and is not closed.
	open map[*Conn]struct{}
}

// Listen listens on a TCP address for New. Go would make a socket of Multipath TCP, of which Linux does not let anybody
// hold off handshakes.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	var config net.ListenConfig
	config.SetMultipathTCP(false)
	return config.Listen(ctx, "tcp", addr)
}

// New takes connections from inner, max at once (0: as many as come).
func New(inner net.Listener, max int) *Listener {
	return &Listener{inner: inner, max: max, woken: make(chan struct{}, 1), stopped: make(chan struct{}), open: make(map[*Conn]struct{})}
}

// Addr implements net.Listener.
func (l *Listener) Addr() net.Addr { return l.inner.Addr() }

// Open is how many connections there are.
func (l *Listener) Open() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.open)
}

// Evicted is how many idle connections were closed to make room for others.
func (l *Listener) Evicted() int64 { return l.evicted.Load() }

// Close takes no more connections, and leaves those that were taken. What waits in the kernel is cut off.
func (l *Listener) Close() error {
	l.stopOnce.Do(func() { close(l.stopped) })
	return l.inner.Close()
}

// Accept implements net.Listener. A connection that is not TCP is neither counted nor drained.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		last, began := l.draining.Load(), time.Now()
		if last {
			l.setDeadline(began.Add(lull))
		}
		inner, err := l.inner.Accept()
		switch {
		case err == nil:
			tcp, ok := inner.(*net.TCPConn)
			if !ok {
				return inner, nil
			}
			// With this one there is a file more in use than max.
			if !l.awaitRoom() {
				_ = tcp.Close()
				return nil, net.ErrClosed
			}
			return l.add(tcp), nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			// Drain has begun, or no client is on its way any more. A deadline that is over when Accept begins says nothing
			// of those who wait.
			if !last || time.Since(began) < lull || l.hasWaiting() {
				continue
			}
			_ = l.Close()
			return nil, net.ErrClosed
		case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
			l.evict() // others have taken the files; http.Server tries again in a moment
		}
		return nil, err
	}
}

// awaitRoom waits until there is room for a connection, and makes some by closing idle ones. It is false if no more
// connections are to be taken.
func (l *Listener) awaitRoom() bool {
	if l.max == 0 || l.Open() < l.max {
		return true
	}
	// A connection that becomes idle later than evict has looked wakes us.
	l.wanting.Store(true)
	defer l.wanting.Store(false)
	for l.Open() >= l.max {
		if l.evict() > 0 {
			continue
		}
		select {
		case <-l.woken:
		case <-l.stopped:
			return false
		}
	}
	return true
}

func (l *Listener) wake() {
	select {
	case l.woken <- struct{}{}:
	default:
	}
}

// evict closes the connections that have been idle for longest, and returns how many.
func (l *Listener) evict() (closed int) {
	for _, c := range l.idle() {
		if c.closeIfIdle() {
			closed++
		}
		if closed > l.max/evictShare {
			break
		}
	}
	l.evicted.Add(int64(closed))
	return closed
}

// idle is the connections that are idle, the longest first.
func (l *Listener) idle() []*Conn {
	type idleConn struct {
		conn  *Conn
		since int64
	}
	var found []idleConn
	l.mu.Lock()
	for c := range l.open {
		if since := c.idleSince.Load(); since != 0 {
			found = append(found, idleConn{c, since})
		}
	}
	l.mu.Unlock()
	slices.SortFunc(found, func(a, b idleConn) int { return cmp.Compare(a.since, b.since) })
	conns := make([]*Conn, len(found))
	for i, f := range found {
		conns[i] = f.conn
	}
	return conns
}

func (l *Listener) add(tcp *net.TCPConn) *Conn {
	c := &Conn{TCPConn: tcp, listener: l}
	l.accepted.Add(1)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open[c] = struct{}{}
	return c
}

func (l *Listener) remove(c *Conn) {
	l.mu.Lock()
	delete(l.open, c)
	l.mu.Unlock()
	if l.wanting.Load() {
		l.wake()
	}
}

// hasWaiting tells whether there are connections in the kernel that Accept would return.
func (l *Listener) hasWaiting() bool {
	tcp, ok := l.inner.(*net.TCPListener)
	if !ok {
		return false
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return false
	}
	var n int
	_ = raw.Control(func(fd uintptr) { n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0) })
	return err == nil && n > 0
}

func (l *Listener) setDeadline(t time.Time) {
	if tcp, ok := l.inner.(*net.TCPListener); ok {
		_ = tcp.SetDeadline(t) // a listener that is closed says so in Accept
	}
}

// Drain takes the connections that are on their way and no further ones, and then waits until all that were taken are
// closed: by the server or the client, or here as soon as they are idle. Its error is that of ctx. It needs an
// http.Server that goes on serving, and closes its connections behind its answers ("Connection: close").
func (l *Listener) Drain(ctx context.Context) error {
	tcp, ok := l.inner.(*net.TCPListener)
	if ok && !l.isStopped() {
		// From here on no handshake begins, and those under way come to their end. Where that cannot be had, clients
		// may come for ever, and what comes in the very last moment is cut off.
		if refuseHandshakes(tcp) != nil {
			defer time.AfterFunc(lullMax, func() { _ = l.Close() }).Stop()
		}
		l.draining.Store(true)
		l.setDeadline(time.Now()) // so that an Accept that waits learns of it
	} else {
		_ = l.Close()
	}
	look := time.NewTicker(drainEvery)
	defer look.Stop()
	for {
		if l.isStopped() && l.closeIdle() == 0 {
			return nil
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			_ = l.Close()
			return ctx.Err()
		}
	}
}

func (l *Listener) isStopped() bool {
	select {
	case <-l.stopped:
		return true
	default:
		return false
	}
}

// closeIdle closes all connections that are idle, and returns how many are left.
func (l *Listener) closeIdle() (left int) {
	for _, c := range l.idle() {
		c.closeIfIdle()
	}
	return l.Open()
}

// Conn is a TCP connection of an http.Server. It is idle while the server waits on it for the first byte of another
// request than the first: the first one is on its way, and the server does not wait for it for long.
type Conn struct {
	*net.TCPConn
	listener *Listener

	// quiet is true from the end of a request until the first byte of the next.
	quiet atomic.Bool
	// idleSince is how many connections had been accepted when the server began to wait, or 0 while it does not.
	idleSince atomic.Int64
}

// Changed is to be called by http.Server.ConnState.
func (c *Conn) Changed(state http.ConnState) {
	if state == http.StateIdle {
		c.quiet.Store(true)
	}
}

// Read implements net.Conn. The server reads a single byte only to notice a client that leaves while its request is worked
// on. That may be a request that came together with the one before, in which case the state never was active.
func (c *Conn) Read(p []byte) (n int, err error) {
	if !c.quiet.Load() || len(p) == 1 {
		return c.TCPConn.Read(p)
	}
	c.idleSince.Store(c.listener.accepted.Load())
	if c.listener.wanting.Load() {
		c.listener.wake()
	}
	n, err = c.TCPConn.Read(p)
	c.idleSince.Store(0)
	if n > 0 {
		c.quiet.Store(false)
	}
	return n, err
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	err := c.TCPConn.Close()
	c.listener.remove(c)
	return err
}

// closeIfIdle closes the connection unless a request has begun. Of one that comes in this very instant the client hears
// that the connection is closed, as it must be ready to on every connection that it uses again (RFC 9112, section 9.5).
func (c *Conn) closeIfIdle() bool {
	if c.idleSince.Load() == 0 || c.hasUnread() {
		return false
	}
	return c.Close() == nil
}

// hasUnread tells whether something has come in that the server has not read yet.
func (c *Conn) hasUnread() bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	var n int
	_ = raw.Control(func(fd uintptr) {
		var first [1]byte
		n, _, err = syscall.Recvfrom(int(fd), first[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	})
	return err == nil && n > 0
}

// Package accept takes connections and requests from clients: no more connections than the limit of open files allows,
// without losing a request when the server stops.
//
//	accept.go         Listener: at the limit, the connections that have been idle for longest are closed to make room
//	                  (while none is idle, new ones wait in the kernel); Drain ends it without a lost request
//	server.go         the limits of a connection; serving with and without the plain reader; when a request came
//	                  (socket_linux.go: the kernel knows)
//	plain.go          the plain reader: most purchases are answered in front of net/http
//	plain_request.go  what it reads: a strict subset of HTTP
//
// The contract of the plain reader: what it takes, net/http would have read and answered in the same way
// (plain_contract_test.go).
package accept

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// lull is the time without a new connection after which none can be pending. It is longer than a handshake.
	lull = 200 * time.Millisecond
	// lullMax bounds the wait for a lull if new handshakes cannot be refused.
	lullMax = time.Second
	// drainInterval is the pause between two searches of Drain for connections to close.
	drainInterval = 5 * time.Millisecond
	// evictShare: at the limit, one connection in evictShare is closed, if as many are idle. So the search for the
	// oldest ones costs little per connection.
	evictShare = 32
)

// Listener is a net.Listener of TCP connections. Its Drain replaces http.Server.Shutdown, which drops requests that
// arrive after the call. It is safe for concurrent use, except that Accept is for one
// goroutine.
type Listener struct {
	inner net.Listener
	limit int

	// Refusal, unless nil, returns the whole answer to a request that http.Server refuses by itself, or nil to leave it a
	// text. Set it before Accept.
	Refusal func(status int) []byte

	// accepted counts connections. It is the clock of acceptedConn.idleSince.
	accepted atomic.Int64
	// evicted counts idle connections that were closed to make room.
	evicted atomic.Int64
	// wanting is true while Accept waits for room; woken ends that wait.
	wanting atomic.Bool
	woken   chan struct{}

	draining atomic.Bool
	// stopped is closed when no more connections are accepted.
	stopped  chan struct{}
	stopOnce sync.Once

	mu sync.Mutex
	// open has the accepted connections that are not closed.
	open map[*acceptedConn]struct{}
}

// Listen listens on a TCP address for New. It turns Multipath TCP off, because Linux cannot refuse handshakes on
// such a socket.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	var config net.ListenConfig
	config.SetMultipathTCP(false)
	return config.Listen(ctx, "tcp", addr)
}

// New accepts connections from inner, with at most limit open at the same time (0: unlimited).
func New(inner net.Listener, limit int) *Listener {
	stampArrivals(inner)
	return &Listener{
		inner: inner, limit: limit,
		woken: make(chan struct{}, 1), stopped: make(chan struct{}), open: make(map[*acceptedConn]struct{}),
	}
}

// Addr implements net.Listener.
func (l *Listener) Addr() net.Addr { return l.inner.Addr() }

// Open returns the number of open connections.
func (l *Listener) Open() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.open)
}

// Evicted returns how many idle connections were closed to make room for others.
func (l *Listener) Evicted() int64 { return l.evicted.Load() }

// Close stops accepting connections, and leaves the accepted ones open. Those that wait in the kernel are reset.
func (l *Listener) Close() error {
	l.stopOnce.Do(func() { close(l.stopped) })
	return l.inner.Close()
}

// Accept implements net.Listener. A connection that is not TCP is neither counted nor drained.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		draining, began := l.draining.Load(), time.Now()
		if draining {
			l.setDeadline(began.Add(lull))
		}
		inner, err := l.inner.Accept()
		switch {
		case err == nil:
			tcp, ok := inner.(*net.TCPConn)
			if !ok {
				return inner, nil
			}
			// This connection is one file more than the limit while it waits for room.
			if !l.awaitRoom() {
				_ = tcp.Close()
				return nil, net.ErrClosed
			}
			return l.add(tcp), nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			// Drain has begun, or no connection has arrived for a lull. If the deadline passed before Accept began,
			// connections may still be waiting.
			if !draining || time.Since(began) < lull || l.hasWaiting() {
				continue
			}
			_ = l.Close()
			return nil, net.ErrClosed
		case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
			l.evict() // other code uses the files; http.Server retries after a pause
		}
		return nil, err
	}
}

// awaitRoom waits until there is room for a connection, and closes idle ones to make room. It returns false after
// Close.
func (l *Listener) awaitRoom() bool {
	if l.limit == 0 || l.Open() < l.limit {
		return true
	}
	// A connection that becomes idle after the search of evict wakes this goroutine.
	l.wanting.Store(true)
	defer l.wanting.Store(false)
	for l.Open() >= l.limit {
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
		if closed > l.limit/evictShare {
			break
		}
	}
	l.evicted.Add(int64(closed))
	return closed
}

// idle returns the idle connections, the longest idle first.
func (l *Listener) idle() []*acceptedConn {
	type idleConn struct {
		conn  *acceptedConn
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
	conns := make([]*acceptedConn, len(found))
	for i, f := range found {
		conns[i] = f.conn
	}
	return conns
}

func (l *Listener) add(tcp *net.TCPConn) *acceptedConn {
	c := &acceptedConn{TCPConn: tcp, listener: l}
	c.arrivals.init(tcp)
	l.accepted.Add(1)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open[c] = struct{}{}
	return c
}

func (l *Listener) remove(c *acceptedConn) {
	l.mu.Lock()
	delete(l.open, c)
	l.mu.Unlock()
	if l.wanting.Load() {
		l.wake()
	}
}

// hasWaiting reports whether the kernel has connections for Accept.
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
		_ = tcp.SetDeadline(t) // fails only if the listener is closed, and then Accept fails too
	}
}

// Drain accepts only connections whose handshake has begun. Then it waits until all accepted connections are
// closed: by the server, by the client, or by Drain when they are idle. Its error is that of ctx. The http.Server
// must keep serving, and close each connection after an answer ("Connection: close").
func (l *Listener) Drain(ctx context.Context) error {
	tcp, ok := l.inner.(*net.TCPListener)
	if ok && !l.isStopped() {
		// From now on no handshake begins, and those in progress end. If handshakes cannot be refused, clients may
		// never stop arriving, so the listener closes after lullMax and resets the latest ones.
		if refuseHandshakes(tcp) != nil {
			defer time.AfterFunc(lullMax, func() { _ = l.Close() }).Stop()
		}
		l.draining.Store(true)
		l.setDeadline(time.Now()) // wakes a blocked Accept
	} else {
		_ = l.Close()
	}
	tick := time.NewTicker(drainInterval)
	defer tick.Stop()
	for {
		if l.isStopped() && l.closeIdle() == 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			_ = l.Close()
			return ctx.Err()
		}
	}
}

// CloseAll closes all accepted connections, also those in use.
func (l *Listener) CloseAll() {
	l.mu.Lock()
	conns := slices.Collect(maps.Keys(l.open))
	l.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
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

// closeIdle closes all idle connections, and returns how many remain.
func (l *Listener) closeIdle() (left int) {
	for _, c := range l.idle() {
		c.closeIfIdle()
	}
	return l.Open()
}

// acceptedConn is a TCP connection of an http.Server. It is idle while the server waits for the first byte of a
// request, except the first request, which arrives soon after the handshake.
type acceptedConn struct {
	*net.TCPConn
	listener *Listener
	arrivals arrivals

	// quiet is true from the end of a request until the first byte of the next.
	quiet atomic.Bool
	// idleSince is Listener.accepted when the connection became idle, or 0 while it is not idle.
	idleSince atomic.Int64
}

// connState is for http.Server.ConnState.
func connState(c net.Conn, state http.ConnState) {
	if c, ok := c.(Conn); ok {
		c.Changed(state)
	}
}

// Changed implements Conn.
func (c *acceptedConn) Changed(state http.ConnState) {
	if state == http.StateIdle {
		c.quiet.Store(true)
	}
}

// Read implements net.Conn. A read of one byte is http.Server's background read, which detects a client that
// disconnects during a request. The connection may be quiet then: if two requests arrive together, the state does not
// become active for the second.
func (c *acceptedConn) Read(p []byte) (n int, err error) {
	if !c.quiet.Load() || len(p) == 1 {
		return c.arrivals.read(c.TCPConn, p)
	}
	c.idleSince.Store(c.listener.accepted.Load())
	if c.listener.wanting.Load() {
		c.listener.wake()
	}
	n, err = c.arrivals.read(c.TCPConn, p)
	c.idleSince.Store(0)
	if n > 0 {
		c.quiet.Store(false)
	}
	return n, err
}

// Write implements net.Conn.
func (c *acceptedConn) Write(p []byte) (int, error) {
	if refuse, status := c.listener.Refusal, refusedStatus(p); status != 0 && refuse != nil {
		if answer := refuse(status); answer != nil {
			_, err := c.TCPConn.Write(answer)
			return len(p), err
		}
	}
	return c.TCPConn.Write(p)
}

// refusedStatus returns the status of an answer with which http.Server itself refuses a request, or 0 for any other.
// It writes them at once, and nothing else writes one that begins with these headers: others have a Date before.
func refusedStatus(answer []byte) int {
	line, rest, _ := bytes.Cut(answer, []byte("\r\n"))
	text, isHTTP := bytes.CutPrefix(line, []byte("HTTP/1.1 "))
	if !isHTTP || !bytes.HasPrefix(rest, []byte("Content-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n")) {
		return 0
	}
	code, _, _ := bytes.Cut(text, []byte(" "))
	status, _ := strconv.Atoi(string(code))
	return status
}

// Arrived implements Conn.
func (c *acceptedConn) Arrived() (at time.Time, left bool) { return c.arrivals.arrived() }

// HasLeft implements Conn.
func (c *acceptedConn) HasLeft() bool { return c.arrivals.hasLeft() }

// Close implements net.Conn.
func (c *acceptedConn) Close() error {
	err := c.TCPConn.Close()
	c.listener.remove(c)
	return err
}

// closeIfIdle closes the connection unless a request has begun. If a request arrives at the
// same moment, its client gets a closed connection, which it must expect on every reused connection (RFC 9112,
// section 9.5).
func (c *acceptedConn) closeIfIdle() bool {
	if c.idleSince.Load() == 0 || c.hasUnread() {
		return false
	}
	return c.Close() == nil
}

// hasUnread reports whether bytes have arrived that the server has not read.
func (c *acceptedConn) hasUnread() bool {
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

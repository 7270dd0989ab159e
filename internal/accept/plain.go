package accept

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// acceptRetryPause is the pause before connections are accepted again when files were short.
const acceptRetryPause = 50 * time.Millisecond

// PlainConfig says how plain purchases are answered.
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

// plainFront answers plain purchases in front of an http.Server, for which it is the listener: it accepts connections,
// and those on which anything else arrives go to that server. The server's ConnState must be connState.
type plainFront struct {
	config PlainConfig
	ctx    context.Context // of requests
	addr   net.Addr
	// allowed has the headers that a plain purchase may have.
	allowed map[string]plainHeader

	others    chan net.Conn // to the http.Server
	closed    chan struct{}
	closeOnce sync.Once
}

// newPlainFront returns nil if no request can be a plain purchase, because the buyer's header has another meaning. The
// context is that of the requests.
func newPlainFront(ctx context.Context, addr net.Addr, config PlainConfig) *plainFront {
	allowed := plainAllowList(config.Buyer, config.Traced)
	if allowed == nil {
		return nil
	}
	return &plainFront{
		config: config, ctx: ctx, addr: addr, allowed: allowed,
		others: make(chan net.Conn), closed: make(chan struct{}),
	}
}

// run accepts connections until the listener fails, which is when it is closed. The accepted ones are served on.
func (f *plainFront) run(connections *Listener) error {
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

func (f *plainFront) serve(conn net.Conn) {
	if conn, ok := conn.(Conn); ok {
		newPlainConn(f, conn).serve()
		return
	}
	if !f.pass(conn) {
		_ = conn.Close()
	}
}

// handOver gives a connection to the http.Server, which reads the unread bytes first. It is false if that server is
// closed.
func (f *plainFront) handOver(conn Conn, unread []byte) bool {
	// The server sets deadlines of its own.
	_ = conn.SetDeadline(time.Time{})
	return f.pass(&resumedConn{conn, unread})
}

func (f *plainFront) pass(conn net.Conn) bool {
	select {
	case f.others <- conn:
		return true
	case <-f.closed:
		return false
	}
}

// Accept implements net.Listener: it returns the connections that were handed over.
func (f *plainFront) Accept() (net.Conn, error) {
	select {
	case conn := <-f.others:
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

// resumedConn is a connection whose first bytes were read before it was handed over.
type resumedConn struct {
	Conn
	unread []byte
}

// Read implements net.Conn. http.Server has one read at a time.
func (c *resumedConn) Read(p []byte) (int, error) {
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
func (c *resumedConn) CloseWrite() error {
	if tcp, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return tcp.CloseWrite()
	}
	return nil
}

const (
	// deadlineSlack is how much later than due a connection may be cut off, so that its deadlines move once a second
	// and not with each request.
	deadlineSlack = time.Second
	// peekBytes is how much of another request net/http waits for, and how many line ends it skips behind a POST.
	peekBytes = 4
)

// plainConn answers plain purchases on a connection until something else arrives. All its memory is its own and used
// for each request again, so it is for one goroutine.
type plainConn struct {
	front *plainFront
	conn  Conn

	request *plainRequest
	answer  plainAnswer
	handle  func(sale string)

	// unread[:filled] has been received and is not answered.
	unread [plainRequestMax]byte
	filled int
	out    []byte
	// answered is true behind the first request.
	answered bool
	// The socket's deadlines.
	readBy, writeBy time.Time
}

func newPlainConn(front *plainFront, conn Conn) *plainConn {
	c := &plainConn{
		front: front, conn: conn,
		request: newPlainRequest(front.ctx, front.allowed, front.config.Buyer, conn.RemoteAddr().String()),
		answer:  plainAnswer{header: make(http.Header)},
	}
	c.handle = front.config.Handler(&c.answer, c.request.Request)
	return c
}

// serve answers plain purchases. At the first other request it leaves the connection to net/http for good, with all
// bytes from the start of that request on.
func (c *plainConn) serve() {
	keep := false
	defer func() {
		if cause := recover(); cause != nil && cause != http.ErrAbortHandler { //nolint:errorlint // as in net/http
			c.front.config.Logger.Error("a plain purchase panicked", "sale", c.request.sale, "panic", cause,
				"stack", string(debug.Stack()))
		}
		if !keep {
			_ = c.conn.Close()
		}
	}()
	for c.awaitRequest() {
		length := c.request.read(c.unread[:c.filled])
		if length == 0 {
			keep = c.front.handOver(c.conn, c.unread[:c.filled])
			return
		}
		if !c.serveRequest() {
			return
		}
		c.filled = copy(c.unread[:], c.unread[length:c.filled])
		c.answered = true
	}
}

// awaitRequest waits for the next request as long as net/http would. It is false if none comes. A request that does
// not come whole is not a plain one, so no other deadline is needed while it is read.
func (c *plainConn) awaitRequest() bool {
	least := 1
	switch {
	case !c.answered: // the first request is on its way
		_ = c.conn.SetReadDeadline(time.Now().Add(readHeaderTimeout))
	case c.filled < peekBytes:
		least = peekBytes
		c.allowIdle()
	}
	for c.filled < least {
		n, err := c.conn.Read(c.unread[c.filled:])
		if c.filled += n; err != nil && c.filled < least {
			return false
		}
	}
	if c.answered {
		c.skipLineEnds()
	}
	return true
}

// skipLineEnds drops line ends in front of a request that follows a POST, as net/http does.
func (c *plainConn) skipLineEnds() {
	n := 0
	for n < peekBytes && (c.unread[n] == '\r' || c.unread[n] == '\n') {
		n++
	}
	if n > 0 {
		c.filled = copy(c.unread[:], c.unread[n:c.filled])
	}
}

// serveRequest has the handler of the route answer the request. It is false if the connection is not to be kept.
func (c *plainConn) serveRequest() bool {
	c.answer.reset(arrivalOn(c.conn))
	c.handle(c.request.sale)
	c.out = c.answer.append(c.out[:0], time.Now())
	c.allowWrite()
	if _, err := c.conn.Write(c.out); err != nil || c.answer.closes() {
		return false
	}
	c.conn.Changed(http.StateIdle)
	return true
}

// allowIdle gives the client time to send another request.
func (c *plainConn) allowIdle() {
	if time.Until(c.readBy) < idleTimeout {
		c.readBy = time.Now().Add(idleTimeout + deadlineSlack)
		_ = c.conn.SetReadDeadline(c.readBy) // fails if the connection is closed, and so does the read
	}
}

// allowWrite gives the client time to take the answer.
func (c *plainConn) allowWrite() {
	if by := c.answer.arrival.Read.Add(WriteTimeout); c.writeBy.Before(by) {
		c.writeBy = by.Add(deadlineSlack)
		_ = c.conn.SetWriteDeadline(c.writeBy) // as in allowIdle
	}
}

// plainAnswer is the http.ResponseWriter of a plain purchase. It holds the answer until the handler is done.
type plainAnswer struct {
	arrival Arrival // of the request
	header  http.Header
	status  int
	body    []byte
}

func (a *plainAnswer) Header() http.Header { return a.header }

func (a *plainAnswer) WriteHeader(status int) { a.status = status }

func (a *plainAnswer) Write(body []byte) (int, error) {
	a.body = append(a.body, body...)
	return len(body), nil
}

// Body is what the handler has written. Tests of handlers compare it with the contract of their API.
func (a *plainAnswer) Body() []byte { return a.body }

func (a *plainAnswer) reset(arrival Arrival) {
	a.arrival = arrival
	clear(a.header)
	a.status, a.body = http.StatusOK, a.body[:0]
}

// closes reports whether the connection ends behind this answer.
func (a *plainAnswer) closes() bool { return a.header["Connection"] != nil }

// append appends the answer as net/http would send it. No part of a header comes from a client.
func (a *plainAnswer) append(dst []byte, now time.Time) []byte {
	dst = append(dst, "HTTP/1.1 "...)
	dst = strconv.AppendInt(dst, int64(a.status), 10)
	dst = append(dst, ' ')
	dst = append(dst, http.StatusText(a.status)...)
	for name, values := range a.header {
		for _, value := range values {
			dst = append(dst, "\r\n"...)
			dst = append(dst, name...)
			dst = append(dst, ": "...)
			dst = append(dst, value...)
		}
	}
	dst = append(dst, "\r\nDate: "...)
	dst = append(dst, httpDate(now)...)
	dst = append(dst, "\r\nContent-Length: "...)
	dst = strconv.AppendInt(dst, int64(len(a.body)), 10)
	dst = append(dst, "\r\n\r\n"...)
	return append(dst, a.body...)
}

// dateLine is a second as HTTP writes it.
type dateLine struct {
	second int64
	text   string
}

var lastDate atomic.Pointer[dateLine]

// httpDate formats a time once for all answers of its second.
func httpDate(now time.Time) string {
	if last := lastDate.Load(); last != nil && last.second == now.Unix() {
		return last.text
	}
	made := &dateLine{now.Unix(), now.UTC().Format(http.TimeFormat)}
	lastDate.Store(made)
	return made.text
}

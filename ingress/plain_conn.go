package ingress

import (
	"net/http"
	"runtime/debug"
	"time"

	"stampede/internal/accept"
)

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
	front *PlainFront
	conn  accept.Conn

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

func newPlainConn(front *PlainFront, conn accept.Conn) *plainConn {
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
	c.answer.reset(accept.ArrivalOn(c.conn))
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
	if by := c.answer.arrival.Read.Add(writeTimeout); c.writeBy.Before(by) {
		c.writeBy = by.Add(deadlineSlack)
		_ = c.conn.SetWriteDeadline(c.writeBy) // as in allowIdle
	}
}

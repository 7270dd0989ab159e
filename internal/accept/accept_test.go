package accept

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// web is an http.Server on a Listener.
type web struct {
	t        *testing.T
	listener *Listener
	serve    func()
	// handling gets a value for each request to /slow; each is answered after a value from finish.
	handling, finish chan struct{}
}

func open(t *testing.T, limit int) *web {
	t.Helper()
	inner, err := Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	w := &web{t: t, listener: New(inner, limit), handling: make(chan struct{}, 100), finish: make(chan struct{})}
	server := &http.Server{
		Handler:           http.HandlerFunc(w.handle),
		ConnState:         connState,
		ReadHeaderTimeout: 2 * time.Second,
	}
	served := make(chan struct{})
	w.serve = func() {
		go func() {
			defer close(served)
			_ = server.Serve(w.listener)
		}()
		t.Cleanup(func() {
			_ = server.Close()
			<-served
		})
	}
	return w
}

func (w *web) handle(out http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/slow" {
		w.handling <- struct{}{}
		<-w.finish
	}
	if w.listener.draining.Load() {
		out.Header().Set("Connection", "close")
	}
	_, _ = io.WriteString(out, "done")
}

type client struct {
	t    *testing.T
	conn net.Conn
	in   *bufio.Reader
}

func (w *web) dial() *client {
	w.t.Helper()
	conn, err := net.Dial("tcp", w.listener.Addr().String()) //nolint:noctx // it ends with the test
	require.NoError(w.t, err)
	w.t.Cleanup(func() { _ = conn.Close() })
	require.NoError(w.t, conn.SetDeadline(time.Now().Add(20*time.Second)))
	return &client{w.t, conn, bufio.NewReader(conn)}
}

func (c *client) ask(path string) {
	c.t.Helper()
	_, err := fmt.Fprintf(c.conn, "GET %s HTTP/1.1\r\nHost: web\r\n\r\n", path)
	require.NoError(c.t, err)
}

func (c *client) answered() {
	c.t.Helper()
	res, err := http.ReadResponse(c.in, nil)
	require.NoError(c.t, err)
	body, err := io.ReadAll(res.Body)
	require.NoError(c.t, err)
	require.Equal(c.t, "done", string(body))
}

func (c *client) isClosed() {
	c.t.Helper()
	_, err := c.in.ReadByte()
	require.ErrorIs(c.t, err, io.EOF)
}

func (w *web) awaitIdle(n int) {
	w.t.Helper()
	testkit.Eventually(w.t, 30*time.Second, "the connections are idle", func() bool { return len(w.listener.idle()) == n })
}

func TestAcceptEvictsOldestIdleConnection(t *testing.T) {
	t.Parallel()
	w := open(t, 3)
	w.serve()
	busy := w.dial()
	busy.ask("/slow")
	<-w.handling
	var idle []*client
	for n := range 2 {
		c := w.dial()
		c.ask("/")
		c.answered()
		w.awaitIdle(n + 1)
		idle = append(idle, c)
	}
	next := w.dial()
	next.ask("/")
	next.answered()
	idle[0].isClosed()
	idle[1].ask("/") // was idle for a shorter time
	idle[1].answered()
	require.EqualValues(t, 1, w.listener.Evicted())
	require.Equal(t, 3, w.listener.Open())
	w.finish <- struct{}{}
	busy.answered()
}

func TestAcceptWaitsWhileNoConnectionIsIdle(t *testing.T) {
	t.Parallel()
	w := open(t, 2)
	w.serve()
	one, two := w.dial(), w.dial()
	one.ask("/slow")
	two.ask("/slow")
	<-w.handling
	<-w.handling
	three := w.dial()
	three.ask("/")
	testkit.Eventually(t, 30*time.Second, "a connection waits for room", w.listener.wanting.Load)
	require.Equal(t, 2, w.listener.Open())
	w.finish <- struct{}{} // its connection becomes idle and is closed
	three.answered()
	w.finish <- struct{}{}
	require.LessOrEqual(t, w.listener.Open(), 2)
}

// The server has not read the request yet.
func TestConnectionWithUnreadRequestIsNotIdle(t *testing.T) {
	t.Parallel()
	w := open(t, 0)
	c := w.dial()
	conn, err := w.listener.Accept()
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	accepted := conn.(*acceptedConn)
	accepted.idleSince.Store(1)
	c.ask("/")
	testkit.Eventually(t, 30*time.Second, "the request arrives", accepted.hasUnread)
	require.False(t, accepted.closeIfIdle())
}

// The clients connect and send their requests before the server accepts any of them.
func TestDrainServesQueuedConnections(t *testing.T) {
	t.Parallel()
	w := open(t, 0)
	var waiting []*client
	for range 50 {
		c := w.dial()
		c.ask("/")
		waiting = append(waiting, c)
	}
	drained := make(chan error, 1)
	go func() { drained <- w.listener.Drain(context.Background()) }()
	testkit.Eventually(t, 30*time.Second, "the drain has begun", w.listener.draining.Load)
	w.serve()
	for _, c := range waiting {
		c.answered()
	}
	require.NoError(t, <-drained)
	_, err := net.Dial("tcp", w.listener.Addr().String()) //nolint:noctx // it is refused
	require.ErrorContains(t, err, "connection refused")
}

func TestDrainWaitsForRequestsAndClosesIdleConnections(t *testing.T) {
	t.Parallel()
	w := open(t, 0)
	w.serve()
	idle, half, slow := w.dial(), w.dial(), w.dial()
	idle.ask("/")
	idle.answered()
	half.ask("/")
	half.answered()
	w.awaitIdle(2)
	slow.ask("/slow")
	<-w.handling
	_, err := io.WriteString(half.conn, "GET / HT") // a request has begun
	require.NoError(t, err)
	w.awaitIdle(1)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	drained := make(chan error, 1)
	go func() { drained <- w.listener.Drain(ctx) }()
	idle.isClosed()
	_, err = io.WriteString(half.conn, "TP/1.1\r\nHost: web\r\n\r\n")
	require.NoError(t, err)
	half.answered()
	half.isClosed()
	require.Empty(t, drained)
	cancel()
	require.ErrorIs(t, <-drained, context.Canceled)
	w.finish <- struct{}{}
	slow.answered()
	require.NoError(t, w.listener.Drain(t.Context()))
}

// The server reads both requests together, so it neither waits for the first byte of the second nor calls the
// connection active for it.
func TestDrainWaitsForPipelinedRequest(t *testing.T) {
	t.Parallel()
	w := open(t, 0)
	w.serve()
	c := w.dial()
	c.ask("/")
	c.answered()
	_, err := io.WriteString(c.conn, "GET / HTTP/1.1\r\nHost: web\r\n\r\nGET /slow HTTP/1.1\r\nHost: web\r\n\r\n")
	require.NoError(t, err)
	c.answered()
	<-w.handling
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	require.ErrorIs(t, w.listener.Drain(ctx), context.DeadlineExceeded, "a request is in progress")
	close(w.finish)
	c.answered()
}

package accept

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
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

// serve has the market serve purchases on a listener, with the plain reader.
func (m *market) serve(t *testing.T, limit int, change ...func(*PlainConfig)) *web {
	t.Helper()
	inner, err := Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	return m.serveOn(t, inner, limit, change...)
}

func (m *market) serveOn(t *testing.T, inner net.Listener, limit int, change ...func(*PlainConfig)) *web {
	t.Helper()
	w := &web{t: t, listener: New(inner, limit)}
	m.isStopping = w.listener.draining.Load
	plain, server := m.plainly(), m.server()
	for _, c := range change {
		c(&plain)
	}
	served := Serve(t.Context(), server, w.listener, &plain)
	t.Cleanup(func() {
		_ = server.Close()
		for range served {
		}
	})
	return w
}

// awaitEntered waits until the purchase of the buyer "held" is being answered.
func (m *market) awaitEntered(t *testing.T) {
	t.Helper()
	select {
	case <-m.entered:
	case <-time.After(20 * time.Second):
		t.Fatal("the purchase has not reached the market")
	}
}

func (c *client) sends(text string) {
	c.t.Helper()
	_, err := io.WriteString(c.conn, text)
	require.NoError(c.t, err)
}

func (c *client) receives(status int) *http.Response {
	c.t.Helper()
	res, err := http.ReadResponse(c.in, nil)
	require.NoError(c.t, err)
	_, err = io.Copy(io.Discard, res.Body)
	require.NoError(c.t, err)
	require.Equal(c.t, status, res.StatusCode)
	return res
}

// buys makes a plain purchase.
func (c *client) buys() {
	c.t.Helper()
	c.sends(plainHead() + plainJSON)
	c.receives(http.StatusAccepted)
}

func TestPlainConnStaysWithNetHTTPAfterAnotherRequest(t *testing.T) {
	t.Parallel()
	m := newMarket()
	w := m.serve(t, 0)
	const livez = "GET /livez HTTP/1.1\r\nHost: shop\r\n\r\n"
	c := w.dial()
	c.buys()
	c.buys()
	require.EqualValues(t, 2, m.plain.Load())
	c.sends(livez)
	c.receives(http.StatusOK)
	c.buys()
	require.EqualValues(t, 2, m.plain.Load())

	c = w.dial()
	c.sends(plainHead() + plainJSON + livez + plainHead() + plainJSON)
	for _, status := range []int{http.StatusAccepted, http.StatusOK, http.StatusAccepted} {
		c.receives(status)
	}
	require.EqualValues(t, 3, m.plain.Load())
	require.Len(t, m.take(), 5)
}

func TestPlainReaderIsOffIfBuyerHeaderHasAnotherMeaning(t *testing.T) {
	t.Parallel()
	m := newMarket()
	m.serve(t, 0, func(c *PlainConfig) { c.Buyer = "Idempotency-Key" }).dial().buys()
	require.Zero(t, m.plain.Load())
	require.Len(t, m.take(), 1)
}

// Purchases in progress and connections whose request has begun are served to their end; idle ones are closed.
func TestDrainFinishesPlainPurchases(t *testing.T) {
	t.Parallel()
	m := newMarket()
	w := m.serve(t, 0)
	busy, idle, half := w.dial(), w.dial(), w.dial()
	busy.sends(plainHead("X-User-ID: held") + plainJSON)
	m.awaitEntered(t)
	idle.buys()
	half.buys()
	text := plainHead() + plainJSON
	half.sends(text[:30])
	w.awaitIdle(1)
	drained := make(chan error, 1)
	go func() { drained <- w.listener.Drain(context.Background()) }()
	idle.isClosed()
	half.sends(text[30:])
	require.True(t, half.receives(http.StatusAccepted).Close)
	half.isClosed()
	require.Empty(t, drained)
	close(m.goOn)
	busy.receives(http.StatusAccepted)
	busy.isClosed()
	require.NoError(t, <-drained)
	require.Len(t, m.take(), 4)
	require.EqualValues(t, 3, m.plain.Load(), "a request that comes in two parts is not plain")
}

func TestIdlePlainConnsMakeRoom(t *testing.T) {
	t.Parallel()
	w := newMarket().serve(t, 2)
	clients := []*client{w.dial(), w.dial()}
	for _, c := range clients {
		c.buys()
	}
	third := w.dial()
	third.buys()
	// Either of the first two: they may become idle at the same time.
	require.EqualValues(t, 1, w.listener.Evicted())
	require.Equal(t, 2, w.listener.Open())
	for _, c := range append(clients, third) {
		require.NoError(t, c.conn.Close())
	}
	testkit.Eventually(t, 30*time.Second, "the connections are closed", func() bool { return w.listener.Open() == 0 })
}

// A client that connects and is silent, or begins a request and does not end it, is cut off.
func TestPlainConnIsCutOff(t *testing.T) {
	t.Parallel()
	w := newMarket().serve(t, 0)
	text := plainHead() + plainJSON
	for _, c := range []struct {
		name, text    string
		answers       bool
		least, most   time.Duration
		afterPurchase bool
	}{
		{name: "silent", least: readHeaderTimeout, most: ReadTimeout},
		{name: "half a head", text: text[:30], least: readHeaderTimeout, most: ReadTimeout, afterPurchase: true},
		{name: "half a body", text: text[:len(text)-1], answers: true, least: ReadTimeout, most: 2 * ReadTimeout},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			conn := w.dial()
			if c.afterPurchase {
				conn.buys()
			}
			began := time.Now()
			conn.sends(c.text)
			if c.answers {
				require.True(t, conn.receives(http.StatusBadRequest).Close)
			}
			_, err := io.ReadAll(conn.in) // net/http may answer half a line
			require.NoError(t, err)
			require.GreaterOrEqual(t, time.Since(began), c.least-c.least/10)
			require.Less(t, time.Since(began), c.most)
		})
	}
}

// deadlineConn checks that each call has the deadline that it should have.
type deadlineConn struct {
	*scriptedConn
	t                   *testing.T
	reads, writes       int
	readBy, writeBy     time.Time
	readsSet, writesSet int
}

func (c *deadlineConn) SetReadDeadline(by time.Time) error {
	c.readBy, c.readsSet = by, c.readsSet+1
	return nil
}

func (c *deadlineConn) SetWriteDeadline(by time.Time) error {
	c.writeBy, c.writesSet = by, c.writesSet+1
	return nil
}

func (c *deadlineConn) Read(p []byte) (int, error) {
	wait, slack := idleTimeout, deadlineSlack
	if c.reads++; c.reads == 1 {
		wait, slack = readHeaderTimeout, 0
	}
	left := time.Until(c.readBy)
	assert.Greater(c.t, left, wait-time.Second)
	assert.LessOrEqual(c.t, left, wait+slack)
	return c.scriptedConn.Read(p)
}

func (c *deadlineConn) Write(p []byte) (int, error) {
	c.writes++
	left := time.Until(c.writeBy)
	assert.Greater(c.t, left, WriteTimeout-time.Second)
	assert.LessOrEqual(c.t, left, WriteTimeout+deadlineSlack)
	return c.scriptedConn.Write(p)
}

func TestPlainConnKeepsDeadlines(t *testing.T) {
	t.Parallel()
	both := newBothReaders(t)
	c := &deadlineConn{t: t, scriptedConn: both.newScriptedConn([]byte(plainHead()+plainJSON), 0)}
	for range 99 {
		c.parts = append(c.parts, []byte(plainHead()+plainJSON))
	}
	both.reader.serve(c)
	require.Equal(t, 100, c.writes)
	require.Equal(t, 101, c.reads)
	require.LessOrEqual(t, c.readsSet, 10, "deadlines move once a second")
	require.LessOrEqual(t, c.writesSet, 10)
}

// The connection is closed, though its purchase goes on.
func TestCloseAllClosesPlainConns(t *testing.T) {
	t.Parallel()
	m := newMarket()
	w := m.serve(t, 0)
	defer close(m.goOn)
	c := w.dial()
	c.sends(plainHead("X-User-ID: held") + plainJSON)
	m.awaitEntered(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, w.listener.Drain(ctx), context.Canceled)
	w.listener.CloseAll()
	c.isClosed()
}

// flakyListener fails at first for want of files, and its next connection is none of TCP.
type flakyListener struct {
	net.Listener
	accepted atomic.Int64
	other    net.Conn
}

func (l *flakyListener) Accept() (net.Conn, error) {
	switch l.accepted.Add(1) {
	case 1:
		return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
	case 2:
		return l.other, nil
	}
	return l.Listener.Accept()
}

func TestPlainReaderOutlivesShortageOfFiles(t *testing.T) {
	t.Parallel()
	inner, err := Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	ours, theirs := net.Pipe()
	defer func() { _ = ours.Close() }()
	m := newMarket()
	w := m.serveOn(t, &flakyListener{Listener: inner, other: theirs}, 0)
	w.dial().buys()
	// A connection that is not TCP goes to net/http.
	c := &client{t, ours, bufio.NewReader(ours)}
	c.buys()
	require.EqualValues(t, 1, m.plain.Load())
}

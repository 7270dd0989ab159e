package ingress

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/accept"
	"stampede/reservation"
)

// countedListener accepts connections whose sockets count calls.
type countedListener struct {
	net.Listener
	accepted chan *socket
}

func (l countedListener) Accept() (net.Conn, error) {
	accepted, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	s := &socket{tcpConn: accepted.(*net.TCPConn)}
	l.accepted <- s
	return newConn(s), nil
}

// webServer is an http.Server with the timeouts of Server.Run, unless change sets others.
func webServer(
	t testing.TB, wrap func(net.Listener) net.Listener, h http.HandlerFunc, change ...func(*http.Server),
) (*http.Server, string) {
	t.Helper()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := &http.Server{
		Handler: h, ConnContext: withConn, ConnState: connState,
		ErrorLog:          log.New(io.Discard, "", 0), // tests panic on purpose
		ReadHeaderTimeout: readHeaderTimeout, ReadTimeout: readTimeout, WriteTimeout: writeTimeout, IdleTimeout: idleTimeout,
	}
	for _, c := range change {
		c(server)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(wrap(listener))
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-served
	})
	return server, listener.Addr().String()
}

func wrapped(l net.Listener) net.Listener { return connListener{accept.New(l, 0)} }

// caller is an HTTP client that writes the text of its requests.
type caller struct {
	t *testing.T
	net.Conn
	answers *bufio.Reader
}

func dialHTTP(t *testing.T, addr string) *caller {
	t.Helper()
	c, err := new(net.Dialer).DialContext(t.Context(), "tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(30*time.Second)))
	return &caller{t, c, bufio.NewReader(c)}
}

func (c *caller) sends(text string) {
	c.t.Helper()
	_, err := io.WriteString(c, text)
	require.NoError(c.t, err)
}

func (c *caller) receives(method string) (int, string) {
	c.t.Helper()
	answer, err := http.ReadResponse(c.answers, &http.Request{Method: method})
	require.NoError(c.t, err)
	body, err := io.ReadAll(answer.Body)
	require.NoError(c.t, err)
	require.NoError(c.t, answer.Body.Close())
	return answer.StatusCode, string(body)
}

func (c *caller) receivesEnd() {
	c.t.Helper()
	_, err := c.answers.ReadByte()
	require.ErrorIs(c.t, err, io.EOF)
}

func posted(path, body string, headers ...string) string {
	return fmt.Sprintf(
		"POST %s HTTP/1.1\r\nHost: shop\r\nContent-Length: %d\r\n%s\r\n%s", path, len(body), strings.Join(headers, ""), body,
	)
}

// connOf returns the connection of a request.
func connOf(r *http.Request) *httpConn { return r.Context().Value(connKey{}).(*httpConn) }

// echoed skips the background read and answers with the request's body.
func echoed(w http.ResponseWriter, r *http.Request) {
	skipBackgroundRead(r)
	body, err := io.ReadAll(r.Body)
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	_, _ = w.Write(body)
}

// willSkip is true until a background read was skipped.
func (c *httpConn) willSkip() bool {
	c.read.mu.Lock()
	defer c.read.mu.Unlock()
	return c.skipRead
}

// deadlinesSince bounds the deadlines set on the socket of a connection that began then: those of the first request,
// and again whenever one that was put off has passed, every two seconds.
func deadlinesSince(began time.Time) int64 { return 3 + 3*int64(time.Since(began)/readHeaderTimeout) }

// Each request costs one read.
func TestSkippedBackgroundReadsSetNoDeadlines(t *testing.T) {
	t.Parallel()
	accepted := make(chan *socket, 1)
	counted := func(l net.Listener) net.Listener { return countedListener{l, accepted} }
	_, addr := webServer(t, counted, func(w http.ResponseWriter, r *http.Request) {
		echoed(w, r)
		for limit := time.Now().Add(10 * time.Second); connOf(r).willSkip() && time.Now().Before(limit); {
			runtime.Gosched()
		}
	})
	c := dialHTTP(t, addr)
	const requests = 200
	began := time.Now()
	for n := range requests {
		body := fmt.Sprint("request ", n)
		c.sends(posted("/", body))
		status, answer := c.receives(http.MethodPost)
		require.Equal(t, http.StatusOK, status)
		require.Equal(t, body, answer)
	}
	due := deadlinesSince(began)
	s := <-accepted
	require.LessOrEqual(t, s.deadlines.Load(), due)
	require.LessOrEqual(t, s.reads.Load(), requests+due)
}

// A waiting purchase ends when its client leaves.
func TestPurchaseSkipsBackgroundReadUnlessItWaits(t *testing.T) {
	t.Parallel()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	accepted := make(chan *socket, 1)
	s, _, _ := runShop(t, func(c *Config) { c.Listener = countedListener{listener, accepted} })
	sale := s.sale(reservation.Terms{Stock: 1000})
	c := dialHTTP(t, s.server.listenAddr())
	const purchases = 50
	began := time.Now()
	for n := range purchases {
		buyer := fmt.Sprintf("X-User-ID: buyer-%d\r\n", n)
		c.sends(posted(ordersOf(sale), `{"quantity":1}`, "Content-Type: application/json\r\n", buyer))
		status, body := c.receives(http.MethodPost)
		require.Equal(t, http.StatusAccepted, status, body)
	}
	require.LessOrEqual(t, (<-accepted).deadlines.Load(), deadlinesSince(began))

	waits := "X-User-ID: waits\r\nPrefer: wait=30\r\n"
	c.sends(posted(ordersOf(sale), `{"quantity":1}`, "Content-Type: application/json\r\n", waits))
	s.awaitWaiting(1)
	require.NoError(t, c.Close())
	s.awaitWaiting(0)
}

func TestRunWrapsConnections(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	s.server.echo.GET("/conn", func(c echo.Context) error {
		return c.String(http.StatusOK, fmt.Sprintf("%T", c.Request().Context().Value(connKey{})))
	})
	require.Equal(t, "*ingress.httpConn", s.get("/conn").body)
}

// Earlier requests on the same connection skip their background reads.
func TestContextEndsWhenClientLeaves(t *testing.T) {
	t.Parallel()
	for _, body := range []string{"", "a body"} {
		entered, left := make(chan struct{}), make(chan bool, 1)
		_, addr := webServer(t, wrapped, func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/skipped":
				echoed(w, r)
			case "/too-late":
				for c := connOf(r); c.read.inProgress() == 0; {
					runtime.Gosched()
				}
				skipBackgroundRead(r)
			default:
				_, _ = io.Copy(io.Discard, r.Body)
				close(entered)
				select {
				case <-r.Context().Done():
					left <- true
				case <-time.After(10 * time.Second):
					left <- false
				}
			}
		})
		c := dialHTTP(t, addr)
		for range 3 {
			for _, request := range []string{posted("/skipped", "x"), posted("/skipped", ""), posted("/too-late", "")} {
				c.sends(request)
				status, _ := c.receives(http.MethodPost)
				require.Equal(t, http.StatusOK, status)
			}
		}
		c.sends(posted("/normal", body))
		<-entered
		require.NoError(t, c.Close())
		require.True(t, <-left, "with body %q", body)
	}
}

// Bytes that arrive during a request belong to the next one, wherever they are cut.
func TestConnServesPipelinedRequests(t *testing.T) {
	t.Parallel()
	entered, goOn := make(chan struct{}), make(chan struct{})
	_, addr := webServer(t, wrapped, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/held" {
			body := new(bytes.Buffer)
			skipBackgroundRead(r)
			_, _ = body.ReadFrom(r.Body)
			entered <- struct{}{}
			<-goOn
			_, _ = w.Write(body.Bytes())
			return
		}
		echoed(w, r)
	})
	c := dialHTTP(t, addr)
	next := posted("/", "second") + posted("/", "") + posted("/", "fourth")
	for cut := range len(next) {
		c.sends(posted("/held", "first"))
		<-entered
		c.sends(next[:cut])
		goOn <- struct{}{}
		c.sends(next[cut:])
		for _, want := range []string{"first", "second", "", "fourth"} {
			status, body := c.receives(http.MethodPost)
			require.Equal(t, http.StatusOK, status)
			require.Equal(t, want, body)
		}
	}
}

// Each request is answered, and its connection is kept or closed as HTTP asks.
func TestConnServesAllKindsOfRequests(t *testing.T) {
	t.Parallel()
	_, addr := webServer(t, wrapped, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/unread":
			skipBackgroundRead(r)
			_, _ = io.WriteString(w, "unread")
		case "/panic":
			skipBackgroundRead(r)
			_, _ = io.Copy(io.Discard, r.Body)
			panic("on purpose")
		default:
			echoed(w, r)
		}
	})
	large := strings.Repeat("x", 1<<20)
	for _, request := range []struct {
		name, method, text, answer string
		ends                       bool
	}{
		{name: "with a body", text: posted("/", "hello"), answer: "hello"},
		{name: "without a body", text: posted("/", "")},
		{name: "GET", method: http.MethodGet, text: "GET / HTTP/1.1\r\nHost: shop\r\n\r\n"},
		{name: "HEAD", method: http.MethodHead, text: "HEAD / HTTP/1.1\r\nHost: shop\r\n\r\n"},
		{
			name:   "chunked",
			text:   "POST / HTTP/1.1\r\nHost: shop\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
			answer: "hello",
		},
		{
			name: "chunked with a trailer",
			text: "POST / HTTP/1.1\r\nHost: shop\r\nTrailer: A\r\nTransfer-Encoding: chunked\r\n\r\n" +
				"5\r\nhello\r\n0\r\nA: b\r\n\r\n",
			answer: "hello",
		},
		{name: "HTTP/1.0", text: "POST / HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello", answer: "hello", ends: true},
		{
			name: "HTTP/1.0 that goes on", text: "POST / HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\nhello",
			answer: "hello",
		},
		{name: "the last one", text: posted("/", "hello", "Connection: close\r\n"), answer: "hello", ends: true},
		{name: "large", text: posted("/", large), answer: large},
		{name: "unread", text: posted("/unread", "hello"), answer: "unread"},
		{
			name:   "unread and chunked",
			text:   "POST /unread HTTP/1.1\r\nHost: shop\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
			answer: "unread",
		},
		{name: "unread and large", text: posted("/unread", large), answer: "unread", ends: true},
		{
			name: "unread, and it waits to be asked",
			text: "POST /unread HTTP/1.1\r\nHost: shop\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n", answer: "unread",
			ends: true,
		},
	} {
		t.Run(request.name, func(t *testing.T) {
			t.Parallel()
			method := request.method
			if method == "" {
				method = http.MethodPost
			}
			c := dialHTTP(t, addr)
			for range 3 {
				c.sends(request.text)
				status, body := c.receives(method)
				require.Equal(t, http.StatusOK, status)
				require.Equal(t, request.answer, body)
				if request.ends {
					_, err := c.answers.ReadByte()
					require.Error(t, err)
					return
				}
			}
		})
	}
	t.Run("waits to be asked", func(t *testing.T) {
		t.Parallel()
		c := dialHTTP(t, addr)
		for range 3 {
			c.sends("POST / HTTP/1.1\r\nHost: shop\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
			status, _ := c.receives(http.MethodPost)
			require.Equal(t, http.StatusContinue, status)
			c.sends("hello")
			_, body := c.receives(http.MethodPost)
			require.Equal(t, "hello", body)
		}
	})
	t.Run("panics", func(t *testing.T) {
		t.Parallel()
		c := dialHTTP(t, addr)
		c.sends(posted("/", "hello"))
		c.receives(http.MethodPost)
		c.sends(posted("/panic", "hello"))
		c.receivesEnd()
	})
}

// The timeouts are those of a connection that is not wrapped, also after requests whose deadlines never
// reached the socket.
func TestConnKeepsServerTimeouts(t *testing.T) {
	t.Parallel()
	const head, whole, written, idle = 500 * time.Millisecond, 2 * time.Second, 4 * time.Second, 7 * time.Second
	times := func(s *http.Server) {
		s.ReadHeaderTimeout, s.ReadTimeout, s.WriteTimeout, s.IdleTimeout = head, whole, written, idle
	}
	within := func(t *testing.T, began time.Time, least, less time.Duration) {
		t.Helper()
		took := time.Since(began)
		require.GreaterOrEqual(t, took, least)
		require.Less(t, took, less)
	}
	for name, wrap := range map[string]func(net.Listener) net.Listener{
		"with a conn": wrapped, "without": func(l net.Listener) net.Listener { return l },
	} {
		cutOff := make(chan time.Duration, 1)
		_, addr := webServer(t, wrap, func(w http.ResponseWriter, r *http.Request) {
			skipBackgroundRead(r)
			if _, err := io.ReadAll(r.Body); err != nil {
				w.WriteHeader(http.StatusBadRequest)
				return
			}
			if r.URL.Path == "/much" {
				began := time.Now()
				_, err := w.Write(muchMore())
				assert.Error(t, err)
				cutOff <- time.Since(began)
			}
		}, times)
		// The answers to earlier requests show that their deadlines are over.
		later := func(t *testing.T) *caller {
			t.Helper()
			c := dialHTTP(t, addr)
			for range 3 {
				c.sends(posted("/", "hello"))
				status, _ := c.receives(http.MethodPost)
				require.Equal(t, http.StatusOK, status)
			}
			return c
		}
		t.Run(name+"/first head", func(t *testing.T) {
			t.Parallel()
			c, began := dialHTTP(t, addr), time.Now()
			c.sends("GET / HT")
			_, err := io.ReadAll(c) // it may get an answer that this is not a request
			require.NoError(t, err)
			within(t, began, head-head/10, whole) // counts from the accept, which may be before began
		})
		t.Run(name+"/head", func(t *testing.T) {
			t.Parallel()
			c, began := later(t), time.Now()
			c.sends("GET / HTTP/1.1\r\nHost")
			_, err := io.ReadAll(c)
			require.NoError(t, err)
			within(t, began, head, whole)
		})
		t.Run(name+"/body", func(t *testing.T) {
			t.Parallel()
			c, began := later(t), time.Now()
			c.sends("POST / HTTP/1.1\r\nHost: shop\r\nContent-Length: 5\r\n\r\nhel")
			status, _ := c.receives(http.MethodPost)
			require.Equal(t, http.StatusBadRequest, status)
			within(t, began, whole, idle)
		})
		t.Run(name+"/idle", func(t *testing.T) {
			t.Parallel()
			c, began := later(t), time.Now()
			c.receivesEnd()
			within(t, began, idle-idle/10, 2*idle) // counts from the answer, which is before began
		})
		t.Run(name+"/answer that is not read", func(t *testing.T) {
			t.Parallel()
			c := later(t)
			c.sends(posted("/much", "hello"))
			select {
			case took := <-cutOff:
				require.GreaterOrEqual(t, took, written-written/10)
				require.Less(t, took, 2*written)
			case <-time.After(20 * time.Second):
				t.Fatal("the answer is not cut off")
			}
		})
	}
}

// Idle connections are closed though they are being read from; requests in progress are finished.
func TestShutdownClosesIdleConnections(t *testing.T) {
	t.Parallel()
	entered, goOn := make(chan struct{}), make(chan struct{})
	server, addr := webServer(t, wrapped, func(w http.ResponseWriter, r *http.Request) {
		echoed(w, r)
		if r.URL.Path == "/held" {
			close(entered)
			<-goOn
		}
	})
	idle, busy := dialHTTP(t, addr), dialHTTP(t, addr)
	for _, c := range []*caller{idle, busy} {
		c.sends(posted("/", "hello"))
		c.receives(http.MethodPost)
	}
	busy.sends(posted("/held", "hello"))
	<-entered
	down := make(chan error, 1)
	go func() { down <- server.Shutdown(t.Context()) }()
	idle.receivesEnd()
	require.Empty(t, down)
	close(goOn)
	_, body := busy.receives(http.MethodPost)
	require.Equal(t, "hello", body)
	busy.receivesEnd()
	require.NoError(t, <-down)
}

package accept

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/tracing"
)

// FuzzPlainReader sends the same bytes to net/http alone and to the reader in front of it. Both must read the same
// purchases and give the same answers, wherever the bytes are cut. A purchase that follows shows where the last
// request ends.
func FuzzPlainReader(f *testing.F) {
	for _, texts := range []map[string]string{plainRequests, otherRequests} {
		for _, text := range texts {
			f.Add([]byte(text), uint16(0))
			f.Add([]byte(text), uint16(len(text)/2))
		}
	}
	both := newBothReaders(f)
	f.Fuzz(func(t *testing.T, text []byte, cut uint16) {
		readsAsNetHTTP(t, text)
		both.agree(t, append(bytes.Clone(text), plainHead("X-User-ID: canary")+plainJSON...), int(cut))
	})
}

func TestPlainReaderAnswersAsNetHTTP(t *testing.T) {
	t.Parallel()
	both := newBothReaders(t)
	const canary = "X-User-ID: canary"
	for name, text := range plainRequests {
		t.Run(name, func(t *testing.T) {
			before := both.front.plain.Load()
			both.agree(t, []byte(text+plainHead(canary)+plainJSON), 0)
			require.Greater(t, both.front.plain.Load(), before)
			for cut := 1; cut < len(text) && cut < 400; cut += 7 {
				both.agree(t, []byte(text), cut)
			}
		})
	}
	for name, text := range otherRequests {
		t.Run(name, func(t *testing.T) {
			both.agree(t, []byte(text), 0)
			both.agree(t, []byte(text+plainHead(canary)+plainJSON), 0)
			both.agree(t, []byte(plainHead(canary)+plainJSON+text), 0)
			both.agree(t, []byte(plainHead(canary)+plainJSON+text), len(plainHead(canary)+plainJSON))
		})
	}
	for buyer := range answersTo {
		text := plainHead("X-User-ID: "+buyer) + plainJSON
		both.agree(t, []byte(text+text), 0)
	}
}

// market answers purchases by the name of the buyer, and records what it has read.
type market struct {
	mu        sync.Mutex
	purchases []string
	// plain counts the purchases that the plain reader has read.
	plain atomic.Int64
	// entered gets a value for each purchase of the buyer "held", who is answered after a value from goOn.
	entered, goOn chan struct{}
	isStopping    func() bool // nil is never
}

func newMarket() *market { return &market{entered: make(chan struct{}), goOn: make(chan struct{})} }

// answersTo are the answers that differ in their form.
var answersTo = map[string]func(w http.ResponseWriter){
	"refused":  func(w http.ResponseWriter) { w.WriteHeader(http.StatusConflict) },
	"overload": func(w http.ResponseWriter) { w.Header()["Retry-After"] = []string{"1"}; w.WriteHeader(503) },
	"closed":   func(w http.ResponseWriter) { w.Header()["Connection"] = []string{"close"} },
	"twice":    func(w http.ResponseWriter) { w.Header()["Vary"] = []string{"Origin", "Accept"} },
	"long":     func(w http.ResponseWriter) { _, _ = w.Write(bytes.Repeat([]byte("x"), 1500)) },
	"panics":   func(http.ResponseWriter) { panic("on purpose") },
	"aborts":   func(http.ResponseWriter) { panic(http.ErrAbortHandler) },
}

// buy answers a purchase. Whatever a handler may look at is in what it records.
func (m *market) buy(w http.ResponseWriter, r *http.Request, sale string) {
	h := w.Header()
	h["Content-Type"] = []string{"application/json"}
	if m.isStopping != nil && m.isStopping() {
		h["Connection"] = []string{"close"}
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, MaxBodyBytes+1))
	if err != nil || len(body) > MaxBodyBytes {
		h["Connection"] = []string{"close"}
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	trace := r.Header["Traceparent"]
	if len(trace) == 1 && !tracing.Sampled(trace[0]) {
		trace = nil // it has no meaning, so that the reader may leave it out
	}
	read := fmt.Sprint(r.Method, r.RequestURI, r.URL, r.Proto, r.RemoteAddr, sale, r.ContentLength, trace)
	for _, name := range []string{
		"X-User-Id", "Content-Type", "Content-Encoding", "X-Forwarded-For", "Idempotency-Key", "Origin", "Prefer",
	} {
		read += fmt.Sprintf(" %s %q", name, r.Header[name])
	}
	m.mu.Lock()
	m.purchases = append(m.purchases, read+string(body))
	m.mu.Unlock()
	buyer := r.Header.Get("X-User-Id")
	if buyer == "held" {
		m.entered <- struct{}{}
		<-m.goOn
	}
	if answer := answersTo[buyer]; answer != nil {
		answer(w)
	} else {
		h["Location"] = []string{"/v1/orders/1"}
		w.WriteHeader(http.StatusAccepted)
	}
	// net/http sends an answer of more than 2048 bytes in chunks.
	_, _ = fmt.Fprintf(w, "%d bytes: %.100q\n", len(body), body)
}

func (m *market) take() (purchases []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	purchases, m.purchases = m.purchases, nil
	return purchases
}

// server serves the market by net/http.
func (m *market) server() *http.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/sales/{sale}/orders", func(w http.ResponseWriter, r *http.Request) {
		m.buy(w, r, r.PathValue("sale"))
	})
	mux.HandleFunc("GET /livez", func(http.ResponseWriter, *http.Request) {})
	return NewServer(mux, slog.New(slog.DiscardHandler))
}

// plainly has the market serve plain purchases.
func (m *market) plainly() PlainConfig {
	return PlainConfig{
		Buyer: "X-User-ID", Traced: true, Logger: slog.New(slog.DiscardHandler),
		Handler: func(w http.ResponseWriter, r *http.Request) func(string) {
			return func(sale string) {
				m.plain.Add(1)
				m.buy(w, r, sale)
			}
		},
	}
}

// bothReaders are a market behind net/http alone, and one behind the plain reader.
type bothReaders struct {
	alone, front *market
	open         sync.WaitGroup // connections
	toAlone      pipeListener
	reader       *plainFront
}

func newBothReaders(t testing.TB) *bothReaders {
	t.Helper()
	b := &bothReaders{alone: newMarket(), front: newMarket()}
	b.toAlone = pipeListener{make(chan net.Conn), make(chan struct{})}
	b.reader = newPlainFront(t.Context(), b.toAlone.Addr(), b.front.plainly())
	for server, on := range map[*http.Server]net.Listener{b.alone.server(): b.toAlone, b.front.server(): b.reader} {
		var serving sync.WaitGroup
		serving.Go(func() { _ = server.Serve(on) })
		t.Cleanup(func() { _ = server.Close(); serving.Wait() })
	}
	t.Cleanup(b.open.Wait)
	return b
}

// agree fails unless both read and answer the text in the same way. The first read of a connection gets it up to the
// cut.
func (b *bothReaders) agree(t *testing.T, text []byte, cut int) {
	t.Helper()
	want := b.newScriptedConn(text, cut)
	b.toAlone.conns <- want
	want.await(t)
	got := b.newScriptedConn(text, cut)
	go b.reader.serve(got)
	got.await(t)
	require.Equal(t, b.alone.take(), b.front.take(), "purchases in %q, cut at %d", text, cut)
	require.Equal(t, answersIn(t, want.written()), answersIn(t, got.written()), "answers to %q, cut at %d", text, cut)
}

// answersIn reads answers until there are none.
func answersIn(t *testing.T, text []byte) (answers []string) {
	t.Helper()
	in := bufio.NewReader(bytes.NewReader(text))
	for {
		if _, err := in.Peek(1); err != nil {
			return answers
		}
		res, err := http.ReadResponse(in, nil)
		require.NoError(t, err, "%q", text)
		body, err := io.ReadAll(res.Body)
		require.NoError(t, err, "%q", text)
		if date := res.Header["Date"]; date != nil {
			require.Len(t, date, 1)
			at, err := time.Parse(http.TimeFormat, date[0])
			require.NoError(t, err)
			require.WithinDuration(t, time.Now(), at, time.Minute)
			res.Header["Date"] = []string{"a date"}
		}
		answers = append(answers, fmt.Sprintf("%s %v %v %v %q",
			res.Status, res.Header, res.ContentLength, res.TransferEncoding, body))
	}
}

// scriptedConn is a connection whose client sends some bytes in two parts and then nothing. It is at its end for a
// server that waits for more of a request, and silent for one that watches whether its client leaves.
type scriptedConn struct {
	mu     sync.Mutex
	parts  [][]byte
	out    []byte
	closed bool
	by     time.Time
	moved  *sync.Cond
	over   chan struct{}
	end    func()
	done   func()
}

func (b *bothReaders) newScriptedConn(text []byte, cut int) *scriptedConn {
	b.open.Add(1)
	c := &scriptedConn{over: make(chan struct{}), done: sync.OnceFunc(b.open.Done)}
	c.moved = sync.NewCond(&c.mu)
	c.end = sync.OnceFunc(func() { close(c.over) })
	if cut %= len(text) + 1; cut > 0 {
		c.parts = append(c.parts, text[:cut])
	}
	c.parts = append(c.parts, text[cut:])
	return c
}

func (c *scriptedConn) Read(p []byte) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.closed:
			return 0, net.ErrClosed
		case !c.by.IsZero() && !c.by.After(time.Now()):
			return 0, os.ErrDeadlineExceeded
		case len(c.parts) > 0 && len(c.parts[0]) == 0:
			c.parts = c.parts[1:]
		case len(c.parts) > 0:
			n = copy(p, c.parts[0])
			c.parts[0] = c.parts[0][n:]
			return n, nil
		case len(p) > 1:
			return 0, io.EOF
		default: // the background read of net/http, which ends it by a deadline
			c.moved.Wait()
		}
	}
}

func (c *scriptedConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0, net.ErrClosed
	}
	c.out = append(c.out, p...)
	return len(p), nil
}

func (c *scriptedConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.moved.Broadcast()
	c.end()
	c.done()
	return nil
}

// CloseWrite is called by net/http half a second before it closes.
func (c *scriptedConn) CloseWrite() error {
	c.end()
	return nil
}

func (c *scriptedConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.by = t
	c.moved.Broadcast()
	return nil
}

func (c *scriptedConn) SetDeadline(t time.Time) error    { return c.SetReadDeadline(t) }
func (c *scriptedConn) SetWriteDeadline(time.Time) error { return nil }
func (c *scriptedConn) Changed(http.ConnState)           {}
func (c *scriptedConn) Arrived() (time.Time, bool)       { return time.Time{}, false }
func (c *scriptedConn) HasLeft() bool                    { return false }
func (c *scriptedConn) LocalAddr() net.Addr              { return pipeListener{}.Addr() }
func (c *scriptedConn) RemoteAddr() net.Addr             { return pipeListener{}.Addr() }

func (c *scriptedConn) await(t *testing.T) {
	t.Helper()
	select {
	case <-c.over:
	case <-time.After(20 * time.Second):
		t.Fatal("the connection is not closed")
	}
}

func (c *scriptedConn) written() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out
}

// pipeListener accepts the connections that it is given.
type pipeListener struct {
	conns  chan net.Conn
	closed chan struct{}
}

func (l pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l pipeListener) Close() error { close(l.closed); return nil }

func (pipeListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 4000} }

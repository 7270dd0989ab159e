package ingress

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/internal/accept"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// FuzzPlainReader sends the same bytes to net/http alone and to the reader in front of it. Both must make the same
// purchases and give the same answers, wherever the bytes are cut. A purchase that follows shows where the last
// request ends.
func FuzzPlainReader(f *testing.F) {
	for _, texts := range []map[string]string{plainRequests, otherRequests} {
		for _, text := range texts {
			f.Add([]byte(text), uint16(0))
			f.Add([]byte(text), uint16(len(text)/2))
		}
	}
	both := newBothServers(f, "https://shop.example")
	f.Fuzz(func(t *testing.T, text []byte, cut uint16) {
		for _, special := range []string{"metrics", "events"} {
			if bytes.Contains(text, []byte(special)) {
				t.Skip("NOT COMPARED: the answer is never the same, or never ends")
			}
		}
		readsAsNetHTTP(t, text)
		both.agree(t, append(bytes.Clone(text), plainHead("X-User-ID: canary")+plainJSON...), int(cut))
	})
}

func TestPlainReaderAnswersAsNetHTTP(t *testing.T) {
	t.Parallel()
	t.Run("without CORS", func(t *testing.T) { comparesReaders(t) })
	t.Run("some origins", func(t *testing.T) { comparesReaders(t, "https://shop", "https://shop.example") })
	t.Run("any origin", func(t *testing.T) { comparesReaders(t, "*") })
}

func comparesReaders(t *testing.T, origins ...string) {
	t.Parallel()
	both := newBothServers(t, origins...)
	const canary = "X-User-ID: canary"
	for name, text := range plainRequests {
		t.Run(name, func(t *testing.T) {
			before := testutil.ToFloat64(both.reader.metrics.plainPurchases)
			both.agree(t, []byte(text+plainHead(canary)+plainJSON), 0)
			require.Greater(t, testutil.ToFloat64(both.reader.metrics.plainPurchases), before)
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
	for _, buyer := range []string{"bob", "cid", "dan", "eve", "fay", "gus"} { // see decidedByName
		for _, key := range []string{"-Idempotency-Key", "Idempotency-Key: k"} {
			text := plainHead("X-User-ID: "+buyer, key) + plainJSON
			both.agree(t, []byte(text+text), 0)
		}
	}
}

func TestStoppingReaderAnswersAsNetHTTP(t *testing.T) {
	t.Parallel()
	both := newBothServers(t)
	both.reader.stopping.Store(true)
	both.plain.stopping.Store(true)
	both.agree(t, []byte(plainHead()+plainJSON+plainHead()+plainJSON), 0)
	require.EqualValues(t, 1, testutil.ToFloat64(both.reader.metrics.plainPurchases), "the connection is closed")
}

// bothServers are a server without the reader, and one with it. Neither has Redis or Postgres.
type bothServers struct {
	plain, reader         *Server
	decisions, withReader *decidedByName
	open                  sync.WaitGroup // connections
	toPlain               pipeListener
	front                 *PlainFront
}

func newBothServers(t testing.TB, origins ...string) *bothServers {
	t.Helper()
	b := &bothServers{decisions: &decidedByName{}, withReader: &decidedByName{}}
	b.plain, b.reader = newStubServer(t, b.decisions, origins), newStubServer(t, b.withReader, origins)
	b.toPlain = pipeListener{make(chan net.Conn), make(chan struct{})}
	b.front = b.reader.newPlainFront(t.Context(), b.toPlain.Addr())
	serveStub(t, b.plain, b.toPlain)
	serveStub(t, b.reader, b.front)
	t.Cleanup(b.open.Wait)
	return b
}

func newStubServer(t testing.TB, decisions *decidedByName, origins []string) *Server {
	t.Helper()
	s, err := New(Config{
		Reservations: decisions, Sales: noSales{}, Orders: noOrders{}, Postgres: noOrders{}, Auth: AuthHeader,
		ReceiptSecret: "a secret that is the same for both", Logger: slog.New(slog.DiscardHandler), CORSOrigins: origins,
	})
	require.NoError(t, err)
	t.Cleanup(s.Close)
	s.endWaits() // no purchase waits
	return s
}

func serveStub(t testing.TB, s *Server, on net.Listener) {
	t.Helper()
	server := &http.Server{
		Handler: s.echo, ConnState: accept.ConnState, ErrorLog: log.New(io.Discard, "", 0), MaxHeaderBytes: maxHeaderBytes,
		ReadHeaderTimeout: readHeaderTimeout, ReadTimeout: readTimeout, WriteTimeout: writeTimeout, IdleTimeout: idleTimeout,
	}
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(on) })
	t.Cleanup(func() { _ = server.Close(); serving.Wait() })
}

// agree fails unless both servers handle the text in the same way. The first read of a connection gets it up to the
// cut.
func (b *bothServers) agree(t *testing.T, text []byte, cut int) {
	t.Helper()
	want := b.newScriptedConn(text, cut)
	b.toPlain.conns <- want
	want.await(t)
	got := b.newScriptedConn(text, cut)
	go b.front.serve(got)
	got.await(t)
	require.Equal(t, b.decisions.take(), b.withReader.take(), "decisions for %q, cut at %d", text, cut)
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

func (b *bothServers) newScriptedConn(text []byte, cut int) *scriptedConn {
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

var errStub = errors.New("there is no such server")

// decidedByName decides purchases by the name of the buyer, always in the same way, and records them.
type decidedByName struct {
	mu   sync.Mutex
	made []reservation.Request
}

func (d *decidedByName) Reserve(_ context.Context, r reservation.Request) (reservation.Answer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r.Arrived, r.Client = time.Time{}, nil // they differ
	d.made = append(d.made, r)
	id := uuid.NewSHA1(r.Sale, fmt.Append(nil, r.User, " ", r.IdempotencyKey, " ", r.Quantity))
	answer := reservation.Answer{Verdict: reservation.Reserved, Reservation: order.Reservation{
		OrderID: id, Quantity: r.Quantity, Epoch: 1, Sequence: 7, ReservedAt: time.UnixMilli(1_700_000_000_123),
	}}
	switch r.User {
	case "bob":
		answer.Verdict = reservation.SoldOut
	case "cid":
		answer.Verdict = reservation.AlreadyPurchased
	case "dan":
		answer.Verdict = reservation.Paused
	case "eve":
		answer.Verdict = reservation.Replayed
	case "fay":
		return reservation.Answer{}, reservation.ErrOutcomeUnknown
	case "gus":
		answer.Verdict, answer.Status = reservation.OrderEnded, order.StatusCancelled
	}
	return answer, nil
}

func (d *decidedByName) FindReserved(context.Context, uuid.UUID, string) (order.Order, error) {
	return order.Order{}, errStub
}

func (*decidedByName) Writable(context.Context) error { return nil }

func (d *decidedByName) take() []reservation.Request {
	d.mu.Lock()
	defer d.mu.Unlock()
	made := d.made
	d.made = nil
	return made
}

// noOrders is a Postgres without orders.
type noOrders struct{}

func (noOrders) Ping(context.Context) error { return nil }
func (noOrders) Order(context.Context, uuid.UUID) (order.Order, error) {
	return order.Order{}, order.ErrNotFound
}
func (noOrders) FindOrders(context.Context, []uuid.UUID) ([]order.Order, error) { return nil, nil }
func (noOrders) FindByReceipt(context.Context, order.Receipt) (order.Order, error) {
	return order.Order{}, errStub
}

func (noOrders) PastAnswer(context.Context, reservation.Request) (reservation.Answer, error) {
	return reservation.Answer{Verdict: reservation.Ended}, nil
}
func (noOrders) ReceiptSecret(context.Context) ([]byte, error) { return nil, errStub }

func (noOrders) ListOrders(
	context.Context, order.Filter, uuid.UUID, int,
) ([]order.Placed, uuid.UUID, error) {
	return nil, uuid.Nil, errStub
}

func (noOrders) History(context.Context, uuid.UUID) (order.Placed, []order.Logged, error) {
	return order.Placed{}, nil, errStub
}

func (noOrders) Withdraw(context.Context, uuid.UUID, string, string) (order.Placed, error) {
	return order.Placed{}, errStub
}

func (noOrders) Pay(context.Context, uuid.UUID, string, string) (order.Order, error) {
	return order.Order{}, errStub
}

func (noOrders) Cancel(context.Context, uuid.UUID, string) (order.Order, error) {
	return order.Order{}, errStub
}

// noSales is a catalog that cannot be read.
type noSales struct{}

func (noSales) CreateOnce(context.Context, reservation.Terms, string) (catalog.CountedSale, bool, error) {
	return catalog.CountedSale{}, false, errStub
}

func (noSales) Newest(context.Context, int) ([]uuid.UUID, error) { return nil, nil }

func (noSales) CountPage(context.Context, uuid.UUID, int) ([]catalog.CountResult, error) {
	return nil, errStub
}

func (noSales) CountSales(context.Context, []uuid.UUID) ([]catalog.CountResult, error) {
	return nil, errStub
}

func (noSales) Pause(context.Context, uuid.UUID) (catalog.CountedSale, error) {
	return catalog.CountedSale{}, errStub
}

func (noSales) Resume(context.Context, uuid.UUID) (catalog.CountedSale, error) {
	return catalog.CountedSale{}, errStub
}

func (noSales) End(context.Context, uuid.UUID) (catalog.CountedSale, error) {
	return catalog.CountedSale{}, errStub
}

func (noSales) Restock(context.Context, uuid.UUID, int64, string) (catalog.CountedSale, error) {
	return catalog.CountedSale{}, errStub
}

func (noSales) History(context.Context, uuid.UUID, int) ([]catalog.Change, error) {
	return nil, reservation.ErrUnavailable
}

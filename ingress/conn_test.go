package ingress

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
)

// socket counts the calls on a real socket.
type socket struct {
	tcpConn
	reads, deadlines atomic.Int64
}

func (s *socket) Read(p []byte) (int, error) {
	s.reads.Add(1)
	return s.tcpConn.Read(p)
}

func (s *socket) SetReadDeadline(t time.Time) error {
	s.deadlines.Add(1)
	return s.tcpConn.SetReadDeadline(t)
}

func (s *socket) SetWriteDeadline(t time.Time) error {
	s.deadlines.Add(1)
	return s.tcpConn.SetWriteDeadline(t)
}

// connected returns a connection, its socket, and its peer.
func connected(t *testing.T) (*httpConn, *socket, net.Conn) {
	t.Helper()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = listener.Close() }()
	peer, err := new(net.Dialer).DialContext(t.Context(), "tcp", listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = peer.Close() })
	accepted, err := listener.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = accepted.Close() })
	s := &socket{tcpConn: accepted.(*net.TCPConn)}
	return newConn(s), s, peer
}

// inProgress returns the number of calls in the socket.
func (d *deadline) inProgress() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.calls
}

// transfer is the result of a Read or a Write.
type transfer struct {
	n    int
	err  error
	data []byte
	took time.Duration
}

// startCall starts a call and returns when it is in the socket.
func (d *deadline) startCall(t *testing.T, p []byte, call func([]byte) (int, error)) <-chan transfer {
	t.Helper()
	done := make(chan transfer, 1)
	go func() {
		began := time.Now()
		n, err := call(p)
		done <- transfer{n, err, p[:n], time.Since(began)}
	}()
	testkit.Eventually(t, 10*time.Second, "a call is in the socket", func() bool { return d.inProgress() == 1 })
	return done
}

func awaitTransfer(t *testing.T, done <-chan transfer) transfer {
	t.Helper()
	select {
	case x := <-done:
		return x
	case <-time.After(10 * time.Second):
		t.Fatal("the call does not end")
		return transfer{}
	}
}

func isTimeout(t *testing.T, err error) {
	t.Helper()
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	timeout, ok := err.(net.Error) //nolint:errorlint // so does net/http
	require.True(t, ok && timeout.Timeout(), "%T", err)
}

// The length of a deadline that a test waits for, and of one that it does not.
const (
	shortly = 500 * time.Millisecond
	far     = time.Hour
)

func TestReadGoesOnAfterExtendedDeadline(t *testing.T) {
	t.Parallel()
	for what, until := range map[string]time.Time{"to later": time.Now().Add(far), "to none": {}} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			c, s, peer := connected(t)
			read := c.read.startCall(t, make([]byte, 8), c.Read)
			require.NoError(t, c.SetReadDeadline(time.Now().Add(shortly)))
			require.NoError(t, c.SetReadDeadline(until))
			require.EqualValues(t, 1, s.deadlines.Load())
			testkit.Eventually(t, 10*time.Second, "the socket has a later deadline", func() bool {
				return s.deadlines.Load() == 2
			})
			require.Empty(t, read)
			_, err := peer.Write([]byte("hello"))
			require.NoError(t, err)
			x := awaitTransfer(t, read)
			require.NoError(t, x.err)
			require.Equal(t, "hello", string(x.data))
			require.GreaterOrEqual(t, x.took, shortly)
		})
	}
}

func TestEarlierDeadlineEndsRead(t *testing.T) {
	t.Parallel()
	for what, before := range map[string]time.Time{"than a later one": time.Now().Add(far), "than none": {}} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			c, _, _ := connected(t)
			require.NoError(t, c.SetReadDeadline(before))
			read := c.read.startCall(t, make([]byte, 8), c.Read)
			began := time.Now()
			require.NoError(t, c.SetReadDeadline(began.Add(shortly)))
			isTimeout(t, awaitTransfer(t, read).err)
			require.GreaterOrEqual(t, time.Since(began), shortly)

			require.NoError(t, c.SetReadDeadline(before))
			read = c.read.startCall(t, make([]byte, 1), c.Read)
			require.NoError(t, c.SetReadDeadline(time.Unix(1, 0))) // as net/http does to end a background read
			isTimeout(t, awaitTransfer(t, read).err)
		})
	}
}

// The next call fails without touching the socket.
func TestPassedDeadlineNeedsNoSocket(t *testing.T) {
	t.Parallel()
	c, s, peer := connected(t)
	_, err := peer.Write([]byte("hello"))
	require.NoError(t, err)
	require.NoError(t, c.SetDeadline(time.Unix(1, 0)))
	p := make([]byte, 5)
	for range 2 {
		_, err = c.Read(p)
		isTimeout(t, err)
		_, err = c.Write(p)
		isTimeout(t, err)
	}
	require.Zero(t, s.reads.Load())
	require.Zero(t, s.deadlines.Load())

	require.NoError(t, c.SetDeadline(time.Time{}))
	_, err = io.ReadFull(c, p)
	require.NoError(t, err)
	require.Equal(t, "hello", string(p))
	_, err = c.Write(p)
	require.NoError(t, err)
	require.Zero(t, s.deadlines.Load())
	_, err = io.ReadFull(peer, p)
	require.NoError(t, err)
	require.Equal(t, "hello", string(p))
}

// muchMore returns more than Linux buffers for a socket that is not read from, without repetition.
func muchMore() []byte {
	p := make([]byte, 24<<20)
	rand.NewChaCha8([32]byte{1}).Read(p)
	return p
}

func TestWriteGoesOnAfterExtendedDeadline(t *testing.T) {
	t.Parallel()
	c, s, peer := connected(t)
	all := muchMore()
	written := c.write.startCall(t, all, c.Write)
	require.NoError(t, c.SetWriteDeadline(time.Now().Add(shortly)))
	require.NoError(t, c.SetWriteDeadline(time.Now().Add(far)))
	testkit.Eventually(t, 10*time.Second, "the socket has a later deadline", func() bool {
		return s.deadlines.Load() == 2
	})
	require.Empty(t, written)
	received := make([]byte, len(all))
	_, err := io.ReadFull(peer, received)
	require.NoError(t, err)
	require.True(t, bytes.Equal(all, received))
	x := awaitTransfer(t, written)
	require.NoError(t, x.err)
	require.Equal(t, len(all), x.n)
}

func TestWriteFailsAfterDeadline(t *testing.T) {
	t.Parallel()
	for _, before := range []time.Time{{}, time.Now().Add(far)} {
		c, _, peer := connected(t)
		require.NoError(t, c.SetWriteDeadline(before))
		all := muchMore()
		written := c.write.startCall(t, all, c.Write)
		began := time.Now()
		require.NoError(t, c.SetWriteDeadline(began.Add(shortly)))
		x := awaitTransfer(t, written)
		isTimeout(t, x.err)
		require.GreaterOrEqual(t, time.Since(began), shortly)
		require.Less(t, x.n, len(all))
		require.NoError(t, c.CloseWrite())
		received, err := io.ReadAll(peer)
		require.NoError(t, err)
		require.True(t, bytes.Equal(x.data, received), "%d bytes were reported written, %d arrived", x.n, len(received))
	}
}

func TestCallsOnClosedConnFail(t *testing.T) {
	t.Parallel()
	c, _, _ := connected(t)
	read := c.read.startCall(t, make([]byte, 8), c.Read)
	require.NoError(t, c.Close())
	require.ErrorIs(t, awaitTransfer(t, read).err, net.ErrClosed)
	for _, until := range []time.Time{{}, time.Now().Add(far)} {
		_ = c.SetDeadline(until)
		_, err := c.Read(make([]byte, 8))
		require.ErrorIs(t, err, net.ErrClosed)
		_, err = c.Write(make([]byte, 8))
		require.ErrorIs(t, err, net.ErrClosed)
	}
}

// Run it with the race detector.
func TestConcurrentDeadlinesAreKept(t *testing.T) {
	t.Parallel()
	c, _, peer := connected(t)
	for range 200 {
		read := c.read.startCall(t, make([]byte, 8), c.Read)
		var setters sync.WaitGroup
		for range 4 {
			setters.Go(func() {
				for range 5 {
					assert.NoError(t, c.SetReadDeadline(time.Now().Add(far+rand.N(far))))
				}
			})
		}
		setters.Wait()
		c.read.mu.Lock()
		require.False(t, isEarlier(c.read.wanted, c.read.applied), "the socket would outlive it")
		c.read.mu.Unlock()
		if rand.N(2) == 0 {
			_, err := peer.Write([]byte("x"))
			require.NoError(t, err)
			require.Equal(t, "x", string(awaitTransfer(t, read).data))
		} else {
			require.NoError(t, c.SetReadDeadline(time.Now().Add(-time.Second)))
			isTimeout(t, awaitTransfer(t, read).err)
		}
		require.NoError(t, c.SetReadDeadline(time.Time{}))
	}
}

// A background read is the first read of one byte without a deadline.
func TestOnlyBackgroundReadIsSkipped(t *testing.T) {
	t.Parallel()
	c, s, peer := connected(t)
	request, err := http.NewRequestWithContext(withConn(t.Context(), c), http.MethodPost, "/", nil)
	require.NoError(t, err)
	reads := func(p []byte, want string) {
		t.Helper()
		before := s.reads.Load()
		n, err := c.Read(p)
		require.NoError(t, err)
		require.Equal(t, want, string(p[:n]))
		require.Equal(t, int64(len(want)), s.reads.Load()-before, "each byte takes one read of the socket")
	}
	one, two := make([]byte, 1), make([]byte, 2)
	says := func(text string) {
		t.Helper()
		_, err := peer.Write([]byte(text))
		require.NoError(t, err)
	}

	require.NoError(t, c.SetReadDeadline(time.Now().Add(far)))
	skipBackgroundRead(request)
	says("a")
	reads(one, "a") // from a body
	require.NoError(t, c.SetReadDeadline(time.Time{}))
	says("b")
	reads(two, "b")
	says("c")
	reads(one, "")
	reads(one, "c")

	skipBackgroundRead(request)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(far))) // the request is over
	require.NoError(t, c.SetReadDeadline(time.Time{}))
	says("d")
	reads(one, "d")

	// Without an httpConn the call does nothing.
	skipBackgroundRead(request.WithContext(t.Context()))
	skipBackgroundRead(request.WithContext(withConn(t.Context(), peer)))
}

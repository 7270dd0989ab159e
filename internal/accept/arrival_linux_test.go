package accept

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// arrivalsNoted returns when the kernel notes arrivals: it begins a moment after the first socket wants that. The
// listener, which is never closed, keeps it from ending.
var arrivalsNoted = sync.OnceValues(func() (keep net.Listener, err error) {
	inner, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // it stays until the process ends
	if err != nil {
		return nil, err
	}
	l := New(inner, 0)
	for until := time.Now().Add(30 * time.Second); time.Now().Before(until); {
		if noted, err := arrivalNoted(l); noted || err != nil {
			return l, err
		}
	}
	return l, errors.New("the kernel does not note when bytes arrive")
})

func arrivalNoted(l net.Listener) (bool, error) {
	client, err := net.Dial("tcp", l.Addr().String()) //nolint:noctx // it ends here
	if err != nil {
		return false, err
	}
	defer func() { _ = client.Close() }()
	conn, err := l.Accept()
	if err != nil {
		return false, err
	}
	defer func() { _ = conn.Close() }()
	if _, err := io.WriteString(client, "x"); err != nil {
		return false, err
	}
	_, err = conn.Read(make([]byte, 1))
	at, _ := conn.(Conn).Arrived()
	return !at.IsZero(), err
}

// listen returns a listener whose connections know when bytes arrive.
func listen(t *testing.T) *Listener {
	t.Helper()
	_, err := arrivalsNoted()
	require.NoError(t, err)
	inner, err := Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	l := New(inner, 0)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// accepted is a connection with both of its ends.
func accepted(t *testing.T) (server *acceptedConn, client net.Conn) {
	t.Helper()
	l := listen(t)
	client, err := net.Dial("tcp", l.Addr().String()) //nolint:noctx // it ends with the test
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	conn, err := l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn.(*acceptedConn), client
}

func read(t *testing.T, c *acceptedConn, want string) {
	t.Helper()
	buf := make([]byte, 100)
	n, err := c.Read(buf)
	require.NoError(t, err)
	require.Equal(t, want, string(buf[:n]))
}

// Bytes that wait for the connection to be accepted, or to be read, have the time at which they arrived.
func TestArrivedIsTimeInKernel(t *testing.T) {
	t.Parallel()
	l := listen(t)
	client, err := net.Dial("tcp", l.Addr().String()) //nolint:noctx // it ends with the test
	require.NoError(t, err)
	defer func() { _ = client.Close() }()

	const inaccuracy = 10 * time.Millisecond // of the clock of the kernel
	sent := time.Now()
	_, err = io.WriteString(client, "first")
	require.NoError(t, err)
	<-time.After(300 * time.Millisecond) // nothing else shows that bytes wait
	accepted := time.Now()
	conn, err := l.Accept()
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	c := conn.(*acceptedConn)
	at, left := c.Arrived()
	require.Zero(t, at, "nothing was read")
	require.False(t, left)
	read(t, c, "first")
	at, _ = c.Arrived()
	require.WithinRange(t, at, sent.Add(-inaccuracy), accepted)

	again := time.Now()
	_, err = io.WriteString(client, "second")
	require.NoError(t, err)
	read(t, c, "second")
	at, _ = c.Arrived()
	require.GreaterOrEqual(t, at.Sub(again), -inaccuracy)

	raw, err := c.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 0)
	}))
	require.NoError(t, err)
	_, err = io.WriteString(client, "third")
	require.NoError(t, err)
	read(t, c, "third")
	at, left = c.Arrived()
	require.Zero(t, at, "not the time of what was read before")
	require.False(t, left)
}

// A read tells that the client has left, and does not take the time at which it left for that of its bytes.
func TestReadTellsThatClientHasLeft(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(c *net.TCPConn) error{
		"closes":      (*net.TCPConn).Close,
		"half-closes": (*net.TCPConn).CloseWrite,
		"resets":      func(c *net.TCPConn) error { return errors.Join(c.SetLinger(0), c.Close()) },
		"stays":       func(*net.TCPConn) error { return nil },
		"sends more":  func(c *net.TCPConn) error { _, err := io.WriteString(c, "more"); return err },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, client := accepted(t)
			_, err := io.WriteString(client, "request")
			require.NoError(t, err)
			sent := time.Now()
			<-time.After(300 * time.Millisecond) // the age of the request
			require.NoError(t, leave(client.(*net.TCPConn)))
			// The buffer has no room for anything behind the request.
			_, err = io.ReadFull(c, make([]byte, len("request")))
			require.NoError(t, err)
			at, left := c.Arrived()
			if name == "sends more" {
				require.False(t, left)
				return // later bytes of a client that is still there
			}
			const jiffy = 10 * time.Millisecond
			require.WithinRange(t, at, sent.Add(-time.Second), sent.Add(jiffy))
			// After a reset the bytes can be read, and the read does not tell more; the kernel does.
			require.Equal(t, name == "closes" || name == "half-closes", left)
			require.Equal(t, name != "stays", c.HasLeft())
		})
	}
}

// A client that leaves after the last read is found by asking.
func TestHasLeftAsksTheKernel(t *testing.T) {
	t.Parallel()
	c, client := accepted(t)
	_, err := io.WriteString(client, "request")
	require.NoError(t, err)
	read(t, c, "request")
	require.False(t, c.HasLeft())
	require.NoError(t, client.Close())
	require.True(t, c.HasLeft())
	_, left := c.Arrived()
	require.True(t, left, "it does not come back")

	c, _ = accepted(t)
	require.NoError(t, c.Close())
	require.True(t, c.HasLeft(), "the connection was closed by the server")
}

// Reads end as those of a net.TCPConn, for which http.Server is written.
func TestReadEndsAsOfTCPConn(t *testing.T) {
	t.Parallel()
	c, client := accepted(t)
	n, err := c.Read(nil)
	require.NoError(t, err)
	require.Zero(t, n)

	require.NoError(t, c.SetReadDeadline(time.Now().Add(-time.Second)))
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	var failed *net.OpError
	require.ErrorAs(t, err, &failed)
	require.Equal(t, "read", failed.Op)
	require.True(t, failed.Timeout())
	require.NoError(t, c.SetReadDeadline(time.Time{}))

	require.NoError(t, client.Close())
	_, err = c.Read(make([]byte, 1))
	require.Equal(t, io.EOF, err)
	require.NoError(t, c.Close())
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, net.ErrClosed)

	c, client = accepted(t)
	require.NoError(t, client.(*net.TCPConn).SetLinger(0))
	require.NoError(t, client.Close())
	_, err = c.Read(make([]byte, 1))
	require.ErrorAs(t, err, &failed)
	require.Equal(t, "read", failed.Op)
	require.ErrorContains(t, err, "connection reset by peer")
}

func TestReadAllocatesNothing(t *testing.T) {
	c, client := accepted(t)
	buf, sent := make([]byte, 100), []byte("bytes")
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if _, err := client.Write(sent); err != nil {
			t.Error(err)
		}
		if _, err := c.Read(buf); err != nil {
			t.Error(err)
		}
	}))
}

func BenchmarkRead(b *testing.B) {
	inner, err := Listen(b.Context(), "127.0.0.1:0")
	require.NoError(b, err)
	l := New(inner, 0)
	defer func() { _ = l.Close() }()
	client, err := net.Dial("tcp", l.Addr().String()) //nolint:noctx // it ends with the benchmark
	require.NoError(b, err)
	defer func() { _ = client.Close() }()
	conn, err := l.Accept()
	require.NoError(b, err)
	defer func() { _ = conn.Close() }()
	buf, sent := make([]byte, 1000), make([]byte, 400)
	for name, read := range map[string]func([]byte) (int, error){
		"arrivals": conn.Read, "plain": conn.(*acceptedConn).TCPConn.Read,
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				_, _ = client.Write(sent)
				_, _ = read(buf)
			}
		})
	}
}

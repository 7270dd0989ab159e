package fulfillment_test

import (
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// cutOff is a proxy between clients and Postgres. After a certain statement it forwards nothing more of that
// connection and keeps both sides open: for Postgres the client has vanished in the middle of a batch, although its
// kernel still answers keepalives.
type cutOff struct {
	after    string
	happened chan struct{} // closed when a connection was cut off
	once     sync.Once
}

// cutOffAfter returns a URL of the test's database. The connection that first executes a statement with this text
// is cut off.
func cutOffAfter(t testing.TB, statement string) (databaseURL string, happened <-chan struct{}) {
	t.Helper()
	u, err := url.Parse(testkit.DatabaseURL(t))
	require.NoError(t, err)
	c := &cutOff{after: statement, happened: make(chan struct{})}
	u.Host = testkit.Proxy(t, u.Host, func(client, server net.Conn) {
		var requests sync.WaitGroup
		requests.Go(func() {
			if !c.forward(server, client) {
				_ = server.Close()
			}
		})
		_, _ = io.Copy(client, server)
		_ = client.Close()
		requests.Wait()
	})
	return u.String(), c.happened
}

// forward forwards the messages of a client. It returns true if the connection was cut off.
func (c *cutOff) forward(server io.Writer, client io.Reader) bool {
	const sslRequest = 80877103
	for plain := false; !plain; { // the first messages have no type
		body, err := forwardMessage(server, client, nil)
		if err != nil {
			return false
		}
		plain = binary.BigEndian.Uint32(body) != sslRequest
	}
	awaited := map[string]bool{} // statements with the text
	bound := false
	for {
		kind := make([]byte, 1)
		if _, err := io.ReadFull(client, kind); err != nil {
			return false
		}
		body, err := forwardMessage(server, client, kind)
		if err != nil {
			return false
		}
		switch words := strings.SplitN(string(body), "\x00", 3); kind[0] {
		case 'P':
			awaited[words[0]] = strings.Contains(words[1], c.after)
		case 'B':
			bound = awaited[words[1]]
		case 'E':
			cut := false
			if bound {
				c.once.Do(func() { cut = true })
			}
			if cut {
				close(c.happened)
				return true
			}
		}
	}
}

// forwardMessage forwards one message, and returns its body.
func forwardMessage(server io.Writer, client io.Reader, kind []byte) ([]byte, error) {
	length := make([]byte, 4)
	if _, err := io.ReadFull(client, length); err != nil {
		return nil, err
	}
	body := make([]byte, binary.BigEndian.Uint32(length)-4)
	if _, err := io.ReadFull(client, body); err != nil {
		return nil, err
	}
	_, err := server.Write(append(append(kind, length...), body...))
	return body, err
}

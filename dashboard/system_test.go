//go:build system

package dashboard

import (
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/dashboard/fleet"
	"stampede/internal/test/testkit"
)

func TestStreamEndsWithItsSession(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	b := d.as("vic")
	f := b.follow("")
	_, ok := f.next()
	require.True(t, ok)
	d.operators(line("ada", "admin"))
	testkit.Eventually(t, within, "the end of the session", func() bool {
		_, page := d.browser().do(http.MethodGet, "/", nil, map[string]string{"Cookie": cookie + "=" + b.cookie()})
		return strings.Contains(page, "operator's token")
	})
	d.fleet.publish(func(*fleet.Snapshot) {})
	last, ok := f.next()
	require.True(t, ok)
	require.Equal(t, "over", last.event)
	_, ok = f.next()
	require.False(t, ok)
}

// A browser that opens a stream and reads nothing must not grow the process, nor hold up the others or the end.
func TestSlowBrowserHoldsUpNobody(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	b := d.as("vic")
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", strings.TrimPrefix(d.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	require.NoError(t, conn.(*net.TCPConn).SetReadBuffer(1))
	request := "GET /live HTTP/1.1\r\nHost: localhost\r\nCookie: " + cookie + "=" + b.cookie() + "\r\n\r\n"
	_, err = conn.Write([]byte(request))
	require.NoError(t, err)
	testkit.Eventually(t, within, "the stream", func() bool { return testutil.ToFloat64(d.metrics.watchers) == 1 })
	f := b.follow("")
	_, ok := f.next()
	require.True(t, ok)
	text := strings.Repeat("x", 200<<10)
	for i := range 40 { // more than the buffers of a connection
		d.fleet.publish(func(s *fleet.Snapshot) {
			s.Troubles = []fleet.Trouble{{Text: text[i:], Severity: fleet.Warning}}
		})
		_, ok := f.next()
		require.True(t, ok)
	}
	testkit.Eventually(t, within, "the end of the slow one", func() bool {
		return testutil.ToFloat64(d.metrics.watchers) == 1
	})
}

// Bodies and heads that come drop by drop end by the time limits of the server.
func TestSlowHeadIsEnded(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", strings.TrimPrefix(d.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	_, err = conn.Write([]byte("POST /login HTTP/1.1\r\nHost: localhost\r\n"))
	require.NoError(t, err)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(within)))
	began := time.Now()
	_, err = conn.Read(make([]byte, 1000))
	require.Error(t, err)
	require.Less(t, time.Since(began), within)
}

func TestSessionEndsWithItsRights(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	viewer, operator := d.as("vic"), d.as("ann")
	d.operators(line("vic", "viewer") + line("ann", "viewer") + line("ada", "admin"))
	testkit.Eventually(t, within, "the end of the session whose role changed", func() bool {
		_, page := operator.get("/")
		return strings.Contains(page, "Your operator's token")
	})
	_, page := viewer.get("/")
	require.Contains(t, page, "Log out", "who did not change goes on")
	d.operators(line("ada", "admin"))
	testkit.Eventually(t, within, "the end of the session of who was revoked", func() bool {
		_, page := viewer.get("/")
		return strings.Contains(page, "Your operator's token")
	})
}

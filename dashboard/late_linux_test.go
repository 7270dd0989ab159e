package dashboard

import (
	"bufio"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// The operator may have done the opposite elsewhere since, as when this process was frozen.
func TestNothingIsDoneForBrowserThatLeft(t *testing.T) {
	t.Parallel()
	d := openDesk(t)
	id := d.sale("drop", 5)
	conn, err := net.Dial("tcp", strings.TrimPrefix(d.url, "http://")) //nolint:noctx // it ends with the test
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	testkit.SendLast(t, conn, "POST /sales/"+id.String()+"/pause HTTP/1.1\r\nHost: localhost\r\nOrigin: "+d.url+
		"\r\nSec-Fetch-Site: same-origin\r\nCookie: "+cookie+"="+d.as("ann").cookie()+"\r\nContent-Length: 0\r\n\r\n")
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusServiceUnavailable, res.StatusCode)
	require.EqualValues(t, "open", d.shown(id).State)
}

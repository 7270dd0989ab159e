//go:build system

package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Idle connections of clients leave files for new clients, Redis and Postgres.
func TestIdleConnectionsLeaveFileDescriptors(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	c := s.command("serve")
	c.LimitFiles(200)
	c.Setenv("STAMPEDE_AUTH", "header")
	c.Setenv("STAMPEDE_ADMIN_TOKEN", adminToken)
	c.Setenv("STAMPEDE_HTTP_ADDR", "127.0.0.1:0")
	c.Start()
	addr := loggedAddr(c, "ingress listens")
	require.Contains(t, c.WaitOutput(within, "ingress listens"), "connections_max=100")

	// 30 s: an idle connection is closed after a minute.
	idle := func() {
		conn, err := net.Dial("tcp", addr) //nolint:noctx // it ends with the test
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		require.NoError(t, conn.SetDeadline(time.Now().Add(30*time.Second)))
		_, err = fmt.Fprint(conn, "GET /livez HTTP/1.1\r\nHost: shop\r\n\r\n")
		require.NoError(t, err)
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err, "a new connection is not served")
		_, _ = io.Copy(io.Discard, res.Body)
		require.Equal(t, http.StatusOK, res.StatusCode)
	}
	for range 300 {
		idle()
	}
	url := "http://" + addr
	assert.Equal(t, http.StatusAccepted, ask(t, http.MethodPost, url+"/v1/sales/"+s.sale(url, 1).String()+"/orders", "ann",
		"").HTTP)
	idle()

	var closed, open int
	for _, line := range scrape(t, url) {
		_, _ = fmt.Sscanf(line, "stampede_idle_connections_closed_total %d", &closed)
		_, _ = fmt.Sscanf(line, "stampede_connections %d", &open)
	}
	assert.Greater(t, closed, 200)
	assert.LessOrEqual(t, open, 100)
	assert.NotContains(t, strings.ToLower(c.Output()), "too many open files")
}

//go:build system

package main

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// remote runs a command through an ingress, without the databases' URLs.
func remote(t *testing.T, url, token string, args ...string) (status int, out, output string) {
	t.Helper()
	c := testkit.Command(t, args...)
	c.Setenv("REDIS_URL", "")
	c.Setenv("DATABASE_URL", "")
	c.Setenv("STAMPEDE_SERVER", url)
	c.Setenv("STAMPEDE_ADMIN_TOKEN", token)
	c.Setenv("STAMPEDE_YES", "true")
	c.KeepStdout()
	c.Start()
	status = c.Wait(within).ExitCode()
	return status, c.Stdout(), c.Output()
}

// Through an ingress, the commands on sales print what they print on the databases.
func TestSaleCommandsWorkThroughServer(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, url := s.serve()
	over := func(args ...string) string {
		t.Helper()
		status, out, output := remote(t, url, adminToken, args...)
		require.Equal(t, exitOK, status, "%v: %s", args, output)
		return out
	}
	created := objects(t, over("sale", "create", "--name=spring", "--stock=10", "--per-order-limit=2", "--opens-at=+1h",
		"--closes-at=2999-01-01T00:00:00Z", "--payment-window=10m", "--idempotency-key=k", "--output=json"))[0]
	id := created["id"].(string)
	assert.Equal(t, "spring", created["name"])
	assert.Equal(t, "scheduled", created["state"])
	same := func(args ...string) {
		t.Helper()
		for _, format := range []string{"--output=text", "--output=json"} {
			output := s.ends(exitOK, append(args, format)...)
			testkit.Eventually(t, within, strings.Join(args, " ")+" prints the same", func() bool {
				return over(append(args, format)...) == output // an ingress shows sales as they were a second ago
			})
		}
	}
	same("sale", "show", id)
	for _, step := range []string{"pause", "resume"} {
		assert.Contains(t, over("sale", step, id), "spring")
	}
	assert.Contains(t, over("sale", "restock", id, "5", "--idempotency-key=five"), "  15  ")
	assert.Contains(t, over("sale", "restock", id, "5", "--idempotency-key=five"), "  15  ", "a repeat changes nothing")
	assert.Contains(t, over("sale", "restock", id, "--idempotency-key=less", "--", "-3"), "  12  ")
	assert.Contains(t, over("sale", "rename", id, "summer"), "summer")
	for range 3 {
		over("sale", "create", "--name=another", "--stock=1")
	}
	same("sale", "list")
	same("sale", "list", "--limit=2")
	same("sale", "list", "--after="+id)
	assert.Contains(t, over("sale", "end", id), "ended")
	same("sale", "history", id)
	same("sale", "history", id, "--limit=2")
	assert.Contains(t, over("sale", "history", id), " admin ", "the server records the operator of the token")

	// Orders.
	sale, orders := s.recorded("ann", "bob")
	ann := orders["ann"].String()
	same("order", "show", ann)
	same("order", "list", "--sale="+sale.String())
	same("order", "list", "--user=bob", "--limit=1", "--status=confirmed")
	assert.Contains(t, over("order", "cancel", ann, "--reason=r"), "is cancelled")
	same("order", "show", ann)
	same("order", "cancel", ann, "--reason=again")
}

func TestErrorsOfServer(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	operators := filepath.Join(t.TempDir(), "operators")
	viewer := fmt.Sprintf("ann viewer %x\n", sha256.Sum256([]byte("token-of-ann")))
	require.NoError(t, os.WriteFile(operators, []byte(viewer), 0o600))
	_, url := s.serve("--operators-file=" + operators)
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("<html>"))
	}))
	t.Cleanup(page.Close)
	id := uuid.NewString()
	for _, c := range []struct {
		url, token, args string
		status           int
		want             string
	}{
		{url, "wrong", "sale history " + id, exitUsage, "the server refuses the token (STAMPEDE_ADMIN_TOKEN): HTTP 401"},
		{url, "", "sale pause " + id, exitUsage, "the server refuses the token (STAMPEDE_ADMIN_TOKEN): HTTP 401"},
		{url, "token-of-ann", "sale pause " + id, exitUsage, "This call needs the role operator"},
		{url, "token-of-ann", "sale history " + id, exitFailed, "sale not found"},
		{url, adminToken, "sale show " + id, exitFailed, "sale not found"},
		{url, adminToken, "sale pause " + id, exitFailed, "sale not found"},
		{url, adminToken, "order show " + id, exitFailed, "order not found"},
		{url, adminToken, "sale create --name=x --stock=0", exitUsage, "stock"},
		{url, adminToken, "sale list --limit=0", exitUsage, "--limit is 0"},
		{"http://127.0.0.1:1", adminToken, "sale list", exitUnknown, "refused"},
		{"http://127.0.0.1:1", adminToken, "sale show " + id, exitUnknown, "refused"},
		{"http://127.0.0.1:1", adminToken, "sale history " + id, exitUnknown, "refused"},
		{"http://127.0.0.1:1", adminToken, "order list --user=ann", exitUnknown, "refused"},
		{"http://127.0.0.1:1", adminToken, "sale pause " + id, exitFailed, "refused"},
		{"ftp://x", adminToken, "sale list", exitUsage, "--server: want the URL of an ingress"},
		{page.URL, adminToken, "sale list", exitUnknown, "is this the URL of an ingress?"},
		{page.URL + "/%zz", adminToken, "sale list", exitUsage, "--server"},
		{url, adminToken, "sale archive --server=" + url + " --dir=.", exitUsage, "this command has no --server: it moves"},
		{"", adminToken, "sale list", exitUsage, "missing flags: --redis-url=URL (or REDIS_URL), --database-url=URL (or " +
			"DATABASE_URL); or --server=URL (or STAMPEDE_SERVER) instead"},
		{"", adminToken, "order list --user=ann", exitUsage, "missing flags: --database-url=URL (or DATABASE_URL); or --server"},
	} {
		status, out, output := remote(t, c.url, c.token, strings.Fields(c.args)...)
		assert.Equal(t, c.status, status, "%s: %s", c.args, output)
		assert.Contains(t, output, c.want, c.args)
		assert.Empty(t, out)
	}
}

// A server that vanishes with the answer leaves the outcome unknown, and the message says how to repeat the request.
func TestLostAnswerNamesIdempotencyKey(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		panic(http.ErrAbortHandler)
	}))
	t.Cleanup(server.Close)
	create := []string{"sale", "create", "--name=x", "--stock=1", "--idempotency-key=k7"}
	status, _, output := remote(t, server.URL, adminToken, create...)
	assert.Equal(t, exitFailed, status)
	assert.Contains(t, output, "the outcome is unknown")
	assert.Contains(t, output, "repeat it with --idempotency-key=k7, or it may be done twice")
	status, _, output = remote(t, server.URL, adminToken, "order", "cancel", uuid.NewString(), "--reason=r")
	assert.Equal(t, exitFailed, status)
	assert.Contains(t, output, "the outcome is unknown")
	assert.Contains(t, output, "it may be repeated")
	status, _, output = remote(t, server.URL, adminToken, "sale", "list")
	assert.Equal(t, exitUnknown, status, output)
}

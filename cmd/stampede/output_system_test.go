//go:build system

package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What others wrote controls and reorders nothing on an operator's terminal, whichever command shows it.
func TestNoCommandPrintsMisleadingText(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	sale, orders := s.recorded("ann")
	const hostile = "\u202eevil\u2066\u200b\u009b"
	for _, forge := range []string{
		"UPDATE sales SET name = $1",
		"UPDATE sale_events SET operator = $1, data = jsonb_build_object('reason', $1::text, 'list', ARRAY[$1, $1, $1, $1], 'of', jsonb_build_object('x', $1))",
		"UPDATE orders SET user_id = $1, payment_reference = $1",
		"UPDATE order_events SET data = jsonb_build_object('reason', $1::text, 'operator', $1::text, 'by', ARRAY[$1])",
		`INSERT INTO dead_letters (stream, entry_id, fields, deliveries, reason, resolution, operator)
			VALUES ($1, $1, jsonb_build_array($1::text, $1::text), 1, $1, $1, $1)`,
		`INSERT INTO relay_targets (name, url, state, position, last_error) VALUES ('t', 'https://shop.example/' || $1, 'paused', 0, $1)`,
	} {
		_, err := s.pool.Exec(t.Context(), forge, hostile)
		require.NoError(t, err, forge)
	}
	var letter string
	require.NoError(t, s.pool.QueryRow(t.Context(), "SELECT id::text FROM dead_letters").Scan(&letter))
	id, order := sale.String(), orders["ann"].String()
	for _, command := range [][]string{
		{"sale", "list"},
		{"sale", "show", id},
		{"sale", "pause", id},
		{"sale", "history", id},
		{"sale", "end", id},
		{"order", "list", "--sale", id},
		{"order", "show", order},
		{"order", "cancel", order, "--reason=r"},
		{"dlq", "list"},
		{"dlq", "show", letter},
		{"dlq", "discard", letter, "--reason=" + hostile},
		{"relay", "list"},
		{"relay", "remove", "t"},
		{"audit"},
		{"reconcile", "--explain"},
		{"top", "--once"},
	} {
		_, output := s.run(command...)
		require.NotEmpty(t, output, command)
		require.NotRegexp(t, `[^\P{C}\n\t]`, output, "%v", command)
	}
}

// runJSON runs a command with --output json, and returns the objects that it prints, one a line.
func (s *shop) runJSON(want int, args ...string) []map[string]any {
	s.t.Helper()
	c := s.command(args...)
	c.Setenv("STAMPEDE_OUTPUT", "json")
	c.KeepStdout()
	c.Start()
	require.Equal(s.t, want, c.Wait(within).ExitCode(), "%v: %s", args, c.Output())
	return objects(s.t, c.Stdout())
}

func TestMigrateCommandsPrintJSON(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	assert.Empty(t, s.runJSON(exitOK, "migrate", "up")[0]["applied"])
	undone := s.runJSON(exitOK, "migrate", "down")[0]["undone"]
	assert.NotEmpty(t, undone)
	status := s.runJSON(exitOK, "migrate", "status")[0]
	all := status["migrations"].([]any)
	assert.Equal(t, map[string]any{"name": undone, "applied": false}, all[len(all)-1])
	assert.Equal(t, []any{}, status["missing"])
	assert.Equal(t, []any{undone}, s.runJSON(exitOK, "migrate", "up")[0]["applied"])

	_, err := s.pool.Exec(t.Context(), "DROP INDEX orders_one_live_per_user")
	require.NoError(t, err)
	missing := s.runJSON(exitFailed, "migrate", "status")[0]["missing"].([]any)
	require.Len(t, missing, 1)
	assert.Contains(t, missing[0].(map[string]any)["mend"], "CREATE UNIQUE INDEX")
}

func TestRelayCommandsPrintTargetAsJSON(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, c := range []struct {
		args, state string
	}{
		{"add one redis-stream://localhost:1/0?stream=s --from=start", "active"},
		{"pause one", "paused"},
		{"resume one", "active"},
		{"replay one --from=start", "active"},
		{"list", "active"},
	} {
		got := s.runJSON(exitOK, append([]string{"relay"}, strings.Fields(c.args)...)...)
		require.Len(t, got, 1, c.args)
		assert.Equal(t, "one", got[0]["name"], c.args)
		assert.Equal(t, c.state, got[0]["state"], c.args)
		assert.Contains(t, got[0], "position", c.args)
	}
	assert.Equal(t, map[string]any{"name": "one", "removed": true}, s.runJSON(exitOK, "relay", "remove", "one")[0])
	assert.Empty(t, s.runJSON(exitOK, "relay", "list"))
}

func TestHealthcheckPrintsJSON(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, url := s.serve()
	for path, want := range map[string]map[string]any{
		"/readyz": {"ready": true, "status": 200.0}, "/none": {"ready": false, "status": 404.0},
	} {
		want["url"] = url + path
		status := map[bool]int{true: exitOK, false: exitFailed}[want["ready"].(bool)]
		assert.Equal(t, want, s.runJSON(status, "healthcheck", "--url="+url+path)[0])
	}
}

func TestLoadPrintsJSON(t *testing.T) {
	t.Parallel()
	_, load := loadCommand(t)
	load.Setenv("STAMPEDE_OUTPUT", "json")
	load.KeepStdout()
	load.Start()
	assert.Equal(t, exitOK, load.Wait(within).ExitCode())
	got := objects(t, load.Stdout())
	require.Len(t, got, 1)
	crowd := got[0]["crowd"].(map[string]any)
	assert.Equal(t, 50.0, crowd["accepted"])
	assert.Equal(t, 200.0, crowd["buyers"])
	assert.Positive(t, crowd["winners_ms"].(map[string]any)["p50"])
	assert.Equal(t, 50.0, crowd["durable"].(map[string]any)["orders"])
	assert.Equal(t, 50.0, got[0]["checked"].(map[string]any)["found"])
	assert.Len(t, got[0]["audit"].(map[string]any)["promises"], 8)
}

func TestDemoPrintsVerdictAsJSON(t *testing.T) {
	t.Parallel()
	c := demoCommand(t)
	c.Setenv("STAMPEDE_OUTPUT", "json")
	c.KeepStdout()
	c.Start()
	assert.Equal(t, exitOK, c.Wait(within).ExitCode())
	got := objects(t, c.Stdout())
	require.Len(t, got, 1, c.Stdout())
	assert.Equal(t, true, got[0]["kept"])
	assert.Len(t, got[0]["promises"], 5)
	assert.Equal(t, 500.0, got[0]["checked"].(map[string]any)["found"])
	assert.Contains(t, c.Output(), "kill -9 of worker-", "the story goes to standard error")
}

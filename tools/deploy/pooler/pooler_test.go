// Package pooler runs the program through PgBouncer, as Debian installs it: with the settings that a user has to give,
// and no others.
package pooler

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"stampede/tools/deploy/program"
)

func TestMain(m *testing.M) { program.Main(m) }

// start starts PgBouncer in front of a Postgres, and returns the URL of the database behind it.
func start(t *testing.T, databaseURL, mode string) string {
	t.Helper()
	binary, err := exec.LookPath("pgbouncer")
	if err != nil {
		t.Fatal("no pgbouncer: `sh tools/setup.sh proxies` installs it")
	}
	u, err := url.Parse(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	port := program.FreePort(t)
	settings := fmt.Sprintf(`[databases]
%s = host=%s port=%s user=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %s
unix_socket_dir =
auth_type = any
%s`, strings.TrimPrefix(u.Path, "/"), u.Hostname(), u.Port(), u.User.Username(), port, mode)
	file := filepath.Join(t.TempDir(), "pgbouncer.ini")
	if err := os.WriteFile(file, []byte(settings), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{file}
	if os.Geteuid() == 0 { // which PgBouncer refuses
		args = append([]string{"--user=postgres"}, args...)
	}
	program.RunCommand(t, exec.Command(binary, args...)).WaitFor(regexp.MustCompile("process up"))
	u.Host = "127.0.0.1:" + port
	return u.String()
}

// servers starts Redis and Postgres, with a database that only a pooler's clients use.
func servers(t *testing.T) (s program.Servers) {
	t.Helper()
	s = program.Start(t)
	for _, server := range []struct {
		url  *string
		path string
	}{{&s.RedisURL, "/1"}, {&s.DatabaseURL, "/pooled"}} {
		u, err := url.Parse(*server.url)
		if err != nil {
			t.Fatal(err)
		}
		if u.Scheme == "postgres" {
			if out, err := exec.Command("psql", u.String(), "-c", "CREATE DATABASE pooled").CombinedOutput(); err != nil {
				t.Fatalf("psql: %v: %s", err, out)
			}
		}
		u.Path = server.path
		*server.url = u.String()
	}
	return s
}

func environment(servers program.Servers, databaseURL, port string) []string {
	return []string{
		"REDIS_URL=" + servers.RedisURL, "DATABASE_URL=" + databaseURL, "STAMPEDE_METRICS_ADDR=127.0.0.1:" + port,
		"STAMPEDE_HTTP_ADDR=127.0.0.1:0", "STAMPEDE_AUTH=header", "STAMPEDE_ADMIN_TOKEN=operator", "STAMPEDE_STOP_DELAY=0s",
	}
}

// collector is a server of OpenTelemetry that waits for the spans of one purchase.
func collector(t *testing.T) (url string, recorded <-chan struct{}) {
	t.Helper()
	found := make(chan struct{})
	once := sync.OnceFunc(func() { close(found) })
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if spans, _ := io.ReadAll(r.Body); bytes.Contains(spans, []byte("COMMIT")) {
			once()
		}
	}))
	t.Cleanup(server.Close)
	return server.URL, found
}

// call sends a request with JSON, and returns what the answer says about an id.
func call(t *testing.T, url, body string, want int, headers ...string) (id string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	r.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != want {
		t.Fatalf("%s: %d: %s: %v", url, answer.StatusCode, text, err)
	}
	return regexp.MustCompile(`[0-9a-f-]{36}`).FindString(string(text))
}

// The crowd buys through an ingress, a worker writes its orders, and the audit looks at them, all in session mode. A
// purchase is traced: its statements are flushed one by one.
func TestSessionModeWorks(t *testing.T) {
	servers := servers(t)
	databaseURL := start(t, servers.DatabaseURL, "")
	run := func(env []string, command ...string) {
		t.Helper()
		p := program.Run(t, command, append(env, environment(servers, databaseURL, "0")...))
		if err := p.Wait(); err != nil {
			t.Fatalf("%v: %v\n%s", command, err, p.Output())
		}
	}
	run(nil, "migrate", "up")
	port := program.FreePort(t)
	traces, recorded := collector(t)
	traced := func(port string) []string {
		return append(environment(servers, databaseURL, port), "OTEL_EXPORTER_OTLP_ENDPOINT="+traces)
	}
	worker := program.Run(t, []string{"work"}, traced(port))
	worker.Answer("http://127.0.0.1:"+port+"/readyz", http.StatusOK)
	ingress := program.Run(t, []string{"serve"}, traced(program.FreePort(t)))
	addr := ingress.WaitFor(regexp.MustCompile(`ingress listens" addr=(\S+)`))[1]
	sale := call(t, "http://"+addr+"/v1/sales", `{"name":"traced","stock":1}`, http.StatusCreated,
		"Authorization", "Bearer operator")
	call(t, "http://"+addr+"/v1/sales/"+sale+"/orders", "", http.StatusCreated, "X-User-ID", "ann", "Prefer", "wait=20",
		"Traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
	select {
	case <-recorded:
	case <-time.After(time.Minute):
		t.Fatal("no trace of the purchase has a COMMIT")
	}
	load := []string{"STAMPEDE_LOAD_URL=http://" + addr, "STAMPEDE_LOAD_OVER=2s"}
	run(load, "load", "--buyers=500", "--stock=200")
	run([]string{"STAMPEDE_YES=true"}, "projections", "rebuild")
	run([]string{"STAMPEDE_YES=true"}, "rebuild")
	run(nil, "audit", "--wait=60s")
	run(nil, "doctor")
}

// In the other modes nothing starts, and doctor says why.
func TestOtherModesAreNamed(t *testing.T) {
	servers := servers(t)
	for _, mode := range []string{"transaction", "statement"} {
		env := environment(servers, start(t, servers.DatabaseURL, "pool_mode = "+mode), program.FreePort(t))
		for _, command := range [][]string{
			{"doctor"}, {"migrate", "up"}, {"work"}, {"serve"}, {"relay", "run"}, {"dashboard"}, {"rebuild", "--yes"},
		} {
			p := program.Run(t, command, env)
			if err := p.Wait(); err == nil || !strings.Contains(p.Output(), "a pooler in transaction or statement mode") {
				t.Errorf("%s: %v: %v\n%s", mode, command, err, p.Output())
			}
		}
	}
}

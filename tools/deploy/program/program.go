// Package program builds stampede for the tests of the manifests and units, and starts servers for it. It is for tests.
package program

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Root is the root of the repository, seen from the folder of a test.
const Root = "../../.."

// patience bounds each wait: a busy machine starts a new Postgres slowly.
const patience = 2 * time.Minute

// built is the folder of the program, "" before it is built.
var built string

var build = sync.OnceValues(func() (string, error) {
	var err error
	if built, err = os.MkdirTemp("", "stampede-deploy-"); err != nil {
		return "", err
	}
	path := filepath.Join(built, "stampede")
	cmd := exec.Command("go", "build", "-trimpath", "-o", path, "./cmd/stampede")
	cmd.Dir, cmd.Stderr = Root, os.Stderr
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	return path, cmd.Run()
})

// Path builds the program, once for all tests of a package, and returns its path. Main deletes it.
func Path(t *testing.T) string {
	t.Helper()
	path, err := build()
	if err != nil {
		t.Fatal("go build: ", err)
	}
	return path
}

// Main runs the tests of a package.
func Main(m *testing.M) {
	status := m.Run()
	if built != "" {
		_ = os.RemoveAll(built)
	}
	os.Exit(status)
}

var inHelp = regexp.MustCompile(`\(\$([A-Z][A-Z_]+)|\$([A-Z][A-Z_]+)[,)]`)

// Variables returns the environment variables that a command knows, by its help.
func Variables(t *testing.T, command []string) map[string]bool {
	t.Helper()
	args := append(command[:len(command):len(command)], "--help")
	help, err := exec.CommandContext(t.Context(), Path(t), args...).Output()
	if err != nil {
		t.Fatalf("%v --help: %v", command, err)
	}
	// Go reads these itself.
	known := map[string]bool{"GOMEMLIMIT": true, "GOGC": true}
	// A name is broken over two lines only at a space, of which it has none.
	for _, found := range inHelp.FindAllStringSubmatch(string(help), -1) {
		known[found[1]+found[2]] = true
	}
	return known
}

// RequireVariables checks that a command reads all of these environment variables.
func RequireVariables[V any](t *testing.T, command []string, variables map[string]V) {
	t.Helper()
	known := Variables(t, command)
	if len(known) < 5 {
		t.Fatalf("%v --help names only %v", command, known)
	}
	for name := range variables {
		if !known[name] {
			t.Errorf("%v does not read %s", command, name)
		}
	}
}

// StopTime is the most that a command may take to stop with these settings, with a reserve for closing connections.
func StopTime(t *testing.T, settings map[string]string, command string) time.Duration {
	t.Helper()
	takes := 5 * time.Second
	var names []string
	switch command {
	case "serve":
		names = []string{"STAMPEDE_STOP_DELAY", "STAMPEDE_DRAIN_TIMEOUT"}
	case "work":
		names = []string{"STAMPEDE_DRAIN_TIMEOUT"}
		takes += 1250 * time.Millisecond // a handover: STAMPEDE_MIN_IDLE ÷ 8
	case "relay":
		names = []string{"STAMPEDE_DRAIN_TIMEOUT"}
	}
	for _, name := range names {
		d, err := time.ParseDuration(settings[name])
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		takes += d
	}
	return takes
}

// Read returns the content of a file.
func Read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Shell returns the lines of the runbook that make a shell for commands, from their title on.
func Shell(t *testing.T, title string) string {
	t.Helper()
	_, block, found := strings.Cut(Read(t, Root+"/docs/runbook.md"), "```sh\n# "+title)
	if !found {
		t.Fatalf("docs/runbook.md has no shell for %s", title)
	}
	_, block, _ = strings.Cut(block, "\n")
	block, _, _ = strings.Cut(block, "```")
	return block
}

// RequireDocumented checks that a README makes the secrets that are used, and no others. The pattern finds the names of
// its secrets.
func RequireDocumented(t *testing.T, readme string, pattern *regexp.Regexp, used map[string]bool) {
	t.Helper()
	documented := map[string]bool{}
	for _, found := range pattern.FindAllStringSubmatch(readme, -1) {
		documented[found[1]] = true
		if !used[found[1]] {
			t.Errorf("README.md makes the secret %s, which nothing uses", found[1])
		}
	}
	for name := range used {
		if !documented[name] {
			t.Errorf("README.md does not say how the secret %s is made", name)
		}
	}
}

// Servers are a private Redis and Postgres.
type Servers struct{ RedisURL, DatabaseURL string }

// Secrets are the secrets of an installation on these servers, by their names in deploy.
func (s Servers) Secrets() map[string]string {
	secrets := map[string]string{
		"admin-token": "token-of-the-tests", "jwt-secret": "a secret of the tests, 32 bytes or more",
		"operators": "ann operator " + strings.Repeat("0a", 32) + "\n",
	}
	for _, role := range []string{"ingress", "worker", "operator"} {
		secrets["redis-url-"+role] = s.RedisURL
	}
	for _, role := range []string{"migrator", "ingress", "worker", "relay", "desk"} {
		secrets["database-url-"+role] = s.DatabaseURL
	}
	return secrets
}

var serversLine = regexp.MustCompile(`REDIS_URL='([^']*)' DATABASE_URL='([^']*)'`)

// Start runs stampede dev until the test ends, and returns its private servers, which have the program's schema.
func Start(t *testing.T) Servers {
	t.Helper()
	dev := Run(t, []string{"dev", "--http-addr=127.0.0.1:0"}, nil)
	found := dev.WaitFor(serversLine)
	return Servers{RedisURL: found[1], DatabaseURL: found[2]}
}

// Process is a running command.
type Process struct {
	t      *testing.T
	cmd    *exec.Cmd
	output *buffer
	done   chan struct{}
	err    error // of Wait; set before done is closed
}

// Run starts a command of the program with no other environment than the given one.
func Run(t *testing.T, command, env []string) *Process {
	t.Helper()
	cmd := exec.Command(Path(t), command...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, env...)
	return RunCommand(t, cmd)
}

// RunCommand starts a command, and stops it when the test ends.
func RunCommand(t *testing.T, cmd *exec.Cmd) *Process {
	t.Helper()
	p := &Process{t: t, cmd: cmd, output: newBuffer(), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = p.output, p.output
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.Stop(patience)
		if t.Failed() {
			t.Logf("%v wrote:\n%s", cmd.Args, p.output)
		}
	})
	return p
}

// Stop sends SIGTERM and returns how long the process took to end. It is killed after the given time, and the test
// fails.
func (p *Process) Stop(within time.Duration) time.Duration {
	p.t.Helper()
	began := time.Now()
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // fails if it has ended
	select {
	case <-p.done:
	case <-time.After(within):
		_ = p.cmd.Process.Kill()
		<-p.done
		p.t.Errorf("%v has not ended %v after SIGTERM:\n%s", p.cmd.Args, within, p.output)
	}
	return time.Since(began)
}

// Wait waits for the end of a command that ends by itself, and returns its error.
func (p *Process) Wait() error {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(patience):
		p.t.Fatalf("%v does not end:\n%s", p.cmd.Args, p.output)
	}
	return p.err
}

// Output returns what the process has written so far.
func (p *Process) Output() string { return p.output.String() }

// WaitFor waits for a line of the output.
func (p *Process) WaitFor(pattern *regexp.Regexp) []string {
	p.t.Helper()
	deadline := time.After(patience)
	for {
		text, changed := p.output.look()
		if found := pattern.FindStringSubmatch(text); found != nil {
			return found
		}
		select {
		case <-changed:
		case <-p.done:
			p.t.Fatalf("%v has ended (%v):\n%s", p.cmd.Args, p.err, p.output)
		case <-deadline:
			p.t.Fatalf("%v does not write %s:\n%s", p.cmd.Args, pattern, p.output)
		}
	}
}

// Answer asks url until the answer has the wanted status, and its body matches the patterns.
func (p *Process) Answer(url string, want int, patterns ...*regexp.Regexp) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	last := "no answer"
	for {
		status, body, err := get(ctx, url)
		switch {
		case err == nil && status == want && !slices.ContainsFunc(patterns, func(pattern *regexp.Regexp) bool {
			return !pattern.MatchString(body)
		}):
			return
		case err == nil:
			last = http.StatusText(status) + ": " + body
		case ctx.Err() == nil:
			last = err.Error()
		}
		select {
		case <-p.done:
			p.t.Fatalf("%v has ended (%v) before %s was %d:\n%s", p.cmd.Args, p.err, url, want, p.output)
		case <-ctx.Done():
			p.t.Fatalf("%s is never %d and like %v: %s\n%s", url, want, patterns, last, p.output)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func get(ctx context.Context, url string) (status int, body string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(bufio.NewReader(resp.Body))
	return resp.StatusCode, string(text), err
}

// FreePort returns a port that nothing listens on.
func FreePort(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	_, port, err := net.SplitHostPort(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// buffer is output that can be read while it grows.
type buffer struct {
	mu      sync.Mutex
	text    strings.Builder
	changed chan struct{}
}

func newBuffer() *buffer { return &buffer{changed: make(chan struct{})} }

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.changed)
	b.changed = make(chan struct{})
	return b.text.Write(p)
}

// look returns the text, and a channel that is closed when it grows.
func (b *buffer) look() (string, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String(), b.changed
}

func (b *buffer) String() string {
	text, _ := b.look()
	return text
}

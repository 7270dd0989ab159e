// Command testclients runs the tests of clients/ against real servers: testclients PROGRAM COMMAND [ARGUMENT…] starts
// PROGRAM (a built stampede) as dev, and as serve with tokens, puts a proxy with faults in front, and runs COMMAND with
// their addresses in its environment. Its exit status is the command's.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"stampede/internal/dev/child"
)

const (
	adminToken = "operator-of-the-tests"
	jwtSecret  = "a secret of the tests, 32 bytes or more"
	// startTimeout bounds the start of a server on a busy machine, with a new Postgres.
	startTimeout = 2 * time.Minute
	stopTimeout  = 20 * time.Second
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: testclients PROGRAM COMMAND [ARGUMENT…]")
		os.Exit(2)
	}
	ctx, restore := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1], os.Args[2], os.Args[3:])
	restore()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(max(exit.ExitCode(), 1))
	case err != nil:
		fmt.Fprintln(os.Stderr, "testclients:", err)
		os.Exit(1)
	}
}

// serversLine matches the command that stampede dev prints for a second terminal.
var serversLine = regexp.MustCompile(`REDIS_URL='([^']*)' DATABASE_URL='([^']*)'`)

func run(ctx context.Context, program, command string, arguments []string) error {
	program, err := filepath.Abs(program) // for tests in other folders
	if err != nil {
		return err
	}
	dev := exec.CommandContext(ctx, program, "dev", "--http-addr=127.0.0.1:0", "--admin-token="+adminToken)
	found, stop, err := start(dev, regexp.MustCompile(`ingress +(http://\S+)`), serversLine)
	if err != nil {
		return err
	}
	defer stop()
	header, redisURL, databaseURL := found[0][1], found[1][1], found[1][2]

	serve := exec.CommandContext(ctx, program, "serve", "--http-addr=127.0.0.1:0", "--stop-delay=0s",
		"--log-format=json", "--redis-url="+redisURL, "--database-url="+databaseURL, "--jwt-secret="+jwtSecret)
	found, stop, err = start(serve, regexp.MustCompile(`"addr":"([^"]+)"`))
	if err != nil {
		return err
	}
	defer stop()
	jwt := "http://" + found[0][1]

	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	faults := &http.Server{Handler: newProxy(header), ReadHeaderTimeout: startTimeout}
	go func() { _ = faults.Serve(listener) }()
	defer func() { _ = faults.Close() }()

	tests := exec.CommandContext(ctx, command, arguments...)
	tests.Stdout, tests.Stderr = os.Stdout, os.Stderr
	tests.Env = append(os.Environ(), "STAMPEDE_TEST_URL="+header, "STAMPEDE_TEST_JWT_URL="+jwt,
		"STAMPEDE_TEST_JWT_SECRET="+jwtSecret, "STAMPEDE_TEST_ADMIN_TOKEN="+adminToken,
		"STAMPEDE_TEST_FAULTS_URL=http://"+listener.Addr().String(),
		"STAMPEDE_TEST_PROGRAM="+program, "REDIS_URL="+redisURL, "DATABASE_URL="+databaseURL)
	return tests.Run()
}

// start starts a server and waits until its output has matched all patterns. The output is kept for an error only.
func start(cmd *exec.Cmd, patterns ...*regexp.Regexp) (found [][]string, stop func(), err error) {
	output, input := io.Pipe()
	cmd.Stdout, cmd.Stderr = input, input
	process, err := child.Start(cmd, syscall.SIGTERM)
	if err != nil {
		return nil, nil, err
	}
	stop = func() { process.Stop(syscall.SIGTERM, stopTimeout) }
	go func() {
		<-process.Done()
		_ = input.Close()
	}()
	matched := make(chan [][]string, 1)
	var said strings.Builder // until all patterns have matched, or the output has ended
	go func() {
		defer close(matched)
		lines := bufio.NewScanner(output)
		for len(found) < len(patterns) && lines.Scan() {
			said.WriteString(lines.Text() + "\n")
			if match := patterns[len(found)].FindStringSubmatch(lines.Text()); match != nil {
				found = append(found, match)
			}
		}
		if err := lines.Err(); err != nil {
			said.WriteString(err.Error())
		}
		if len(found) == len(patterns) {
			matched <- found
		}
		_, _ = io.Copy(io.Discard, output)
	}()
	timeout := time.NewTimer(startTimeout)
	defer timeout.Stop()
	select {
	case all, ok := <-matched:
		if ok {
			return all, stop, nil
		}
		err = fmt.Errorf("%s ended:\n%s", strings.Join(cmd.Args[:2], " "), said.String())
	case <-timeout.C:
		err = fmt.Errorf("%s is not up after %v", strings.Join(cmd.Args[:2], " "), startTimeout)
	}
	stop()
	return nil, nil, err
}

const bodyMax = 1 << 20

// fault is what happens to one request.
type fault struct {
	// On is a method and a part of the path, as in "POST /orders"; empty is any request.
	On string `json:"on"`
	// Do is one of:
	//   refuse: the connection is closed before the server sees the request
	//   drop: the server answers, and the connection is closed in place of its answer
	//   hold: the server answers, and its answer is held back until the client leaves
	//   answer: the proxy answers with Status, Headers and Body; the server does not see the request
	//   cut: the answer of the server is passed on and cut in the middle of event number Events + 1
	//   silence: the same, but nothing comes any more in place of the cut
	Do      string            `json:"do"`
	Status  int               `json:"status"`
	Headers map[string]string `json:"headers"`
	Body    string            `json:"body"`
	Events  int               `json:"events"`
}

func (f fault) matches(r *http.Request, path string) bool {
	method, part, _ := strings.Cut(f.On, " ")
	return f.On == "" || r.Method == method && strings.Contains(path, part)
}

// seen is a request as the proxy got it.
type seen struct {
	Method  string            `json:"method"`
	Path    string            `json:"path"` // with its query
	Headers map[string]string `json:"headers"`
	Body    string            `json:"body"`
	AtMs    int64             `json:"at_ms"`
	Fault   string            `json:"fault,omitempty"`
	Status  int               `json:"status,omitempty"` // of the server's answer
}

// plan holds the faults for the requests below /PLAN/, each of which happens once, and all requests.
type plan struct {
	faults []fault
	seen   []*seen
}

// proxy passes requests below /PLAN/ on to a server, with the faults of that plan. PUT /_plans/PLAN sets them; GET
// returns the requests so far.
type proxy struct {
	target string
	client *http.Client
	began  time.Time

	mu    sync.Mutex
	plans map[string]*plan
}

func newProxy(target string) *proxy {
	return &proxy{
		target: target, began: time.Now(), plans: map[string]*plan{},
		client: &http.Client{Transport: &http.Transport{DisableCompression: true, DisableKeepAlives: true}},
	}
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name, path, _ := strings.Cut(strings.TrimPrefix(r.URL.RequestURI(), "/"), "/")
	if name == "_plans" {
		p.control(w, r, path)
		return
	}
	path = "/" + path
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, bodyMax))
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	f, log := p.next(name, path, string(body), r)
	switch f.Do {
	case "refuse":
		panic(http.ErrAbortHandler)
	case "answer":
		for name, value := range f.Headers {
			w.Header().Set(name, value)
		}
		w.WriteHeader(f.Status)
		_, _ = io.WriteString(w, f.Body)
		return
	}
	request, err := http.NewRequestWithContext(r.Context(), r.Method, p.target+path, bytes.NewReader(body))
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	request.Header = r.Header.Clone()
	answer, err := p.client.Do(request)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer func() { _ = answer.Body.Close() }()
	p.mu.Lock()
	log.Status = answer.StatusCode
	p.mu.Unlock()
	switch f.Do {
	case "drop", "hold":
		_, _ = io.Copy(io.Discard, answer.Body)
		if f.Do == "hold" {
			<-r.Context().Done()
		}
		panic(http.ErrAbortHandler)
	}
	for name, values := range answer.Header {
		w.Header()[name] = values
	}
	w.WriteHeader(answer.StatusCode)
	pass(w, r, answer.Body, f)
}

// pass copies the server's answer as it comes, up to the end that the fault sets.
func pass(w http.ResponseWriter, r *http.Request, from io.Reader, f fault) {
	flush := http.NewResponseController(w).Flush
	_ = flush()
	dataField, events := []byte("\ndata: "), 0
	buf := make([]byte, 4096)
	for {
		n, err := from.Read(buf)
		part := buf[:n]
		if f.Do == "cut" || f.Do == "silence" {
			// The server flushes each event by itself.
			if events += bytes.Count(part, dataField); events > f.Events {
				_, _ = w.Write(part[:n/2])
				_ = flush()
				if f.Do == "silence" {
					<-r.Context().Done()
				}
				panic(http.ErrAbortHandler)
			}
		}
		if _, failed := w.Write(part); failed != nil || flush() != nil {
			return
		}
		if err == io.EOF {
			return
		}
		if err != nil {
			panic(http.ErrAbortHandler)
		}
	}
}

// next takes the fault for a request, if there is one, and logs the request.
func (p *proxy) next(name, path, body string, r *http.Request) (fault, *seen) {
	log := &seen{
		Method: r.Method, Path: path, Body: body, Headers: map[string]string{}, AtMs: time.Since(p.began).Milliseconds(),
	}
	for name, values := range r.Header {
		log.Headers[strings.ToLower(name)] = strings.Join(values, ", ")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	current := p.plan(name)
	current.seen = append(current.seen, log)
	for i, f := range current.faults {
		if f.matches(r, path) {
			current.faults = append(current.faults[:i:i], current.faults[i+1:]...)
			log.Fault = f.Do
			return f, log
		}
	}
	return fault{}, log
}

// plan returns the plan with this name; p.mu is held.
func (p *proxy) plan(name string) *plan {
	if p.plans[name] == nil {
		p.plans[name] = &plan{seen: []*seen{}}
	}
	return p.plans[name]
}

func (p *proxy) control(w http.ResponseWriter, r *http.Request, name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	current := p.plan(name)
	if r.Method == http.MethodPut {
		var faults []fault
		if err := json.NewDecoder(io.LimitReader(r.Body, bodyMax)).Decode(&faults); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		current.faults = faults
		w.WriteHeader(http.StatusNoContent)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(current.seen)
}

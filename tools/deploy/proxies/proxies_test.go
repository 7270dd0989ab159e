// Package proxies runs the proxy of compose.yaml in front of an ingress: what it answers by itself must not say more
// than it knows.
package proxies

import (
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
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

// patience bounds a request through a proxy.
const patience = time.Minute

// backend is an ingress behind which a request may be lost, as X-Fault says: die closes the connection after the
// ingress has answered, and freeze never answers.
type backend struct {
	*httptest.Server
	mu   sync.Mutex
	came map[string]int // requests by Idempotency-Key
}

func newBackend(t *testing.T, ingress string) *backend {
	t.Helper()
	target, err := url.Parse(ingress)
	if err != nil {
		t.Fatal(err)
	}
	b := &backend{came: map[string]int{}}
	pass := httputil.NewSingleHostReverseProxy(target)
	pass.ModifyResponse = func(r *http.Response) error {
		switch r.Request.Header.Get("X-Fault") {
		case "die":
			panic(http.ErrAbortHandler)
		case "freeze":
			<-r.Request.Context().Done()
		}
		return nil
	}
	b.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b.mu.Lock()
		b.came[r.Header.Get("Idempotency-Key")]++
		b.mu.Unlock()
		pass.ServeHTTP(w, r)
	}))
	t.Cleanup(b.Close)
	return b
}

func (b *backend) requests(key string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.came[key]
}

// replaced returns a file of the repository, with the replacements made, each of which must be there.
func replaced(t *testing.T, file string, replace ...string) string {
	t.Helper()
	text := program.Read(t, filepath.Join(program.Root, file))
	for i := 0; i < len(replace); i += 2 {
		pattern := regexp.MustCompile("(?m)" + replace[i])
		if !pattern.MatchString(text) {
			t.Fatalf("%s has nothing like %s", file, replace[i])
		}
		text = pattern.ReplaceAllString(text, replace[i+1])
	}
	return text
}

// config is deploy/haproxy.cfg with the addresses of the test and a shorter timeout.
func config(t *testing.T, front, back string) string {
	t.Helper()
	return replaced(t, "deploy/haproxy.cfg",
		`^resolvers docker\n(    .*\n)+`, "",
		`^    log stdout .*\n`, "",
		`bind :8080`, "bind "+front,
		`server-template .*`, "server one "+back,
		`timeout server 45s`, "timeout server 2s")
}

// startProxy starts a proxy in front of the backend, and returns its URL once it passes requests on.
func startProxy(t *testing.T, b *backend) string {
	t.Helper()
	path, err := exec.LookPath("haproxy")
	if err != nil {
		if path = "/usr/sbin/haproxy"; exec.Command(path, "-v").Run() != nil {
			t.Fatal("haproxy is missing: sh tools/setup.sh proxies installs it")
		}
	}
	file, front := filepath.Join(t.TempDir(), "config"), net.JoinHostPort("127.0.0.1", program.FreePort(t))
	text := config(t, front, b.Listener.Addr().String())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	program.RunCommand(t, exec.Command(path, "-db", "-f", file)).Answer("http://"+front+"/readyz", http.StatusOK)
	return "http://" + front
}

// answer is what a client makes of an answer (docs/http-api.md): no slug is one that Stampede did not make.
type answer struct {
	status          int
	slug            string
	replayed        bool
	order           string
	media, retry    string
	title, detail   string
	statusInProblem int
}

func (a answer) unknown() bool { return a.slug == "" || a.slug == "outcome-unknown" }

// buy sends a purchase of a buyer with a key of the same name.
func buy(t *testing.T, at, buyer, body string, headers map[string]string) answer {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, at, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("X-User-ID", buyer)
	r.Header.Set("Idempotency-Key", buyer)
	for name, value := range headers {
		r.Header.Set(name, value)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	got, err := client.Do(r)
	if err != nil {
		return answer{} // a proxy may close a connection on which too much is sent
	}
	defer func() { _ = got.Body.Close() }()
	var members struct {
		Type, Title, Detail string
		Status              any
		OrderID             string `json:"order_id"`
	}
	_ = json.NewDecoder(got.Body).Decode(&members) // another body has no members
	slug, _ := strings.CutPrefix(members.Type, "/problems/")
	if slug == members.Type {
		slug = ""
	}
	number, _ := members.Status.(float64)
	return answer{
		got.StatusCode, slug, got.Header.Get("Idempotency-Replayed") == "true", members.OrderID,
		got.Header.Get("Content-Type"), got.Header.Get("Retry-After"), members.Title, members.Detail, int(number),
	}
}

func TestProxyDoesNotGuessOutcome(t *testing.T) {
	const token = "operator-of-the-tests"
	dev := program.Run(t, []string{"dev", "--http-addr=127.0.0.1:0", "--admin-token=" + token}, nil)
	ingress := dev.WaitFor(regexp.MustCompile(`ingress +(http://\S+)`))[1]
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, ingress+"/v1/sales",
		strings.NewReader(`{"name":"behind proxies","stock":100}`))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer "+token)
	made, err := http.DefaultClient.Do(r)
	if err != nil || made.StatusCode != http.StatusCreated {
		t.Fatal(made, err)
	}
	_ = made.Body.Close()
	orders := made.Header.Get("Location") + "/orders"

	large := strings.Repeat("x", 1<<20)
	b := newBackend(t, ingress)
	at := startProxy(t, b) + orders
	for name, c := range map[string]struct {
		headers map[string]string
		status  int // 0: any
		slug    string
		bought  bool
	}{
		"dies after the purchase":    {map[string]string{"X-Fault": "die"}, 502, "outcome-unknown", true},
		"freezes after the purchase": {map[string]string{"X-Fault": "freeze"}, 504, "outcome-unknown", true},
		"gets a large header":        {map[string]string{"X-Large": large}, 0, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			buyer := strings.ReplaceAll(name, " ", "-")
			first := buy(t, at, buyer, "", c.headers)
			if !first.unknown() || first.slug != c.slug || c.status != 0 && first.status != c.status {
				t.Errorf("%+v, want %d %q", first, c.status, c.slug)
			}
			if first.slug != "" && (first.media != "application/problem+json" || first.retry != "1" ||
				first.title != "The outcome is unknown" || first.detail == "" || first.statusInProblem != first.status) {
				t.Errorf("%+v is not the problem that an ingress makes", first)
			}
			if n := b.requests(buyer); c.bought && n != 1 {
				t.Errorf("the proxy has sent the purchase %d times", n)
			}
			again := buy(t, at, buyer, "", nil)
			if again.status != http.StatusAccepted || again.order == "" || again.replayed != c.bought {
				t.Errorf("the repeat with the same key: %+v", again)
			}
		})
	}
	// What an ingress refuses is passed on, and what a proxy refuses is no answer of Stampede.
	for size, want := range map[int]string{5_000: "body-too-large", len(large): ""} {
		got := buy(t, at, "large-body", large[:size], nil)
		if got.slug != "body-too-large" && (want != "" || !got.unknown()) {
			t.Errorf("a body of %d bytes: %+v", size, got)
		}
	}
	// Without a backend nothing was sent.
	b.Close()
	if got := buy(t, at, "down", "", nil); got.status/100 != 5 || got.slug != "sale-unavailable" {
		t.Errorf("without a backend: %+v", got)
	}
}

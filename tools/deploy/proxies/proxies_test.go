// Package proxies runs the proxies that the documentation shows in front of an ingress: what they answer by themselves
// must not say more than they know.
package proxies

import (
	"encoding/json"
	"fmt"
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

// read returns a file of the repository, with the replacements made, each of which must be there.
func read(t *testing.T, file string, replace ...string) string {
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

// haproxyConfig is deploy/haproxy.cfg with the addresses of the test and a shorter timeout.
func haproxyConfig(t *testing.T, _, front, back string) string {
	return read(t, "deploy/haproxy.cfg",
		`^resolvers docker\n(    .*\n)+`, "",
		`^    log stdout .*\n`, "",
		`bind :8080`, "bind "+front,
		`server-template .*`, "server one "+back,
		`timeout server 45s`, "timeout server 2s")
}

var annotation = regexp.MustCompile(`nginx\.ingress\.kubernetes\.io/(\S+): "?([^"\n]+)`)

// nginxConfig has the directives that the annotations of deploy/kubernetes/example make, with a shorter timeout.
func nginxConfig(t *testing.T, folder, front, back string) string {
	var directives strings.Builder
	found := annotation.FindAllStringSubmatch(
		read(t, "deploy/kubernetes/example/shop.yaml", `proxy-read-timeout: "60"`, `proxy-read-timeout: "2"`), -1)
	for _, a := range found {
		name := strings.ReplaceAll(a[1], "-", "_")
		if name == "proxy_body_size" {
			name = "client_max_body_size"
		}
		fmt.Fprintf(&directives, "%s %s;\n", name, a[2])
	}
	var temporary strings.Builder
	for _, name := range []string{"client_body", "proxy", "fastcgi", "uwsgi", "scgi"} {
		fmt.Fprintf(&temporary, "%s_temp_path %s/%s;\n", name, folder, name)
	}
	return fmt.Sprintf(`
		daemon off; master_process off; pid %s/pid; error_log stderr;
		events {}
		http {
			access_log off; %s
			server { listen %s; location / { proxy_pass http://%s; proxy_http_version 1.1; %s } }
		}`, folder, temporary.String(), front, back, directives.String())
}

// startProxy starts a proxy in front of the backend, and returns its URL once it passes requests on.
func startProxy(
	t *testing.T, config func(t *testing.T, folder, front, back string) string, b *backend, name string, args ...string,
) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		if path = filepath.Join("/usr/sbin", name); exec.Command(path, "-v").Run() != nil {
			t.Fatalf("%s is missing: sh tools/setup.sh proxies installs it", name)
		}
	}
	folder, front := t.TempDir(), net.JoinHostPort("127.0.0.1", program.FreePort(t))
	file := filepath.Join(folder, "config")
	text := config(t, folder, front, b.Listener.Addr().String())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	program.RunCommand(t, exec.Command(path, append(args, file)...)).Answer("http://"+front+"/readyz", http.StatusOK)
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

func TestProxiesDoNotGuessOutcome(t *testing.T) {
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
	for _, proxy := range []struct {
		name   string
		args   []string
		config func(t *testing.T, folder, front, back string) string
		// The slugs of its own answers.
		gone, down string
	}{
		{"haproxy", []string{"-db", "-f"}, haproxyConfig, "outcome-unknown", "sale-unavailable"},
		{"nginx", []string{"-c"}, nginxConfig, "", ""},
	} {
		t.Run(proxy.name, func(t *testing.T) {
			t.Parallel()
			b := newBackend(t, ingress)
			at := startProxy(t, proxy.config, b, proxy.name, proxy.args...) + orders
			for name, c := range map[string]struct {
				body    string
				headers map[string]string
				status  int // 0: any
				slug    string
				bought  bool
			}{
				"dies after the purchase":    {"", map[string]string{"X-Fault": "die"}, 502, proxy.gone, true},
				"freezes after the purchase": {"", map[string]string{"X-Fault": "freeze"}, 504, proxy.gone, true},
				"gets a large header":        {"", map[string]string{"X-Large": large}, 0, "", false},
			} {
				t.Run(name, func(t *testing.T) {
					buyer := proxy.name + "-" + strings.ReplaceAll(name, " ", "-")
					first := buy(t, at, buyer, c.body, c.headers)
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
					again := buy(t, at, buyer, c.body, nil)
					if again.status != http.StatusAccepted || again.order == "" || again.replayed != c.bought {
						t.Errorf("the repeat with the same key: %+v", again)
					}
				})
			}
			// What an ingress refuses is passed on, and what a proxy refuses is no answer of Stampede.
			for size, want := range map[int]string{5_000: "body-too-large", len(large): ""} {
				got := buy(t, at, proxy.name+"-large-body", large[:size], nil)
				if got.slug != "body-too-large" && (want != "" || !got.unknown()) {
					t.Errorf("a body of %d bytes: %+v", size, got)
				}
			}
			// Without a backend nothing was sent.
			b.Close()
			if got := buy(t, at, proxy.name+"-down", "", nil); got.status/100 != 5 || got.slug != proxy.down {
				t.Errorf("without a backend: %+v", got)
			}
		})
	}
}

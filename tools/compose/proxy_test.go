package compose

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// directives returns the lines of the proxy's configuration without comments and indentation.
func directives(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "deploy", "haproxy.cfg"))
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	return lines
}

// setting returns the only value of a directive.
func setting(t *testing.T, name string) string {
	t.Helper()
	var values []string
	for _, line := range directives(t) {
		if value, found := strings.CutPrefix(line, name+" "); found {
			values = append(values, value)
		}
	}
	if len(values) != 1 {
		t.Fatalf("%s is %q, want one value", name, values)
	}
	return values[0]
}

// sourceSeconds returns the value of a constant in seconds. The file is a path from the root.
func sourceSeconds(t *testing.T, file, name string) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^(?:const|)\s*` + name + `\s*= (\d+) \* time\.Second$`).FindSubmatch(text)
	if found == nil {
		t.Fatalf("%s declares no %s in seconds", file, name)
	}
	seconds, err := strconv.Atoi(string(found[1]))
	if err != nil {
		t.Fatal(err)
	}
	return seconds
}

// The proxy must not time out before the slowest answer of an ingress: a purchase waits up to waitMax (Prefer: wait),
// and its answer may take WriteTimeout more.
func TestProxyTimeoutExceedsSlowestAnswer(t *testing.T) {
	const transit = 2 // seconds, both ways
	latest := sourceSeconds(t, "ingress/request.go", "waitMax") +
		sourceSeconds(t, "internal/accept/server.go", "WriteTimeout")
	text := setting(t, "timeout server")
	seconds, err := strconv.Atoi(strings.TrimSuffix(text, "s"))
	if err != nil || seconds < latest+transit || seconds > 2*latest {
		t.Errorf("timeout server is %s, and the slowest answer takes %d s (%v)", text, latest, err)
	}
}

func TestProxyHasSlotForEachIngress(t *testing.T) {
	header, err := os.ReadFile(filepath.Join(root, "compose.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(header), "up to 8 ingresses") {
		t.Error("compose.yaml does not name the largest number of ingresses")
	}
	if got := setting(t, "server-template"); !strings.HasPrefix(got, "ingress 8 ingress:8080 ") {
		t.Errorf("server-template is %q, want 8 slots", got)
	}
	if got := service(t, loadWithSecrets(t), "ingress").GetScale(); got > 8 {
		t.Errorf("%d ingresses, but the proxy has 8 slots", got)
	}
}

// The proxy must not repeat an order that an ingress may have received: it may have no Idempotency-Key.
func TestProxyRetriesOnlyFailedConnections(t *testing.T) {
	if got := setting(t, "retry-on"); got != "conn-failure" {
		t.Errorf("retry-on is %q, want conn-failure only", got)
	}
}

// HAProxy does not start if its connections need more files than it may open.
func TestProxyFileLimitCoversConnections(t *testing.T) {
	limit := service(t, loadWithSecrets(t), "proxy").Ulimits["nofile"]
	if limit == nil {
		t.Fatal("the proxy has no limit of open files")
	}
	const rest = 100 // listeners, health checks, the resolver
	text := setting(t, "maxconn")
	connections, err := strconv.Atoi(text)
	if err != nil || limit.Single < 2*connections+rest {
		t.Errorf("maxconn is %s with %d open files, want at least two per connection (%v)", text, limit.Single, err)
	}
}

// Limits per client address rely on X-Forwarded-For, so the proxy must replace it.
func TestIngressTrustsOnlyTheProxy(t *testing.T) {
	trusted := service(t, loadWithSecrets(t), "ingress").Environment["STAMPEDE_TRUSTED_PROXIES"]
	if trusted == nil {
		t.Fatal("the ingress trusts no proxy: all clients would share the limits of the proxy's address")
	}
	for _, pool := range []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"} { // Docker's address pools
		if !slices.Contains(strings.Split(*trusted, ","), pool) {
			t.Errorf("addresses in %s are not trusted, only %s", pool, *trusted)
		}
	}
	lines := directives(t)
	deleted, added := slices.Index(lines, "http-request del-header X-Forwarded-For"),
		slices.Index(lines, "option forwardfor")
	if deleted < 0 || added < 0 {
		t.Error("the proxy does not replace X-Forwarded-For")
	}
}

// An ingress must learn that a client has left, so that it does not decide the purchase.
func TestProxyClosesConnectionsOfClientsThatLeft(t *testing.T) {
	if !slices.Contains(directives(t), "option abortonclose") {
		t.Error("the proxy keeps the connections of clients that have left")
	}
}

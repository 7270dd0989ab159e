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

// directives are the lines of the proxy's configuration, comments and indentation left out.
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

// sourceSeconds is a constant of the ingress that is a number of seconds.
func sourceSeconds(t *testing.T, file, name string) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "ingress", file))
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^\s+` + name + `\s*= (\d+) \* time\.Second$`).FindSubmatch(text)
	if found == nil {
		t.Fatalf("%s has no %s in seconds", file, name)
	}
	seconds, err := strconv.Atoi(string(found[1]))
	if err != nil {
		t.Fatal(err)
	}
	return seconds
}

// The answer of an ingress says more than the proxy's: the proxy waits for it, and for nothing that
// cannot come any more.
func TestProxyWaitsAsLongAsAnIngressMayTake(t *testing.T) {
	const transit = 2 // seconds, there and back
	latest := sourceSeconds(t, "server.go", "writeTimeout")
	for _, line := range directives(t) {
		text, found := strings.CutPrefix(line, "timeout server ")
		if !found {
			continue
		}
		waits, err := strconv.Atoi(strings.TrimSuffix(text, "s"))
		if err != nil || waits < latest+transit || waits > 2*latest {
			t.Errorf("it waits %s for an ingress, whose last answer comes after %d s (%v)", text, latest, err)
		}
		return
	}
	t.Error("no timeout server")
}

func TestProxyHasASlotForEveryIngress(t *testing.T) {
	header, err := os.ReadFile(filepath.Join(root, "compose.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(header), "up to 8 ingresses") {
		t.Error("compose.yaml does not say how many ingresses there may be")
	}
	const directive = "server-template ingress 8 ingress:8080 "
	for _, line := range directives(t) {
		if strings.HasPrefix(line, directive) {
			if got := service(t, loadWithSecrets(t), "ingress").GetScale(); got > 8 {
				t.Errorf("%d ingresses, and the proxy has 8 slots", got)
			}
			return
		}
	}
	t.Errorf("no line begins with %q", directive)
}

// An order that an ingress may have seen must not be sent to another one by the proxy: only the client
// knows whether it gave an Idempotency-Key.
func TestProxyRepeatsOnlyWhatNeverReachedAnIngress(t *testing.T) {
	var policies []string
	for _, line := range directives(t) {
		if policy, found := strings.CutPrefix(line, "retry-on "); found {
			policies = append(policies, policy)
		}
	}
	if len(policies) != 1 || policies[0] != "conn-failure" {
		t.Errorf("it retries on %q, want conn-failure only", policies)
	}
}

// HAProxy does not start where it may open fewer files than its connections need.
func TestProxyMayOpenAFileForEachEndOfItsConnections(t *testing.T) {
	limit := service(t, loadWithSecrets(t), "proxy").Ulimits["nofile"]
	if limit == nil {
		t.Fatal("the proxy's limit of open files is left to the host")
	}
	for _, line := range directives(t) {
		text, found := strings.CutPrefix(line, "maxconn ")
		if !found {
			continue
		}
		const rest = 100 // listeners, health checks, the resolver
		connections, err := strconv.Atoi(text)
		if err != nil || limit.Single < 2*connections+rest {
			t.Errorf("maxconn %s and %d open files, want at least two a connection (%v)", text, limit.Single, err)
		}
		return
	}
	t.Error("no maxconn")
}

// Bounds of client addresses go by what the proxy says, and the proxy says only what it has seen itself.
func TestIngressBelievesTheProxyAndTheProxyNobody(t *testing.T) {
	trusted := service(t, loadWithSecrets(t), "ingress").Environment["STAMPEDE_TRUSTED_PROXIES"]
	if trusted == nil {
		t.Fatal("the ingress trusts no proxy: all clients would share the bounds of the proxy's address")
	}
	for _, pool := range []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"} { // from which Docker takes addresses
		if !slices.Contains(strings.Split(*trusted, ","), pool) {
			t.Errorf("a proxy in %s is not trusted, only %s", pool, *trusted)
		}
	}
	lines := directives(t)
	deleted, added := slices.Index(lines, "http-request del-header X-Forwarded-For"),
		slices.Index(lines, "option forwardfor")
	if deleted < 0 || added < 0 {
		t.Error("the proxy does not replace X-Forwarded-For")
	}
}

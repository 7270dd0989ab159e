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

// stages returns the build stages of the Dockerfile: the instructions from one FROM to the next, without comments,
// continued lines joined.
func stages(t *testing.T) [][]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	var found [][]string
	for line := range strings.Lines(strings.ReplaceAll(string(text), "\\\n", " ")) {
		words := strings.Fields(line)
		if len(words) == 0 || words[0] == "#" {
			continue
		}
		if words[0] == "FROM" {
			found = append(found, nil)
		}
		if len(found) == 0 {
			t.Fatalf("instruction before the first FROM: %s", line)
		}
		last := len(found) - 1
		found[last] = append(found[last], strings.Join(words, " "))
	}
	if len(found) < 2 {
		t.Fatalf("%d stages, want a build stage and a final one", len(found))
	}
	return found
}

// has reports whether an instruction of the stage begins with prefix and contains all parts.
func has(stage []string, prefix string, parts ...string) bool {
instructions:
	for _, instruction := range stage {
		if !strings.HasPrefix(instruction, prefix) {
			continue
		}
		for _, part := range parts {
			if !strings.Contains(instruction, part) {
				continue instructions
			}
		}
		return true
	}
	return false
}

// The flags are those of a release (tools/deploy/release), so that the image has the same program.
func TestBinaryIsThatOfRelease(t *testing.T) {
	build := stages(t)[0]
	if !has(build, "RUN", `CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH go build -trimpath -buildvcs=false `+
		`-ldflags "-s -w -X stampede/internal/telemetry.version=$VERSION"`, "./cmd/stampede") {
		t.Errorf("no static, stripped build with a version: %q", build)
	}
}

func TestBuildUsesCaches(t *testing.T) {
	if !has(stages(t)[0], "RUN", "--mount=type=cache,target=/go/pkg/mod",
		"--mount=type=cache,target=/root/.cache/go-build", "go build") {
		t.Error("the build has no cache mounts")
	}
}

func TestImageHoldsOnlyBinaryAndCertificates(t *testing.T) {
	all := stages(t)
	final := all[len(all)-1]
	if final[0] != "FROM scratch" {
		t.Errorf("the image begins with %q, want FROM scratch", final[0])
	}
	if !has(final, "USER 65532:65532") {
		t.Error("the user is not numeric and unprivileged")
	}
	if !has(final, "COPY --from=build /etc/ssl/certs/ca-certificates.crt") {
		t.Error("no CA certificates")
	}
	if !has(final, "ENTRYPOINT", `["/stampede"]`) {
		t.Error("the entrypoint is not the binary")
	}
	if !has(final, "HEALTHCHECK", `CMD ["/stampede", "healthcheck"]`) {
		t.Error("no health check without a shell")
	}
	if has(final, "RUN") {
		t.Error("RUN in the final stage, which has no shell")
	}
}

// A registry and a scanner read what an image is from its labels.
func TestImageHasLabels(t *testing.T) {
	all := stages(t)
	final := all[len(all)-1]
	for name, value := range map[string]string{
		"title": "stampede", "licenses": "Apache-2.0", "version": "$VERSION", "revision": "$REVISION",
		"created": "$CREATED", "source": "$SOURCE",
	} {
		if !has(final, "LABEL", `org.opencontainers.image.`+name+`="`+value+`"`) {
			t.Errorf("no label %s with %s", name, value)
		}
		if argument, ok := strings.CutPrefix(value, "$"); ok && !has(final, "ARG "+argument) {
			t.Errorf("the last stage has no ARG %s, so the label %s is empty", argument, name)
		}
	}
	build := service(t, loadWithSecrets(t), "ingress").Build
	for _, argument := range []string{"VERSION", "REVISION"} {
		if build.Args[argument] == nil {
			t.Errorf("compose.yaml does not pass %s on", argument)
		}
	}
}

package compose

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

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

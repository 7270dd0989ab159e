package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/buildinfo"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/santhosh-tekuri/jsonschema/v6"
)

const (
	root = "../../.."
	tag  = "v9.8.7"
)

// host is the platform of this machine, whose program can be run.
const host = runtime.GOOS + "/" + runtime.GOARCH

// git runs git in a folder, as a user that exists nowhere else, at a fixed time.
func git(t *testing.T, folder string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", append([]string{"-c", "core.hooksPath=/dev/null"}, args...)...)
	cmd.Dir = folder
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.com",
		"GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.com", "GIT_AUTHOR_DATE=2026-02-03T04:05:06Z",
		"GIT_COMMITTER_DATE=2026-02-03T04:05:06Z")
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("git %v: %s", args, exit.Stderr)
		}
		t.Fatalf("git %v: %v", args, err)
	}
	return string(out)
}

// checkout commits the files of this work tree in a new repository, with a changelog of that version, and tags them.
func checkout(t *testing.T) string {
	t.Helper()
	folder := t.TempDir()
	for _, name := range strings.Split(strings.TrimSpace(git(t, root, "ls-files", "--cached", "--others",
		"--exclude-standard", "--deduplicate")), "\n") {
		content, err := os.ReadFile(filepath.Join(root, name))
		if errors.Is(err, os.ErrNotExist) { // deleted, and not committed
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if name == "CHANGELOG.md" {
			content = bytes.Replace(content, []byte("## Unreleased\n"),
				[]byte("## Unreleased\n\n## 9.8.7 - 2026-02-03\n\nThe notes of the test.\n\n## 9.8.6\n"), 1)
		}
		to := filepath.Join(folder, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, content, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	git(t, folder, "init", "--quiet")
	git(t, folder, "add", "--all")
	git(t, folder, "commit", "--quiet", "--message", "A release")
	git(t, folder, "tag", tag)
	return folder
}

func makeRelease(t *testing.T, folder string) *release {
	t.Helper()
	r := &release{root: folder, platforms: []string{host}}
	if err := r.make(t.Context()); err != nil {
		t.Fatal(err)
	}
	return r
}

// files returns the content of all files of a folder.
func files(t *testing.T, folder string) map[string][]byte {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string][]byte{}
	for _, entry := range entries {
		if found[entry.Name()], err = os.ReadFile(filepath.Join(folder, entry.Name())); err != nil {
			t.Fatal(err)
		}
	}
	return found
}

// Everything of a release is the same in another folder, and is what it says.
func TestRelease(t *testing.T) {
	first := makeRelease(t, checkout(t))
	second := makeRelease(t, checkout(t))
	made := files(t, first.dist)
	name := "stampede_" + tag + "_" + strings.ReplaceAll(host, "/", "_")
	for _, want := range []string{name + ".tar.gz", name + ".cdx.json", "SHA256SUMS", "NOTES.txt"} {
		if made[want] == nil {
			t.Fatalf("there is no %s", want)
		}
	}
	for name, again := range files(t, second.dist) {
		if !bytes.Equal(made[name], again) {
			t.Errorf("%s is another one in another folder", name)
		}
	}
	if got := string(made["NOTES.txt"]); got != "The notes of the test.\n" {
		t.Errorf("the notes are %q", got)
	}

	verify := exec.CommandContext(t.Context(), "sha256sum", "--check", "--strict", "SHA256SUMS")
	verify.Dir = first.dist
	if out, err := verify.CombinedOutput(); err != nil {
		t.Errorf("sha256sum: %v: %s", err, out)
	}
	if got := strings.Count(string(made["SHA256SUMS"]), "\n"); got != 2 {
		t.Errorf("%d checksums, want one of the archive and one of the list of parts", got)
	}

	packed := unpack(t, made[name+".tar.gz"])
	for _, want := range []string{
		"LICENSE", "README.md", "CHANGELOG.md", "docs/operations.md", "deploy/haproxy.cfg",
		"deploy/kubernetes/base/kustomization.yaml", "deploy/systemd/stampede-worker@.service",
	} {
		if len(packed[name+"/"+want]) == 0 {
			t.Errorf("the archive has no %s", want)
		}
	}
	program := filepath.Join(t.TempDir(), "stampede")
	if err := os.WriteFile(program, packed[name+"/stampede"], 0o700); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), program, "version").CombinedOutput()
	if err != nil || !strings.Contains(string(out), tag) {
		t.Errorf("stampede version says %q (%v), want %s", out, err, tag)
	}
	checkParts(t, made[name+".cdx.json"], program)
}

// unpack returns the files of an archive, whose headers depend on nothing but the commit.
func unpack(t *testing.T, packed []byte) map[string][]byte {
	t.Helper()
	plain, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	found := map[string][]byte{}
	at := time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC)
	for archive := tar.NewReader(plain); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			t.Fatal(err)
		}
		if found[header.Name], err = io.ReadAll(archive); err != nil {
			t.Fatal(err)
		}
		mode := int64(0o644)
		if strings.HasSuffix(header.Name, "/stampede") {
			mode = 0o755
		}
		if !header.ModTime.Equal(at) || header.Uid != 0 || header.Gid != 0 || header.Mode != mode {
			t.Errorf("%s: time %v, owner %d:%d, mode %o", header.Name, header.ModTime, header.Uid, header.Gid, header.Mode)
		}
	}
}

// checkParts holds the list of parts against the schema of CycloneDX and against the program.
func checkParts(t *testing.T, text []byte, program string) {
	t.Helper()
	validateBOM(t, text)
	var bom cdx.BOM
	if err := cdx.NewBOMDecoder(bytes.NewReader(text), cdx.BOMFileFormatJSON).Decode(&bom); err != nil {
		t.Fatal(err)
	}
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"std " + strings.TrimPrefix(info.GoVersion, "go")}
	for _, m := range info.Deps {
		want = append(want, m.Path+" "+m.Version)
	}
	var got []string
	for _, c := range *bom.Components {
		got = append(got, c.Name+" "+c.Version)
		if c.Name != "std" && c.Hashes == nil {
			t.Errorf("%s has no hash", c.Name)
		}
	}
	if slices.Sort(want); len(want) < 10 || !slices.Equal(slices.Sorted(slices.Values(got)), want) {
		t.Errorf("the list has %v, and the program %v", got, want)
	}
	sum, err := checksum(program)
	if err != nil {
		t.Fatal(err)
	}
	described := bom.Metadata.Component
	if described.Version != tag || (*described.Hashes)[0].Value != sum ||
		bom.Metadata.Timestamp != "2026-02-03T04:05:06Z" {
		t.Errorf("it is the list of %+v", described)
	}
}

// validateBOM uses the schemas that come with the module.
func validateBOM(t *testing.T, text []byte) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}",
		"github.com/CycloneDX/cyclonedx-go").Output()
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(strings.TrimSpace(string(out)), "schema")
	compiler := jsonschema.NewCompiler()
	const at = "http://cyclonedx.org/schema/"
	for address, file := range map[string]string{
		"bom-1.6.schema.json": "bom-1.6.schema.json", "spdx.schema.json": "spdx.schema.json",
		"jsf-0.82.schema.json": "jsf-0.82.schemax.json",
	} {
		in, err := os.Open(filepath.Join(folder, file))
		if err != nil {
			t.Fatal(err)
		}
		schema, err := jsonschema.UnmarshalJSON(in)
		if err := errors.Join(err, in.Close(), compiler.AddResource(at+address, schema)); err != nil {
			t.Fatal(err)
		}
	}
	schema, err := compiler.Compile(at + "bom-1.6.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	bom, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	if err := schema.Validate(bom); err != nil {
		t.Error(err)
	}
	bom.(map[string]any)["components"].([]any)[1].(map[string]any)["type"] = "module"
	if schema.Validate(bom) == nil {
		t.Error("the schema accepts everything")
	}
}

// A release is refused before anything is built.
func TestReleaseIsRefused(t *testing.T) {
	for name, test := range map[string]struct {
		spoil func(folder string)
		want  string
	}{
		"no tag": {func(folder string) { git(t, folder, "tag", "--delete", tag) }, "no tag"},
		"another tag": {func(folder string) {
			git(t, folder, "tag", "--delete", tag)
			git(t, folder, "tag", "nightly")
		}, "no tag"},
		"two versions": {func(folder string) { git(t, folder, "tag", "v9.8.8") }, "several versions"},
		"no section": {func(folder string) {
			git(t, folder, "tag", "--delete", tag)
			git(t, folder, "tag", "v9.8.8")
		}, `no section "v9.8.8"`},
		"a changed file": {func(folder string) { write(t, filepath.Join(folder, "go.mod"), "module x\n") }, "not committed"},
		"a new file":     {func(folder string) { write(t, filepath.Join(folder, "new.go"), "package x\n") }, "not committed"},
		"a folder in use": {func(folder string) {
			write(t, filepath.Join(folder, "dist", "something"), "of somebody")
		}, "is no release"},
	} {
		t.Run(name, func(t *testing.T) {
			folder := t.TempDir()
			write(t, filepath.Join(folder, "CHANGELOG.md"), "# Changelog\n\n## Unreleased\n\n## 9.8.7\n\nNotes.\n")
			write(t, filepath.Join(folder, "go.mod"), "module stampede\n")
			write(t, filepath.Join(folder, ".gitignore"), "/dist/\n")
			git(t, folder, "init", "--quiet")
			git(t, folder, "add", "--all")
			git(t, folder, "commit", "--quiet", "--message", "A release")
			git(t, folder, "tag", tag)
			test.spoil(folder)
			err := (&release{root: folder, platforms: []string{host}}).make(t.Context())
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("it returns %v, want an error with %q", err, test.want)
			}
		})
	}
}

// What the commands of the READMEs leave behind is ignored, so that a release after them is not refused.
func TestLeftoversAreIgnored(t *testing.T) {
	for _, left := range []string{
		"bin/stampede", "clients/python/build/lib/x.py", "clients/python/stampede_client.egg-info/PKG-INFO",
		"clients/python/.venv/x", "clients/python/stampede_client/__pycache__/x.pyc", "clients/typescript/dist/index.js",
		"clients/typescript/node_modules/x", ".env",
	} {
		cmd := exec.CommandContext(t.Context(), "git", "-C", "../../..", "check-ignore", "--quiet", left)
		if err := cmd.Run(); err != nil {
			t.Errorf("git does not ignore %s", left)
		}
	}
}

func write(t *testing.T, file, content string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(content), 0o600)); err != nil {
		t.Fatal(err)
	}
}

func TestNotesOfChangelog(t *testing.T) {
	file := filepath.Join(t.TempDir(), "CHANGELOG.md")
	write(t, file, "# Changelog\n\n## Unreleased\n\n- New.\n\n## [1.2.4] - 2026-02-03\n\n- Four.\n\n### Fixed\n\n- That.\n\n"+
		"## v1.2.3\n\n- Three.\n\n## 1.2.2\n")
	for section, want := range map[string]string{
		"Unreleased": "- New.\n", "v1.2.4": "- Four.\n\n### Fixed\n\n- That.\n", "v1.2.3": "- Three.\n",
		"v1.2.2": "", "v1.2": "", "v1x2.3": "",
	} {
		got, err := readNotes(file, section)
		if string(got) != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v, want %q", section, got, err, want)
		}
	}
}

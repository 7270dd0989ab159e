// Command release makes what a release consists of, in dist: an archive and a list of its parts (SBOM) for each
// platform, their checksums, and the notes. The same commit and the same version of Go give the same bytes, in any
// folder and at any time.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// platforms are the platforms of a release.
var platforms = []string{"linux/amd64", "linux/arm64", "darwin/amd64", "darwin/arm64"}

func main() {
	ctx, restore := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer restore()
	var r release
	only := ""
	flag.StringVar(&r.root, "root", "../..", "`folder` of the repository")
	flag.StringVar(&r.dist, "dist", "", "`folder` of the result (default: dist in the repository)")
	flag.StringVar(&only, "platforms", strings.Join(platforms, ","), "`list` of GOOS/GOARCH")
	flag.BoolVar(&r.isSnapshot, "snapshot", false, "build a commit that has no tag, or files that are not committed")
	flag.Parse()
	r.platforms = strings.Split(only, ",")
	if flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "release: unexpected", flag.Args())
		os.Exit(2)
	}
	if err := r.make(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// release is one version.
type release struct {
	root, dist string
	isSnapshot bool
	platforms  []string

	version string // the tag
	// at is the time of the commit, or SOURCE_DATE_EPOCH: the only time in what is made.
	at time.Time
}

func (r *release) make(ctx context.Context) error {
	if err := r.identify(ctx); err != nil {
		return err
	}
	notes, err := readNotes(filepath.Join(r.root, "CHANGELOG.md"), r.section())
	switch {
	case err != nil && r.isSnapshot: // nothing may have been written yet since the last release
		notes = []byte("A snapshot.\n")
	case err != nil:
		return err
	}
	if r.dist == "" {
		r.dist = filepath.Join(r.root, "dist")
	}
	if err := empty(r.dist); err != nil {
		return err
	}
	files, err := r.filesOfArchive(ctx)
	if err != nil {
		return err
	}
	var made []string
	for _, platform := range r.platforms {
		names, err := r.makePlatform(ctx, platform, files)
		if err != nil {
			return fmt.Errorf("%s: %w", platform, err)
		}
		made = append(made, names...)
	}
	if err := os.WriteFile(filepath.Join(r.dist, "NOTES.txt"), notes, 0o644); err != nil {
		return err
	}
	slices.Sort(made)
	if err := writeChecksums(r.dist, made); err != nil {
		return err
	}
	fmt.Printf("%s, built with %s: %d files in %s\n", r.version, runtime.Version(), len(made)+2, r.dist)
	return nil
}

// makePlatform builds the program for a platform, and returns the names of its archive and its SBOM.
func (r *release) makePlatform(ctx context.Context, platform string, files []string) ([]string, error) {
	goos, goarch, ok := strings.Cut(platform, "/")
	if !ok {
		return nil, errors.New("want GOOS/GOARCH")
	}
	folder, err := os.MkdirTemp("", "stampede-release-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	program := filepath.Join(folder, "stampede")
	if err := r.build(ctx, goos, goarch, program); err != nil {
		return nil, err
	}
	name := fmt.Sprintf("stampede_%s_%s_%s", r.version, goos, goarch)
	archive, list := name+".tar.gz", name+".cdx.json"
	if err := r.writeArchive(filepath.Join(r.dist, archive), name, program, files); err != nil {
		return nil, err
	}
	if err := r.writeSBOM(filepath.Join(r.dist, list), program); err != nil {
		return nil, err
	}
	return []string{archive, list}, nil
}

// build runs the go command as the Dockerfile does. What the environment of the caller says of Go does not count.
func (r *release) build(ctx context.Context, goos, goarch, program string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false",
		"-ldflags", "-s -w -X stampede/internal/telemetry.version="+r.version, "-o", program, "./cmd/stampede")
	cmd.Dir, cmd.Stdout, cmd.Stderr = r.root, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+goos, "GOARCH="+goarch, "GOAMD64=v1", "GOARM64=v8.0",
		"GOFLAGS=", "GOEXPERIMENT=", "GOWORK=off")
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go build: %w", err)
	}
	return nil
}

// empty makes an empty folder. One with files that no release has made is left as it is.
func empty(folder string) error {
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	_, noRelease := os.Stat(filepath.Join(folder, checksums))
	if len(entries) > 0 && noRelease != nil {
		return fmt.Errorf("%s has files, and is no release: name another folder by -dist", folder)
	}
	if err := os.RemoveAll(folder); err != nil {
		return err
	}
	return os.MkdirAll(folder, 0o755)
}

var isVersion = regexp.MustCompile(`^v[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$`)

// identify finds the version and the time of the commit. A release is a commit with a tag, as it was committed.
func (r *release) identify(ctx context.Context) error {
	changed, err := r.git(ctx, "status", "--porcelain")
	if err != nil {
		return err
	}
	if err := r.findTime(ctx); err != nil {
		return err
	}
	if r.isSnapshot {
		r.version, err = r.git(ctx, "describe", "--tags", "--always", "--abbrev=12", "--dirty")
		return err
	}
	if changed != "" {
		return fmt.Errorf("these files are not committed (-snapshot builds them):\n%s", changed)
	}
	tags, err := r.git(ctx, "tag", "--points-at", "HEAD")
	if err != nil {
		return err
	}
	var versions []string
	for _, tag := range strings.Fields(tags) {
		if isVersion.MatchString(tag) {
			versions = append(versions, tag)
		}
	}
	switch len(versions) {
	case 0:
		return errors.New("HEAD has no tag such as v1.2.3 (-snapshot builds it all the same)")
	case 1:
		r.version = versions[0]
		return nil
	}
	return fmt.Errorf("HEAD has several versions: %s", strings.Join(versions, ", "))
}

// findTime takes SOURCE_DATE_EPOCH, or else the time of the commit.
func (r *release) findTime(ctx context.Context) error {
	text := os.Getenv("SOURCE_DATE_EPOCH")
	if text == "" {
		var err error
		if text, err = r.git(ctx, "log", "-1", "--format=%ct"); err != nil {
			return err
		}
	}
	seconds, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
	}
	r.at = time.Unix(seconds, 0).UTC()
	return nil
}

// section is the heading of the changelog that has the notes.
func (r *release) section() string {
	if r.isSnapshot {
		return "Unreleased"
	}
	return r.version
}

func (r *release) git(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir = r.root
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return "", fmt.Errorf("git %s: %s", args[0], strings.TrimSpace(string(exit.Stderr)))
		}
		return "", fmt.Errorf("git %s: %w", args[0], err)
	}
	return strings.TrimSpace(string(out)), nil
}

// readNotes returns a section of the changelog: "Unreleased", or the one of a version, whose heading may have its date,
// as in "## 1.2.3 - 2026-11-23".
func readNotes(changelog, section string) ([]byte, error) {
	text, err := os.ReadFile(changelog)
	if err != nil {
		return nil, err
	}
	heading := regexp.MustCompile(`(?m)^## \[?v?` + regexp.QuoteMeta(strings.TrimPrefix(section, "v")) + `\]?( .*)?$`)
	at := heading.FindIndex(text)
	if at == nil {
		return nil, fmt.Errorf("CHANGELOG.md has no section %q", section)
	}
	notes, _, _ := strings.Cut(string(text[at[1]:]), "\n## ")
	if notes = strings.TrimSpace(notes); notes == "" {
		return nil, fmt.Errorf("the section %q of CHANGELOG.md is empty", section)
	}
	return []byte(notes + "\n"), nil
}

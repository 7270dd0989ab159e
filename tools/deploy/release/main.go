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
	"runtime"
	"slices"
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

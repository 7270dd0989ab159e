package rig

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// buildBinary builds Stampede once, from the sources that this module's go.mod replaces it with.
var buildBinary = sync.OnceValues(func() (path string, err error) {
	folder, err := os.MkdirTemp("", "stampede-bench-")
	if err != nil {
		return "", err
	}
	AtExit(func() { _ = os.RemoveAll(folder) })
	path = filepath.Join(folder, "stampede")
	build := exec.Command("go", "build", "-o", path, "./cmd/stampede")
	build.Dir = "../.." // a package's benchmarks run in its folder
	build.Stderr = os.Stderr
	return path, build.Run()
})

// stampedeBinary returns the path of Stampede's binary.
func stampedeBinary(b testing.TB) string {
	b.Helper()
	path, err := buildBinary()
	if err != nil {
		b.Fatalf("build Stampede: %v", err)
	}
	return path
}

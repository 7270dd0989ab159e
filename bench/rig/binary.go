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
	if binaryFolder, err = os.MkdirTemp("", "stampede-bench-"); err != nil {
		return "", err
	}
	path = filepath.Join(binaryFolder, "stampede")
	build := exec.Command("go", "build", "-o", path, "./cmd/stampede")
	build.Dir = "../.." // a package's benchmarks run in its folder
	build.Stderr = os.Stderr
	return path, build.Run()
})

// binaryFolder holds the binary after it was built.
var binaryFolder string

func removeBinary() {
	if binaryFolder != "" {
		_ = os.RemoveAll(binaryFolder)
	}
}

// stampedeBinary returns the path of Stampede's binary.
func stampedeBinary(b testing.TB) string {
	b.Helper()
	path, err := buildBinary()
	if err != nil {
		b.Fatalf("build Stampede: %v", err)
	}
	return path
}

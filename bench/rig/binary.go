package rig

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// binary builds the product once, from the sources that this module replaces it by.
var binary = sync.OnceValues(func() (string, error) {
	folder, err := os.MkdirTemp("", "stampede-bench-")
	if err != nil {
		return "", err
	}
	binaryFolder = folder
	path := filepath.Join(folder, "stampede")
	build := exec.Command("go", "build", "-o", path, "./cmd/stampede")
	build.Dir = "../.." // a package's benchmarks run in its folder
	build.Stderr = os.Stderr
	return path, build.Run()
})

// binaryFolder holds the binary once there is one.
var binaryFolder string

func removeBinary() {
	if binaryFolder != "" {
		_ = os.RemoveAll(binaryFolder)
	}
}

// Binary is the path of the product's binary.
func Binary(b testing.TB) string {
	b.Helper()
	path, err := binary()
	if err != nil {
		b.Fatalf("build the product: %v", err)
	}
	return path
}

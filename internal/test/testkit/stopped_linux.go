package testkit

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// Stopped reports whether SIGSTOP has stopped a process. A signal takes effect after kill(2) has returned.
func Stopped(t testing.TB, pid int) bool {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(stat), ") T ")
}

package testshop

import (
	"testing"

	"stampede/internal/test/testkit"
)

// Process is a worker of this shop in a process of its own.
func (s *Shop) Process(t testing.TB) *testkit.Cmd {
	t.Helper()
	process := testkit.Command(t)
	process.UseServers(s.Keys)
	return process
}

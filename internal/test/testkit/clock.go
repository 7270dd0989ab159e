package testkit

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"stampede/internal/dev/localserver"
	"stampede/sql/migrate"
)

// fakers are where packages put the library that fakes the clock of a process.
var fakers = []string{
	"/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib/faketime/libfaketimeMT.so.1",
	"/usr/lib64/faketime/libfaketimeMT.so.1",
}

// ClockedPostgres starts a migrated Postgres for this test only. set sets its clock ahead of that of this machine, or
// behind it. (Redis ends under the library.)
func ClockedPostgres(t testing.TB) (server *localserver.Postgres, set func(ahead time.Duration)) {
	t.Helper()
	var found []string
	for _, pattern := range fakers {
		paths, _ := filepath.Glob(pattern) // the patterns are valid
		found = append(found, paths...)
	}
	if len(found) == 0 {
		t.Fatal("the test needs the package faketime: sh tools/setup.sh")
	}
	offset, err := os.CreateTemp("", "stampede-clock-") // where the user of the server reads it, unlike t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(offset.Name()) })
	_ = offset.Close() // nothing was written
	set = func(ahead time.Duration) {
		t.Helper()
		if err := os.WriteFile(offset.Name(), fmt.Appendf(nil, "%+f\n", ahead.Seconds()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	set(0)
	if err := os.Chmod(offset.Name(), 0o644); err != nil {
		t.Fatal(err)
	}
	server, err = localserver.StartPostgres(t.Context(), localserver.PostgresOptions{Env: []string{
		"LD_PRELOAD=" + found[0], "FAKETIME_TIMESTAMP_FILE=" + offset.Name(), "FAKETIME_NO_CACHE=1",
		"FAKETIME_DONT_FAKE_MONOTONIC=1",
	}})
	if err != nil {
		t.Fatalf("the test needs its own Postgres: %v", err)
	}
	t.Cleanup(server.Stop)
	if err := migrate.Up(t.Context(), server.URL); err != nil {
		t.Fatal(err)
	}
	return server, set
}

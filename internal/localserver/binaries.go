package localserver

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// errNotInstalled is wrapped by the error for a server whose programs are neither in PATH nor where
// packages put them. The error's text says what is missing and what can be done about it.
var errNotInstalled = errors.New("not installed")

const waysOut = `any one of these helps:
  - sh tools/setup.sh
  - apt-get install --no-install-recommends redis-server postgresql
  - set REDIS_URL and DATABASE_URL to servers that run already`

// Where packages put programs that are not in PATH. Debian keeps the server programs of every
// Postgres version apart; the others are Red Hat, Homebrew on either kind of Mac, and sbin for
// users who lack it in PATH.
var (
	postgresFolders = []string{
		"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin",
		"/opt/homebrew/opt/postgresql@*/bin", "/usr/local/opt/postgresql@*/bin",
	}
	redisFolders = []string{"/usr/bin", "/usr/local/bin", "/usr/sbin", "/opt/homebrew/bin"}
)

// What is missing where a server cannot be found.
const (
	redisPrograms    = "Redis (redis-server or valkey-server)"
	postgresPrograms = "Postgres (postgres and initdb)"
)

func notInstalled(missing ...string) error {
	return fmt.Errorf("%s: %w; %s", strings.Join(missing, " and "), errNotInstalled, waysOut)
}

// findRedis returns the path of redis-server or of valkey-server: of the first folder in PATH that has one, else of
// the first where packages put them.
func findRedis() (path string, found bool) {
	for _, folder := range append(filepath.SplitList(os.Getenv("PATH")), redisFolders...) {
		if !filepath.IsAbs(folder) {
			continue // a program from the working directory is not run by accident
		}
		for _, name := range []string{"redis-server", "valkey-server"} {
			if path, err := exec.LookPath(filepath.Join(folder, name)); err == nil {
				return path, true
			}
		}
	}
	return "", false
}

// findPostgres returns the folder with the server programs: the first in PATH that has them, else
// the one of the newest version that is installed.
func findPostgres() (folder string, found bool) {
	folders := filepath.SplitList(os.Getenv("PATH"))
	for _, pattern := range postgresFolders {
		found, _ := filepath.Glob(pattern) // fails for malformed patterns only
		slices.SortFunc(found, func(a, b string) int { return cmp.Compare(versionIn(b), versionIn(a)) })
		folders = append(folders, found...)
	}
	for _, folder := range folders {
		if !filepath.IsAbs(folder) {
			continue // a program from the working directory is not run by accident
		}
		_, errInit := exec.LookPath(filepath.Join(folder, "initdb"))
		_, errRun := exec.LookPath(filepath.Join(folder, "postgres"))
		if errInit == nil && errRun == nil {
			return folder, true
		}
	}
	return "", false
}

var version = regexp.MustCompile(`[0-9]+(\.[0-9]+)?`)

// versionIn is the last version in a folder's path: 9.6 comes before 10, and 15 before 18.
func versionIn(folder string) float64 {
	found := version.FindAllString(folder, -1)
	if len(found) == 0 {
		return 0
	}
	v, _ := strconv.ParseFloat(found[len(found)-1], 64) // a number, says the pattern
	return v
}
